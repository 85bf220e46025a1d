"""Draft sources, alone and together: the same text from all, learned shares, self-drafting without a second model."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, GraphConfig, LayerSkip
from gsd_kernels.ops.learn import Asked
from gsd_kernels_hf import progress
from gsd_kernels_hf.costs.prior import CostPrior
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.engine.options import Options
from gsd_kernels_hf.engine.resolved import Sources
from gsd_kernels_hf.policy.shapes import ladder
from gsd_kernels_hf.sources import layer_skip
from gsd_kernels_hf.sources.base import DraftSource
from gsd_kernels_hf.sources.history import History
from gsd_kernels_hf.sources.layer_skip import expected_speed
from gsd_kernels_hf.sources.mixer import Mixer
from gsd_kernels_hf.sources.weights import SourceWeights

NEW = 24
CPU = torch.device("cpu")
FREE = GraphConfig(depth=0, branch=3, max_rows=16, history_depth=4, history_width=3)
GRAPH = GraphConfig(depth=3, width=3, branch=3, max_rows=32, merge_context=0, history_depth=2, history_width=4)


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=4)


@pytest.fixture(scope="module")
def draft(target):
    return {"assistant_model": noised(target, 0.03)}


@pytest.fixture(scope="module")
def heads(target):
    return DraftHeads.for_model(target, 3).requires_grad_(False)


def test_the_history_is_alone_below_the_last_head(target, heads, monkeypatch):
    """Weighed against nothing, it would count for its weight alone, and learn that it is always right."""
    levels, propose = [], Mixer.propose

    def noted(mixer, level):
        drafted = propose(mixer, level)
        levels.append((level.number, {name: asked.first_tokens is None for name, asked in drafted.asked.items()}))
        return drafted

    monkeypatch.setattr(Mixer, "propose", noted)
    gsd.generate(target, **prompts(1, 14), draft_heads=heads, graph_config=FREE, max_new_tokens=6)
    beside = {"heads": True, "history": False}
    assert levels and all(alone == (beside if number < 3 else {"history": True}) for number, alone in levels)


def test_auto_drops_a_draft_that_does_not_pay(target, draft, tmp_path, monkeypatch):
    """Where drafting by a model costs more than a plain forward and the history is right, shapes without it win."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    expensive = CostPrior(target_bytes=1e8, target_layers=1, draft_bytes=1e9, draft_layers=1, bandwidth=1e10)
    monkeypatch.setattr(CostPrior, "of", classmethod(lambda *_, **__: expensive))
    engines_of(target).clear()
    monkeypatch.setattr("gsd_kernels_hf.engine.stats.Clock.last", lambda *_: 0.0)
    out = gsd.generate(
        target,
        **prompts(1, 14),
        **draft,
        max_new_tokens=60,
        eos_token_id=None,
        do_sample=False,
        return_dict_in_generate=True,
    )
    drafted = gsd.Automatic().first_choice_steps * (max(s.draft_rows for s in ladder("cpu", with_model=True).values()))
    assert out.stats.draft_rows <= drafted, "the first choice has no times to go by, and drops it"
    assert out.stats.plain_steps < out.stats.steps


def test_layer_skip_is_the_target_without_blocks_and_leaves_it_alone(target):
    before = copy.deepcopy(target.state_dict())
    skip = LayerSkip(target, attention=[1, 3], mlp=[3])
    ids = prompts(1, 9)["input_ids"]
    by_hand = copy.deepcopy(target)
    for layer in (1, 3):
        by_hand.model.layers[layer].self_attn.o_proj.weight.data.zero_()
    by_hand.model.layers[3].mlp.down_proj.weight.data.zero_()
    torch.testing.assert_close(skip.view(ids).logits, by_hand(ids).logits)
    assert not torch.equal(skip.view(ids).logits, target(ids).logits)
    assert len(skip.view.model.layers) == 3 and len(target.model.layers) == 4
    assert skip.view.model.layers[0] is target.model.layers[0]
    assert 0.5 < skip.cost < 0.9
    assert all(torch.equal(v, before[k]) for k, v in target.state_dict().items())


def test_layer_skip_needs_no_second_cache(target):
    options = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False, "return_dict_in_generate": True}
    options |= {"graph_config": GRAPH}
    alone = gsd.generate(target, **prompts(1, 9), draft_sources=("history",), **options)
    skipping = gsd.generate(target, **prompts(1, 9), assistant_model=LayerSkip(target, mlp=[2]), **options)
    assert skipping.stats.cache_bytes == alone.stats.cache_bytes
    assert skipping.stats.draft_rows == skipping.stats.steps * (1 + GRAPH.draft_slots)


def test_search_finds_the_blocks_that_do_nothing():
    target = tiny(num_hidden_layers=4)
    target.model.layers[1].self_attn.o_proj.weight.data.zero_()
    target.model.layers[2].mlp.down_proj.weight.data.zero_()
    target.model.layers[2].self_attn.o_proj.weight.data.zero_()
    found = LayerSkip.search(target, prompts(4, 40, ragged=False)["input_ids"])
    assert 1 in found.attention and 2 in found.attention and 2 in found.mlp
    ids = prompts(2, 30, seed=7, ragged=False)["input_ids"]
    agreement = (found.view(ids).logits.argmax(-1) == target(ids).logits.argmax(-1)).float().mean()
    assert expected_speed(float(agreement), found.cost) > 0.9 * expected_speed(1.0, 1 - 3 / 8)


def exhaustive(target, ids):
    """The best speed of the greedy search that tries every block every time, and its forwards."""
    with torch.no_grad():
        wanted = target(ids).logits.argmax(-1)
    count, skipped, best, forwards = len(target.model.layers), frozenset(), 0.0, 0
    blocks = {(name, i) for name in ("attention", "mlp") for i in range(count)}
    while len(blocks - skipped) > 1:
        tried = {}
        for name, i in blocks - skipped:
            chosen = skipped | {(name, i)}
            skip = LayerSkip(target, **{part: [j for p, j in chosen if p == part] for part, _ in blocks})
            with torch.no_grad():
                agreement = float((skip.view(ids).logits.argmax(-1) == wanted).float().mean())
            tried[chosen] = expected_speed(agreement, skip.cost)
            forwards += 1
        skipped = max(tried, key=tried.get)
        best = max(best, tried[skipped])
    return best, forwards


def test_search_tries_few_sets_and_is_as_good_as_trying_all(monkeypatch):
    target = tiny(num_hidden_layers=6, dtype=torch.bfloat16)
    for layer in target.model.layers[1:5]:
        layer.mlp.down_proj.weight.data.mul_(0.2)
    ids = prompts(2, 30, ragged=False)["input_ids"]
    views, made = [], layer_skip._without
    monkeypatch.setattr(layer_skip, "_without", lambda *a, **k: views.append(0) or made(*a, **k))
    steps = []
    found = LayerSkip.search(target, ids, progress=lambda done, total: steps.append((done, total)))
    forwards = len(views)
    speed, all_forwards = exhaustive(target, ids)
    agreement = (found.view(ids).logits.argmax(-1) == target(ids).logits.argmax(-1)).float().mean()
    assert expected_speed(float(agreement), found.cost) > 0.97 * speed
    assert forwards < 0.6 * all_forwards, "sets that cannot be the best are not tried"
    assert {total for _, total in steps} == {23} and steps == sorted(steps) and steps[-1] == (23, 23)


def test_search_ends_with_its_time_and_says_so(target, caplog, monkeypatch):
    ids = prompts(1, 38, ragged=False)["input_ids"]
    clock = iter(range(1000))
    monkeypatch.setattr(layer_skip.time, "monotonic", lambda: float(next(clock)))
    found = LayerSkip.search(target, ids, seconds=3.5)
    (record,) = [r for r in caplog.records if r.levelname == "WARNING"]
    assert re.search("3.5 seconds are over after [1-4] forwards of 38 tokens", record.message)
    assert len(found.attention) + len(found.mlp) == 1, "the best so far"
    for wrong in (0, -1, float("nan"), "1"):
        with pytest.raises(ValueError, match="seconds: expected a number above 0, or None"):
            LayerSkip.search(target, ids, seconds=wrong)


def test_search_tells_the_log_how_far_it_is(target, caplog, monkeypatch):
    monkeypatch.setattr(progress, "WAIT_SECONDS", 0.0)
    caplog.set_level("INFO", logger="gsd_kernels.progress")
    LayerSkip.search(target, prompts(1, 38, ragged=False)["input_ids"])
    assert re.match(r"LayerSkip\.search: 1 of 15 steps, .* times the speed at best, 0 s so far", caplog.messages[0])


def test_expected_speed_is_a_geometric_sum():
    assert expected_speed(0.0, 0.5) == pytest.approx(1 / 1.5)
    assert expected_speed(1.0, 0.0) == 11.0
    assert expected_speed(0.8, 0.1) == pytest.approx(
        max((1 - 0.8 ** (n + 1)) / 0.2 / (1 + 0.1 * n) for n in range(1, 11))
    )


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({}, ValueError, "nothing is skipped"),
        ({"mlp": [4]}, ValueError, "mlp: expected indices 0 … 3, got 4"),
        ({"attention": ["a"]}, TypeError, "attention: expected indices of layers, got 'a'"),
        ({"attention": range(4), "mlp": range(4)}, ValueError, "all that attends is skipped"),
    ],
)
def test_layers_that_cannot_be_skipped_are_refused(arguments, error, match, target):
    with pytest.raises(error, match=match):
        LayerSkip(target, **arguments)


def test_sources_that_do_not_fit_are_refused(target, heads):
    other = tiny(num_hidden_layers=3)

    def refused(match, **arguments):
        with pytest.raises((TypeError, ValueError), match=match):
            gsd.generate(target, **prompts(1, 5), max_new_tokens=4, do_sample=False, **arguments)

    refused("a LayerSkip of another model", assistant_model=LayerSkip(other, mlp=[0]))
    refused("draft_heads: no such folder: heads", draft_heads="heads")
    refused('"heads" needs draft_heads', draft_sources=("heads",))
    refused('"layer_skip" needs assistant_model=LayerSkip', draft_sources=("layer_skip",))
    refused('leave out draft_heads, or name "heads"', draft_sources=("history",), draft_heads=heads)
    with pytest.raises(ValueError, match="another model"):
        gsd.patch(target, assistant_model=LayerSkip(other, mlp=[0]))
    assert "generate" not in vars(target)


def damaged(folder, file):
    DraftHeads(32, 2).save_pretrained(folder)
    (folder / file).write_bytes(b"{}")
    return folder


def another_models(folder):
    DraftHeads.for_model(tiny(num_hidden_layers=3), 2).save_pretrained(folder)
    return folder


HEADS = {
    "made for another": (lambda _: DraftHeads.for_model(tiny(num_hidden_layers=3), 2), "made for a target with num_"),
    "a folder of another's": (another_models, "made for a target with num_hidden_layers=3"),
    "Medusa's of another vocabulary": (lambda _: DraftHeads(32, 2, output_size=3000), "this Medusa drafter was made"),
    "elsewhere": (lambda _: DraftHeads(32, 2).to("meta"), "on meta, and the target's output matrix on cpu"),
    "no config": (lambda folder: damaged(folder, "draft_heads.json"), ".* holds no readable draft heads"),
    "no weights": (lambda folder: damaged(folder, "draft_heads.safetensors"), ".* holds no readable draft heads"),
}


@pytest.mark.parametrize("option", ["draft_heads", "drafter"])
@pytest.mark.parametrize("name", HEADS)
def test_heads_that_do_not_fit_are_refused_by_the_option_that_named_them(option, name, target, tmp_path):
    make, why = HEADS[name]
    with pytest.raises(ValueError, match=f"^{option}: {why}"):
        gsd.generate(target, **prompts(1, 5), max_new_tokens=4, **{option: make(tmp_path)})


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 0.95), st.integers(0, 1000))
def test_a_mixture_learns_which_source_was_right(share, seed):
    """Two sources that never agree; the other is right ``share`` of the time."""
    gen = torch.Generator().manual_seed(seed)
    weights = SourceWeights((0.0, 0.5), None, 1, CPU)
    nodes = torch.arange(5, dtype=torch.int32).expand(4, -1)
    for _ in range(120):
        right = torch.rand(4, 5, generator=gen) < share
        first, other = torch.where(right, -1, 7)[..., None].int(), torch.where(right, 7, -1)[..., None].int()
        log_probs = torch.full((4, 5, 1), 0.9).log()
        asked = Asked(nodes, other, log_probs, torch.ones(4, 5, dtype=torch.int32), first, log_probs)
        weights.learn([asked], nodes, torch.full((4, 5), 7, dtype=torch.int32))
    assert weights.mixture.weights[1] == pytest.approx(share, abs=0.09)
    assert weights.mixture.weights[0] == 0.0


def test_a_mixture_knows_that_candidates_are_not_all_of_a_distribution():
    """A token that the first source did not name is the other's alone only where the first one left nothing for it."""
    nodes, weak = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([[[7, 8]]], dtype=torch.int32)
    for probs, share in (([0.5, 0.2], 0.1 * 0.02 / (0.1 * 0.02 + 0.9 * 0.1)), ([0.7, 0.3], 1.0), ([0.5, 0.0], 1.0)):
        weights = SourceWeights((0.1,), None, 2, CPU)
        first = torch.tensor([[[3, 4]]], dtype=torch.int32), torch.tensor([[probs]]).log()
        asked = Asked(nodes, weak, torch.tensor([[[0.02, 0.01]]]).log(), None, *first)
        weights.learn([asked], nodes, torch.full((1, 1), 7, dtype=torch.int32))
        assert weights.mixture.weights.item() == pytest.approx((0.8 + share) / 9, abs=1e-3)


def test_a_mixture_ignores_what_was_not_seen_and_what_none_had_said():
    weights = SourceWeights((0.3, 0.7), None, 1, CPU)
    nodes, index = torch.arange(6, dtype=torch.int32)[None], torch.tensor([[0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    tokens, log_probs = torch.full((1, 6, 1), 5, dtype=torch.int32), torch.full((1, 6, 1), 0.5).log()
    asked = Asked(nodes, tokens, log_probs, index, tokens, log_probs / 2)
    weights.learn([asked], nodes, torch.full((1, 6), 4, dtype=torch.int32))  # none had said
    weights.learn([asked], nodes + 10, torch.full((1, 6), 5, dtype=torch.int32))  # not asked about
    assert weights.mixture.weights.tolist() == pytest.approx([0.3, 0.7])


def test_worth_is_learned_by_context_and_rank():
    weights = SourceWeights((0.0, 0.0, 0.0), (0.0, 0.5, 0.5), 2, CPU)
    gen = torch.Generator().manual_seed(0)
    log_probs = torch.tensor([[[0.6, 0.3], [0.8, 0.1]]]).log()
    nodes, index = torch.tensor([[3, 5]], dtype=torch.int32), torch.tensor([[1, 2]], dtype=torch.int32)
    tokens = torch.tensor([[[10, 11], [12, 13]]], dtype=torch.int32)
    for _ in range(600):
        first, second = torch.rand(2, generator=gen).tolist()
        picked = [10 if first < 0.3 else 11 if first > 0.9 else 0, 12 if second < 0.78 else 0]
        weights.learn([Asked(nodes, tokens, log_probs, index)], nodes, torch.tensor([picked], dtype=torch.int32))
    found = weights.calibrated(log_probs, index).exp()[0]
    assert found[0].tolist() == pytest.approx([0.3, 0.1], abs=0.06)
    assert found[1, 0] == pytest.approx(0.78, abs=0.06) and found[1, 1] < 0.03
    assert (weights.calibrated(log_probs, torch.zeros_like(index)) == -torch.inf).all()
    assert (weights.calibrated(torch.zeros(1, 1, 2), index[:, 1:]) <= 0).all()


def test_what_was_learned_serves_the_next_call_and_no_other_pair(target, draft):
    options = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False, "graph_config": GRAPH}
    engines_of(target).clear()
    gsd.generate(target, **prompts(1, 14), **draft, **options)
    (only,) = engines_of(target)

    def learned():
        return only.statistics(sampled=False).weights["history"].mixture.weights

    shares = learned()
    assert not torch.equal(shares, torch.tensor(History.shares))
    gsd.generate(target, **prompts(1, 14), draft_sources=("history",), **options)
    assert torch.equal(learned(), shares)
    gsd.generate(target, **prompts(1, 14), **draft, **options)
    assert not torch.equal(learned(), shares)


def test_every_model_of_a_source_is_known():
    """The first of two is checked against the target, too, and no name hides it."""

    class Two(DraftSource):
        name = "two"

        def __init__(self, *found):
            self.forwards = found

        def propose(self, level):
            return None

    target = tiny()
    drafts = noised(target), noised(target)
    options = Options(draft_sources=(Two(*drafts), "history"))
    found = Sources.of(options, target).models
    assert list(found.items()) == [("draft_sources: two", drafts[0]), ("draft_sources: two 2", drafts[1])]
    stranger = tiny(vocab_size=target.config.vocab_size + 5000)
    for pair in ((stranger, drafts[0]), (drafts[0], stranger)):
        with pytest.raises(ValueError, match=r"draft_sources: two.*mean different tokenizers"):
            Sources.of(Options(draft_sources=(Two(*pair), "history")), target)


def test_a_source_is_four_calls():
    """What is attached to a text, asked, told and ended is the whole of what one has to know to write a source."""
    calls = {name for name, value in vars(gsd.DraftSource).items() if callable(value) and not name.startswith("_")}
    assert calls == {"attach", "propose", "observe", "end"}


def test_layer_skip_is_a_source_like_others():
    """Nothing outside its file asks whether a draft is one."""
    package = Path(gsd.__file__).parents[1] / "python"
    asking = re.compile(r"(isinstance|type)\([^()]*\([^()]*LayerSkip|(isinstance|type)\([^()]*LayerSkip")
    found = [path.name for path in package.rglob("*.py") if asking.search(path.read_text(encoding="utf-8"))]
    assert not found and issubclass(LayerSkip, gsd.DraftSource)
