"""Linear layers on a CPU: as accurate as PyTorch's, few rows each on its own, and the model stays as it is."""

from __future__ import annotations

import copy

import pytest
import tiny_configs
import torch
from models import noised, prompts, tiny
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.row_linear import row_linear
from gsd_kernels_hf.model import linear
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
