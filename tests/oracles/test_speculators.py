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
from gsd_kernels_hf.sources.load import load_drafter, source_of

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}
VOCAB, LENGTH, BLOCK = 97, 19, 5
LISTED = "aux_hidden_state_layer_ids"
EAGLE = {f"eagle_{LISTED}": [0, 1, 2]}
MASKED = {LISTED: [0, 1, 2], "mask_token_id": VOCAB - 1, "block_size": BLOCK}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def both(folder, model, described, layers, draft, settings, sizes=Qwen3Config):
    """A drafter of theirs with random weights, ours from its folder, and a target of both."""
    given = {"vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 5000.0, "num_hidden_layers": 1, **SIZES}
    config = sizes(**{"hidden_size": 32, **given, **layers})
    config._attn_implementation = "eager"
    theirs = model(described(transformer_layer_config=config, draft_vocab_size=draft, **settings)).eval()
    random_tensors(theirs)
    if theirs.d2t is not None:
        ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(2))[:draft].sort().values
        theirs.d2t.copy_(ids - torch.arange(draft))
        theirs.t2d[:] = torch.isin(torch.arange(VOCAB), ids)
    theirs.save_pretrained(folder)
    target = tiny(
        hidden_size=theirs.hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        dtype=torch.float32,
        vocab_size=VOCAB,
    )
    ours = load_drafter(folder, target)
    assert (ours.d2t is None) == (draft == VOCAB)
    for own, same, shared in (
        (ours.embed_tokens, theirs.embed_tokens, target.get_input_embeddings()),
        (ours.lm_head, theirs.lm_head, target.lm_head),
    ):
        if own is None:  # a checkpoint has none
            same.weight.copy_(shared.weight)
    return theirs, ours, target


def text_of(size, length=LENGTH):
    """Features [1, n, 3 · size] and tokens [1, n + 2] of a text."""
    gen = torch.Generator().manual_seed(1)
    return torch.randn(1, length, 3 * size, generator=gen), torch.randint(0, VOCAB, (1, length + 2), generator=gen)


def behind(lengths, ours, target, hidden, tokens):
    """Our source with a sequence for every length [A] of a text; hidden states [1, n, 3 D]."""
    count = len(lengths)
    text = FixedText(target, tokens.expand(count, -1), torch.zeros(count, dtype=torch.int32))
    source = source_of(ours)
    source.check(target)
    source.attach(text)
    source.observe(Prefilled(dict(enumerate(hidden.expand(count, -1, -1).chunk(3, -1))), 0))
    text.state.out_len.copy_(lengths)
    return source


LLAMA = {
    "reduced": ({}, 61, {}),
    "gqa-4": ({"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True}, 61, {"norm_before_fc": True}),
    "every": ({"mlp_bias": True}, 61, {"fc_norm": True, "norm_output": True, "norm_before_residual": True}),
    "qwen3": ({"num_hidden_layers": 2}, VOCAB, {"norm_before_residual": True}),
    "rope": ({"rope_scaling": ROPE | {"original_max_position_embeddings": 16}}, VOCAB, {}),
}


@pytest.mark.parametrize("name", LLAMA)
@torch.no_grad()
def test_eagle3(name, tmp_path):
    """Two levels: all positions of a text with the target's features, then one drafted token after every position."""
    layers, draft, flags = LLAMA[name]
    kind = Qwen3Config if name == "qwen3" else LlamaConfig
    made = Eagle3DraftModel, Eagle3SpeculatorConfig, layers, draft, EAGLE | flags, kind
    theirs, ours, target = both(tmp_path, *made)
    hidden, tokens = text_of(theirs.hidden_size)
    found = []
    theirs.lm_head.register_forward_hook(lambda _, __, out: found.append(out))
    theirs(hidden, tokens[:, 1:-1], torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=2)
    source = behind(torch.arange(LENGTH) + 2, ours, target, hidden, tokens[:, :-1])  # entries 0 … i
    assert source.operator is not None
    vectors, logits = source.feed(source.state.out_len - 1, LENGTH, keep=1)
    torch.testing.assert_close(logits[:, 0], found[0][0], **TOLERANCE)
    zeros = torch.zeros(LENGTH, 1, dtype=torch.int32)
    graph = torch.ones(LENGTH, 1, 1, dtype=torch.int32), zeros, zeros
    ids = tokens[0, 2:, None].to(torch.int32)
    _, after = source.forward(ids, vectors, source.cached, 0, *graph, keep=1)
    # Theirs reads token 0 after the last position.
    torch.testing.assert_close(after[:-1, 0], found[1][0, :-1], **TOLERANCE)
    assert (found[0] - found[1]).abs().max() > 0.1


PARALLEL = {
    "reduced": ({}, 61, {"norm_before_residual": True, "norm_before_fc": True}),
    "qwen3": ({"num_hidden_layers": 3}, 61, {"fc_norm": True, "norm_output": True}),
}


@pytest.mark.parametrize("name", PARALLEL)
@torch.no_grad()
def test_parallel_eagle(name, tmp_path):
    """Behind every position of a text as many masks as the package samples for it."""
    layers, draft, flags = PARALLEL[name]
    kind, settings = Qwen3Config if name == "qwen3" else LlamaConfig, EAGLE | flags | {"mask_token_id": 5}
    theirs, ours, target = both(tmp_path, PEagleDraftModel, PEagleSpeculatorConfig, layers, draft, settings, kind)
    assert "P-EAGLE" in repr(ours)
    hidden, tokens = text_of(32)
    found, depths = [], 4
    theirs.lm_head.register_forward_hook(lambda _, __, out: found.append(out[0]))
    ratios = {"num_depths": depths, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
    torch.manual_seed(3)
    theirs(
        hidden,
        tokens[:, 1:-1],
        torch.zeros(1, LENGTH, dtype=torch.long),
        verifier_last_hidden_states=torch.zeros(1, LENGTH, 32),
        loss_config=resolve_loss_config("kl_div", "eager"),
        **ratios,
    )
    torch.manual_seed(3)
    anchors, depth = generate_cod_sample_indices(LENGTH, torch.ones(1, LENGTH), **ratios)
    assert set(depth.tolist()) == set(range(depths))
    source = behind(torch.arange(LENGTH) + 2, ours, target, hidden, tokens[:, :-1])  # entries 0 … i
    _, logits = source.feed(source.state.out_len - 1, LENGTH, unknown=depths - 1, keep=depths)
    real = anchors >= 0  # it samples masks behind no position, too
    torch.testing.assert_close(logits[anchors[real], depth[real]], found[0][real], **TOLERANCE)
    assert (logits[:, 0] - logits[:, 1]).abs().max() > 0.1


WINDOW = {"num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 3}
DFLASH = DFlashDraftModel, DFlashSpeculatorConfig
DSPARK = DSparkDraftModel, DSparkSpeculatorConfig
SECOND = DFlash2DraftModel, DFlash2SpeculatorConfig
SELECTED = {"selector_rank": 6, "selector_top_k": 8, "conv_kernel_size": 3, "conv_group_size": 8}
ANCHOR = {"sample_from_anchor": True}
RECURRENT = {"markov_rank": 6, "markov_head_type": "rnn"}
BLOCKS = {
    "reduced": (*DFLASH, {"num_hidden_layers": 2, "hidden_size": 48, "attention_bias": True}, 61, {"block_size": 7}),
    "window": (*DFLASH, WINDOW | {"max_window_layers": 1}, VOCAB, {}),
    "both ways": (*DFLASH, WINDOW | {"max_window_layers": 0}, VOCAB, {"sliding_window_non_causal": True}),
    "DSpark": (*DSPARK, {}, VOCAB, {"markov_rank": 6} | ANCHOR),
    "DSpark gated": (*DSPARK, {}, VOCAB, {"markov_rank": 6, "markov_head_type": "gated", "sample_from_anchor": False}),
    "DSpark recurrent": (*DSPARK, {}, VOCAB, RECURRENT | ANCHOR),
    "DSpark masks": (
        *(*DSPARK, {}, VOCAB),
        RECURRENT | {"sample_from_anchor": False, "confidence_head_with_markov": False},
    ),
    "DFlash 2": (*SECOND, {"num_hidden_layers": 2}, VOCAB, SELECTED | {"sample_from_anchor": False}),
}


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_blocks(name, tmp_path, monkeypatch):
    """States and logits of a block at every place of a text, and what heads for edges and confidence say along it."""
    model, described, layers, draft, settings = BLOCKS[name]
    theirs, ours, target = both(tmp_path, model, described, layers, draft, MASKED | settings)
    hidden, tokens = text_of(theirs.hidden_size)
    tokens, block, drafted = tokens[:, :LENGTH], ours.block_size, ours.num_drafted
    anchors = LENGTH - block - 1
    mask = torch.zeros(1, LENGTH)
    mask[:, 1 : 1 + anchors] = 1  # drafts from places 1 … anchors
    zeros = torch.zeros(1, LENGTH, theirs.hidden_size), torch.zeros(1, LENGTH, dtype=torch.long)
    states, logits, _, _, at = theirs._backbone_forward(hidden, tokens, mask, *zeros, max_anchors=anchors)
    places = torch.arange(1, 1 + anchors)
    assert torch.equal(at.view(anchors, block)[:, 0], places)

    source = behind(places + 1, ours, target, hidden, tokens)
    source.feed(source.state.out_len - 1, LENGTH, keep=0)
    mine, given = source.forward_block()
    last = slice(block - drafted, None)
    torch.testing.assert_close(mine, states.view(anchors, block, -1), **TOLERANCE)
    torch.testing.assert_close(given, theirs.lm_head(states).view(anchors, block, -1)[:, last], **TOLERANCE)
    if ours.edges is None:
        return
    before = tokens[0, places[:, None] + torch.arange(drafted)]
    if model is DFlash2DraftModel:
        scored, _ = ours.edges(given, mine[:, last], before)
        following = theirs._predecessor_ids(tokens, at).reshape(1, -1)
        ids, scores = (
            found.view(anchors, block, -1)[:, last]
            for found in theirs.candidate_selector.select(logits, states, following)
        )
        torch.testing.assert_close(scored.gather(-1, ids), scores, **TOLERANCE)
    else:
        found = []
        monkeypatch.setattr(dspark_core, "compute_metrics", lambda *given, **_: found.extend(given[:3]) or (0, {}))
        theirs(hidden, tokens, mask, *zeros, max_anchors=anchors)
        # A recurrent head's state begins with the root's row, whether or not that drafts.
        rows = torch.cat([given[:, : block - drafted], given], 1)
        root = tokens[0, places[:, None].expand(-1, block - drafted)]
        scored = ours.edges(rows, mine, torch.cat([root, before], 1))[0][:, last]
        torch.testing.assert_close(scored, found[0].view(anchors, block, -1)[:, last], **TOLERANCE)
        sure = ours.confidence(mine[:, last], before)[..., 0]
        torch.testing.assert_close(sure, found[2].view(anchors, block)[:, last], **TOLERANCE)
        assert sure.std() > 0.1
    assert (scored - given).abs().max() > 0.1
