"""Automatic budgets: choices follow costs and acceptance, the text stays the same, costs are kept on disk."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels_hf.engine import decoder
from gsd_kernels_hf.policy import auto, tuning
from gsd_kernels_hf.policy.acceptance import AcceptanceModel
from gsd_kernels_hf.policy.auto import Budget
from gsd_kernels_hf.policy.tuning import FAMILIES, StepCosts, family_key
from gsd_kernels_hf.sources.weights import Calibration


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))


def costs(target: dict[int, float], level: float = 0.001) -> StepCosts:
    return StepCosts(target, {family_key("all", w, b): (level, level) for w, b in FAMILIES}, overhead=0.0)


CPU_LIKE = {1: 0.077, 2: 0.131, 4: 0.128, 8: 0.123, 16: 0.156, 32: 0.211, 64: 0.298, 128: 0.55}
FLAT = {1: 0.020, 64: 0.021, 128: 0.022}


def test_rows_follow_the_cost_curve():
    cpu, flat = (Budget(costs(c), AcceptanceModel(4)).current for c in (CPU_LIKE, FLAT))
    assert cpu is not None and 4 <= cpu.max_rows <= 16
    assert flat is not None and flat.max_rows >= 48 > cpu.max_rows


def test_speculation_is_off_where_a_step_costs_more_than_it_brings():
    dear_draft = Budget(costs({1: 0.002, 8: 0.003, 64: 0.008}, level=0.002), AcceptanceModel(4))
    assert dear_draft.current is None
    for _ in range(300):  # hopeless even on an easy text: never tried again
        dear_draft.advance(0.002)
        assert dear_draft.current is None


def test_a_draft_that_is_always_wrong_is_switched_off_and_tried_again_later():
    budget = Budget(costs({1: 0.05, 64: 0.06}, level=0.012), AcceptanceModel(4))
    assert budget.current is not None
    history = []
    for _ in range(400):
        history.append(budget.current is not None)
        k = budget.current.branch if budget.current else 1
        probs, hits = np.full((1, k), 0.5 / k), np.zeros((1, k), dtype=bool)
        if budget.current is not None:
            budget.learn({"all": (probs, hits)}, [1])
        budget.advance(0.05)
    off = history.index(False)
    assert off < 120
    assert any(history[off:]), "never tried again"
    assert sum(history[off:]) < 0.35 * len(history[off:])


def test_what_a_step_needs_besides_the_target_counts_as_it_was_seen():
    budget = Budget(costs({1: 0.05, 64: 0.06}), AcceptanceModel(4))
    assert budget.current is not None
    for _ in range(200):
        if budget.current is not None:
            budget.advance(0.05, rest_seconds=0.3)  # sixty times what was measured
    assert budget.current is None


def test_depth_grows_with_acceptance():
    easy, hard = AcceptanceModel(4), AcceptanceModel(4)
    for _ in range(80):
        easy.observe("all", np.array([[0.95, 0.02, 0.01, 0.0]]), np.array([[True, False, False, False]]))
        hard.observe("all", np.array([[0.3, 0.2, 0.1, 0.1]]), np.array([[False, True, False, False]]))
    deep, shallow = (Budget(costs(CPU_LIKE), m).current for m in (easy, hard))
    assert deep.depth > (shallow.depth if shallow else 0)


def test_calibration_tells_an_overconfident_draft():
    model = AcceptanceModel(2)
    for i in range(400):
        model.observe("all", np.array([[0.9, 0.05]]), np.array([[i % 2 == 0, False]]))
    calibration = Calibration(2, torch.device("cpu"))
    model.write(calibration)
    log_probs = torch.tensor([[[0.9, 0.05]]]).log()
    calibrated = calibration(log_probs).exp()[0, 0]
    assert 0.45 < calibrated[0] < 0.6
    assert calibrated[1] < 0.05
    assert (calibration(torch.tensor([[[0.0, float("-inf")]]])) <= 0).all()


def test_tune_measures_once_and_keeps_the_result(tmp_path, monkeypatch):
    target = tiny(dtype=torch.float32)
    draft = noised(target)
    first = gsd.tune(target, draft)
    files = list(tmp_path.glob("tune-*.json"))
    assert len(files) == 1 and json.loads(files[0].read_text())["about"]["batch"] == 1
    monkeypatch.setattr(tuning, "measure", lambda *a: pytest.fail("measured twice"))
    assert gsd.tune(target, draft) == first
    tuning._known.clear()
    assert gsd.tune(target, draft) == first
    files[0].write_text("{")
    tuning._known.clear()
    monkeypatch.setattr(tuning, "measure", lambda *a: dataclasses.replace(first, overhead=1.0))
    assert gsd.tune(target, draft).overhead == 1.0
    assert sorted(first.target) == list(first.target) and first.target_seconds(3) > 0


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("sampled", [False, True])
def test_auto_gives_the_same_text_while_shapes_change(batch, sampled, monkeypatch):
    target = tiny()
    draft = noised(target, 0.03)
    turns = iter([None, *([gsd.GraphConfig(depth=3, max_rows=9), gsd.GraphConfig(depth=1, max_rows=4), None] * 99)])

    fixed = decoder.GraphDecoder.policy

    def unsteady(self, *args, **kwargs):
        if self.assistant_model is None:
            return fixed(self, *args, **kwargs)
        budget = Budget(costs(FLAT), AcceptanceModel(4))
        budget.advance = lambda *a: setattr(
            budget, "current", next(turns) if np.random.rand() < 0.4 else budget.current
        )
        return budget

    monkeypatch.setattr(decoder.GraphDecoder, "policy", unsteady)
    np.random.seed(batch)
    options = {"do_sample": sampled, "max_new_tokens": 80, "eos_token_id": None}
    if sampled:
        options |= {"seed": 1, "temperature": 0.6}
    inputs = prompts(batch, 17, seed=3)
    plain = gsd.generate(target, **inputs, **options)
    out = gsd.generate(target, **inputs, **options, assistant_model=draft, return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    assert 0 < out.stats.plain_steps < out.stats.steps


def test_deterministic_algorithms_make_no_timing_decisions(monkeypatch):
    target = tiny()
    monkeypatch.setattr(auto, "tune", lambda *a, **k: pytest.fail("measured"))
    torch.use_deterministic_algorithms(True)
    try:
        out = gsd.generate(
            target, **prompts(1, 9), assistant_model=noised(target), max_new_tokens=8, return_dict_in_generate=True
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.stats.plain_steps == 0
