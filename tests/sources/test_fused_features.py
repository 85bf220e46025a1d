"""Drafters that read features as operators, level by level or a block: what their modules compute."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from block_code import rows as block_code
from models import prompts, tiny
from ops.contracts.backends import backend_param
from sources.drafters import FixedText, dflash_config, eagle3_config, random_dflash, random_eagle3, random_tensors
from torch import nn

from gsd_kernels import DFlash, Eagle3, Mtp
from gsd_kernels_hf.model import replay
from gsd_kernels_hf.sources.base import Prefilled
from gsd_kernels_hf.sources.dflash import DFlashDrafts
from gsd_kernels_hf.sources.features import why_not
from gsd_kernels_hf.sources.load import source_of
from gsd_kernels_hf.sources.recursion import Recursive
from gsd_kernels_train.mtp import block_to_train, new_head

pytestmark = backend_param("cpu").marks
VOCAB = 41
VARIANTS = {
    "reduced": {"draft_vocab_size": 29},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "num_key_value_heads": 4},
    "layers": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "norm_before_fc": True},
    "rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
HEADS = {
    "llama": ("llama-gqa", {"attention_bias": True, "mlp_bias": True}),
    "yarn": ("llama-tied", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}}),
    "mistral": ("mistral-window", {"head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}
"""Targets of heads of multi-token prediction."""
FIRST = ("yarn", "qwen2")
"""Of them those whose heads read the feature first, with a bias."""
BLOCKS = {
    "DFlash": {},
    "JetSpec": {"inner": {"causal_head": True}},
    "DSpark": {"inner": {"markov_rank": 6, "sample_from_anchor": True}},
    "recurrent": {"inner": {"markov_rank": 6, "markov_head_type": "rnn"}, "num_hidden_layers": 1},
    "reduced block": {"draft_vocab_size": 31, "attention_bias": True},
    "rope block": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
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


def target_of(dtype: torch.dtype, name: str = "", **sizes: int):
    family, config = HEADS.get(name, ("llama-gqa", {}))
    return tiny(family, num_hidden_layers=3, vocab_size=VOCAB, dtype=dtype, **{**config, **sizes})


def drafter_of(variant: str, dtype: torch.dtype, **sizes: int) -> Eagle3 | Mtp | DFlash:
    if variant in HEADS:
        torch.manual_seed(0)
        target = target_of(torch.float64, variant, **sizes)
        module = new_head(block_to_train(target)).requires_grad_(False)
        if variant in FIRST:
            module.layout = replace(module.layout, hidden_first=True)
            module.projection = nn.Linear(64, 32, dtype=torch.float64).requires_grad_(False)
        random_tensors(module)
        return module.to(dtype)
    if variant in VARIANTS:
        config = eagle3_config(target_of(dtype), **{**VARIANTS[variant], **sizes})
        return random_eagle3(config, own_embedding=variant == "layers").to(dtype)
    config = dflash_config(target_of(dtype), **{**BLOCKS, **NO_OPERATOR}[variant], **sizes)
    return random_dflash(config, own=variant == "reduced block").to(dtype)


def started(module, target, tokens: torch.Tensor, pads: list[int], *, modules: bool = False):
    """A source behind a text, of which it was told in two pieces; ``modules``: it forwards these."""
    device, gen = target.device, torch.Generator().manual_seed(3)
    source = source_of(module)
    source.check(target)
    source.attach(FixedText(target, tokens.to(device), torch.tensor(pads, dtype=torch.int32, device=device)))
    if modules:
        source.operator = None
    for begin, length in ((0, 5), (5, tokens.shape[1] - 5)):
        states = [torch.randn(len(tokens), length, 32, generator=gen).to(target.dtype) for _ in source.hidden_layers]
        states = [state.to(device) for state in states]
        source.observe(Prefilled(dict(zip(source.hidden_layers, states, strict=True)), begin))
    return source


def computed(source) -> list[torch.Tensor]:
    """What a step of it computes, and all keys and values of the text and the step."""
    found, behind = block(source) if isinstance(source, DFlashDrafts) else levels(source)
    layers = source.rows.cache.layers[: len(source.module.layers)]
    caches = [t for layer in layers for t in (layer.keys, layer.values)]
    pads, end = source.rows.text_kv_start.tolist(), int(source.state.out_len.max()) + behind
    stored = [torch.cat([t[b, :, pad:end] for b, pad in enumerate(pads)], 1) for t in caches]
    return [t.float() for t in (*found, *stored)]


def block(source: DFlashDrafts) -> tuple[list[torch.Tensor], int]:
    """States and logits of the block behind features that came in two pieces; rows behind the text but its root."""
    end = source.state.out_len - 1
    source.enter(end - 5, source.state.tokens.shape[1])
    source.enter(end, 7)  # with rows that are padding
    return [*source.forward_block()], source.module.config.block_size - 1


def levels(source: Recursive) -> tuple[list[torch.Tensor], int]:
    """Vectors and logits: entries in two pieces, the last three kept; a fork of two behind the root, one more each."""
    state, batch, device = source.state, len(source.cached), source.cached.device
    found = [*source.feed(state.out_len - 6, 8, keep=0), *source.feed(state.out_len - 1, 6, keep=3)]
    source.feed(state.out_len - 1, 2, keep=1)  # nothing is missing
    vectors, node_depths = found[-2][:, -1:].expand(-1, 2, -1), torch.zeros(batch, 4, dtype=torch.int32, device=device)
    for level, mask in ((0, [1, 2]), (1, [0b101, 0b1010])):
        tokens = torch.tensor([[level + 3, 40]], dtype=torch.int32, device=device).expand(batch, -1).contiguous()
        graph = torch.tensor(mask, dtype=torch.int32, device=device)[:, None].expand(batch, -1, -1).contiguous()
        depths = torch.full((batch, 2), level + 1, dtype=torch.int32, device=device)
        found += source.forward(
            tokens, vectors, state.out_len - 1, 2 * level, graph, depths, node_depths, keep=2, shift=1
        )
        vectors = found[-2]
    return found, 3


@pytest.mark.parametrize("variant", [*VARIANTS, *HEADS, *BLOCKS])
@torch.no_grad()
def test_the_operators_compute_what_the_modules_do(variant):
    target, module = target_of(torch.float32, variant), drafter_of(variant, torch.float32)
    tokens, found = prompts(3, 17, vocab=VOCAB)["input_ids"], []
    for modules in (False, True):
        source = started(module, target, tokens, [0, 4, 16], modules=modules)
        assert modules or source.operator is not None
        found.append(computed(source))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.fixture(params=[block_code.OWN, *block_code.DEVICES])
def device(request, monkeypatch, tmp_path_factory):
    return block_code.drafting_on(request.param, monkeypatch, tmp_path_factory)


@pytest.mark.parametrize(
    ("variant", "dtype"),
    [
        (name, (torch.bfloat16, torch.float16)[i % 2])
        for i, name in enumerate(("norms", "layers", "llama", "yarn", *BLOCKS))
    ],
    ids=str,
)
@torch.no_grad()
def test_the_error_is_at_most_twice_the_modules(device, variant, dtype):
    """Against the modules in float64: vectors or states, logits, keys and values."""
    target, module = target_of(dtype, variant, **SERVED).to(device), drafter_of(variant, dtype, **SERVED).to(device)
    tokens, found = prompts(2, 17, vocab=VOCAB)["input_ids"], []
    for exact, modules in ((True, True), (False, True), (False, False)):
        of = (copy.deepcopy(module).double(), copy.deepcopy(target).double()) if exact else (module, target)
        source = started(*of, tokens, [0, 4], modules=modules)
        assert modules or source.operator is not None
        assert source.rows.operator == ("cuda" if replay.is_gpu(source.rows.device) else "auto")
        found.append([t.double() for t in computed(source)])
    for number, (exactly, theirs, ours) in enumerate(zip(*found, strict=True)):
        assert ours.isfinite().all()
        assert (ours - exactly).norm() <= 2 * (theirs - exactly).norm() + 1e-6 * exactly.norm(), number


@pytest.mark.parametrize("kind", NO_OPERATOR)
def test_what_is_no_plain_decoder_keeps_its_modules(kind):
    source = started(drafter_of(kind, torch.float32), target_of(torch.float32), torch.arange(9)[None], [0])
    assert source.operator is None


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


def test_what_is_no_operator_keeps_its_modules(monkeypatch):
    embed, module = nn.Embedding(VOCAB, 32), drafter_of("norms", torch.float32)
    assert why_not(module, embed, module.lm_head, "auto") is why_not(module, embed, module.lm_head, "cpu") is None
    assert "backend 'reference'" in why_not(module, embed, module.lm_head, "reference")
    assert "Scaled" in why_not(module, Scaled(VOCAB, 32), module.lm_head, "auto")
    doubled = copy.deepcopy(module).double()
    assert "no plain tensor of torch.float64" in why_not(doubled, embed.double(), doubled.lm_head, "auto")
    assert "the embedding is no plain tensor" in why_not(module, embed.bfloat16(), module.lm_head, "auto")
    embed = embed.float()
    handle = module.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "hook" in why_not(module, embed, module.lm_head, "auto")
    handle.remove()
    for change, match in (
        (lambda m: setattr(m.norm, "variance_epsilon", 1e-3), "another epsilon"),
        (lambda m: setattr(m.layers[0].mlp, "act_fn", nn.GELU()), "layers.0.mlp.act_fn is no plain module, but GELU"),
        (lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.zeros(VOCAB))), "a bias of the output matrix"),
        (lambda m: setattr(m.config.layers, "hidden_act", "gelu"), "the activation gelu"),
        (lambda m: m.config.layers.rope_parameters.update(rope_type="dynamic"), "depend on the length"),
    ):
        changed = copy.deepcopy(module)
        change(changed)
        assert match in why_not(changed, embed, changed.lm_head, "auto")
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    assert "GSD_KERNELS_FUSED_ROWS=0" in why_not(module, embed, module.lm_head, "auto")
