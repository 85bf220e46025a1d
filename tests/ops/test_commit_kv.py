"""commit_kv on every backend: read all, then write; every bit of the caches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ops.contracts.backends import Backend, assert_bit_equal, backends, cases
from ops.contracts.kv import copied

import gsd_kernels as gsd

pytestmark = pytest.mark.quick

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEW = [(torch.float32, 80), (torch.bfloat16, 64), (torch.float16, 256)]
HALF_AND_SINGLE = list(itertools.product(FLOATS[:3], (64, 80, 256)))
ODD = list(itertools.product((torch.bfloat16, torch.float32, torch.float64), (1, 7, 63, 64, 128)))  # narrower loads
COMPILED = [*HALF_AND_SINGLE, *ODD]
COMMITS = {"reference": COMPILED, "cpu": COMPILED, "interpreter": FEW, "triton": HALF_AND_SINGLE, "cuda": COMPILED}


LAYOUTS = ("stacked", "separate", "positions first")


def caches_of(layout: str, dtype: torch.dtype, dim: int, slots: int, gen: torch.Generator) -> list[torch.Tensor]:
    """Three layers of four sequences, some numbers NaN: parts of one tensor, or of several sizes."""
    if layout == "stacked":
        stacked = torch.randn(3, 4, 2, slots, dim, generator=gen).to(dtype)
        return list(stacked.masked_fill_(stacked.abs() < 0.01, math.nan))
    caches = [torch.randn(4, heads, slots, size, generator=gen).to(dtype) for heads, size in ((1, dim), (2, 7), (3, 9))]
    caches[1][:, :, 12:] = math.nan
    return caches if layout == "separate" else [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]


@pytest.mark.parametrize("layout", LAYOUTS)
@cases("kind", {name: [(f"{t}-D{d}", (t, d)) for t, d in dict.fromkeys(kinds)] for name, kinds in COMMITS.items()})
def test_commit_equals_reading_all_and_then_writing(on, kind, layout):
    """Rows in any order, sources that are also destinations, finished sequences, several layers of several sizes."""
    gen = torch.Generator().manual_seed(3 * kind[1] + LAYOUTS.index(layout))
    batch, rows, prefix, width = 4, 60, 31, 6
    kv_len = torch.randint(0, prefix + 1, (batch,), generator=gen, dtype=torch.int32)
    count = torch.randint(1, width + 1, (batch,), generator=gen, dtype=torch.int32)
    count[3] = 0  # finished
    accepted = torch.rand(batch, rows, generator=gen).argsort(-1)[:, :width].int()
    accepted[0] = accepted[0].sort().values
    accepted[1] %= 7  # close to each other, some of them twice
    accepted = torch.where(torch.arange(width) < count[:, None], accepted, -1)
    others = (
        layout if on.name == "triton" else LAYOUTS[LAYOUTS.index(layout) - 1]
    )  # whose keys and values have one shape
    caches = [caches_of(of, *kind, prefix + rows + 2, gen) for of in (layout, others)]
    expected = [[cache.clone() for cache in part] for part in caches]
    for cache, before in zip(itertools.chain(*expected), itertools.chain(*caches), strict=True):
        for b in range(batch):
            for i in range(int(count[b])):
                cache[b, :, int(kv_len[b]) + i] = before[b, :, int(kv_len[b]) + int(accepted[b, i])]
    moved = [on_device(part, on) for part in caches]
    length = on.to(kv_len.clone())
    gsd.commit_kv(*moved, on.to(accepted), on.to(count), length, backend=on.name)
    assert_bit_equal(itertools.chain(*moved), itertools.chain(*expected))
    assert torch.equal(length.cpu(), kv_len + count)


def on_device(layers: list[torch.Tensor], on: Backend) -> list[torch.Tensor]:
    """Copies; layers of one tensor are layers of one tensor again."""
    whole = layers[0]._base
    if whole is not None and all(layer._base is whole for layer in layers):
        return list(on.to(copied(whole)))
    return [on.to(copied(layer)) for layer in layers]


@backends("cpu", "triton", "cuda")
def test_more_caches_than_one_launch_takes(on):
    cache = on.to(torch.randn(400, 1, 2, 20, 8))
    expected = cache.clone()
    expected[:, :, :, 6] = expected[:, :, :, 9]
    layers = list(cache)
    rows = on.to(torch.tensor([[0, 4]], dtype=torch.int32))
    kv_len = on.to(torch.tensor([5], dtype=torch.int32))
    gsd.commit_kv(layers[:200], layers[200:], rows, torch.full_like(kv_len, 2), kv_len, backend=on.name)
    assert torch.equal(cache, expected) and kv_len.item() == 7
