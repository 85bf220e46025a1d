"""Models that multiply integers: the bits of the library's own layers, and one text with any draft or none."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from models import noised, prompts
from quantised import original
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.row_linear import row_linear
from gsd_kernels_hf.costs.pair import describe
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.packed.adapters import stored_in
from gsd_kernels_hf.packed.modules import matrix_of

pytestmark = pytest.mark.skipif(
    unavailable_reason("cpu", torch.device("cpu")) is not None, reason="codes are for the operator"
)
SHAPE = gsd.GraphConfig(depth=3, width=3, branch=2, max_rows=16, history_depth=2)
DTYPES = (torch.bfloat16, torch.float32)


def torchao(model, **how):
    """``how``: names of torchao's."""
    ao = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install -e '.[quantised]'")
    if "granularity" in how:
        how["granularity"] = getattr(ao, how["granularity"])()
    if "act_mapping_type" in how:
        how["act_mapping_type"] = getattr(ao.MappingType, how["act_mapping_type"])
    config = ao.Int8DynamicActivationInt8WeightConfig(**how)
    ao.quantize_(model, config, filter_fn=lambda module, name: type(module) is nn.Linear and "lm_head" not in name)
    return model


class Scheme(NamedTuple):
    """``make`` quantises a model; ``kind``: of its matrices."""

    make: object
    kind: str


SCHEMES = {"torchao": Scheme(torchao, "int8_dynamic")}
names = pytest.mark.parametrize("name", SCHEMES)


@pytest.fixture(scope="module")
def made():
    """A quantised model by name and dtype, made once."""
    known = {}

    def of(name, dtype=torch.bfloat16):
        if (name, dtype) not in known:
            known[name, dtype] = SCHEMES[name].make(original(dtype))
        return known[name, dtype]

    return of


def layers(model):
    return [module for module in model.modules() if stored_in(module) is not None]


@names
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_have_the_bits_of_the_librarys_layers(name, dtype, made):
    found = layers(made(name, dtype))
    assert len(found) == 14
    gen = torch.Generator().manual_seed(0)
    for module in found:
        matrix, x = matrix_of(module), torch.randn(128, module.in_features, generator=gen)
        assert matrix.kind.name == SCHEMES[name].kind
        x = (x * 10 ** (4 * torch.rand(128, 1, generator=gen) - 2)).to(dtype)
        x[5] = 0
        with torch.no_grad():
            for rows in (1, 2, 17, 128):
                assert torch.equal(row_linear(x[:rows], matrix), module(x[:rows]))
            alone = torch.cat([module(row[None]) for row in x[:8]])
        assert torch.equal(row_linear(x, matrix)[:8], alone)


@names
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_any_draft(name, dtype, sampled, made):
    model, inputs = made(name, dtype), prompts(3, 9, vocab=96)
    call = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": sampled}
    call |= {"temperature": 0.8, "seed": 7} if sampled else {}
    asked = {"return_dict_in_generate": True, "output_logits": True}
    expected = gsd.generate(model, **inputs, **call, **asked, graph_config="plain")
    assert expected.stats.why_modules is None
    assert len(set(expected.sequences[:, 9:].flatten().tolist())) > 15
    ways = {
        "draft": {"assistant_model": noised(original(dtype), 0.02), "graph_config": SHAPE},
        "itself": {"assistant_model": model, "graph_config": "tree"},
        "history": {"draft_sources": ("history",), "graph_config": SHAPE},
        "auto": {},
    }
    for way, options in ways.items():
        out = gsd.generate(model, **inputs, **call, **asked, **options)
        assert out.stats.why_modules is None
        assert torch.equal(out.sequences, expected.sequences), way
        assert all(map(torch.equal, out.logits, expected.logits)), way
        if way == "draft":
            assert out.stats.tokens_per_step > 1.2 and sum(out.stats.accepted[2:]) > 0


@names
def test_a_patched_model_notices_changed_scales(name, made):
    model, inputs = made(name), prompts(1, 9, vocab=96)
    call = {"max_new_tokens": 16, "eos_token_id": None, "do_sample": False}
    gsd.patch(model, graph_config="chain")
    first = model.generate(**inputs, **call)
    scales = [t for module in layers(model) for t in stored_in(module).tensors if t.is_floating_point()]
    with torch.no_grad():
        for scale in scales:
            scale.mul_(-1.5)
        second = model.generate(**inputs, **call)
        expected = gsd.generate(model, **inputs, **call, graph_config="plain")
        for scale in scales:
            scale.div_(-1.5)
    gsd.unpatch(model)
    assert torch.equal(second, expected) and not torch.equal(second, first)


@names
def test_costs_know_the_format(name, made):
    assert describe(made(name), None, "auto")["target"]["packed"][0].endswith(f" of {name}")


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"granularity": "PerTensor"}, "q_proj quantises its activations with one scale for all rows"),
        ({"act_mapping_type": "ASYMMETRIC"}, "q_proj quantises its activations to codes with a zero point"),
        ({"reduce_range": True}, "q_proj quantises its activations to seven bits"),
    ],
)
def test_what_is_not_read_keeps_the_modules_and_says_why(how, reason):
    assert reason in why_not(torchao(original(), **how), "auto")


def test_layers_that_also_scale_their_activations_keep_the_modules(made):
    model = torchao(original())
    model.model.layers[1].mlp.up_proj.weight.act_pre_scale = torch.ones(64)
    assert "layers.1.mlp.up_proj scales its activations" in why_not(model, "auto")
