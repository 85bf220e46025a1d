"""Short convolutions over rows: a path's outputs, whatever is beside it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gsd_kernels_hf.model.recurrent.short_convolution import ShortConvolution
from gsd_kernels_hf.model.recurrent.tree import RowTree

CHANNELS = 32


def tree_of(parents: list[int]) -> RowTree:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return RowTree(torch.tensor([parents]), torch.tensor([depths]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(2, 4), st.integers(1, 5), st.booleans())
def test_rows_are_a_convolution_over_their_path(dtype, beside, width, path, biased):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, CHANNELS, 80, generator=generator).to(dtype)
    weight = torch.randn(CHANNELS, width, generator=generator).to(dtype)
    bias = torch.randn(CHANNELS, generator=generator).to(dtype) if biased else None
    convolution, done = ShortConvolution(), 3
    convolution.begin(torch.nn.functional.pad(x[..., :done], (width, 0))[..., -width:])
    for accepted in (1, path, 1):
        parents = list(range(-1, path - 1))
        parents += [p % (path + i + 1) - 1 for i, p in enumerate(beside)]
        places = [*range(done, done + path), *range(60, 60 + len(beside))]
        out = convolution(tree_of(parents), x[..., places], weight, bias, "silu")
        for row in range(len(parents)):
            up, text = row, []
            while up >= 0:
                text, up = [places[up], *text], parents[up]
            whole = torch.nn.functional.pad(x[..., [*range(done), *text]], (width, 0)).double()
            right = (whole[0, :, -width:] * weight.double()).sum(-1) + (0 if bias is None else bias.double())
            right = torch.nn.functional.silu(right.to(dtype)).double()
            assert torch.allclose(out[0, :, row].double(), right, atol=1e-5 if dtype != torch.bfloat16 else 3e-2)
            alone = ShortConvolution()
            alone.begin(whole[..., -width - 1 : -1].to(dtype))
            one = alone(tree_of([-1]), x[..., places[row] : places[row] + 1], weight, bias, "silu")
            assert torch.equal(one[..., 0], out[..., row])
        convolution.commit(torch.arange(path)[None], torch.tensor([accepted]))
        done += accepted


def test_sequences_that_accept_nothing_stay():
    x, weight = torch.randn(2, CHANNELS, 4), torch.randn(CHANNELS, 4)
    convolution, tree = ShortConvolution(), RowTree(torch.tensor([[-1, 0], [-1, 0]]), torch.tensor([[0, 1], [0, 1]]))
    convolution(tree, x[..., :2], weight)
    convolution.commit(torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32))
    state = convolution.end()
    assert torch.equal(state[0, :, 2:], x[0, :, :2]) and not state[1].any()
    assert state.shape == (2, CHANNELS, 4)
