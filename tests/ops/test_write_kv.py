"""write_kv on every backend: every bit of the caches, all of them finite."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ops.contracts.backends import assert_bit_equal, backends, cases
from ops.contracts.kv import WRITES, check_write

import gsd_kernels as gsd

pytestmark = pytest.mark.quick

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SHAPES = {
    f"{dtype}-D{dim}-{heads}-{rows}": (dtype, (dim, dim), heads, rows)
    for dtype, dim, heads, rows in itertools.product(FLOATS[:3], (64, 128, 256), (1, 8), (1, 64))
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@backends("reference", "cpu", "interpreter", "triton")
def test_rows_are_written_to_their_positions_and_made_finite(on, dtype):
    k_cache = on.to(torch.ones(2, 3, 9, 4, dtype=dtype))
    v_cache = on.to(torch.ones(2, 9, 3, 5, dtype=dtype).transpose(1, 2))
    k, v = torch.randn(2, 3, 2, 4).to(dtype), torch.randn(2, 3, 2, 5).to(dtype)
    k[0, 1, 1] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    positions = torch.tensor([[8, 2], [0, 5]])
    gsd.write_kv(k_cache, v_cache, *on.to((k, v, positions)), backend=on.name)
    k_cache, v_cache = k_cache.cpu(), v_cache.cpu()
    top = torch.finfo(dtype).max
    assert k_cache[0, 1, 2].tolist() == [0.0, top, -top, 0.0]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for b in range(2):
            assert torch.equal(cache[b][:, positions[b]], rows[b].nan_to_num())
        assert int((cache != 1).any(-1).any(1).sum()) == 4, "nothing else is written"


@cases("case", {**{n: WRITES.items() for n in ("cpu", "interpreter")}, "triton": {**WRITES, **SHAPES}.items()})
def test_written_rows_equal_the_reference_bit_for_bit(on, case):
    check_write(*case, on)


@pytest.mark.parametrize("dtype", FLOATS)
@backends("cpu")
def test_write_of_strided_rows_and_a_position_outside(on, dtype):
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 5, 3, d, generator=gen).to(dtype).transpose(1, 2) for d in (16, 8))
    k[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0], dtype=dtype)
    positions = torch.stack([torch.randperm(20, generator=gen)[:5] for _ in range(2)])
    caches = [[torch.zeros(2, 3, 20, 16, dtype=dtype), torch.zeros(2, 3, 20, 8, dtype=dtype)] for _ in range(2)]
    for (k_cache, v_cache), backend in zip(caches, ("cpu", "reference"), strict=True):
        gsd.write_kv(k_cache, v_cache, k, v, positions, backend=backend)
    assert_bit_equal(*caches)
    assert caches[0][0].isfinite().all()
    with pytest.raises(RuntimeError, match="positions: 20 is outside"):
        gsd.write_kv(*caches[0], k, v, positions + (20 - positions.max()), backend="cpu")
