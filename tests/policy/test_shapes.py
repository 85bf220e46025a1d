"""The ladders: few shapes, each with a name."""

from __future__ import annotations

import pytest

from gsd_kernels_hf.policy.row_selector import ROW_BONUS
from gsd_kernels_hf.policy.shapes import BRANCH, ladder, row_shape, shape_name


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda", "xpu"])
def test_at_most_eight_shapes(device, with_model):
    shapes = ladder(device, with_model=with_model)
    assert 0 < len(shapes) <= 8 and len(set(shapes.values())) == len(shapes)
    assert all(name == shape_name(shape) and shape.branch <= BRANCH for name, shape in shapes.items())
    assert any(s.depth for s in shapes.values()) == with_model
    assert any(s.depth == 0 for s in shapes.values()), "what costs no forward has shapes of its own"
    if not with_model and device != "cuda":
        assert list(shapes.values()) == [row_shape()], "rows are chosen"
        assert 0.0 < row_shape().min_prob < ROW_BONUS, "what would pay for a row is drafted, and little else"
    alone = ladder(device, with_model=with_model, reuses=False)
    assert all(s.depth for s in alone.values()) or not with_model
    assert set(alone) <= set(shapes), "their costs are known by the same names"
    if with_model:
        assert all(alone[name] == shapes[name].replace(history_depth=0, history_width=8) for name in alone)
