"""Sources that bring little are left out of later generations, and tried again: counts alone decide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import noised, prompts, tiny
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.ops.learn import Asked
from gsd_kernels_hf.costs.prior import CostPrior
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.sources.base import DraftSource, Proposal
from gsd_kernels_hf.sources.retention import MAX_WAIT_STEPS, Retention
from gsd_kernels_hf.sources.weights import SourceWeights

NEW = 60
CPU = torch.device("cpu")


class Oracle(DraftSource):
    """Proposes the text, or never a token of it; as expensive as a model by what it declares."""

    def __init__(self, name, text, *, right):
        self.name, self.text = name, text
        self.known = {"right": right, "asked": 0}  # one for all copies
        self.forwards = (nn.Linear(2, 2),)  # what automatic shapes take for its model

    def attach(self, text):
        self.state = text.state

    def propose(self, level):
        if level.number >= level.config.depth:
            return None
        self.known["asked"] += 1
        at = level.positions.long().clamp(max=self.text.shape[1] - 1)
        tokens = self.text[0][at].int()[..., None]
        if not self.known["right"]:
            tokens = (tokens + 1) % 40
        return Proposal(tokens, torch.full_like(tokens, -0.1, dtype=torch.float32), rows=1)


def first_wait(steps: int, monkeypatch) -> None:
    """Let sources be left out for so many steps at first."""
    monkeypatch.setattr("gsd_kernels_hf.sources.retention.FIRST_WAIT_STEPS", steps)


@pytest.fixture(scope="module")
def target():
    return tiny(vocab_size=41)


def generations(target, sources, count, monkeypatch, tmp_path, **options):
    """Which sources were left out of each generation, and how often each source was asked in it."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr("gsd_kernels_hf.engine.stats.Clock.last", lambda *_: 0.0)  # no times: shapes by the priors,
    monkeypatch.setattr("gsd_kernels_hf.costs.pair.bandwidth", lambda _: 1e10)  # the same on any machine
    monkeypatch.setattr("gsd_kernels_hf.costs.pair.gemm_speed", lambda *_: None)
    found = []
    for _ in range(count):
        before = [source.known["asked"] for source in sources]
        out = gsd.generate(target, draft_sources=(*sources, "history"), return_dict_in_generate=True, **options)
        asked = [source.known["asked"] - b for source, b in zip(sources, before, strict=True)]
        found.append((out.stats.left_out, asked, out))
    return found


@pytest.mark.parametrize(
    ("order", "sampled"),
    [(("right", "wrong"), False), (("wrong", "right"), True)],
    ids=["wrong-second", "wrong-first-sampled"],
)
def test_a_source_that_is_always_wrong_is_left_out_and_comes_back(order, sampled, target, monkeypatch, tmp_path):
    first_wait(20, monkeypatch)
    inputs = prompts(1, 14, vocab=40)
    options = {**inputs, "max_new_tokens": NEW, "eos_token_id": None, "do_sample": sampled}
    options |= {"seed": 4, "temperature": 0.8} if sampled else {}
    plain = gsd.generate(target, **options)
    wrong, right = Oracle("wrong", plain, right=False), Oracle("right", plain, right=True)
    sources = [{"wrong": wrong, "right": right}[name] for name in order]
    at = order.index("wrong")
    engines_of(target).clear()

    found = generations(target, sources, 14, monkeypatch, tmp_path, **options)
    assert all(torch.equal(out.sequences, plain) for *_, out in found)
    without = [number for number, (left, *_) in enumerate(found) if left]
    assert without and 0 not in without and all(found[number][0] == ["wrong"] for number in without)
    assert all(found[number][1][at] == 0 and found[number][1][1 - at] > 0 for number in without)
    # It was tried again in between, and then left out for longer.
    spells = "".join("x" if left else "." for left, *_ in found).split(".")
    lengths = [len(spell) for spell in spells if spell]
    assert len(lengths) > 1 and lengths[1] > lengths[0]

    wrong.known["right"], right.known["right"] = True, False
    later = generations(target, sources, 10, monkeypatch, tmp_path, **options)
    assert all(torch.equal(out.sequences, plain) for *_, out in later)
    assert any(left == ["right"] and asked[at] > 0 for left, asked, _ in later), "it returned, and the other left"


def test_a_fixed_shape_after_automatic_calls_takes_what_they_left_out(target, monkeypatch, tmp_path):
    """On one engine, in a chat: sources, caches and statistics of both kinds of calls meet in it."""
    first_wait(1000, monkeypatch)
    cheap = CostPrior(target_bytes=1e9, target_layers=4, draft_bytes=1e6, draft_layers=1, bandwidth=1e10)
    monkeypatch.setattr(CostPrior, "of", classmethod(lambda *_, **__: cheap))
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr("gsd_kernels_hf.engine.stats.Clock.last", lambda *_: 0.0)
    options = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    fixed = {"graph_config": gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=2)}
    plain, left = [prompts(1, 14, vocab=40)["input_ids"]], []

    def turn(number, **more):
        ids = torch.cat([plain[number], torch.full((1, 3), number + 3)], 1)
        return target.generate(ids, attention_mask=torch.ones_like(ids), **options, **more)

    for number in range(8):
        plain.append(turn(number))
    good, bad = noised(target, 0.01), noised(target, 4.0)
    forwards = []
    bad.register_forward_pre_hook(lambda *_: forwards.append(1))
    with gsd.patch(target, assistant_model=[good, bad]) as handle:
        for number in range(7):
            before = len(forwards)
            assert torch.equal(turn(number, **(fixed if left and left[-1] else {})), plain[number + 1])
            left.append(list(handle.stats.left_out))
            if left[-1]:
                assert len(forwards) == before, "what is left out is not run"
            elif number and left[-2]:
                assert len(forwards) > before, "the fixed shape drafts with both"
                assert len(handle.engines._engines) == 1
        spells = "".join("x" if names else "." for names in left)
    assert "x.x" in spells, "left out, taken by the fixed shape, and left out again: its steps are not the wait's"


def test_a_fixed_shape_takes_all_that_are_given(target, monkeypatch, tmp_path):
    inputs = prompts(1, 14, vocab=40)
    options = {**inputs, "max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    plain = gsd.generate(target, **options)
    sources = [Oracle("right", plain, right=True), Oracle("wrong", plain, right=False)]
    found = generations(target, sources, 6, monkeypatch, tmp_path, graph_config="graph", **options)
    assert all(not left and min(asked) > 0 for left, asked, _ in found)


def named(*names):
    return [Oracle(name, None, right=True) for name in names]


def seen(share, picks=200):
    """Weights of a source that was right ``share`` of the time, where the one before was right else."""
    weights = SourceWeights((0.1,), None, 1, CPU)
    for number in range(picks):
        mine = (number * 0.618) % 1 < share
        token = [torch.full((1, 1, 1), value, dtype=torch.int32) for value in ((-1, 7) if mine else (7, -1))]
        nodes, log_probs = torch.zeros(1, 1, dtype=torch.int32), torch.full((1, 1, 1), -0.1)
        asked = Asked(nodes, token[1], log_probs, None, token[0], log_probs)
        weights.learn([asked], nodes, torch.full((1, 1), 7, dtype=torch.int32))
    return weights


def test_little_evidence_decides_nothing():
    sources = named("first", "second")
    kept = Retention()
    kept.observe(sources, {"first": seen(0, 0), "second": seen(0.0, 40)}, 1000)
    assert kept.staying(sources) == sources
    kept.observe(sources, {"first": seen(0, 0), "second": seen(0.0, 200)}, 1000)
    assert kept.staying(sources) == sources[:1]


def test_each_leave_in_a_row_is_twice_as_long():
    sources, kept = named("first", "second"), Retention()
    for wait in (256, 512, 1024):
        kept.observe(sources, {"first": seen(0, 0), "second": seen(0.0)}, 10)
        assert kept.wait == {"second": wait}
        kept.observe(sources[:1], {}, wait)
        assert not kept.wait
    kept.observe(sources, {"first": seen(0, 0), "second": seen(0.9)}, 10)
    assert not kept.next_wait or set(kept.next_wait) == {"first"}


def test_calls_that_overlap_do_not_leave_out_all():
    sources, kept = named("first", "second"), Retention()
    kept.observe(sources, {"first": seen(0, 0), "second": seen(0.0)}, 10)
    kept.observe(sources, {"first": seen(0, 0), "second": seen(1.0)}, 10)
    assert set(kept.wait) == {"first", "second"} and kept.staying(sources) == sources


def test_what_is_left_out_begins_again_from_its_priors():
    sources, weights = named("first", "second"), {"first": seen(0, 0), "second": seen(0.0)}
    assert weights["second"].mixture.weights < 0.01
    Retention().observe(sources, weights, 10)
    assert all(torch.equal(a, b) for a, b in zip(weights["second"].mixture, seen(0, 0).mixture, strict=True))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=3), st.lists(st.integers(1, 600), min_size=1, max_size=8))
def test_one_source_that_forwards_always_stays_and_none_is_gone_for_ever(shares, steps):
    sources = named("first", *(f"other {i}" for i in range(len(shares))))
    weights = {"first": seen(0, 0), **{f"other {i}": seen(share, 80) for i, share in enumerate(shares)}}
    kept = Retention()
    for count in steps:
        took = kept.staying(sources)
        assert took
        kept.observe(took, weights, count)
    kept.observe(sources[:1], weights, MAX_WAIT_STEPS)
    assert kept.staying(sources) == sources
