"""Packed matrices with sensible scales, which random bytes have not."""

from __future__ import annotations

import torch

from gsd_kernels.ops.packed import KINDS, Kind, PackedMatrix

HALVES = {"q6_k": (208,), "mxfp4": (), "q4_1": (0, 2), "q5_1": (0, 2), "q4_k": (0, 2), "q5_k": (0, 2)}
"""Bytes of a block at which a float16 scale or minimum lies; 0 where a kind is not listed."""


def packed_matrix(kind: Kind, outputs: int, inputs: int, seed: int = 0) -> PackedMatrix:
    """A random one whose weights are about ``inputs`` ** −½."""
    gen = torch.Generator().manual_seed(seed)
    if kind.scaled:
        data = torch.randint(-128, 128, (outputs, inputs), generator=gen, dtype=torch.int8)
        groups = 2 if inputs % 2 == 0 else 1
        return PackedMatrix(kind, data, inputs, (torch.rand(outputs, groups, generator=gen) + 0.1) / 100)
    shape = (outputs, inputs // kind.weights, kind.bytes)
    blocks = torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)
    for at in HALVES.get(kind.name, (0,)):
        scale = (torch.rand(shape[:2], generator=gen) + 0.1) * (0.02 if kind.weights == 32 else 0.0001)
        blocks[..., at : at + 2] = scale.half()[..., None].view(torch.uint8)
    if kind.name == "mxfp4":
        blocks[..., 0] = torch.randint(118, 125, shape[:2], generator=gen, dtype=torch.uint8)
    return PackedMatrix(kind, blocks.flatten(1), inputs)


def width_of(kind: Kind, least: int) -> int:
    """The smallest number of inputs from ``least`` on that makes whole blocks."""
    return -(-least // kind.weights) * kind.weights


__all__ = ["KINDS", "packed_matrix", "width_of"]
