"""Models that read images or sounds: served exactly or refused by name, as docs/model_classes.json says."""

from __future__ import annotations

import image_sweep
import model_sweep
import pytest
import tiny_vision
import torch
import transformers

torch.set_num_threads(1)
VERSION, ROWS = model_sweep.read_table("images")
pytestmark = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the table and the inputs are of transformers {VERSION}"
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.many if i % 3 else ()) for i, n in enumerate(sorted(tiny_vision.FAMILIES))],
)
def test_served_exactly_or_refused_by_name(name):
    transformers.logging.set_verbosity_error()
    found = image_sweep.row(image_sweep.sweep(name))
    assert ROWS[name] == found, "docs/model_classes.json is old; run python tests/image_sweep.py"


def test_the_table_lists_every_class():
    assert list(ROWS) == sorted(tiny_vision.FAMILIES)
    assert sum(row.startswith(image_sweep.SERVED) for row in ROWS.values()) >= 25
