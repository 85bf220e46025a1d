"""P-EAGLE: several tokens from one forward, the same text as without."""

from __future__ import annotations

import functools

import pytest
import torch
from models import prompts, tiny
from sources.drafters import (
    eagle3_config,
    fit_parallel,
    random_eagle3,
    started,
)
from torch.nn.functional import rms_norm, silu
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import gsd_kernels as gsd
from gsd_kernels import Eagle3, GraphConfig
from gsd_kernels_hf.sources.recursion import Parallel

VOCAB = 41
SAYS = {"mask_token_id": 3, "speculators_config": {"proposal_methods": [{"speculative_tokens": 5}]}}
VARIANTS = {
    "plain": {},
    "reduced": {"draft_vocab_size": 29, "num_hidden_layers": 2},
    "norms": {"fc_norm": True, "norm_output": True, "norm_before_residual": True, "num_hidden_layers": 2},
    "before": {"norm_before_fc": True, "attention_bias": True},
}


@functools.cache
def target_of():
    return tiny(num_hidden_layers=3, vocab_size=VOCAB)


def config_of(variant: str, **more) -> dict:
    return eagle3_config(target_of(), **SAYS, **VARIANTS[variant], **more)


def random_of(variant: str) -> Eagle3:
    return random_eagle3(config_of(variant), own_embedding=variant == "before", mask_shape=(1, 1, 96))


@functools.cache
def drafter_of(variant: str) -> Eagle3:
    return fit_parallel(random_of(variant), target_of(), steps=60)


def written_out(module: Eagle3, tokens: list[int], count: int) -> torch.Tensor:
    """Logits [count, V] of the ``count`` tokens after a text: every row, layer and head of the paper's forward."""
    config, weights = module.config, module.state_dict()
    eps, sizes = config.layers.rms_norm_eps, config.layers

    def normed(name, x):
        return rms_norm(x, x.shape[-1:], weights[name], eps)

    with torch.no_grad():
        hidden = target_of()(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
    wide = torch.cat([hidden[number][0] for number in module.layers_of(target_of())], -1)  # [T − 1, 3 D]
    wide = torch.cat([wide, module.mask_hidden.view(1, -1).expand(count - 1, -1)])
    if config.norm_before_fc:
        wide = normed("input_norm.weight", wide)
    if config.fc_norm:
        wide = torch.cat([normed(f"fc_norm.{i}.weight", part) for i, part in enumerate(wide.chunk(3, -1))], -1)
    feature = wide @ weights["fc.weight"].T
    own = weights.get("embed_tokens.weight", target_of().get_input_embeddings().weight)
    embedded = own[torch.tensor([*tokens[1:], *[config.mask_token_id] * (count - 1)])]
    rows, head_dim = len(feature), sizes.head_dim
    cos, sin = module.rotary(feature[None], torch.arange(rows)[None])
    hidden = feature
    for layer in range(sizes.num_hidden_layers):
        at = f"layers.{layer}."
        read, residual = normed(at + "input_layernorm.weight", embedded if layer == 0 else hidden), hidden
        if layer == 0:
            beside = normed(at + "hidden_norm.weight", feature)
            read = torch.cat([read, beside], -1)
            residual = beside if config.norm_before_residual else feature
        query, key, value = (
            (read @ weights[f"{at}self_attn.{name}_proj.weight"].T + weights.get(f"{at}self_attn.{name}_proj.bias", 0))
            .view(1, rows, -1, head_dim)
            .transpose(1, 2)
            for name in "qkv"
        )
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        group = sizes.num_attention_heads // sizes.num_key_value_heads
        scores = query[0] @ key[0].repeat_interleave(group, 0).transpose(1, 2) * head_dim**-0.5
        scores = scores + torch.full((rows, rows), -torch.inf, dtype=scores.dtype).triu(1)
        out = (scores.softmax(-1) @ value[0].repeat_interleave(group, 0)).transpose(0, 1).reshape(rows, -1)
        out = out @ weights[f"{at}self_attn.o_proj.weight"].T + weights.get(f"{at}self_attn.o_proj.bias", 0)
        hidden = residual + out
        read = normed(at + "post_attention_layernorm.weight", hidden)
        gate, up = (read @ weights[f"{at}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        hidden = hidden + (silu(gate) * up) @ weights[f"{at}mlp.down_proj.weight"].T
    return normed("norm.weight", hidden)[-count:] @ weights["lm_head.weight"].T


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_forward_is_the_papers(variant):
    """At once for the whole text, and with most of it in the cache: the masks of the step before left nothing."""
    module, tokens = random_of(variant), prompts(1, 12, vocab=VOCAB)["input_ids"]
    source = started(module, target_of(), tokens)
    assert isinstance(source, Parallel)
    for length, width in ((9, 8), (12, 4)):
        source.state.out_len.fill_(length)
        with torch.no_grad():
            _, logits = source.feed(source.state.out_len - 1, width, unknown=4, keep=5)
        assert int(source.cached) == length - 1
        expected = written_out(module, tokens[0, :length].tolist(), 5)
        torch.testing.assert_close(logits[0], expected, rtol=1e-4, atol=1e-4)
        assert (logits[0, 1:] - logits[0, :-1]).abs().max() > 0.1


def test_a_step_is_one_forward_whatever_the_depth():
    """And no masks beyond what the shape reads, or the drafter was trained for."""
    options = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, **prompts(1, 9, vocab=VOCAB)}
    options |= {"drafter": drafter_of("norms"), "draft_sources": ("drafter",), "return_dict_in_generate": True}
    for depth, masks in ((1, 0), (3, 2), (7, 4)):
        shape = GraphConfig(depth=depth, width=2, branch=2, max_rows=16, merge_context=0)
        stats = gsd.generate(target_of(), **options, graph_config=shape).stats
        assert stats.draft_rows == (shape.chain_rows + masks) * stats.steps
