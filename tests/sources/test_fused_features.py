"""An EAGLE-3 drafter as one operator: what its modules compute, and the same drafts; texts are the target's own."""

from __future__ import annotations

import copy

import pytest
import torch
from models import prompts, tiny
from ops.contracts.backends import backend_param
from sources.drafters import FixedText, check_own_text, eagle3_config, fit_eagle3, random_eagle3
from torch import nn

from gsd_kernels import Eagle3, GraphConfig
from gsd_kernels_hf.sources.base import Prefilled
from gsd_kernels_hf.sources.eagle3 import Eagle3Drafts
from gsd_kernels_hf.sources.fused_features import FusedFeatures, why_not

pytestmark = backend_param("cpu").marks
VOCAB = 41
VARIANTS = {
    "reduced": {"draft_vocab_size": 29},
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True, "num_key_value_heads": 4},
    "layers": {"num_hidden_layers": 2, "attention_bias": True, "mlp_bias": True, "norm_before_fc": True},
    "rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}
GRAPH = GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=0)


def target_of(dtype: torch.dtype):
    return tiny(num_hidden_layers=3, vocab_size=VOCAB, dtype=dtype)


def drafter_of(variant: str, dtype: torch.dtype) -> Eagle3:
    config = eagle3_config(target_of(dtype), **VARIANTS[variant])
    return random_eagle3(config, own_embedding=variant == "layers").to(dtype)


def started(module: Eagle3, target, tokens: torch.Tensor, pads: torch.Tensor) -> Eagle3Drafts:
    source = Eagle3Drafts(module)
    source.check(target)
    source.attach(FixedText(target, tokens, pads))
    gen = torch.Generator().manual_seed(3)
    for begin, length in ((0, 5), (5, tokens.shape[1] - 5)):
        states = [torch.randn(len(tokens), length, 32, generator=gen).to(target.dtype) for _ in source.hidden_layers]
        source.observe(Prefilled(dict(zip(source.hidden_layers, states, strict=True)), begin))
    return source


def levels(source: Eagle3Drafts) -> list[torch.Tensor]:
    """Vectors and logits: entries in two pieces, the last three kept; a fork of two behind the root, one more each."""
    state, batch = source.state, len(source.cached)
    found = [*source.feed(state.out_len - 6, 8, keep=0), *source.feed(state.out_len - 1, 6, keep=3)]
    source.feed(state.out_len - 1, 2, keep=1)  # nothing is missing
    vectors, node_depths = found[-2][:, -1:].expand(-1, 2, -1), torch.zeros(batch, 4, dtype=torch.int32)
    for level, mask in ((0, [1, 2]), (1, [0b101, 0b1010])):
        tokens = torch.tensor([[level + 3, 40]], dtype=torch.int32).expand(batch, -1).contiguous()
        graph = torch.tensor(mask, dtype=torch.int32)[:, None].expand(batch, -1, -1).contiguous()
        depths = torch.full((batch, 2), level + 1, dtype=torch.int32)
        found += source.forward(
            tokens, vectors, state.out_len - 1, 2 * level, graph, depths, node_depths, keep=2, shift=1
        )
        vectors = found[-2]
    layers = source.rows.cache.layers
    end = int(source.state.out_len.max()) + 3
    pads = source.rows.text_kv_start.tolist()
    stored = [
        torch.cat([t[b, :, pad:end] for b, pad in enumerate(pads)], 1) for r in layers for t in (r.keys, r.values)
    ]
    return [t.float() for t in (*found, *stored)]


# Relative. Modules in half precision round after each operation, the operator does not.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_the_operator_computes_what_the_modules_do(variant, dtype, most):
    target, module = target_of(dtype), drafter_of(variant, dtype)
    tokens, pads = prompts(3, 17, vocab=VOCAB)["input_ids"], torch.tensor([0, 4, 16], dtype=torch.int32)
    found = []
    for modules in (False, True):
        source = started(module, target, tokens, pads)
        assert source.operator is not None
        if modules:
            source.operator = None
        found.append(levels(source))
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= most * theirs.norm()
    assert not torch.equal(found[0][3][:, 0], found[0][3][:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_is_the_targets_own(dtype, monkeypatch):
    target = target_of(dtype)
    module = fit_eagle3(drafter_of("reduced", torch.float64), target_of(torch.float64)).to(dtype)
    calls, honest = [], FusedFeatures.__call__
    monkeypatch.setattr(FusedFeatures, "__call__", lambda self, *rest: calls.append(1) or honest(self, *rest))
    check_own_text(target, module, [(("drafter",), GRAPH), (("drafter", "history"), GRAPH)], seed=2)
    assert calls
    calls.clear()
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    check_own_text(target, module, [(("drafter",), GRAPH)], seed=2)
    assert not calls


class Scaled(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


def test_what_is_no_operator_keeps_its_modules(monkeypatch):
    embed, module = nn.Embedding(VOCAB, 32), drafter_of("norms", torch.float32)
    assert why_not(module, embed, "auto") is why_not(module, embed, "cpu") is None
    assert "backend 'reference'" in why_not(module, embed, "reference")
    assert "Scaled" in why_not(module, Scaled(VOCAB, 32), "auto")
    assert "no plain tensor of torch.float64" in why_not(copy.deepcopy(module).double(), embed.double(), "auto")
    assert "the embedding is no plain tensor" in why_not(module, embed.bfloat16(), "auto")
    embed = embed.float()
    handle = module.layers[0].mlp.register_forward_hook(lambda *_: None)
    assert "hook" in why_not(module, embed, "auto")
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
        assert match in why_not(changed, embed, "auto")
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")
    assert "GSD_KERNELS_FUSED_ROWS=0" in why_not(module, embed, "auto")
