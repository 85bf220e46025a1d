"""The cost model: priors from bytes, corrected by steps, robust against a machine that is busy now and then."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny
from simulated import BFLOAT16, GPU, KNOWN, NO_AMX

from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf.costs import machine
from gsd_kernels_hf.costs.model import OBSERVATION_STD, PLAIN, SLOWER_STEPS, CostModel, increasing
from gsd_kernels_hf.costs.prior import MAX_FREE_ROWS, CostPrior, weight_bytes
from gsd_kernels_hf.policy.shapes import ladder

SHAPES = ladder("cpu", with_model=True)
FIRST = next(iter(SHAPES))


def model(known: CostPrior = KNOWN) -> CostModel:
    return CostModel(known, SHAPES)


def target(costs: CostModel, rows: float, cached: float = 0.0) -> float:
    return float(costs.target_seconds(np.array([float(rows)]), cached)[0])


def test_the_prior_is_the_bytes_over_the_bandwidth():
    known = CostPrior(target_bytes=1.4e9, target_layers=0, bandwidth=1.4e10, cache_bytes=1e5)
    assert target(CostModel(known, SHAPES), 1) == pytest.approx(0.1)
    assert target(CostModel(known, SHAPES), 1, cached=1.4e4) == pytest.approx(0.2)
    assert target(CostModel(known, SHAPES), 32) > 1.3 * 0.1


def test_known_counts_the_weights_of_a_model_but_not_an_embedding_that_is_read_by_rows():
    untied, tied = tiny(tie_word_embeddings=False), tiny(tie_word_embeddings=True)
    everything = sum(p.nbytes for p in untied.parameters())
    assert weight_bytes(untied) == everything - untied.get_input_embeddings().weight.nbytes
    assert weight_bytes(tied) == sum(p.nbytes for p in tied.parameters())
    known = CostPrior.of(untied, tied, 1e10, one_op=False)
    assert known.draft_bytes == weight_bytes(tied) and known.target_layers == untied.config.num_hidden_layers
    assert CostPrior.of(untied, None, 1e10, one_op=False).draft_bytes == 0
    deep, shallow = (SHAPES[name] for name in ("10x1x1x12", "3x2x2x4"))
    fast, slow = (CostPrior.of(untied, tied, 1e10, one_op=True, compiled=compiled) for compiled in (True, False))
    assert fast.other_seconds(None) < slow.other_seconds(None)
    assert fast.other_seconds(deep) - fast.other_seconds(shallow) == pytest.approx(
        7 * (fast.forward_seconds + fast.level_seconds + tied.config.num_hidden_layers * fast.draft_layer_seconds),
        rel=0.1,
    )


def test_an_expensive_draft_makes_shapes_without_it_little_more_expensive():
    """Ten times what was known, in two steps of one shape: shapes with the draft are as expensive, others are not."""
    found = model()
    before, place = found.other_seconds(1), found.index
    for _ in range(2):
        found.observe(FIRST, 4, 0.0, 1, 0.02, 10 * before[place[FIRST]])
    ratio = found.other_seconds(1) / before
    alike = [name for name, shape in SHAPES.items() if shape.depth]
    assert min(ratio[place[name]] for name in alike) > 3
    assert max(ratio[place[name]] for name in [PLAIN, *SHAPES] if name not in alike) < 2


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("curve", [BFLOAT16, NO_AMX, GPU])
def test_a_few_steps_overrule_the_prior(curve, factor):
    known = CostPrior(target_bytes=0.05 * 1.4e10, target_layers=0, bandwidth=factor * 1.4e10)
    found, rng = model(known), np.random.default_rng(0)
    for rows, seconds in [*list(curve.items())] * 4:
        found.observe(FIRST, rows, 100.0, 1, seconds * float(np.exp(0.05 * rng.standard_normal())), 0.0)
    for rows, seconds in curve.items():
        assert target(found, rows, 100.0) == pytest.approx(seconds, rel=0.15), rows


def test_rows_that_a_kernel_takes_together_cost_the_same():
    """Six rows at a time: 7 rows cost what 12 do, which a curve through powers of two would miss by a tenth."""
    tiles = {1: 0.0165, 2: 0.0168, 4: 0.0174, 6: 0.0178, 8: 0.0203, 12: 0.0205, 16: 0.0255, 32: 0.0475}
    found, rng = model(), np.random.default_rng(0)
    for rows, seconds in [*list(tiles.items())] * 8:
        found.observe(FIRST, rows, 100.0, 1, seconds * float(np.exp(0.02 * rng.standard_normal())), 0.0)
    for rows, seconds in tiles.items():
        assert target(found, rows, 100.0) == pytest.approx(seconds, rel=0.03), rows


def test_one_number_of_rows_teaches_the_others_the_speed_of_the_machine():
    found = model()
    before = target(found, 1) / target(found, 16)
    for _ in range(4):
        found.observe(FIRST, 16, 0.0, 1, 10 * target(model(), 16), 0.0)
    assert target(found, 16) == pytest.approx(10 * target(model(), 16), rel=0.1)
    assert target(found, 1) > 4 * target(model(), 1)
    assert target(found, 1) / target(found, 16) == pytest.approx(before, rel=0.5)


def test_a_hiccup_hardly_counts_and_a_fast_step_does():
    found = model()
    usual = target(found, 8)
    for _ in range(50):
        found.observe(FIRST, 8, 0.0, 1, usual, 0.003)
    other = found.other_seconds(1)[found.index[FIRST]]
    found.observe(FIRST, 8, 0.0, 1, 30 * usual, 30 * 0.003)
    assert target(found, 8) < 1.05 * usual
    assert found.other_seconds(1)[found.index[FIRST]] < 1.05 * other
    for _ in range(30):
        found.observe(FIRST, 8, 0.0, 1, usual / 2, 0.0)
    assert target(found, 8) == pytest.approx(usual / 2, rel=0.2)


def test_what_lasts_is_believed_in_the_end():
    found = model()
    usual = target(found, 8)
    for _ in range(200):
        found.observe(FIRST, 8, 0.0, 1, usual, 0.003)
    for _ in range(400):
        found.observe(FIRST, 8, 0.0, 1, 2.5 * usual, 0.003)
    assert target(found, 8) == pytest.approx(2.5 * usual, rel=0.15)


def test_step_after_step_slow_is_the_machine_and_one_shape_s_cost_is_not():
    """A neighbour process: shapes that do not run are as much slower, from the sixth step on, and fast when it ends."""
    found, usual = model(), target(model(), 8)
    for _ in range(20):
        for rows in (2, 4, 8, 16):
            found.observe(FIRST, rows, 0.0, 1, target(model(), rows), 0.003)
    before = {rows: target(found, rows) for rows in (2, 16)}
    for _ in range(SLOWER_STEPS - 1):
        found.observe(FIRST, 8, 0.0, 1, 2.5 * usual, 0.003)
    assert target(found, 8) < 1.3 * usual, "this could still be a hiccup"
    for _ in range(2):
        found.observe(FIRST, 8, 0.0, 1, 2.5 * usual, 0.003)
    for rows, seconds in before.items():
        assert 2.0 * seconds < target(found, rows) < 3.0 * seconds
    for _ in range(4):
        found.observe(FIRST, 8, 0.0, 1, usual, 0.003)
    for rows, seconds in before.items():
        assert target(found, rows) < 1.3 * seconds
    other, place = found.other_seconds(1), found.index
    last = [*SHAPES][-1]
    for _ in range(SLOWER_STEPS + 2):  # nobody knew what this one needs
        found.observe(last, 8, 0.0, 1, usual, 1.5 * other[place[last]])
    assert found.other_seconds(1)[place[FIRST]] < 1.15 * other[place[FIRST]]


def test_a_second_of_slowness_at_one_number_of_rows_leaves_the_ratio_between_them():
    found = model()
    for _ in range(100):
        for rows in (1, 16):
            found.observe(FIRST, rows, 0.0, 1, BFLOAT16[rows], 0.003)
    before = target(found, 1) / target(found, 16)
    for _ in range(15):
        found.observe(FIRST, 16, 0.0, 1, 3 * BFLOAT16[16], 0.009)
    assert target(found, 1) / target(found, 16) == pytest.approx(before, rel=0.12)


def test_a_bad_measurement_between_good_ones_does_not_make_few_rows_more_expensive_than_many():
    found = model()
    for _ in range(3):
        for rows, seconds in ((1, 0.056), (2, 0.056), (8, 0.056), (16, 0.058)):
            found.observe(FIRST, rows, 0.0, 1, seconds, 0.0)
    found.observe(FIRST, 4, 0.0, 1, 0.081, 0.0)
    assert target(found, 4) < 1.1 * 0.056


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 512),
            st.floats(0, 1e5),
            st.integers(1, 8),
            st.floats(1e-6, 1e3),
            st.floats(0, 1e3),
            st.sampled_from([PLAIN, *SHAPES]),
        ),
        max_size=60,
    )
)
def test_seconds_never_fall_with_rows_and_stay_finite(steps):
    found = model()
    for rows, cached, batch, seconds, other, name in steps:
        found.observe(name, rows, cached, batch, seconds, other)
        covariance = found.target.covariance
        assert np.linalg.eigvalsh(covariance).min() > -1e-8 * max(1.0, covariance.max())
    rows = 2.0 ** np.linspace(0, 12, 60)
    seconds = found.target_seconds(rows, 1000.0)
    assert np.isfinite(seconds).all() and (seconds > 0).all() and (np.diff(seconds) >= -1e-12 * seconds[1:]).all()
    assert np.isfinite(found.other_seconds(3)).all() and (found.other_seconds(3) > 0).all()


def test_unknown_times_teach_nothing():
    found = model()
    found.observe(FIRST, 8, 100.0, 1, 0.0, 0.0)
    assert found.as_dict() == model().as_dict()


def test_the_slope_over_the_prefix_is_learned():
    known = CostPrior(target_bytes=1.4e9, target_layers=0, bandwidth=1.4e10, cache_bytes=0.0)
    found, rng = CostModel(known, SHAPES), np.random.default_rng(0)
    for cached in np.tile(np.linspace(100, 8000, 60), 3):
        found.observe(FIRST, 8, cached, 1, 0.1 * (1 + cached / 8000) * float(np.exp(0.03 * rng.standard_normal())), 0)
    for cached in (500.0, 4000.0, 8000.0):
        assert target(found, 8, cached) == pytest.approx(0.1 * (1 + cached / 8000), rel=0.2)


def test_batches_enter_as_rows():
    found = model()
    for _ in range(20):
        found.observe(FIRST, 4 * 8, 400.0, 4, 0.2, 0.01)
    assert target(found, 32, 400.0) == pytest.approx(0.2, rel=0.05)


def test_costs_survive_the_disk():
    found = model()
    for rows in (1, 8, 16):
        found.observe(FIRST, rows, 50.0, 2, 0.01 * rows, 0.002, noise=OBSERVATION_STD)
    copy = model()
    copy.load(found.as_dict())
    rows = np.array([1.0, 3.0, 16.0, 100.0])
    np.testing.assert_allclose(copy.target_seconds(rows, 77.0), found.target_seconds(rows, 77.0), rtol=1e-4)
    np.testing.assert_allclose(copy.other_seconds(2), found.other_seconds(2), rtol=1e-5)
    assert copy.timed == found.timed and copy.steps == found.steps


@pytest.mark.parametrize("part", ["names", "target", "other", "steps"])
def test_damaged_costs_are_refused_and_nothing_is_taken_over(part):
    found = model()
    found.observe(FIRST, 8, 50.0, 1, 0.5, 0.1)
    data = {**found.as_dict(), part: {"mean": [float("nan")], "covariance": [[1]]} if part != "steps" else "x"}
    fresh = model()
    with pytest.raises((ValueError, KeyError, TypeError)):
        fresh.load(data)
    assert fresh.as_dict() == model().as_dict()


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.1, 10)), min_size=1, max_size=12))
def test_increasing_is_the_weighted_isotonic_fit(pairs):
    values, weights = (np.array(x) for x in zip(*pairs, strict=True))
    fit = increasing(values, weights)
    assert (np.diff(fit) >= 0).all()
    assert fit @ weights == pytest.approx(values @ weights)
    best = ((fit - values) ** 2) @ weights
    for other in (np.maximum.accumulate(values), np.minimum.accumulate(values[::-1])[::-1]):
        assert best <= ((other - values) ** 2) @ weights + 1e-9


def test_a_machine_is_measured_once_and_that_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    calls = []
    monkeypatch.setattr(machine, "measure_bandwidth", lambda device: calls.append(device) or 2.5e10)
    monkeypatch.setattr(machine, "measure_gemm_speed", lambda dtype, *, operator: calls.append(dtype) or 6.5e10)
    for _ in range(2):
        for _ in range(2):
            assert machine.bandwidth(torch.device("cpu")) == 2.5e10
            assert machine.gemm_speed(torch.bfloat16, "avx2") == machine.gemm_speed(torch.float32, None) == 6.5e10
        machine._known.clear()  # another process
    assert calls == [torch.device("cpu"), torch.bfloat16, torch.float32]
    assert len(list(tmp_path.glob("machine-*.json"))) == 1
    assert machine.gemm_speed(torch.bfloat16, "avx512") == 6.5e10 and calls[3:] == [torch.bfloat16], "another level"
    assert machine.gemm_speed(torch.int8, None) is None


@pytest.mark.parametrize("dtype", machine.FLOATS)
@pytest.mark.parametrize("operator", [False, True])
def test_what_a_machine_can_do_is_measured(dtype, operator, monkeypatch):
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    assert machine.measure_bandwidth(torch.device("cpu")) > 1e7
    if operator and (dtype == torch.float64 or unavailable_reason("cpu", torch.device("cpu")) is not None):
        pytest.skip("no operator")
    before = torch.get_rng_state()
    assert 1e6 < machine.measure_gemm_speed(dtype, operator=operator) < 1e15
    assert torch.equal(torch.get_rng_state(), before), "draws of the caller"


def test_the_arithmetic_of_few_rows_hides_behind_reading_their_weights():
    target = tiny()
    target.bfloat16()
    known = CostPrior.of(target, None, 2e10, gemm_speed=6e10, one_op=False)
    assert known.free_rows == 6.0, "2 bytes · 6e10 / 2e10"
    bytes_ = known.target_bytes / known.bandwidth
    rest = known.target_layers * known.layer_seconds
    seconds = known.target_seconds(np.array([1.0, 4.0, 7.0, 601.0]), 0.0) - rest
    assert seconds / bytes_ == pytest.approx([1.0, 1.25**0.5, 2**0.5, 100.0], rel=1e-4)
    assert CostPrior.of(target, None, 2e10, gemm_speed=1.0, one_op=False).free_rows == 1.0
    assert CostPrior.of(target, None, 2e10, gemm_speed=1e15, one_op=False).free_rows == MAX_FREE_ROWS


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_slow_steps_among_quick_ones_are_no_cost_of_their_rows(share):
    """A share of the forwards is disturbed, by chance more of eight rows or more of one."""
    known, rng = CostModel(KNOWN, SHAPES, rows_vary=True), np.random.default_rng(0)
    for period in range(12):
        alone = [(1, 0.02)] * 8 + [(8, 0.03)] * 8
        steps = [(rows, seconds * (2.5 if rng.random() < share else 1.0)) for rows, seconds in alone]
        known.observe_period(PLAIN, steps, 200.0 + 16 * period, 0.05)
    assert target(known, 8, 300) / target(known, 1, 300) == pytest.approx(1.5, rel=0.05)
    assert known.steps == known.timed[PLAIN] == 12 * 16
