"""row_linear: as accurate as PyTorch's product, and every row on its own."""

from __future__ import annotations

import pytest
import torch
from ops.contracts.backends import backends

from gsd_kernels.ops.row_linear import row_linear

pytestmark = pytest.mark.quick

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [
    (1, 16, 1),
    (2, 48, 63),
    (5, 1008, 111),
    (17, 256, 1000),
    (64, 96, 7),
    (8, 2064, 130),
    (13, 1037, 6),
    (3, 5, 70),
]
"""(rows, in, out): whole tiles and parts of them."""


def tensors(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(rows * 1000 + n)
    return torch.randn(rows, k, generator=gen).to(dtype), torch.randn(n, k, generator=gen).to(dtype)


@backends("reference", "cpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_the_error_is_at_most_twice_pytorchs(rows, k, n, dtype, on):
    x, weight = tensors(rows, k, n, dtype)
    exact = x.double() @ weight.double().T
    theirs = (torch.nn.functional.linear(x, weight).double() - exact).norm()
    ours = (row_linear(x, weight, backend=on.name).double() - exact).norm()
    assert ours <= 2 * theirs + 1e-7 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
@backends("cpu")
def test_a_row_does_not_depend_on_the_others(on, dtype):
    x, weight = tensors(23, 1200, 130, dtype)
    whole = row_linear(x, weight, backend=on.name)
    for rows in (1, 2, 3, 4, 7, 16):
        assert torch.equal(row_linear(x[:rows].contiguous(), weight, backend=on.name), whole[:rows])
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    found = row_linear(poisoned, weight, backend=on.name)
    assert torch.equal(found[::2], whole[::2]) and found[1::2].isnan().all()
