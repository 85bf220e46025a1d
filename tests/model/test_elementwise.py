"""Functions of the elements of rows: a row has the same bits alone and among others, of any size."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from gsd_kernels_hf.model.elementwise import SHARE, Rows, as_rows, own_bits, plain
from gsd_kernels_hf.model.linear import RowLinear

CALLS = {
    "silu": F.silu,
    "softplus": lambda x: F.softplus(x.float() + 0.5),
    "sigmoid": lambda x: x.sigmoid(),
    "exp": lambda x: -x.float().exp(),
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "pow": lambda x: (x.abs() + 1) ** 1.7,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 16, 48, 64, 1100])
def test_a_row_has_its_own_bits(dtype, size):
    x = 3 * torch.randn(1, 64, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    for name, call in CALLS.items():
        with own_bits(True):
            found = {count: plain(call(as_rows(x[:, 64 - count :]))) for count in (1, 2, 3, 5, 16, 33, 64)}
        assert torch.allclose(found[64].double(), call(x.double()).double(), rtol=2e-2, atol=1e-6), name
        for count, values in found.items():
            assert torch.equal(values[0], found[64][0, 64 - count :]), (name, count)


def test_the_bits_could_differ():
    x = 3 * torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
    alone = torch.cat([F.softplus(row[None]) for row in x])
    if torch.equal(alone, F.softplus(x)):
        pytest.skip("this PyTorch computes all elements alike")
    with own_bits(True):
        alone = torch.cat([plain(F.softplus(as_rows(row[None]))) for row in x])
        assert torch.equal(alone, plain(F.softplus(as_rows(x))))


def test_parts_have_their_own_bits():
    x = torch.randn(1, 9, 64)
    with own_bits(True, in_parts=True):
        alone, among = (plain(F.softplus(as_rows(rows)[..., 24:48] + 0.5)) for rows in (x[:, :1], x))
    assert torch.equal(alone, among[:, :1])


def test_linear_layers_return_rows_inside_alone():
    layer = torch.nn.Linear(32, 24, bias=False).requires_grad_(False)
    layer.__class__ = RowLinear
    x = torch.randn(1, 3, 32)
    assert type(layer(x)) is torch.Tensor
    with own_bits(True):
        rows = layer(x)
        assert type(rows) is Rows and type(layer(F.pad(rows, (0, 8)))) is Rows
        with own_bits(False):
            assert type(layer(x)) is torch.Tensor
    assert torch.equal(plain(rows), layer(x)) and type(plain(rows)) is torch.Tensor
    assert type(as_rows(x)) is torch.Tensor


def test_many_elements_are_shared_among_threads_alike():
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        x = torch.randn(4, SHARE - 64)
        with own_bits(True):
            assert type(as_rows(x)) is Rows
            assert torch.equal(plain(F.silu(as_rows(x)))[2], F.silu(x[2]))
    finally:
        torch.set_num_threads(threads)


def test_what_changes_its_argument_changes_it():
    x = torch.randn(2, 5)
    with own_bits(True):
        rows = as_rows(x)
        F.silu(rows, inplace=True)
    assert torch.equal(plain(rows), x)
