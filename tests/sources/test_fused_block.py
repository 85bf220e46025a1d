"""A DFlash drafter's layers as operators: what its modules compute; texts are the target's own."""

from __future__ import annotations

import copy

import pytest
import torch
from block_code import rows as block_code
from models import prompts, tiny
from ops.contracts.backends import backend_param
from sources.drafters import FixedText, dflash_config, random_dflash

from gsd_kernels import DFlash
from gsd_kernels_hf.model import replay
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
SERVED = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
"""Heads that a GPU's operators take."""


def target_of(dtype: torch.dtype, **sizes: int):
    return tiny(num_hidden_layers=3, vocab_size=VOCAB, dtype=dtype, **sizes)


def drafter_of(kind: str, dtype: torch.dtype, **sizes: int) -> DFlash:
    config = dflash_config(target_of(dtype), **{**KINDS[kind], **sizes})
    return random_dflash(config, own=kind == "reduced").to(dtype)


def started(module: DFlash, target, tokens: torch.Tensor, pads: torch.Tensor, *, modules: bool = False) -> DFlashDrafts:
    source, gen = DFlashDrafts(module), torch.Generator().manual_seed(3)
    source.check(target)
    source.attach(FixedText(target, tokens, pads))
    if modules:
        source.operator = None
    shape = len(tokens), tokens.shape[1] - 1, target.config.hidden_size
    states = [torch.randn(shape, generator=gen).to(tokens.device, target.dtype) for _ in source.hidden_layers]
    source.observe(Prefilled(dict(zip(source.hidden_layers, states, strict=True)), 0))
    end = source.state.out_len - 1
    source.enter(end - 5, tokens.shape[1])
    source.enter(end, 7)  # with rows that are padding
    return source


def computed(source: DFlashDrafts, pads: torch.Tensor) -> list[torch.Tensor]:
    """States and logits of the block, and all keys and values of the text and the block."""
    block, end = source.forward_block(), int(source.cached.max()) + source.module.config.block_size
    caches = [t for layer in source.rows.cache.layers for t in (layer.keys, layer.values)]
    stored = [torch.cat([t[b, :, pad:end] for b, pad in enumerate(pads)], 1) for t in caches]
    return [t.float() for t in (*block, *stored)]


# Relative. Modules in half precision round after each operation, the operators do not.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_operators_compute_what_the_modules_do(kind, dtype, most):
    target, module = target_of(dtype), drafter_of(kind, dtype)
    tokens, pads = prompts(3, 17, vocab=VOCAB)["input_ids"], torch.tensor([0, 4, 16], dtype=torch.int32)
    assert started(module, target, tokens, pads).operator is not None
    found = [computed(started(module, target, tokens, pads, modules=own), pads) for own in (False, True)]
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= most * theirs.norm()


@pytest.fixture(params=[block_code.OWN, *block_code.DEVICES])
def device(request, monkeypatch, tmp_path_factory):
    return block_code.drafting_on(request.param, monkeypatch, tmp_path_factory)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, (torch.bfloat16, torch.float16)[i % 2]) for i, kind in enumerate(KINDS)], ids=str
)
@torch.no_grad()
def test_the_error_is_at_most_twice_the_modules(device, kind, dtype):
    """Against the modules in float64: states, logits, keys and values."""
    target, module = target_of(dtype, **SERVED).to(device), drafter_of(kind, dtype, **SERVED).to(device)
    tokens, pads = prompts(2, 17, vocab=VOCAB)["input_ids"].to(device), torch.tensor([0, 4], dtype=torch.int32)
    found = []
    for exact, modules in ((True, True), (False, True), (False, False)):
        of = (copy.deepcopy(module).double(), copy.deepcopy(target).double()) if exact else (module, target)
        source = started(*of, tokens, pads.to(device), modules=modules)
        assert modules or source.operator is not None
        assert source.rows.operator == ("cuda" if replay.is_gpu(source.rows.device) else "auto")
        found.append([t.double() for t in computed(source, pads)])
    for number, (exactly, theirs, ours) in enumerate(zip(*found, strict=True)):
        assert ours.isfinite().all()
        assert (ours - exactly).norm() <= 2 * (theirs - exactly).norm() + 1e-6 * exactly.norm(), number


@pytest.mark.parametrize("kind", NO_OPERATOR)
def test_what_is_no_plain_decoder_keeps_its_modules(kind):
    target = target_of(torch.float32)
    module = random_dflash(dflash_config(target, **NO_OPERATOR[kind])).float()
    tokens, pads = prompts(2, 9, vocab=VOCAB)["input_ids"], torch.zeros(2, dtype=torch.int32)
    with torch.no_grad():
        assert started(module, target, tokens, pads).operator is None
