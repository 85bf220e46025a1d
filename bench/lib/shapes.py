"""Shapes named after real models, and the grids that the cases go through."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gsd_kernels_cli.demo.inflate import SHAPES as INFLATED
from gsd_kernels_cli.demo.inflate import llama

#: Besides the shapes that :mod:`gsd_kernels_cli.demo.inflate` names: a draft for Llama 3, SmolLM2, one that takes no
#: time, and the demo pair's target with each key/value head twice, so that its heads divide among four ranks.
SHAPES: dict[str, LlamaConfig] = {
    **INFLATED,
    "demo-mha": llama(256, 704, 6, 4, 4, 64, 2048, tied=True),
    "smollm2-135m": llama(576, 1536, 30, 9, 3, 64, 49152, tied=True),
    "llama-3.2-1b": llama(2048, 8192, 16, 32, 8, 64, 128256),
    "tiny": llama(64, 128, 2, 4, 2, 16, 512),
}

QUICK_SHAPES = ("tiny", "tinyllama-1.1b")
CPU_SHAPES = ("tinyllama-1.1b", "llama-2-7b", "llama-3-8b")
GPU_SHAPES = ("llama-2-7b", "llama-3-8b", "llama-2-70b")


def shape_named(name: str) -> LlamaConfig:
    """Raises:
    ValueError: no such shape.
    """
    if name not in SHAPES:
        raise ValueError(f"shape {name!r} is unknown; named shapes: {', '.join(SHAPES)}")
    return SHAPES[name]


def num_parameters(name: str) -> int:
    """Number of parameters of a Llama of a named shape."""
    with torch.device("meta"):
        return LlamaForCausalLM(shape_named(name)).num_parameters()
