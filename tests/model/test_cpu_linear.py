"""Linear layers and functions of elements on a CPU: few rows each on its own, as accurate as PyTorch's."""

from __future__ import annotations

import copy

import pytest
import tiny_configs
import torch
from models import noised, prompts, tiny
from torch import nn
from torch.nn import functional as F

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.row_linear import row_linear
from gsd_kernels_hf.model import linear
from gsd_kernels_hf.model.elementwise import SHARE, Rows, as_rows, own_bits, plain
from gsd_kernels_hf.model.linear import CpuLinear, RowLinear, widened_linear, with_cpu_linears

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(("rows", "k", "n"), [(49, 48, 63), (130, 2048, 1025), (300, 16, 7)])
def test_widened_products_are_at_least_as_accurate(rows, k, n, dtype):
    gen = torch.Generator().manual_seed(rows * 1000 + n)
    x, weight = (torch.randn(m, k, generator=gen).to(dtype) for m in (rows, n))
    exact = x.double() @ weight.double().T
    theirs = (torch.nn.functional.linear(x, weight).double() - exact).norm()
    ours = (widened_linear(x, weight).double() - exact).norm()
    assert ours <= 1.1 * theirs and ours <= torch.finfo(dtype).eps / 2 * exact.norm()


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


@pytest.mark.parametrize("name", ["Zamba2ForCausalLM", "GemmaForCausalLM"])
def test_functions_that_activations_keep_are_no_foreign_code(name):
    """Their rows go through the operator, as it is said of them."""
    model = tiny_configs.build(name, 4).float()
    assert any("act" in vars(module) for module in model.modules())
    kinds = {type(m) for m in with_cpu_linears(model, "auto", RowLinear).modules() if isinstance(m, nn.Linear)}
    assert unavailable_reason("cpu", model.device) is not None or kinds == {RowLinear}
    activation = next(module for module in model.modules() if "act" in vars(module))
    activation.forward = activation.forward  # as offloading does
    assert with_cpu_linears(model, "auto", RowLinear) is model


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
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", "0")  # a plain LLaMA goes through one operator otherwise
    seen = []
    monkeypatch.setattr(linear, "row_linear", lambda x, w: seen.append(x.shape[0]) or row_linear(x, w))
    options = {**prompts(1, 9), "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    text = gsd.generate(target, **options, assistant_model=noised(target, 0.02), graph_config="graph")
    assert max(seen) > 4
    assert torch.equal(text, target.generate(**options))


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
