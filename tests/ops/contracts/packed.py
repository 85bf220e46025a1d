"""Packed matrices with sensible scales, which random bytes have not."""

from __future__ import annotations

import torch

from gsd_kernels.ops.packed import KINDS, Kind, PackedMatrix


def packed_matrix(kind: Kind, outputs: int, inputs: int, seed: int = 0, *, groups: int | None = None) -> PackedMatrix:
    """A random one whose weights are about ``inputs`` ** −½; ``groups``: of its scales, ``None`` for some of 64."""
    gen = torch.Generator().manual_seed(seed)
    if kind.beside:
        data = torch.randint(0, 256, (outputs, kind.row_bytes(inputs)), generator=gen, dtype=torch.uint8)
        groups = groups or next(n for n in (inputs // 64, 2, 1) if n and inputs % (n * kind.weights) == 0)
        scales = ((torch.rand(outputs, groups, generator=gen) + 0.1) / 100).bfloat16().float()
        if kind.name == "int8_vectorwise":  # of a row, where others are of a code
            scales *= 127
        if kind.beside == 2:
            second = torch.randint(0, 16, scales.shape, generator=gen) * (scales if kind.name == "int4_offset" else 1.0)
            scales = torch.stack([scales, second], -1)
        return PackedMatrix(kind, data.view(torch.int8) if kind.signed else data, inputs, scales)
    shape = (outputs, inputs // kind.weights, kind.bytes)
    blocks = torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)
    for at in kind.halves:
        scale = (torch.rand(shape[:2], generator=gen) + 0.1) * (0.02 if kind.weights == 32 else 0.0001)
        blocks[..., at : at + 2] = scale.half()[..., None].view(torch.uint8)
    if kind.name == "mxfp4":
        blocks[..., 0] = torch.randint(118, 125, shape[:2], generator=gen, dtype=torch.uint8)
    return PackedMatrix(kind, blocks.flatten(1), inputs)


def width_of(kind: Kind, least: int) -> int:
    """The smallest number of inputs from ``least`` on that makes whole blocks."""
    return -(-least // kind.weights) * kind.weights


__all__ = ["KINDS", "packed_matrix", "width_of"]
