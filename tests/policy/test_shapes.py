"""The ladders: few shapes, and what they lose by the recorded profiles is what the documentation says."""

from __future__ import annotations

import json
from pathlib import Path

import ladders as bench
import numpy as np
import pytest

from gsd_kernels_hf.policy.acceptance import AcceptanceModel, Pool, TreeForecast
from gsd_kernels_hf.policy.row_selector import ROW_BONUS
from gsd_kernels_hf.policy.shapes import BRANCH, ladder, row_shape, shape_name

ROOT = Path(__file__).resolve().parents[2]


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


def test_a_forecast_counts_no_level_that_is_not_drafted():
    """Without a source that costs no forward: whatever the history's candidates would be worth."""
    shapes = list(ladder("cpu", with_model=True, reuses=False).values())
    forecast, model = TreeForecast(shapes, BRANCH), AcceptanceModel(BRANCH)
    model.observe("model", np.full((64, 4), 0.25), np.eye(4)[np.arange(64) % 4])
    easy, worthless = ({**model.pools, "lookup": Pool.prior((p,), BRANCH)} for p in (0.99, 0.0))
    assert np.array_equal(forecast.predict(easy), forecast.predict(worthless))
    drafted = TreeForecast([s.replace(history_depth=4) for s in shapes], BRANCH)
    assert (drafted.predict(easy)[0] > drafted.predict(worthless)[0]).any()


def test_every_shape_of_a_ladder_is_one_of_the_full_set():
    full = set(bench.full_set())
    assert len(full) == 577
    for device in ("cpu", "cuda"):
        for with_model in (True, False):
            assert set(ladder(device, with_model=with_model).values()) <= full | {row_shape()}


@pytest.mark.slow
def test_the_ladders_lose_less_than_two_percent():
    """Over three kinds of text, greedy and sampled, and three cost curves, against all 576 shapes."""
    simulation = bench.Simulation.of(bench.full_set(), bench.windows())
    rows = bench.table(simulation)
    for row in rows:
        if row["curve"] in bench.ASKED:
            assert max(row[kind] for kind in bench.KINDS) < 2.0, row
    kept = json.loads((ROOT / "bench" / "results" / "ladder.json").read_text())["percent_lost"]
    for row, other in zip(rows, kept, strict=True):
        assert all(row[kind] == pytest.approx(other[kind], abs=0.05) for kind in bench.KINDS), "make the table anew"


@pytest.mark.slow
def test_fewer_shapes_lose_more():
    simulation = bench.Simulation.of(bench.full_set()[::9], bench.windows())
    rates = simulation.rates(bench.CURVES["CPU bfloat16"], "code, greedy")
    everything = range(len(simulation.shapes))
    assert bench.loss(rates, everything, everything) == 0
    assert bench.loss(rates, [0], everything) > bench.loss(rates, [0, 5, 20], everything) >= 0
