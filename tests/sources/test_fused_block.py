"""A DFlash drafter's block as one operator: what its modules compute; texts are the target's own."""

from __future__ import annotations

import pytest
import torch
from models import prompts, tiny
from ops.contracts.backends import backend_param
from sources.drafters import FixedText, check_own_text, dflash_config, fit_dflash, random_dflash

from gsd_kernels import DFlash, GraphConfig
from gsd_kernels_hf.sources import dflash
from gsd_kernels_hf.sources.base import Prefilled
from gsd_kernels_hf.sources.dflash import DFlashDrafts

pytestmark = backend_param("cpu").marks
VOCAB = 41
KINDS = {
    "DFlash": {},
    "JetSpec": {"inner": {"causal_head": True}},
    "DSpark": {"inner": {"markov_rank": 6, "sample_from_anchor": True}},
    "recurrent": {"inner": {"markov_rank": 6, "markov_head_type": "rnn"}, "num_hidden_layers": 1},
    "reduced": {"draft_vocab_size": 31, "attention_bias": True},
    "rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
NO_OPERATOR = {
    "windows": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "use_sliding_window": True,
    },
    "DFlash 2": {
        "inner": {"selector_rank": 6, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8},
        "architectures": ["DFlash2DraftModel"],
    },
}
GRAPH = GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=0)


def target_of(dtype: torch.dtype):
    return tiny(num_hidden_layers=3, vocab_size=VOCAB, dtype=dtype)


def drafter_of(kind: str, dtype: torch.dtype) -> DFlash:
    return random_dflash(dflash_config(target_of(dtype), **KINDS[kind]), own=kind == "reduced").to(dtype)


def started(module: DFlash, target, tokens: torch.Tensor, pads: torch.Tensor) -> DFlashDrafts:
    source, gen = DFlashDrafts(module), torch.Generator().manual_seed(3)
    source.check(target)
    source.attach(FixedText(target, tokens, pads))
    states = {
        layer: torch.randn(len(tokens), tokens.shape[1] - 1, 32, generator=gen).to(target.dtype)
        for layer in source.hidden_layers
    }
    source.observe(Prefilled(states, 0))
    source.enter(source.state.out_len - 1, tokens.shape[1])
    return source


# Relative. Modules in half precision round after each operation, the operator does not.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_operator_computes_what_the_modules_do(kind, dtype, most):
    target, module = target_of(dtype), drafter_of(kind, dtype)
    tokens, pads = prompts(3, 17, vocab=VOCAB)["input_ids"], torch.tensor([0, 4, 16], dtype=torch.int32)
    found = []
    for modules in (False, True):
        source = started(module, target, tokens, pads)
        assert source.weights is not None
        if modules:
            source.weights = None
        block, end = source.forward_block(), int(source.cached.max()) + module.config.block_size
        layers = source.rows.cache.layers
        stored = [
            torch.cat([t[b, :, pad:end] for b, pad in enumerate(pads)], 1) for r in layers for t in (r.keys, r.values)
        ]
        found.append([t.float() for t in (*block, *stored)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= most * theirs.norm()


@pytest.mark.parametrize(("kind", "dtype"), [("DFlash", torch.float32), ("DSpark", torch.bfloat16)])
def test_text_is_the_targets_own(kind, dtype, monkeypatch):
    target = target_of(dtype)
    module = fit_dflash(random_dflash(dflash_config(target, **KINDS[kind])), target_of(torch.float64)).to(dtype)
    calls, honest = [], dflash.decoder_rows
    monkeypatch.setattr(dflash, "decoder_rows", lambda *given, **more: calls.append(1) or honest(*given, **more))
    check_own_text(target, module, [(("drafter",), GRAPH), (("drafter", "history"), GRAPH)], seed=2)
    assert calls
    calls.clear()
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    check_own_text(target, module, [(("drafter",), GRAPH)], seed=2)
    assert not calls


@pytest.mark.parametrize("kind", NO_OPERATOR)
def test_what_is_no_plain_decoder_keeps_its_modules(kind):
    target = target_of(torch.float32)
    module = random_dflash(dflash_config(target, **NO_OPERATOR[kind])).float()
    tokens, pads = prompts(2, 9, vocab=VOCAB)["input_ids"], torch.zeros(2, dtype=torch.int32)
    with torch.no_grad():
        assert started(module, target, tokens, pads).weights is None
