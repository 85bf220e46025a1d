"""Predicted tokens: calibration, growth of trees, correction by what steps brought."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gsd_kernels import GraphConfig
from gsd_kernels_hf.policy.acceptance import (
    MAX_PROFILES,
    MIN_PROFILES,
    MISS,
    PRIORS,
    UNKNOWN,
    AcceptanceModel,
    Pool,
    TreeForecast,
)
from gsd_kernels_hf.policy.shapes import ladder
from gsd_kernels_hf.sources.weights import Calibration

MOST = MAX_PROFILES


def pools(first, second=(0.0, 0.0, 0.0, 0.0)):
    return {"model": Pool.of(np.array([first])), "lookup": Pool.of(np.array([second]))}


def tokens(config: GraphConfig, *profiles) -> float:
    return float(TreeForecast([config], 4).predict(pools(*profiles))[0][0])


def test_a_chain_brings_the_geometric_sum():
    chain = GraphConfig(depth=4, width=1, branch=1, max_rows=5, history_depth=0)
    assert tokens(chain, (0.5, 0.2, 0.0, 0.0)) == pytest.approx(1 + 0.5 + 0.25 + 0.125 + 0.0625)
    assert tokens(chain.replace(max_rows=3), (0.5, 0.2, 0.0, 0.0)) == pytest.approx(1.75)


def test_branches_add_and_only_the_best_nodes_are_expanded():
    tree = GraphConfig(depth=2, width=1, branch=2, max_rows=64, history_depth=0)
    assert tokens(tree, (0.6, 0.3, 0.0, 0.0)) == pytest.approx(1 + 0.9 + 0.6 * 0.9)
    assert tokens(tree.replace(width=2), (0.6, 0.3, 0.0, 0.0)) == pytest.approx(1 + 0.9 + 0.9 * 0.9)


def test_reused_levels_draw_from_their_own_pool():
    config = GraphConfig(depth=1, width=1, branch=1, max_rows=64, history_depth=2, history_width=1)
    assert tokens(config, (0.5, 0, 0, 0), (0.8, 0, 0, 0)) == pytest.approx(1 + 0.5 + 0.4 + 0.32)
    lookup = GraphConfig(depth=0, width=1, branch=1, max_rows=64, history_depth=2, history_width=1)
    assert tokens(lookup, (0.5, 0, 0, 0), (0.8, 0, 0, 0)) == pytest.approx(1 + 0.8 + 0.64)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.lists(st.floats(0, 0.3), min_size=4, max_size=4), min_size=1, max_size=MOST), st.data())
def test_more_rows_and_deeper_shapes_never_bring_less(rows, data):
    picks = np.array(data.draw(st.lists(st.integers(UNKNOWN, 3), min_size=len(rows), max_size=len(rows))))
    profiles = {"model": Pool(np.array(rows), picks), "lookup": Pool(np.array(rows)[::-1], picks)}
    width, branch = data.draw(st.sampled_from([(1, 1), (2, 2), (4, 3), (8, 4)]))
    shapes = [
        GraphConfig(depth=depth, width=width, branch=branch, max_rows=rows, history_depth=2)
        for depth in (1, 3, 6)
        for rows in (2, 8, 32, 128)
    ]
    found, used = (part.reshape(3, 4) for part in TreeForecast(shapes, 4).predict(profiles))
    assert (used >= 1).all() and (used <= np.array([2, 8, 32, 128])).all() and (np.diff(used, axis=1) >= 0).all()
    assert (found >= 1).all() and (np.diff(found, axis=1) >= -1e-6).all()
    assert (found <= 1 + np.array([2, 8, 32, 128]) - 1 + 1e-6).all()
    alone = [float(TreeForecast([shape], 4).predict(profiles)[0][0]) for shape in shapes]
    np.testing.assert_allclose(found.ravel(), alone, rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("with_model", [False, True])
def test_a_family_grown_once_predicts_what_each_of_its_shapes_does_alone(device, with_model):
    """Shapes of a ladder that share their trees' growth up to the rows, or up to a level."""
    rng, shapes = np.random.default_rng(0), list(ladder(device, with_model=with_model).values())
    profiles = {
        name: Pool(
            -np.sort(-rng.dirichlet((1, 0.5, 0.2, 0.1), MOST), axis=-1),
            rng.integers(MISS, 4, MOST),
        )
        for name in ("model", "lookup")
    }
    plan = TreeForecast(shapes, 4)
    assert len(plan.grown) < len(shapes) or len(shapes) == 1
    together, alone = plan.predict(profiles), [TreeForecast([shape], 4).predict(profiles) for shape in shapes]
    np.testing.assert_allclose(together, np.squeeze(alone, -1).T, rtol=1e-6)


def test_the_device_table_is_written_when_the_counts_have_changed():
    model, table = AcceptanceModel(4), Calibration(4, torch.device("cpu"))
    model.write(table)
    table.log_ratio.fill_(7.0)
    model.write(table)
    assert (table.log_ratio == 7.0).all(), "written again without need"
    probs, hits = np.full((8, 4), 0.2), np.zeros((8, 4), bool)
    model.observe("model", probs, hits)
    model.write(table)
    assert (table.log_ratio < 1.0).all() and table.log_ratio.min() < 0
    other = AcceptanceModel(4)  # of other calls
    other.write(table)
    assert (table.log_ratio == 0.0).all()
    other.load(model.as_dict())
    other.write(table)
    assert table.log_ratio.min() < 0


def test_calibration_tells_an_overconfident_draft():
    model = AcceptanceModel(2)
    for i in range(400):
        model.observe("model", np.array([[0.9, 0.05]]), np.array([[i % 2 == 0, False]]))
    calibration = Calibration(2, torch.device("cpu"))
    model.write(calibration)
    log_probs = torch.tensor([[[0.9, 0.05]]]).log()
    calibrated = calibration(log_probs).exp()[0, 0]
    assert 0.45 < calibrated[0] < 0.6
    assert calibrated[1] < 0.05
    assert (calibration(torch.tensor([[[0.0, float("-inf")]]])) <= 0).all()


def test_a_pool_keeps_the_newest_and_guesses_what_a_wider_shape_had_found():
    pool = Pool.prior((0.6, 0.1), 4)
    pool = pool.grown(np.array([[0.5]]), np.array([[True]]))
    assert pool.profiles[-1].tolist() == [0.5, 0.25, 0.125, 0.0625]
    pool = pool.grown(np.array([[0.9, 0.1]]), np.array([[False, False]]))
    assert pool.picks.tolist() == [UNKNOWN] * 4 + [0, MISS]
    assert pool.profiles[-1] == pytest.approx([0.9, 0.1, 0.0, 0.0])
    pool = pool.grown(
        np.tile([[0.2, 0.1, 0.0, 0.0]], (MOST, 1)),
        np.tile([[False, True, False, False]], (MOST, 1)),
    )
    assert len(pool.profiles) == len(pool.picks) == MOST and (pool.picks == 1).all()
    assert (pool.profiles == [0.2, 0.1, 0.0, 0.0]).all()
    model = AcceptanceModel(4)
    model.pools["lookup"] = pool
    model.assume_easy("lookup")
    assert len(model.pools["lookup"].profiles) < MIN_PROFILES and model.pools["lookup"].profiles[0, 0] > 0.9


def test_what_steps_bring_corrects_the_prediction():
    shapes = ladder("cpu", with_model=True)
    plan = TreeForecast(list(shapes.values()), 4)
    model = AcceptanceModel(4)
    for name in model.pools:
        model.pools[name] = Pool.of(np.tile([[0.6, 0.1, 0.0, 0.0]], (MOST, 1)))
    before, _ = model.tokens(plan)
    for _ in range(400):
        model.observe_accepted("model", 2.0 * (before[0] - 1.0), float(model.tokens(plan)[0][0]))
    after, _ = model.tokens(plan)
    drafted = [i for i, s in enumerate(shapes.values()) if s.depth]
    assert after[drafted] - 1 == pytest.approx(2 * (before[drafted] - 1), rel=0.1)
    lookup = [i for i, s in enumerate(shapes.values()) if not s.depth]
    assert (after[lookup] == before[lookup]).all()
    model.assume_easy("model")
    assert model.ratio("model") == 1.0


def test_nothing_is_corrected_while_the_prediction_is_a_prior():
    model = AcceptanceModel(4)
    model.observe_accepted("model", 9.0, 2.0)
    assert model.accepted == {}


def test_half_of_a_prediction_is_what_the_tree_would_have_brought():
    """A text in which every other run of eight tokens is foretold: deep trees bring more than even odds promise."""
    sure, unsure = [0.9, 0.05, 0.0, 0.0], [0.1, 0.05, 0.0, 0.0]
    profiles = np.array(([sure] * 8 + [unsure] * 8) * 4)
    picks = np.array(([0] * 8 + [MISS] * 8) * 4)
    chain = GraphConfig(depth=0, width=1, branch=1, max_rows=9, history_depth=8, history_width=1)

    def of(pool):
        return [float(found[0]) for found in TreeForecast([chain], 4).predict({"model": pool, "lookup": pool})]

    (promised, rows), (found, same_rows) = of(Pool.of(profiles)), of(Pool(profiles, picks))
    brought = 1 + np.mean([next((k for k in range(8) if picks[(t * 64 // 24 + k) % 64] < 0), 8) for t in range(24)])
    assert found == pytest.approx(0.5 * (promised + brought)) and rows == same_rows == 9
    shuffled = np.random.default_rng(0).permutation(64)
    assert of(Pool(profiles[shuffled], picks[shuffled]))[0] < found - 0.5
    nothing = Pool(np.zeros((8, 4)), np.full(8, MISS))
    assert of(nothing) == [1.0, 1.0]


def test_the_history_is_calibrated_too():
    model = AcceptanceModel(4)
    for _ in range(60):
        model.observe("lookup", np.array([[0.6, 0.2, 0.0, 0.0]]), np.array([[True, False, False, False]]))
    assert model.pools["lookup"].profiles[-1] == pytest.approx([0.95, 0.05, 0.0, 0.0], abs=0.08)
    assert (model.hits["model"] == PRIORS["model"].hits).all()


def test_probabilities_wider_than_the_model_are_cut():
    model = AcceptanceModel(2)
    model.observe("model", np.full((3, 6), 0.1), np.zeros((3, 6), bool))
    model.observe("lookup", np.full((3, 6), 0.1), np.zeros((3, 6), bool))
    assert model.pools["model"].profiles.shape[1] == 2


def test_it_survives_the_disk_and_refuses_damage():
    model = AcceptanceModel(4)
    model.observe("model", np.array([[0.9, 0.05, 0.0, 0.0]]), np.array([[True, False, False, False]]))
    model.accepted = {"model": (3.0, 4.0)}
    copy = AcceptanceModel(4)
    copy.load(model.as_dict())
    assert copy.as_dict() == model.as_dict()
    for part, bad in (
        ("hits", {"model": [[0.0]], "lookup": [[0.0]]}),
        ("expected", "x"),
        ("pools", {"model": [[[2.0] * 4], [0]], "lookup": [[[0.1] * 4], [0]]}),
        ("pools", {"model": [[[0.1] * 4], [4]], "lookup": [[[0.1] * 4], [0]]}),
        ("pools", {"model": [[[0.1] * 4], [0, 1]], "lookup": [[[0.1] * 4], [0]]}),
        ("pools", {"model": [], "lookup": []}),
        ("accepted", {"model": 1}),
    ):
        with pytest.raises((ValueError, KeyError, TypeError)):
            copy.load({**model.as_dict(), part: bad})
        assert copy.as_dict() == model.as_dict()
