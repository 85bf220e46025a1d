"""Draft sources, alone and together: the same text from all, learned shares, self-drafting without a second model."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, GraphConfig, LayerSkip
from gsd_kernels.ops.learn import Asked
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.sources.history import History
from gsd_kernels_hf.sources.layer_skip import expected_speed
from gsd_kernels_hf.sources.ledger import SourceWeights

NEW = 24
CPU = torch.device("cpu")
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
    refused('"model" needs assistant_model', draft_sources=("model",))
    refused('"layer_skip" needs assistant_model=LayerSkip', draft_sources=("layer_skip",))
    refused('leave out draft_heads, or name "heads"', draft_sources=("history",), draft_heads=heads)
    draft = noised(target)
    refused("assistant_model: expected draft models, got an empty list", assistant_model=[])
    refused("assistant_model( 2)?: the same draft model twice", assistant_model=[draft, draft])
    refused("assistant_model( 2)?: expected a model, got the path 'draft'; load it", assistant_model=[draft, "draft"])
    refused("a LayerSkip is given alone", assistant_model=[draft, LayerSkip(target, attention=[1])])
    refused("assistant_model( 2)?: vocabulary sizes 97", assistant_model=[draft, tiny(vocab_size=5000)])
    two = {"assistant_model": [draft, noised(target, seed=4)], "criterion": "speculative", "graph_config": "chain"}
    refused("assistant_model: criterion=.speculative. drafts from one model alone", **two)
    refused("drafter: expected .*, got list; of drafters one is", drafter=[heads, heads])
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
    weights = SourceWeights((0.0, 0.5), CPU)
    nodes = torch.arange(5, dtype=torch.int32).expand(4, -1)
    for _ in range(120):
        right = torch.rand(4, 5, generator=gen) < share
        first, other = torch.where(right, -1, 7)[..., None].int(), torch.where(right, 7, -1)[..., None].int()
        log_probs = torch.full((4, 5, 1), 0.9).log()
        asked = Asked(nodes, other, log_probs, torch.ones(4, 5, dtype=torch.int32), first, log_probs)
        weights.learn([asked], nodes, torch.full((4, 5), 7, dtype=torch.int32))
    assert weights.mixture.weights[1] == pytest.approx(share, abs=0.09)
    assert weights.mixture.weights[0] == 0.0


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
