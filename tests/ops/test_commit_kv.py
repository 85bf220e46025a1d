"""commit_kv on every backend: read all, then write; every bit of the caches."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ops.contracts.backends import ALL, assert_bit_equal, backends, cases
from ops.contracts.kv import check_commit, check_commitment, copied

import gsd_kernels as gsd

pytestmark = pytest.mark.quick

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEW = [(torch.float32, 80), (torch.bfloat16, 64), (torch.float16, 256)]
HALF_AND_SINGLE = list(itertools.product(FLOATS[:3], (64, 80, 256)))
ODD = list(itertools.product((torch.bfloat16, torch.float32, torch.float64), (1, 7, 63, 64, 128)))  # narrower loads
COMPILED = [*HALF_AND_SINGLE, *ODD]
COMMITS = {"cpu": COMPILED, "interpreter": FEW, "triton": HALF_AND_SINGLE, "cuda": COMPILED}


@pytest.mark.parametrize("transposed", [False, True])
@cases("seed", {name: [(str(seed), seed) for seed in range(6 if name == "interpreter" else 12)] for name in ALL})
def test_commit_equals_reading_all_and_then_writing(on, seed, transposed):
    """Rows in any order, sources that are also destinations, finished sequences, several layers of several sizes."""
    gen = torch.Generator().manual_seed(seed)
    batch, rows, prefix, width = 4, 9, 11, 6
    capacity = prefix + rows + 2
    caches = []
    for heads, dim in ((1, 4), (2, 8), (3, 2)):
        shape = (batch, capacity, heads, dim) if transposed else (batch, heads, capacity, dim)
        cache = torch.randn(shape, generator=gen)
        cache[(cache.abs() < 0.01)] = math.nan
        caches.append(cache.transpose(1, 2) if transposed else cache)
    kv_len = torch.randint(0, prefix + 1, (batch,), generator=gen, dtype=torch.int32)
    accepted, count = torch.full((batch, width), -1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    for b in range(batch - 1):  # the last sequence is finished
        n = int(torch.randint(1, width + 1, (), generator=gen))
        order = torch.randperm(rows, generator=gen)[:n]
        accepted[b, :n] = order.sort().values if b == 0 else order
        count[b] = n
    expected = [cache.clone() for cache in caches]
    for cache, before in zip(expected, caches, strict=True):
        for b in range(batch):
            for i in range(int(count[b])):
                cache[b, :, int(kv_len[b]) + i] = before[b, :, int(kv_len[b]) + int(accepted[b, i])]
    for part in range(2):  # keys and then values
        moved, others = ([on.to(copied(cache)) for cache in caches] for _ in range(2))
        length = on.to(kv_len.clone())
        pair = (moved, others) if part == 0 else (others, moved)
        gsd.commit_kv(*pair, on.to(accepted), on.to(count), length, backend=on.name)
        assert_bit_equal(moved, expected)
        assert torch.equal(length.cpu(), kv_len + count)


@pytest.mark.parametrize("layout", ["stacked", "separate"])
@cases("kind", {name: [(f"{t}-D{d}", (t, d)) for t, d in dict.fromkeys(kinds)] for name, kinds in COMMITS.items()})
def test_commit_equals_the_reference(on, kind, layout):
    check_commit(layout, *kind, on)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(4))
@backends("cpu", "interpreter", "triton", "cuda")
def test_commit_of_odd_sizes(on, dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    layers, batch, heads, slots, width = 3, 5, 2, 97, 6
    # Odd sizes, and layers stored slot-first: [B, S, Hkv, D] seen as [B, Hkv, S, D].
    k = [torch.randn(batch, heads, slots, 7, generator=gen).to(dtype) for _ in range(layers)]
    v = [torch.randn(batch, slots, heads, 9, generator=gen).to(dtype).transpose(1, 2) for _ in range(layers)]
    kv_len = torch.randint(0, 30, (batch,), generator=gen, dtype=torch.int32)
    num_accepted = torch.randint(0, width + 1, (batch,), generator=gen, dtype=torch.int32)
    rows = torch.rand(batch, 60, generator=gen).argsort(-1)[:, :width].int()  # any order, not only ascending
    rows[0] = torch.arange(width)
    rows = torch.where(torch.arange(width) < num_accepted[:, None], rows, -1).int()
    check_commitment(k, v, rows, num_accepted, kv_len, on)


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
