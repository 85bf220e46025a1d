"""write_kv: problems, and equality with the reference bit for bit."""

from __future__ import annotations

import math

import torch
from ops.contracts.backends import Backend, assert_bit_equal
from torch import Tensor

import gsd_kernels as gsd

NAN = math.nan
WRITES = {
    "float32-D80": (torch.float32, (80, 80), 2, 9),
    "float16-one-row": (torch.float16, (64, 64), 8, 1),
    "bfloat16-D128": (torch.bfloat16, (128, 128), 4, 33),
    "float64-odd": (torch.float64, (7, 1), 3, 5),
    "values-narrower": (torch.bfloat16, (96, 24), 5, 6),
    "values-wider": (torch.float16, (17, 200), 1, 10),
    "one-head-per-program": (torch.float32, (1500, 3), 2, 2),
}


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def check_write(dtype: torch.dtype, dims: tuple[int, int], heads: int, rows: int, on: Backend) -> None:
    """Every bit of the caches, whatever they held; values that are not finite, the smallest and both zeros."""
    gen = torch.Generator().manual_seed(rows)
    batch, capacity = 3, rows + 5
    info = torch.finfo(dtype)
    rare = torch.tensor([NAN, -NAN, math.inf, -math.inf, info.max, info.min, info.smallest_normal, 0.0, -0.0])
    rare = torch.cat([rare.to(dtype), torch.tensor([info.tiny / 2, -info.tiny / 2], dtype=dtype)])

    plain = (torch.arange(rows) % 3 > 0)[None, :, None, None]  # other rows are finite

    def rows_of(dim: int, spare: int) -> Tensor:
        values = torch.randn(batch, rows, heads, dim + spare, generator=gen).to(dtype)
        picked = torch.randint(0, 2 * len(rare), values.shape, generator=gen)
        return torch.where((picked < len(rare)) & plain, rare[picked % len(rare)], values)

    k, v = rows_of(dims[0], 3)[..., 3:].transpose(1, 2), rows_of(dims[1], 0).transpose(1, 2)
    v = v.mT.contiguous().mT if rows % 2 else v  # dimensions need not be next to each other
    order = torch.stack([torch.randperm(capacity, generator=gen)[:rows] for _ in range(batch)])
    positions = order.T.contiguous().T
    caches = {
        "k_cache": torch.full((batch, heads, capacity, dims[0]), NAN, dtype=dtype),
        "v_cache": torch.full((batch, capacity, heads, dims[1] + 2), 7.0, dtype=dtype).transpose(1, 2),
    }
    results = []
    for to, name in ((on.to, on.name), (on.to_reference, "reference")):
        mine = [to(copied(cache)) for cache in caches.values()]
        into, spoiled = [c[..., :d] for c, d in zip(mine, dims, strict=True)], to(torch.arange(batch * rows).float())
        spoiled = spoiled.view(batch, rows)
        gsd.write_kv(*into, to(k), to(v), to(positions), spoiled=spoiled, backend=name)
        results.append([*mine, spoiled])
        written = [torch.zeros_like(cache) for cache in into]
        gsd.write_kv(*written, to(k), to(v), to(positions), backend=name)
        for b in range(batch):
            for cache, found in zip(written, into, strict=True):
                assert torch.equal(cache[b, :, positions[b]], found[b, :, positions[b]])
    assert_bit_equal(*results)
