"""Linear layers on a CPU: as accurate as PyTorch's, few rows each on its own, and the model stays as it is."""

from __future__ import annotations

import copy

import pytest
import torch
from models import noised, prompts, tiny
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.row_linear import row_linear
from gsd_kernels_hf.model import linear
from gsd_kernels_hf.model.linear import CpuLinear, widened_linear, with_cpu_linears

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 16, 1), (2, 48, 63), (5, 1008, 111), (17, 256, 1000), (64, 96, 7), (8, 2064, 130), (13, 1040, 6)]
"""(rows, in, out): whole tiles and parts of them."""
BACKENDS = [
    name if name == "reference" or not (why := unavailable_reason(name, torch.device("cpu"))) else
    pytest.param(name, marks=pytest.mark.skip(reason=why))
    for name in ("reference", "cpu")
]  # fmt: skip


def tensors(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(rows * 1000 + n)
    return torch.randn(rows, k, generator=gen).to(dtype), torch.randn(n, k, generator=gen).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_the_error_is_at_most_twice_pytorchs(rows, k, n, dtype, backend):
    x, weight = tensors(rows, k, n, dtype)
    exact = x.double() @ weight.double().T
    theirs = (torch.nn.functional.linear(x, weight).double() - exact).norm()
    ours = (row_linear(x, weight, backend=backend).double() - exact).norm()
    assert ours <= 2 * theirs + 1e-7 * exact.norm()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(dtype):
    x, weight = tensors(23, 1200, 130, dtype)
    whole = row_linear(x, weight)
    for rows in (1, 2, 3, 4, 7, 16):
        assert torch.equal(row_linear(x[:rows].contiguous(), weight), whole[:rows])
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    found = row_linear(poisoned, weight)
    assert torch.equal(found[::2], whole[::2]) and found[1::2].isnan().all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("rows", "k", "n"), [(49, 48, 63), (130, 2048, 1025), (300, 16, 7)])
def test_widened_products_are_at_least_as_accurate(rows, k, n, dtype):
    x, weight = tensors(rows, k, n, dtype)
    exact = x.double() @ weight.double().T
    theirs = (torch.nn.functional.linear(x, weight).double() - exact).norm()
    ours = (widened_linear(x, weight).double() - exact).norm()
    assert ours <= 1.1 * theirs and ours <= torch.finfo(dtype).eps / 2 * exact.norm()


def test_shapes_and_dtypes_are_checked():
    x, weight = tensors(3, 32, 5, torch.float32)
    for wrong_x, wrong_weight, match in (
        (x[:, :20].contiguous(), weight[:, :20].contiguous(), "multiple of 16"),
        (x, weight.bfloat16(), "weight"),
        (x, weight[:, :16].contiguous(), "weight"),
        (x.double(), weight.double(), "x: expected"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            row_linear(wrong_x, wrong_weight)


@pytest.mark.parametrize("length", (8, 64))
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_view_computes_the_same_and_leaves_the_model_alone(dtype, length):
    model = tiny("qwen3", dtype=dtype)
    before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    view = with_cpu_linears(model, "auto")
    if unavailable_reason("cpu", model.device) is None and linear.serves(model.lm_head.weight):
        assert all(type(m) is CpuLinear for m in view.modules() if isinstance(m, nn.Linear))
        assert view.lm_head.weight is model.lm_head.weight
    ids = prompts(2, length, ragged=False)["input_ids"]
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(ids).logits
        theirs, ours = ((m(ids).logits.double() - exact).norm() for m in (model, view))
    assert ours <= 2 * theirs
    assert [type(m) for m in model.modules()] == kinds
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_models_that_keep_their_own_products():
    assert with_cpu_linears(tiny(dtype=torch.float32), "reference") is not None
    model = tiny(dtype=torch.float32)
    assert with_cpu_linears(model, "reference") is model
    model.model.layers[0].forward = model.model.layers[0].forward  # as offloading does
    assert with_cpu_linears(model, "auto") is model
    assert not any(isinstance(m, CpuLinear) for m in with_cpu_linears(tiny(), "auto").modules()), "float64"


def test_biases_adapters_and_hooks_still_count():
    model = tiny(dtype=torch.float32, attention_bias=True)
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.q_proj.bias)
    calls = []
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    view = with_cpu_linears(model, "auto")
    ids = prompts(1, 8)["input_ids"]
    with torch.no_grad():
        torch.testing.assert_close(view(ids).logits, model(ids).logits)
    assert len(calls) == 2
    handle.remove()


def test_generation_goes_through_it(monkeypatch):
    target = tiny(dtype=torch.float32)
    if not linear.serves(target.lm_head.weight) or unavailable_reason("cpu", target.device):
        pytest.skip("PyTorch's own products are used here")
    seen = []
    monkeypatch.setattr(linear, "row_linear", lambda x, w: seen.append(x.shape[0]) or row_linear(x, w))
    options = {**prompts(1, 9), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    text = gsd.generate(target, **options, assistant_model=noised(target, 0.02), graph_config="graph")
    assert max(seen) > 4
    assert torch.equal(text, target.generate(**options))
