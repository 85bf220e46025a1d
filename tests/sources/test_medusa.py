"""Medusa's checkpoints as draft heads with output matrices of their own."""

from __future__ import annotations

import pytest
import torch
from models import tiny
from sources.drafters import save

from gsd_kernels import DraftHeads
from gsd_kernels_hf.sources.checkpoints import Checkpoint

CONFIG = {"model_type": "medusa", "medusa_num_heads": 2, "medusa_num_layers": 1}


def tensors_of(target, heads=3, layers=1, seed=0, scale=0.05):
    """Heads near the target's own, which repeat its next token: right where a text repeats a token."""
    gen, size, found = torch.Generator().manual_seed(seed), target.config.hidden_size, {}
    for head in range(heads):
        for layer in range(layers):
            found[f"{head}.{layer}.linear.weight"] = scale * torch.randn(size, size, generator=gen)
            found[f"{head}.{layer}.linear.bias"] = scale * torch.randn(size, generator=gen)
        found[f"{head}.{layers}.weight"] = target.lm_head.weight.float() * (1 + head)
    return found


@pytest.mark.parametrize("layers", [1, 2])
@torch.no_grad()
def test_a_head_is_its_blocks_and_its_own_matrix(layers, tmp_path):
    target = tiny(dtype=torch.float32)
    tensors, hidden = tensors_of(target, layers=layers), torch.randn(4, 32)
    prefixed = {f"medusa_head.{name}": value for name, value in tensors.items()} | {"lm_head.weight": torch.ones(2, 2)}
    for number, stored in enumerate((tensors, prefixed)):
        folder = save(tmp_path / str(number), CONFIG, stored)
        heads = DraftHeads.from_medusa(Checkpoint.open(folder), target)
        for head in range(3):
            state = hidden
            for layer in range(layers):
                weight, bias = (tensors[f"{head}.{layer}.linear.{part}"] for part in ("weight", "bias"))
                state = state + torch.nn.functional.silu(torch.nn.functional.linear(state, weight, bias))
            want = state @ tensors[f"{head}.{layers}.weight"].T
            torch.testing.assert_close(heads(hidden, target.lm_head)[:, head], want)
    heads.save_pretrained(tmp_path / "heads")
    assert torch.equal(DraftHeads.from_pretrained(tmp_path / "heads")(hidden, None), heads(hidden, None))
