"""Policies of a step's shape and rows."""

from __future__ import annotations

import json
import logging
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import noised, prompts, rotated, tiny
from ops.contracts.step import CONFIG, problem
from simulated import (
    EASY,
    HOPELESS,
    KNOWN,
    LOOKED_UP,
    MACHINES,
    USUAL,
    World,
    experience,
    start,
)

import gsd_kernels as gsd
from gsd_kernels import cpu_levels
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.config import PLAIN
from gsd_kernels_hf import store
from gsd_kernels_hf.costs.model import CostModel
from gsd_kernels_hf.costs.pair import own_costs
from gsd_kernels_hf.engine import decoder, engine
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.policy.learning import KNOWN_CHOICE_STEPS, Experience, FixedPolicy, LearningPolicy
from gsd_kernels_hf.policy.row_selector import EdgeModel, RowSelector
from gsd_kernels_hf.policy.shapes import BRANCH, ladder, shape_name

# Six properties of the automatic policy, on machines and texts of numbers: no clock is read; and its choices as such.
# Choices on seeded machines and texts are replayed against ``replay.json``, so that a change of names, files or records
# shows that it changed nothing, and a change of a constant shows where. It is made anew by ``python
# tests/policy/test_policy.py``, where choices are meant to change.


SETTINGS = gsd.Automatic()
TEXTS = {"easy": EASY, "usual": USUAL, "hopeless": HOPELESS}


def as_in_another_process(known: Experience, again: Experience) -> None:
    """Let the other one know what a process left on disk."""
    for number, (one, other) in enumerate(((known.costs, again.costs), (known, again))):
        document = store.Document("pair", {"number": number})
        document.write(one.arrays())
        document.read(other)


def share(world: World, policy: LearningPolicy, steps: int) -> float:
    """Tokens a second of steps to come over those of the best choice."""
    tokens, seconds = world.tokens, world.idle
    world.run(policy, steps)
    rate = (world.tokens - tokens) / world.batch / (world.idle - seconds)
    return rate / world.best(policy.largest_shapes())


@pytest.mark.parametrize(("machine", "text", "bandwidth"), rotated(MACHINES, list(TEXTS), (0.25, 1.0, 4.0)))
def test_near_the_best_choice_whatever_was_believed_of_the_machine(machine, text, bandwidth):
    found = []
    for seed in range(3):
        world, policy = start(machine, TEXTS[text], bandwidth, seed=seed)
        world.run(policy, 80)
        found.append(share(world, policy, 250))
    assert np.mean(found) >= 0.85, found


@pytest.mark.parametrize("machine", ["bfloat16", "rows, no AMX"])
def test_off_where_nothing_is_right_tried_again_seldom_and_on_where_it_pays(machine, caplog):
    world, policy = start(machine, HOPELESS, step=0.02)
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        rows = world.run(policy, 600)
    assert rows[0] > 0 and rows[:40].count(0) > 0 and sum(map(bool, rows[100:])) < 0.1 * 500
    assert any(rows[60:])
    line = r"auto: speculation (off|on) after (\d+) steps: \S+ has (\S+) tokens/s by \S+ tokens a step, \S+ (\S+) by .*"
    found = [re.fullmatch(line, record.getMessage()).groups() for record in caplog.records]
    assert [how for how, *_ in found] == (["off", "on"] * len(found))[: len(found)]
    assert float(found[0][2]) > float(found[0][3]), "plain decoding had more tokens a second"
    world.text = EASY
    policy.end()
    policy = LearningPolicy(policy.experience, prefix=200)  # a new text is tried soon
    assert any(world.run(policy, 40)) and all(world.run(policy, 300)[-100:])


def test_a_draft_model_that_does_not_pay_is_left_out_and_gets_another_chance():
    world, policy = start("bfloat16", LOOKED_UP, level=0.02)
    world.run(policy, 150)
    assert policy.plan().shape.depth == 0 and isinstance(policy.without_model(reuses=True), FixedPolicy)
    world.text, world.level = ((1.0, 0.95, 0.0),), 0.0012
    rows = [policy.plan().shape for _ in range(600) if world.step(policy) is not None]
    assert any(shape is not None and shape.depth for shape in rows[-50:])


@pytest.mark.parametrize("machine", ["bfloat16", "GPU", "rows, steep"])
def test_the_next_text_and_the_next_process_go_on_where_this_one_ended(machine):
    saved = []
    world, policy = start(machine)
    policy.save = lambda: saved.append(1)
    rows = world.run(policy, 200)
    policy.end()
    last, again = policy.plan().shape, experience(machine)
    as_in_another_process(policy.experience, again)
    assert saved == [1] and again.costs.steps == policy.experience.costs.steps > 150
    for known in (policy.experience, again):
        following = LearningPolicy(known, prefix=200)
        assert following.plan().shape == last and following.next_choice == KNOWN_CHOICE_STEPS
        assert np.mean(world.run(following, 60)) == pytest.approx(np.mean(rows[-60:]), abs=4.0)


def test_behind_a_long_prompt_the_first_step_is_plain_where_a_source_reads_it():
    for prefix, reads in ((SETTINGS.long_prompt_tokens - 1, True), (SETTINGS.long_prompt_tokens, True), (9999, False)):
        policy = LearningPolicy(experience(), prefix=prefix, reads_prompt=reads)
        assert (policy.plan().shape is None) == (reads and prefix >= SETTINGS.long_prompt_tokens)
        policy.end()
        assert policy.names[policy.experience.last[0]] != PLAIN, "a text of one step leaves what would have followed"


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_at_most_eight_shapes(device, with_model):
    shapes = ladder(device, with_model=with_model)
    assert 0 < len(shapes) <= 8 and len(set(shapes.values())) == len(shapes)
    assert all(name == shape_name(shape) and shape.branch <= BRANCH for name, shape in shapes.items())
    assert any(s.depth for s in shapes.values()) == with_model
    assert any(s.depth == 0 for s in shapes.values()), "what costs no forward has shapes of its own"
    if with_model:
        alone = ladder(device, with_model=True, reuses=False)
        expected = {name: shape for name, shape in shapes.items() if shape.depth and name in alone}
        assert alone == {name: s.replace(history_depth=0, history_width=8) for name, s in expected.items()}


# Rows of a step.


@pytest.mark.parametrize(("remaining", "depth"), [(1, 0), (2, 1), (3, 2), (99, 4)])
def test_no_row_is_deeper_than_the_text_will_be(remaining, depth):
    rows = RowSelector(EdgeModel())(problem(0)[0], CONFIG, remaining)
    assert int(rows.depths.max()) == depth


@pytest.mark.parametrize(("batch", "sampled"), [(1, False), (3, True)])
def test_fewer_rows_and_the_same_text(monkeypatch, batch, sampled):
    """Whatever the selector chooses: rows of these models are nearly free, so it is made to choose."""
    target, call, learn, asked, learned = models.tiny(), RowSelector.__call__, RowSelector.observe, [], []

    def fewer(self, *arguments):
        self.seconds = torch.ones(1 + len(asked) % 7, dtype=torch.float64)
        rows = call(self, *arguments)
        asked.append(rows.token_ids.shape[1])
        return rows

    def observe(self, step):
        learned.append(step.accepted.num_accepted.tolist())
        learn(self, step)

    monkeypatch.setattr(RowSelector, "__call__", fewer)
    monkeypatch.setattr(RowSelector, "observe", observe)
    monkeypatch.setattr(LearningPolicy, "_choose", lambda self, **_: None)  # it would turn speculation off
    options = {**models.prompts(batch, 20, seed=1), "max_new_tokens": 60, "eos_token_id": None}
    options |= {"do_sample": True, "seed": 3, "temperature": 0.5, "top_k": 20} if sampled else {}
    plain = gsd.generate(target, **options, graph_config="plain")
    out = gsd.generate(target, **options, draft_sources=("history",), return_dict_in_generate=True)
    assert torch.equal(out.sequences, plain)
    # Every step tells what of each sequence was accepted.
    assert len(learned) == len(asked) == out.stats.steps and any(count > 1 for step in learned for count in step)
    assert sum(map(sum, learned)) == 60 * batch and max(asked) <= 7
    assert out.stats.target_rows == batch * sum(asked)


@pytest.mark.parametrize(("criterion", "selects"), [("speculative", False), ("exact", True)])
def test_tokens_that_were_drawn_are_all_verified(monkeypatch, criterion, selects):
    """Which of them are verified must not depend on what was drawn: the sample would not be exact."""
    asked, call, use, selector = [], RowSelector.__call__, Session.use, RowSelector(EdgeModel())
    monkeypatch.setattr(RowSelector, "__call__", lambda self, *arguments: asked.append(1) or call(self, *arguments))
    monkeypatch.setattr(Session, "use", lambda self, plan: use(self, plan._replace(rows=selector)))
    target = models.tiny()
    options = {"assistant_model": models.noised(target, 0.1), "do_sample": True, "max_new_tokens": 24}
    gsd.generate(target, **models.prompts(1, 8), **options, criterion=criterion)
    assert bool(asked) == selects


# Recorded choices.

RECORDED = Path(__file__).with_name("replay.json")
ROWS = np.array([1.0, 2.0, 5.0, 8.0, 12.0, 32.0, 128.0])
AGREES = 1e-4  # relative: another machine's libraries round otherwise


def replay(machine: str, batch: int, told: bool = True) -> dict[str, Any]:
    """Four texts of one pair, the third of another process, on a machine that is five times as slow now and then."""
    known, choices = experience(machine), []
    world, slow = World(MACHINES[machine][0], batch=batch), np.random.default_rng(1)
    world.slow, world.told = lambda number: 5.0 if slow.random() < 0.05 else 1.0, told
    for number, text in enumerate((USUAL, HOPELESS, EASY, USUAL)):
        if number == 2:
            again = experience(machine)
            as_in_another_process(known, again)
            known = again
        world.text = text
        policy = LearningPolicy(known, batch=batch, prefix=(200, 700)[number % 2], reads_prompt=number % 2 == 1)
        for _ in range(60):
            choices.append(f"{policy.names[policy.current]}" if policy.selector is None else "")
            choices[-1] += f":{world.step(policy)}"
        policy.end()
    figures = [*policy.tokens, *policy.seconds, *known.costs.target_std(ROWS)]
    figures += [*known.costs.target_seconds(ROWS, policy.cached)]
    figures += [] if policy.selector is None else policy.selector.edges.posterior.weights.tolist()
    told_choices = " ".join(f"{choice}*{len(list(some))}" for choice, some in groupby(choices))
    return {"choices": told_choices, "figures": [float(f"{value:.8g}") for value in figures]}


REPLAYS = {
    "shapes, float32": ("float32", 1),
    "shapes, no AMX, batch 3": ("no AMX", 3),
    "shapes, GPU": ("GPU", 1),
    "shapes, bfloat16, no times": ("bfloat16", 1, False),
    "rows, steep": ("rows, steep", 1),
    "rows, no AMX, batch 2": ("rows, no AMX", 2),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_choices_and_what_is_learned_are_those_that_were_recorded(name):
    recorded, found = json.loads(RECORDED.read_text())[name], replay(*REPLAYS[name])
    assert found["choices"] == recorded["choices"]
    assert found["figures"] == pytest.approx(recorded["figures"], rel=AGREES, abs=1e-9)


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(replay(*each))}" for name, each in REPLAYS.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# Decoding with the automatic policy: nothing is measured ahead, what was learned is kept.


OPTIONS = {"do_sample": False, "eos_token_id": None, "return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    forget()


def forget() -> None:
    """As in another process, after this one's end."""
    store._flush_all()
    store._shared.clear()
    engine._unpatched.clear()


@pytest.fixture
def trained_pair():
    target = tiny(dtype=torch.float32)
    return target, noised(target)


@pytest.fixture
def opened(monkeypatch):
    """The policies that generations had."""
    found: list[LearningPolicy] = []
    honest = decoder.automatic_policy

    def remember(*args, **kwargs):
        found.append(honest(*args, **kwargs))
        return found[-1]

    monkeypatch.setattr(decoder, "automatic_policy", remember)
    return found


def costs_of(models):
    return own_costs(models, "auto", ladder("cpu", with_model=len(models) > 1))


def generate(trained_pair, tokens: int = 24, batch: int = 1, length: int = 12, **options):
    target, draft = trained_pair
    inputs = prompts(batch, length, vocab=target.config.vocab_size)
    return gsd.generate(target, **inputs, assistant_model=draft, max_new_tokens=tokens, **{**OPTIONS, **options})


def test_settings_are_objects_that_a_user_can_pass(trained_pair, opened):
    """They reach the policy of either kind and never change the text."""
    plain = generate(trained_pair, tokens=40, graph_config="plain").sequences
    chosen = gsd.Automatic(first_choice_steps=9, min_gain=2.5)
    assert torch.equal(generate(trained_pair, tokens=40, graph_config=chosen).sequences, plain)
    assert opened[-1].settings == chosen
    history = generate((trained_pair[0], None), tokens=40, graph_config=chosen, draft_sources=("history",))
    assert torch.equal(history.sequences, plain) and opened[-1].settings == chosen and opened[-1].least == 9
    generate(trained_pair, tokens=4)
    assert opened[-1].settings == gsd.Automatic()


def test_what_is_known_is_of_weights_a_dtype_and_a_way_of_sampling(trained_pair, opened):
    """As what is on disk is, whatever forwards the rows; costs are shared by ways of sampling and other weights."""
    generate(trained_pair, tokens=4)
    generate(trained_pair, tokens=4, do_sample=True, seed=1)
    generate((trained_pair[0], noised(trained_pair[0], 0.5)), tokens=4)
    generate(trained_pair, tokens=4)
    for model in trained_pair:
        model.double()
    generate(trained_pair, tokens=4)
    one, sampled, others, again, double = (policy.experience for policy in opened)
    assert again is one and one.costs is sampled.costs is others.costs is not double.costs
    assert len({id(found.acceptance) for found in (one, sampled, others, double)}) == 4


def test_every_target_forward_is_decoding(trained_pair):
    """Of a first call, of a new batch size, of a much longer prompt: the prompt's forward and one a step."""
    forwards = []
    trained_pair[0].register_forward_pre_hook(lambda *_: forwards.append(1))
    for _ in range(2):  # a model proves once, by forwards of its own, that it is served
        proofs = len(forwards)
        gsd.patch(trained_pair[0], assistant_model=trained_pair[1])
        gsd.unpatch(trained_pair[0])
    assert len(forwards) == proofs > 0
    for batch, length in ((1, 12), (3, 12), (1, 200)):
        forwards.clear()
        out = generate(trained_pair, batch=batch, length=length)
        assert len(forwards) == out.stats.steps + 1


@pytest.mark.parametrize("by_rows", [False, True], ids=["shapes", "rows"])
def test_what_was_learned_is_on_disk_and_the_next_process_begins_with_it(by_rows, trained_pair, opened, tmp_path):
    given, options = ((trained_pair[0], None), {"draft_sources": ("history",)}) if by_rows else (trained_pair, {})
    generate(given, tokens=60, **options)
    forget()
    kept, fresh = costs_of([model for model in given if model is not None])
    assert sum(kept.read()["timed"]) == fresh.steps > 0
    generate(given, tokens=1, **options)
    first, second = (policy.experience for policy in opened)
    assert (opened[0].selector is not None) == by_rows and second is not first
    assert second.costs.steps >= first.costs.steps and second.last[0] >= 0
    assert not by_rows or np.array_equal(first.arrays()["weights"], second.arrays()["weights"])


def test_a_file_that_is_not_what_was_written_is_one_line_and_changes_no_text(trained_pair, tmp_path, caplog):
    expected = generate(trained_pair).sequences
    store._flush_all()
    document, _ = costs_of(trained_pair)
    document.write({"target": [[1.0]], "other": [], "timed": []})
    forget()
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        assert torch.equal(generate(trained_pair).sequences, expected)
    assert sum(str(document.path) in record.getMessage() for record in caplog.records) == 1
    forget()
    caplog.clear()
    assert torch.equal(generate(trained_pair).sequences, expected) and not caplog.records, "it was written anew"


def test_deterministic_algorithms_make_no_timing_decisions(trained_pair, monkeypatch):
    monkeypatch.setattr(decoder, "automatic_policy", lambda *a, **k: pytest.fail("by the clock"))
    torch.use_deterministic_algorithms(True)
    try:
        out = generate(trained_pair, tokens=8)
    finally:
        torch.use_deterministic_algorithms(False)
    assert out.stats.plain_steps == 0


@pytest.mark.skipif(unavailable_reason("cpu", torch.device("cpu")) is not None, reason="no compiled CPU ops")
def test_costs_of_the_operator_are_not_those_of_the_modules_or_of_other_instructions(trained_pair, opened, monkeypatch):
    for forwards in ("1", "0"):
        monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", forwards)
        for level in (cpu_levels.active(), "portable"):
            with cpu_levels.forced(level):
                generate(trained_pair)
    best, portable, modules, still_modules = (policy.experience.costs for policy in opened)
    assert still_modules is modules  # which do not use them
    assert len({id(costs) for costs in (best, portable, modules)}) == 3 - (cpu_levels.active() == "portable")


# Seconds of a step: priors from bytes, corrected by steps, robust against a machine that is busy now and then.

SHAPES = ladder("cpu", with_model=True)
FIRST = next(iter(SHAPES))


def seconds_of(costs: CostModel, rows: float, cached: float = 0.0) -> float:
    return float(costs.target_seconds(np.array([float(rows)]), cached)[0])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_slow_steps_among_quick_ones_are_no_cost_of_their_rows(share):
    """A share of the forwards is disturbed, by chance more of eight rows or more of one."""
    found, rng = CostModel(KNOWN, SHAPES), np.random.default_rng(0)
    for period in range(12):
        alone = [(1, 0.02)] * 8 + [(8, 0.03)] * 8
        steps = [(rows, seconds * (2.5 if rng.random() < share else 1.0), 0.001) for rows, seconds in alone]
        found.observe(PLAIN, 200.0 + 16 * period, steps)
    assert seconds_of(found, 8, 300) / seconds_of(found, 1, 300) == pytest.approx(1.5, rel=0.05)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([PLAIN, *SHAPES]),
            st.floats(0, 1e5),
            st.tuples(st.integers(1, 512), st.floats(0, 1e300), st.floats(0, 1e300)),
        ),
        max_size=60,
    )
)
def test_seconds_never_fall_with_rows_and_stay_finite(steps):
    found, rows = CostModel(KNOWN, SHAPES), 2.0 ** np.linspace(0, 12, 60)
    for name, cached, step in steps:
        found.observe(name, cached, [step])
    seconds = found.target_seconds(rows, 1000.0)
    assert np.isfinite(seconds).all() and (seconds > 0).all() and (np.diff(seconds) >= -1e-9 * seconds[1:]).all()
    assert np.isfinite(found.other_seconds()).all() and (found.other_seconds() > 0).all()
    assert np.isfinite(found.target_std(rows)).all()
