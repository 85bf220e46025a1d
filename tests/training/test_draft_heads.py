"""Heads on a target: what they compute, how they are stored, and which are refused."""

from __future__ import annotations

import pytest
import torch
from models import tiny

from gsd_kernels_hf.sources.heads import DraftHeads


def hidden_states(target, rows=5):
    return torch.randn(rows, target.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(target.dtype)


def filled(target, num_heads=3, **options):
    heads = DraftHeads.for_model(target, num_heads, **options)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    return heads


@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_is_a_residual_block_before_the_output_matrix(layers):
    target = tiny()
    heads, hidden = filled(target, num_layers=layers), hidden_states(target)
    for k in range(3):
        state = hidden
        for layer in range(layers):
            inner = state @ heads.weight[layer, k] + heads.bias[layer, k]
            state = state + inner * torch.sigmoid(inner)
        torch.testing.assert_close(heads(hidden, target.lm_head)[:, k], target.lm_head(state))


@torch.no_grad()
def test_heads_are_stored_and_loaded_for_their_target(tmp_path):
    target = tiny(dtype=torch.float32)
    heads, hidden = filled(target), hidden_states(target)
    heads.save_pretrained(tmp_path / "heads")
    loaded = DraftHeads.from_pretrained(tmp_path / "heads", target.double())
    assert loaded.weight.dtype == torch.float64 and not loaded.training
    stored = DraftHeads.from_pretrained(tmp_path / "heads")
    assert stored.weight.dtype == torch.float32
    assert (stored(hidden, target.float().lm_head) == heads(hidden, target.lm_head)).all()


def test_heads_of_another_target_are_refused_by_name(tmp_path):
    filled(tiny()).save_pretrained(tmp_path)
    for name, value in (("hidden_size", 64), ("vocab_size", 90), ("num_hidden_layers", 3)):
        with pytest.raises(ValueError, match=f"^draft_heads: made for a target with {name}="):
            DraftHeads.from_pretrained(tmp_path, tiny(**{name: value}))
    with pytest.raises(ValueError, match=r"model_type='llama'.*'qwen3'"):
        DraftHeads.from_pretrained(tmp_path, tiny("qwen3"))
