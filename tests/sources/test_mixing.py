"""What drafts are mixed of: proposals of several sources by their weights, the target's own layers, other tokens."""

from __future__ import annotations

import copy

import pytest
import torch
import two_tokenizers as two
from models import noised, prompts, tiny
from sources.rows import BOTH, OURS, THEIRS, encoded, hybrid, pair_of, sharing
from torch import nn

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, GraphConfig, LayerSkip
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.model.vocabulary import Translation
from gsd_kernels_hf.records import DecodeState
from gsd_kernels_hf.sources.base import DraftSource, Proposal
from gsd_kernels_hf.sources.history import History
from gsd_kernels_hf.sources.layer_skip import expected_speed
from gsd_kernels_hf.sources.mixer import Mixer, Retention, learned, mixture_of

CPU = torch.device("cpu")
SHAPE = GraphConfig(depth=1, width=2, branch=2, max_rows=8, history_depth=0)


class Fixed(DraftSource):
    """The same two candidates after every node."""

    def __init__(self, name: str, costs_forward: bool, tokens: list[int], probs: list[float]) -> None:
        self.name, self.forwards = name, (nn.Identity(),) if costs_forward else ()
        self.tokens, self.probs = torch.tensor(tokens, dtype=torch.int32), torch.tensor(probs)

    def propose(self, level):
        shape = (*level.frontier.node_ids.shape, 2)
        return Proposal(self.tokens.expand(shape), self.probs.log().expand(shape))


MODEL = Fixed("model", True, [3, 4], [0.6, 0.2])
LOOKUP = Fixed("lookup", False, [4, 5], [0.5, 0.25])
THIRD = Fixed("third", False, [6, 5], [0.4, 0.1])


def drafted(sources, shares, reliability=None):
    """What follows the root: probability by token."""
    state = DecodeState.empty(1, 16, SHAPE.max_path + 1, CPU)
    state.restart(torch.tensor([[7, 8, 9]]), torch.zeros(1, dtype=torch.int32), 8, 0)
    for source, share in zip(sources, shares, strict=True):
        source.shares, source.reliability = (share,), reliability if source is sources[0] else None
    mixer = Mixer(sources, state, "reference", vocab_size=10)
    mixer.prepare(SHAPE)
    graph = mixer.draft(SHAPE)
    after = graph.edge_targets[0, 0].tolist()
    return dict(zip(graph.token_ids[0, after].tolist(), graph.edge_log_probs[0, 0].exp().tolist(), strict=True))


def test_each_source_is_mixed_in_by_its_own_weight():
    """P = (1 − w) · P(sources so far) + w · P(next source), the best two of them."""
    assert drafted([MODEL, LOOKUP], (0.9, 0.25)) == pytest.approx({3: 0.45, 4: 0.75 * 0.2 + 0.25 * 0.5})
    assert drafted([MODEL, LOOKUP], (0.25, 0.9)) == pytest.approx({4: 0.1 * 0.2 + 0.9 * 0.5, 5: 0.9 * 0.25})
    three = drafted([MODEL, LOOKUP, THIRD], (0.0, 0.25, 0.5))
    assert three == pytest.approx({3: 0.225, 6: 0.2}), "the second weight is not the third's"


def test_a_source_that_is_alone_is_corrected_by_its_reliability():
    assert drafted([LOOKUP], (0.0,), reliability=(0.5,)) == pytest.approx({4: 0.25, 5: 0.125})
    assert drafted([LOOKUP], (0.0,)) == pytest.approx({4: 0.5, 5: 0.25})


@pytest.mark.parametrize("wrong", ["model", "another"])
def test_one_of_two_models_that_is_never_right_is_left_out_for_a_while(wrong):
    sources, retention = [MODEL, Fixed("another", True, [3, 4], [0.6, 0.2])], Retention()
    weights = {source.name: mixture_of(torch.tensor([0.5])) for source in sources}
    seen = weights["another"]  # 400 tokens, which the other one picked or this one
    seen.counts.add_(400.0), seen.shares.add_(400.0 * (wrong == "model"))
    retention.observe(sources, weights, 10)
    assert [source.name for source in sources if source not in retention.staying(sources)] == [wrong]
    assert learned(weights["another"]) == (0.0, 0.0), "and begins anew"
    retention.observe(sources[:1], weights, 1024)
    assert retention.staying(sources) == sources


def test_what_was_learned_serves_the_next_call_and_no_other_pair():
    target = tiny()
    draft = {"assistant_model": noised(target, 0.03)}
    options = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
    options["graph_config"] = GraphConfig.preset("graph", history_depth=2, history_width=4)
    engines_of(target).clear()
    gsd.generate(target, **prompts(1, 14), **draft, **options)
    (only,) = engines_of(target)

    def weights():
        return only.statistics[False].weights["history"].weights

    shares = weights()
    assert not torch.equal(shares, torch.tensor(History.shares))
    gsd.generate(target, **prompts(1, 14), draft_sources=("history",), **options)
    assert torch.equal(weights(), shares)
    gsd.generate(target, **prompts(1, 14), **draft, **options)
    assert not torch.equal(weights(), shares)


# Layers of the target itself.


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=4)


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


ONES = torch.ones(1, 2, dtype=torch.int64)
NO_LAYERS = {"attention": range(4), "mlp": range(4)}
BOTH_TEXT = {"tokenizer": OURS, "assistant_tokenizer": two.sentencepiece()}
SPECULATIVE = {"criterion": "speculative", "graph_config": "chain"}
REFUSED = {
    "layers of text": (
        lambda t: {"assistant_model": LayerSkip(t, attention=["a"])},
        "expected indices of layers, got 'a'",
    ),
    "all layers": (lambda t: {"assistant_model": LayerSkip(t, **NO_LAYERS)}, "all that attends is skipped"),
    "one token": (lambda t: LayerSkip.search(t, ONES[:, :1]), "at least 2 tokens a row, got 1"),
    "no time": (lambda t: LayerSkip.search(t, ONES, seconds=0), "seconds: .* got 0"),
    "another's layers": (lambda t: {"assistant_model": LayerSkip(tiny(), mlp=[0])}, "a LayerSkip of another model"),
    "heads left out": (
        lambda t: {"draft_sources": ("history",), "draft_heads": DraftHeads.for_model(t, 3)},
        'leave out draft_heads, or name "heads"',
    ),
    "no models": (lambda t: {"assistant_model": []}, "assistant_model: expected draft models, got an empty list"),
    "one twice": (lambda t: {"assistant_model": 2 * [noised(t)]}, "assistant_model( 2)?: the same draft model twice"),
    "layers beside": (lambda t: {"assistant_model": [noised(t), LayerSkip(t, mlp=[1])]}, "a LayerSkip is given alone"),
    "more tokens": (lambda t: {"assistant_model": tiny(vocab_size=5000)}, "assistant_model( 2)?: vocabulary sizes 97"),
    "two samples": (
        lambda t: {"assistant_model": [noised(t), noised(t, seed=4)], **SPECULATIVE},
        "assistant_model: criterion=.speculative. drafts from one model alone",
    ),
    "two drafters": (lambda t: {"drafter": [t, t]}, "drafter: expected .*, got list; of drafters one is"),
    "one tokenizer": (
        lambda t: {"assistant_model": noised(t), "assistant_tokenizer": OURS},
        "needs the target's tokenizer",
    ),
    "two tokenizers": (
        lambda t: {"assistant_model": noised(t), **BOTH, "assistant_tokenizer": [OURS] * 2},
        "a list of 1",
    ),
    "text that samples": (lambda t: {"assistant_model": t, **BOTH_TEXT, **SPECULATIVE}, "every token of the target"),
    "text of states": (lambda t: {"assistant_model": hybrid("qwen3.5"), **BOTH_TEXT}, "keeps a recurrent state"),
    "paths of states": (
        lambda t: {"assistant_model": hybrid("jamba"), "graph_config": GraphConfig(max_rows=64, max_path=40)},
        "max_path=40, and Jamba",
    ),
    "no heads": (lambda t: {"draft_sources": ("heads",)}, '"heads" needs draft_heads'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sources_that_do_not_fit_are_refused(case, target):
    given, message = REFUSED[case]
    with pytest.raises((TypeError, ValueError), match=message):
        gsd.generate(target, **prompts(1, 5), max_new_tokens=4, do_sample=False, **given(target))


# Other tokens.


def test_a_copy_of_the_target_is_right_but_where_it_lacks_a_token():
    """Greedy: of a draft with the target's own rows every token is accepted that it has."""
    between = Translation.between(OURS, THEIRS)
    draft = two.behind(sharing(), between.target, between.draft).float()
    ids = prompts(1, 12, vocab=len(OURS))["input_ids"]
    ids[between.shared.same[ids] < 0] = OURS.convert_tokens_to_ids("e")  # all of the prompt is read as it is
    options = {"max_new_tokens": 32, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    out = gsd.generate(
        sharing(), ids, **options, **BOTH, assistant_model=draft, graph_config="chain", return_dict_in_generate=True
    )
    emitted = out.sequences[0, ids.shape[1] :]
    lacks = (torch.nn.functional.pad(between.shared.same, (0, 3), value=-1)[emitted] < 0).nonzero()
    first = int(lacks[0]) if len(lacks) else len(emitted)
    steps = [count for count, times in enumerate(out.stats.accepted) for _ in range(times)]
    assert first >= 6 and max(steps) == 6, "a chain of five, and the target's own"
    assert torch.equal(out.sequences, sharing().generate(ids, **options))


CALL = {"max_new_tokens": 28, "pad_token_id": 0}


@pytest.mark.parametrize(("between", "least"), [("", 2.5), ("</s><unk>", 1.2)])
def test_most_of_a_draft_that_knows_the_text_is_accepted(between, least):
    """Both know the text by heart; in other tokens, of which mapping ids leaves little."""
    target, draft, both = pair_of("byte-level to sentencepiece")
    call = encoded(both["tokenizer"], (two.TEXT[:30] + between + two.TEXT[30:60],)) | CALL | {"do_sample": False}
    drafts = both | {"assistant_model": draft, "draft_sources": ("model",), "graph_config": "chain"}
    out = gsd.generate(target, **call, **drafts, return_dict_in_generate=True)
    assert torch.equal(out.sequences, gsd.generate(target, **call, graph_config="plain"))
    assert 28 / out.stats.steps > least and out.stats.lossless
