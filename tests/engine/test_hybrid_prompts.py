"""Prompts of hybrids: behind padding of any length, in pieces of one token, in the next turn, with limits on steps."""

from __future__ import annotations

import functools

import pytest
import tiny_configs
import torch

import gsd_kernels as gsd
from gsd_kernels_hf.model.recurrent import mixers
from gsd_kernels_hf.model.recurrent.step_limit import limit_of

pytestmark = pytest.mark.skipif(not mixers.READABLE, reason=f"states are read from transformers {mixers.FIRST} on")

LAYERS = {"Zaya": 2, "NemotronH": 4, "Zamba2": 4}  # the fewest that have a recurrent layer and attention
LIMITED = ("Zamba2", "NemotronH")  # of which transformers limits steps in prompts alone
PADS = (0, 1, 2, 6)  # of the sequences of a batch
LENGTHS = (7, 8)  # of their prompts: the last one has one word, or two


@functools.cache
def target_of(name: str):
    """A tiny model; where there is a limit on steps, one that many of them reach."""
    more = {"time_step_min": 0.3} if name in LIMITED else {}
    model = tiny_configs.build(f"{name}ForCausalLM", LAYERS[name], **more)
    for _, module in mixers.mixers_of(model):
        assert (limit_of(module) is None) == (name not in LIMITED)
        if name in LIMITED:
            with torch.no_grad():
                module.dt_bias.copy_(torch.linspace(-4.0, 0.0, module.dt_bias.numel()))
    return model


@functools.cache
def prompts(length: int) -> dict[str, torch.Tensor]:
    """A prompt behind each of :data:`PADS`."""
    ids = torch.randint(6, tiny_configs.VOCAB - 4, (len(PADS), length), generator=torch.Generator().manual_seed(length))
    mask = torch.ones_like(ids)
    for row, pads in enumerate(PADS):
        ids[row, :pads], mask[row, :pads] = 5, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("backend", "chunk"), [("reference", None), ("reference", 1), ("auto", 3)])
def test_limits_on_steps_are_those_of_transformers(name, backend, chunk):
    """By window and by depth; the first row is the prompt's last token, and no piece of it a generated one."""
    for length in LENGTHS:
        call = {**prompts(length), "max_new_tokens": 6, "do_sample": False}
        options = {"draft_sources": ("history",), "graph_config": "tree", "prefill_chunk_size": chunk}
        out = gsd.generate(target_of(name), **call, **options, backend=backend)
        assert torch.equal(out, target_of(name).generate(**call))
