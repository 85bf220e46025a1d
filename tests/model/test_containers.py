"""Containers on a module, autocast inside a forward, a config beside the weights: the text is the model's."""

from __future__ import annotations

import types

import pytest
import torch
from models import prompts, tiny
from torch import nn

import gsd_kernels as gsd

CALL = {**prompts(1, 12), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Scaled(nn.Module):
    """A module whose output is scaled by what lies in a container beside it."""

    def __init__(self, inner, held):
        super().__init__()
        self.inner, self.held = inner, held

    def forward(self, x):
        held = self.held
        return self.inner(x) * (held["by"] if isinstance(held, dict) else held[0] if len(held) < 9 else sum(held))


def put(held, value):
    held["by" if isinstance(held, dict) else 0] = value


HELD = {
    "a list of 300 numbers": (lambda: [1.0] + 299 * [0.0], lambda held: put(held, 9.0)),
    "a dict of a number": (lambda: {"by": 1.0}, lambda held: put(held, -9.0)),
    "a tensor of a list, written": (lambda: [torch.ones(())], lambda held: held[0].mul_(9.0)),
    "a tensor of a list, replaced": (lambda: [torch.ones(())], lambda held: put(held, torch.tensor(9.0))),
    "a tensor of a dict, written": (lambda: {"by": torch.ones(())}, lambda held: held["by"].mul_(-9.0)),
    "a tensor of a tuple, written": (lambda: (torch.ones(()),), lambda held: held[0].mul_(-9.0)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_container_holds_is_a_setting(name):
    made, change = HELD[name]
    model = tiny()
    held = made()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp, held)
    with gsd.patch(model, draft_sources=("history",), graph_config="tree"), torch.no_grad():
        before = model.generate(**CALL)
        change(held)
        after = model.generate(**CALL)
        assert torch.equal(after, type(model).generate(model, **CALL)) and not torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_inside_a_forward_goes_to_transformers(dtype):
    """As Trainer(bf16=True) and accelerate leave it: keys are turned in float32, values are not."""
    model = tiny(dtype=dtype)
    with gsd.patch(model, draft_sources=("history",), graph_config="tree") as handle:
        model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(type(model).forward), model)
        assert torch.equal(model.generate(**CALL), type(model).generate(model, **CALL))
        assert (handle.stats.why is None) == (dtype == torch.bfloat16), handle.stats.why


@pytest.mark.parametrize("size", [40, 97, 120])
def test_the_weights_say_how_many_tokens_there_are(size):
    """Whatever the config says."""
    model = tiny()
    model.config.vocab_size = size
    ids = torch.tensor([[90, 41, 96, 60, 90, 41]])
    options = {name: value for name, value in CALL.items() if name not in ("input_ids", "attention_mask")}
    plain = type(model).generate(model, ids, **options)
    assert torch.equal(gsd.generate(model, ids, draft_sources=("history",), graph_config="tree", **options), plain)
