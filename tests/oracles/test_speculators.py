"""Forwards of our drafters equal those of the ``speculators`` package, on random weights in float32.

``make test-oracles`` runs these in an environment of its own (the extra ``oracles``); elsewhere they are skipped.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("speculators", reason="oracle: needs gsd-kernels[oracles], which make test-oracles installs")

from models import tiny
from sources.drafters import SIZES, FixedText, random_tensors
from speculators.losses import resolve_loss_config
from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
from speculators.models.dspark import core as dspark_core
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle.data import generate_cod_sample_indices
from transformers import LlamaConfig, Qwen3Config

from gsd_kernels_hf.sources.base import Prefilled
from gsd_kernels_hf.sources.dflash import DFlash, DFlashDrafts
from gsd_kernels_hf.sources.eagle3 import Eagle3
from gsd_kernels_hf.sources.recursion import Parallel, Recursive

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
VOCAB = 97


def theirs_eagle3(kind, layers, draft, made=Eagle3SpeculatorConfig, **flags):
    sizes = {"hidden_size": 32, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, **SIZES, **layers}
    config = {"llama": LlamaConfig, "qwen3": Qwen3Config}[kind](**sizes, attn_implementation="eager")
    config._attn_implementation = "eager"
    return made(
        transformer_layer_config=config,
        draft_vocab_size=draft,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2],
        **flags,
    )


EAGLE3 = {
    "llama": ("llama", {}, VOCAB, {}),
    "reduced": ("llama", {}, 61, {}),
    "mha": ("llama", {"num_key_value_heads": 4}, VOCAB, {"norm_before_residual": True}),
    "gqa-4": ("llama", {"num_key_value_heads": 1, "head_dim": 16}, 61, {"norm_before_fc": True}),
    "fc-norm": ("llama", {"hidden_size": 48}, VOCAB, {"fc_norm": True}),
    "norm-output": ("llama", {"attention_bias": True}, VOCAB, {"norm_output": True}),
    "every": ("llama", {"mlp_bias": True}, 61, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    "two-layers": ("llama", {"num_hidden_layers": 2}, VOCAB, {}),
    "qwen3": ("qwen3", {"num_hidden_layers": 2}, VOCAB, {"norm_before_residual": True}),
    "rope": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
        VOCAB,
        {},
    ),
}


@pytest.mark.parametrize("name", EAGLE3)
@torch.no_grad()
def test_eagle3_equals_speculators(name, tmp_path):
    """Two levels: all positions of a text with the target's features, then one drafted token after every position."""
    kind, layers, draft, flags = EAGLE3[name]
    length = 11
    theirs = Eagle3DraftModel(theirs_eagle3(kind, {"num_hidden_layers": 1, **layers}, draft, **flags)).eval()
    random_tensors(theirs)
    size = theirs.hidden_size
    if theirs.d2t is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:draft].sort().values
        theirs.d2t.copy_(ids - torch.arange(draft))
        theirs.t2d.fill_(False)
        theirs.t2d[ids] = True
    theirs.save_pretrained(tmp_path)
    ours = Eagle3.from_pretrained(tmp_path)
    assert ours.fc.weight.dtype == torch.float32 and (ours.d2t is None) == (draft == VOCAB)

    gen = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, length, 3 * size, generator=gen)
    tokens = torch.randint(0, VOCAB, (1, length + 2), generator=gen)
    found = []
    theirs.lm_head.register_forward_hook(lambda _, __, out: found.append(out))
    theirs(hidden, tokens[:, 1:-1], torch.zeros(1, length, dtype=torch.long), ttt_steps=2)

    # One sequence for every position, which ends there.
    target = tiny(hidden_size=size, num_hidden_layers=2, num_attention_heads=4, dtype=torch.float32)
    text = FixedText(target, tokens[:, :-1].expand(length, -1), torch.zeros(length, dtype=torch.int32))
    source = Recursive(ours)
    source.check(target)
    source.attach(text)
    source.observe(Prefilled(dict(enumerate(hidden.expand(length, -1, -1).chunk(3, -1))), 0))
    text.state.out_len.copy_(torch.arange(length) + 2)  # entries 0 … i
    assert source.operator is not None
    vectors, logits = source.feed(text.state.out_len - 1, length, keep=1)
    torch.testing.assert_close(logits[:, 0], found[0][0], **TOLERANCE)
    zeros = torch.zeros(length, 1, dtype=torch.int32)
    graph = torch.ones(length, 1, 1, dtype=torch.int32), zeros, zeros
    ids = tokens[0, 2:, None].to(torch.int32)
    _, after = source.forward(ids, vectors, source.cached, 0, *graph, keep=1)
    # Theirs reads token 0 after the last position.
    torch.testing.assert_close(after[:-1, 0], found[1][0, :-1], **TOLERANCE)
    assert (found[0] - found[1]).abs().max() > 0.1


PARALLEL = {
    "llama": ("llama", {"num_hidden_layers": 2}, VOCAB, {}),
    "reduced": ("llama", {}, 61, {"norm_before_residual": True, "norm_before_fc": True}),
    "every": ("qwen3", {"num_hidden_layers": 3}, 61, {"fc_norm": True, "norm_output": True}),
}


@pytest.mark.parametrize("name", PARALLEL)
@torch.no_grad()
def test_parallel_eagle_equals_speculators(name, tmp_path):
    """Behind every position of a text as many masks as the package samples for it."""
    kind, layers, draft, flags = PARALLEL[name]
    length, depths, size = 11, 4, 32
    given = theirs_eagle3(kind, {"num_hidden_layers": 1, **layers}, draft, PEagleSpeculatorConfig, **flags)
    given.mask_token_id = 5
    theirs = PEagleDraftModel(given).eval()
    random_tensors(theirs)
    theirs.mask_hidden.normal_()
    if theirs.d2t is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:draft].sort().values
        theirs.d2t.copy_(ids - torch.arange(draft))
    theirs.save_pretrained(tmp_path)
    ours = Eagle3.from_pretrained(tmp_path)
    assert "P-EAGLE" in repr(ours)

    gen = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, length, 3 * size, generator=gen)
    tokens = torch.randint(0, VOCAB, (1, length + 1), generator=gen)
    found = []
    theirs.lm_head.register_forward_hook(lambda _, __, out: found.append(out[0]))
    ratios = {"num_depths": depths, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    torch.manual_seed(3)
    theirs(
        hidden,
        tokens[:, 1:],
        torch.zeros(1, length, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, length, size),
        loss_config=resolve_loss_config("kl_div", "eager"),
        **ratios,
    )
    torch.manual_seed(3)
    anchors, depth = generate_cod_sample_indices(length, torch.ones(1, length), **ratios)
    assert set(depth.tolist()) == set(range(depths))

    target = tiny(hidden_size=size, num_hidden_layers=2, num_attention_heads=4, dtype=torch.float32, vocab_size=VOCAB)
    if ours.embed_tokens is None:
        theirs.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
    text = FixedText(target, tokens.expand(length, -1), torch.zeros(length, dtype=torch.int32))
    source = Parallel(ours)
    source.check(target)
    source.attach(text)
    source.observe(Prefilled(dict(enumerate(hidden.expand(length, -1, -1).chunk(3, -1))), 0))
    text.state.out_len.copy_(torch.arange(length) + 2)  # entries 0 … i
    _, logits = source.feed(text.state.out_len - 1, length, unknown=depths - 1, keep=depths)
    real = anchors >= 0  # it samples masks behind no position, too
    torch.testing.assert_close(logits[anchors[real], depth[real]], found[0][real], **TOLERANCE)
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 0.1


def blocks_at(places, ours, target, hidden, tokens) -> DFlashDrafts:
    """A source with a sequence for every place [A] of a text, where its root is; hidden states [1, N, 3 D]."""
    count = len(places)
    text = FixedText(target, tokens.expand(count, -1), torch.zeros(count, dtype=torch.int32))
    source = DFlashDrafts(ours)
    source.check(target)
    source.attach(text)
    source.observe(Prefilled(dict(enumerate(hidden.expand(count, -1, -1).chunk(3, -1))), 0))
    text.state.out_len.copy_(places + 1)
    source.enter(text.state.out_len - 1, tokens.shape[1])
    return source


DFLASH = {
    "one-layer": ({}, VOCAB, {}),
    "three-layers": ({"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 16}, VOCAB, {}),
    "mha": ({"num_hidden_layers": 2, "num_key_value_heads": 4, "attention_bias": True}, VOCAB, {"block_size": 3}),
    "reduced": ({"num_hidden_layers": 2, "hidden_size": 48}, 61, {"block_size": 7}),
    "anchor": ({}, VOCAB, {"sample_from_anchor": True}),
    "window": (
        {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
        VOCAB,
        {},
    ),
    "window-both-ways": (
        {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        VOCAB,
        {"sliding_window_non_causal": True},
    ),
}


@pytest.mark.parametrize("name", DFLASH)
@torch.no_grad()
def test_dflash_equals_speculators(name, tmp_path):
    """A block at every place of a text that the package chooses to draft from."""
    layers, draft, settings = DFLASH[name]
    length, settings = 19, {"block_size": 5, **settings}
    sizes = {"hidden_size": 32, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, **SIZES}
    config = Qwen3Config(**{**sizes, "num_hidden_layers": 1, **layers})
    config._attn_implementation = "eager"
    theirs = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=config,
            draft_vocab_size=draft,
            aux_hidden_state_layer_ids=[0, 1, 2],
            mask_token_id=VOCAB - 1,
            **settings,
        )
    ).eval()
    random_tensors(theirs)
    size = theirs.hidden_size
    if theirs.d2t is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:draft].sort().values
        theirs.d2t.copy_(ids - torch.arange(draft))
    theirs.save_pretrained(tmp_path)
    ours = DFlash.from_pretrained(tmp_path)
    target = tiny(hidden_size=size, num_hidden_layers=2, num_attention_heads=4, dtype=torch.float32, vocab_size=VOCAB)
    theirs.embed_tokens.weight.copy_(target.get_input_embeddings().weight)  # a checkpoint has none
    assert ours.embed_tokens is None and (ours.lm_head is None) == (draft == VOCAB)

    gen = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, length, 3 * size, generator=gen)
    tokens = torch.randint(0, VOCAB, (1, length), generator=gen)
    block, anchors = settings["block_size"], length - settings["block_size"] - 1
    mask = torch.zeros(1, length)
    mask[:, 1 : 1 + anchors] = 1  # drafts from places 1 … anchors
    found, _, _, _, places = theirs._backbone_forward(
        hidden,
        tokens,
        mask,
        torch.zeros(1, length, size),
        torch.zeros(1, length, dtype=torch.long),
        max_anchors=anchors,
    )
    places = places.view(anchors, block)[:, 0]
    assert places.tolist() == list(range(1, 1 + anchors))

    source = blocks_at(places, ours, target, hidden, tokens)
    mine = source.block_states()
    # Their output for the root's own row is not trained and not read, but it is the same.
    torch.testing.assert_close(mine, found.view(anchors, block, size), **TOLERANCE)
    head = theirs.lm_head if ours.lm_head is None else ours.lm_head
    torch.testing.assert_close(head(mine), theirs.lm_head(found).view(anchors, block, -1), **TOLERANCE)


BLOCK, SIZE = 5, 32


def with_edges(model_class, config_class, folder, **settings):
    """A drafter of theirs with heads that score neighbours, random, and what is read of it here; the target of both."""
    config = Qwen3Config(hidden_size=SIZE, vocab_size=VOCAB, rms_norm_eps=1e-5, num_hidden_layers=2, **SIZES)
    config._attn_implementation = "eager"
    theirs = model_class(
        config_class(
            transformer_layer_config=config,
            draft_vocab_size=VOCAB,
            aux_hidden_state_layer_ids=[0, 1, 2],
            mask_token_id=VOCAB - 1,
            block_size=BLOCK,
            **settings,
        )
    ).eval()
    random_tensors(theirs)
    theirs.save_pretrained(folder)
    ours = DFlash.from_pretrained(folder)
    target = tiny(hidden_size=SIZE, num_hidden_layers=2, num_attention_heads=4, dtype=torch.float32, vocab_size=VOCAB)
    theirs.embed_tokens.weight.copy_(target.get_input_embeddings().weight)  # a checkpoint has neither
    theirs.lm_head.weight.copy_(target.lm_head.weight)
    return theirs, ours, target


def text_of_blocks(length):
    """Features [1, n, 3 · SIZE] and tokens [1, n] of a text; the places 1 … anchors from which blocks are drafted."""
    gen = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, length, 3 * SIZE, generator=gen)
    tokens = torch.randint(0, VOCAB, (1, length), generator=gen)
    anchors = length - BLOCK - 1
    mask = torch.zeros(1, length)
    mask[:, 1 : 1 + anchors] = 1
    return hidden, tokens, mask, anchors


DSPARK = {
    "vanilla": {"sample_from_anchor": True},
    "gated": {"markov_head_type": "gated", "sample_from_anchor": False},
    "recurrent": {"markov_head_type": "rnn", "sample_from_anchor": True},
    "recurrent-masks": {"markov_head_type": "rnn", "sample_from_anchor": False, "confidence_head_with_markov": False},
}


@pytest.mark.parametrize("name", DSPARK)
@torch.no_grad()
def test_dspark_equals_speculators(name, tmp_path, monkeypatch):
    """Logits and confidence along the text, of a block at every place that the package chooses."""
    length, block, size, settings = 19, BLOCK, SIZE, DSPARK[name]
    theirs, ours, target = with_edges(DSparkDraftModel, DSparkSpeculatorConfig, tmp_path, markov_rank=6, **settings)
    hidden, tokens, mask, anchors = text_of_blocks(length)
    found = []
    monkeypatch.setattr(dspark_core, "compute_metrics", lambda *given, **_: found.extend(given[:3]) or (0, {}))
    zeros = torch.zeros(1, length, size)
    theirs(hidden, tokens, mask, zeros, torch.zeros(1, length, dtype=torch.long), max_anchors=anchors)
    logits, _, confidence = found
    logits, confidence = logits.view(anchors, block, VOCAB), confidence.view(anchors, block)

    places = torch.arange(1, 1 + anchors)
    source = blocks_at(places, ours, target, hidden, tokens)
    source.look_ahead(None)
    drafted = ours.config.num_drafted
    assert drafted == block - (not settings["sample_from_anchor"])
    for depth in range(drafted):
        before = tokens[0, places + depth, None]
        at, theirs_at = slice(depth, depth + 1), slice(block - drafted + depth, block - drafted + depth + 1)
        mine, state = source.logits[:, at], source.hidden[:, at]
        if "rnn" in settings.values():
            gain, source.first = ours.edges.after(state, before, source.first)
            mine = mine + gain
        else:
            mine = ours.edges(mine, state, before)
        torch.testing.assert_close(mine, logits[:, theirs_at], **TOLERANCE)
        torch.testing.assert_close(ours.confidence(state, before)[..., 0], confidence[:, theirs_at], **TOLERANCE)
    assert confidence.std() > 0.1


@pytest.mark.parametrize("anchored", [False, True])
@torch.no_grad()
def test_dflash_2_equals_speculators(anchored, tmp_path):
    """What the selector makes of the best candidates, along the text."""
    length, block, size, top = 19, BLOCK, SIZE, 8
    heads = {"selector_rank": 6, "selector_top_k": top, "conv_kernel_size": 3, "conv_group_size": 8}
    heads["sample_from_anchor"] = anchored
    theirs, ours, target = with_edges(DFlash2DraftModel, DFlash2SpeculatorConfig, tmp_path, **heads)
    hidden, tokens, mask, anchors = text_of_blocks(length)
    zeros = torch.zeros(1, length, size), torch.zeros(1, length, dtype=torch.long)
    states, logits, _, _, at = theirs._backbone_forward(hidden, tokens, mask, *zeros, max_anchors=anchors)
    before = theirs._predecessor_ids(tokens, at).reshape(1, -1)
    ids, scores = (
        found.view(anchors, block, top) for found in theirs.candidate_selector.select(logits, states, before)
    )

    places = torch.arange(1, 1 + anchors)
    source = blocks_at(places, ours, target, hidden, tokens)
    source.look_ahead(None)
    drafted = ours.config.num_drafted
    assert drafted == block - (not anchored) and repr(ours).startswith("<DFlash: DFlash 2")
    mine = ours.edges(source.logits, source.hidden, tokens[0, places[:, None] + torch.arange(drafted)])
    torch.testing.assert_close(mine.gather(-1, ids[:, -drafted:]), scores[:, -drafted:], **TOLERANCE)
    assert (mine - source.logits).abs().max() > 0.1
