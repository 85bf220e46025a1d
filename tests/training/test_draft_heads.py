"""Heads on a target: what they compute, how they are stored, and which are refused."""

from __future__ import annotations

import json

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


def test_new_heads_are_the_targets_own_head():
    target = tiny()
    heads, hidden = DraftHeads.for_model(target, 3), hidden_states(target)
    logits = heads(hidden, target.lm_head)
    assert logits.shape == (5, 3, target.config.vocab_size) and logits.dtype == target.dtype
    assert (logits == target.lm_head(hidden)[:, None]).all()


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


@pytest.mark.parametrize("file", ["draft_heads.safetensors", "draft_heads.json"])
def test_heads_that_are_written_over_are_whole_or_as_before(tmp_path, file):
    """Whoever reads or maps a file meanwhile has the old one, which nobody writes into."""
    filled(tiny()).save_pretrained(tmp_path)
    names, before = sorted(tmp_path.iterdir()), (tmp_path / file).read_bytes()
    with (tmp_path / file).open("rb") as read:
        filled(tiny(), num_heads=2).save_pretrained(tmp_path)
        assert read.read() == before != (tmp_path / file).read_bytes()
    assert sorted(tmp_path.iterdir()) == names


def test_heads_of_another_target_are_refused_by_name(tmp_path):
    filled(tiny()).save_pretrained(tmp_path)
    for name, value in (("hidden_size", 64), ("vocab_size", 90), ("num_hidden_layers", 3)):
        with pytest.raises(ValueError, match=f"^draft_heads: made for a target with {name}="):
            DraftHeads.from_pretrained(tmp_path, tiny(**{name: value}))
    with pytest.raises(ValueError, match=r"model_type='llama'.*'qwen3'"):
        DraftHeads.from_pretrained(tmp_path, tiny("qwen3"))


def test_a_folder_without_whole_heads_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"^draft_heads: no draft_heads\.json in"):
        DraftHeads.from_pretrained(tmp_path)
    filled(tiny()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "draft_heads.json").read_text())
    (tmp_path / "draft_heads.json").write_text(json.dumps(config | {"num_heads": 4}))
    with pytest.raises(ValueError, match="no readable draft heads"):
        DraftHeads.from_pretrained(tmp_path)
    (tmp_path / "draft_heads.safetensors").unlink()
    with pytest.raises(ValueError, match=r"^draft_heads: no draft_heads\.safetensors in"):
        DraftHeads.from_pretrained(tmp_path)


def test_bad_sizes_and_states_are_refused_by_name():
    with pytest.raises(ValueError, match="num_heads: expected a positive integer, got 0"):
        DraftHeads(32, 0)
    target = tiny()
    heads = DraftHeads.for_model(target, 2)
    with pytest.raises(ValueError, match=r"hidden: expected \[batch, 32\], got shape \[2, 3, 32\]"):
        heads(torch.zeros(2, 3, 32), target.lm_head)
    with pytest.raises(ValueError, match=r"hidden: expected \[rows, 32\], got shape \[2, 31\]"):
        heads(torch.zeros(2, 31), target.lm_head)
