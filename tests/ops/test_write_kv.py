"""write_kv on every backend: every bit of the caches, all of them finite."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ops.contracts.backends import backends, cases
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


@backends("cpu")
def test_a_position_outside_is_refused(on):
    cache, rows = torch.zeros(2, 1, 20, 4), torch.ones(2, 1, 3, 4)
    with pytest.raises(RuntimeError, match="positions: 20 is outside"):
        gsd.write_kv(cache, cache.clone(), rows, rows, torch.tensor([[0, 19, 5], [1, 20, 3]]), backend=on.name)
