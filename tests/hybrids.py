"""Tiny models with recurrent layers, in the layer patterns of what is published, and what their tests forward."""

from __future__ import annotations

import functools

import tiny_configs
import torch
from models import prompts
from transformers import PreTrainedModel

import gsd_kernels as gsd

FAMILIES = {
    "qwen3.5": ("Qwen3_5ForCausalLM", 4),
    "qwen3-next": ("Qwen3NextForCausalLM", 4),
    "lfm2": ("Lfm2ForCausalLM", 4),
    "bamba": ("BambaForCausalLM", 4),
    "nemotron-h": ("NemotronHForCausalLM", 4),
    "falcon-h1": ("FalconH1ForCausalLM", 2),
    "kimi": ("KimiLinearForCausalLM", 3),
    "zaya": ("ZayaForCausalLM", 2),
    "jamba": ("JambaForCausalLM", 2),
}
BY_DEPTH = {"zaya", "jamba"}  # their kernels are not known
CHAIN = gsd.GraphConfig.preset("chain", depth=4)
TREE = gsd.GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=-1)


def build(family: str) -> PreTrainedModel:
    """A new model of a family."""
    return tiny_configs.build(*FAMILIES[family])


@functools.lru_cache
def inputs_of(batch: int) -> dict[str, torch.Tensor]:
    """Left-padded prompts of one call, or the first of them alone."""
    found = prompts(3, 9, vocab=tiny_configs.VOCAB)
    return found if batch == 3 else {name: value[:1] for name, value in found.items()}
