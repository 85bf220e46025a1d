"""A small draft's rows as one operator: the same proposals as through the model, and only where that is possible."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.graph import pack_bits
from gsd_kernels_hf.model.fused import FusedRows, rows_of, why_not
from gsd_kernels_hf.model.runner import RowModel

MISSING = unavailable_reason("cpu", torch.device("cpu"))
compiled = pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}")


def llama(**changes):
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **changes})).eval()
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=float("norm" in name), std=0.15)
    return model


ROPES = [
    {},
    {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}},
    {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}},
    {"tie_word_embeddings": True},
]


@compiled
@pytest.mark.parametrize("changes", ROPES)
@pytest.mark.parametrize("prompt", [0, 21])
def test_logits_and_caches_are_the_models_own(changes, prompt):
    model = llama(**changes)
    gen = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (2, prompt), generator=gen)
    kv_start = torch.tensor([0, min(prompt, 4)], dtype=torch.int32)
    attention_mask = (torch.arange(prompt) >= kv_start[:, None]).long() if prompt else None
    kv_len = torch.full((2,), prompt, dtype=torch.int32)
    parents = [-1, 0, 0, 1, 2, 3]
    sees = torch.eye(len(parents), dtype=torch.bool)
    depths = torch.zeros(len(parents), dtype=torch.int32)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] |= sees[parent]
            depths[row] = depths[parent] + 1
    mask = pack_bits(sees).expand(2, -1, -1).contiguous()
    depths = depths.expand(2, -1).contiguous()
    tokens = torch.randint(3, 320, (2, len(parents)), generator=gen, dtype=torch.int32)  # some beyond the vocabulary
    assert why_not(model, "auto") is None and type(rows_of(model, 64, kv_start, "auto")) is FusedRows
    with torch.no_grad():
        ours, theirs = FusedRows(model, 64, kv_start, "auto"), RowModel(model, 64, kv_start, "auto")
        results = []
        for rows in (ours, theirs):
            rows.prefill(ids, attention_mask, None)
            results.append(rows.rows(tokens, kv_len, torch.arange(len(parents)), mask, depths, depths, keep=4))
    torch.testing.assert_close(*results, atol=2e-5, rtol=1e-5)
    text = (torch.arange(64) >= kv_start[:, None])[:, None, :, None]  # padding may hold anything
    for a, b in zip(ours.cache.layers, theirs.cache.layers, strict=True):
        torch.testing.assert_close(a.keys * text, b.keys * text, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(a.values * text, b.values * text, atol=1e-5, rtol=1e-5)


class Scaled(nn.Linear):
    pass


def with_hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def with_adapter(model):
    layer = model.model.layers[0].mlp
    layer.up_proj = Scaled(64, 96, bias=False)


def with_other_forward(model):
    model.model.norm.forward = lambda x: x


def transposed(model):
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(torch.randn(64, 96).T)


def double(model):
    model.double()


@compiled
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_hook, r"model.layers.1.mlp has a hook"),
        (with_adapter, r"model.layers.0.mlp.up_proj is not a plain module of transformers or PyTorch but .*Scaled"),
        (with_other_forward, r"model.norm has a function of its own, forward"),
        (transposed, r"could not be forwarded .*up: expected 96 contiguous rows"),
        (double, r"an output matrix of torch.float64, which is none of float32"),
    ],
)
def test_a_changed_model_goes_through_its_modules(change, reason):
    model = llama()
    change(model)
    assert re.search(reason, why_not(model, "auto"))
    assert type(rows_of(model, 64, torch.zeros(1, dtype=torch.int32), "auto")) is RowModel
