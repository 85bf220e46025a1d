"""Weights that libraries quantised, read or kept packed, and models that multiply integers."""

from __future__ import annotations

import copy
from typing import NamedTuple

import pytest
import torch
from models import prompts
from ops.contracts.backends import needs_cpu
from quantised import SCHEMES, by_bitsandbytes, compressed, decompressed, dense_of, gptq, original
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.ops.packed import codes, unpack_rows
from gsd_kernels.ops.row_linear import row_linear
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.packed.adapters import stored_in
from gsd_kernels_hf.packed.modules import matrix_of, packed_in

# Weights that libraries quantised, read packed: the bits of the library's own dequantisation, and the dense text.


GREEDY = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
names = pytest.mark.parametrize("name", SCHEMES)


@pytest.fixture(scope="module")
def made():
    """A quantised model by name, made once; forwarded once, since a library may rewrite its weights then."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = SCHEMES[name](original())
            with torch.no_grad():
                known[name](**prompts(1, 5, vocab=96))
        return known[name]

    return of


def layers(model):
    return {name: module for name, module in model.named_modules() if stored_in(module) is not None}


@names
def test_matrices_have_the_bits_of_the_librarys_dequantisation(name, made):
    for model in (SCHEMES[name](original()), made(name)):
        found = layers(model)
        assert len(found) == 14
        for place, module in found.items():
            matrix, dense = matrix_of(module), SCHEMES[name].dense(module)
            assert matrix.kind.name in SCHEMES[name].kinds
            assert torch.equal(unpack_rows(matrix, dtype=torch.bfloat16), dense), place
            x = torch.randn(128, matrix.inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
            for rows in (1, 2, 17, 128):
                assert torch.equal(row_linear(x[:rows], matrix), row_linear(x[:rows], dense))


@names
def test_a_patched_model_notices_changed_weights(name, made):
    model, scheme = copy.deepcopy(made(name)), SCHEMES[name]
    inputs = prompts(1, 9, vocab=96)
    gsd.patch(model, graph_config="chain")
    first = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY), first)

    def changed():
        expected = gsd.generate(dense_of(model, scheme, original()), **inputs, **GREEDY, graph_config="plain")
        found = model.generate(**inputs, **GREEDY)
        assert torch.equal(found, expected)
        return found

    with torch.no_grad():  # another layer's weights in this one's place, then its scales in place
        for layer in model.model.layers:
            layer.mlp.down_proj = copy.deepcopy(model.model.layers[0].mlp.down_proj)
    second = changed()
    assert not torch.equal(second, first)
    for module in layers(model).values():
        for tensor in stored_in(module).tensors:
            if tensor.is_floating_point():
                tensor.mul_(-1.5)
    assert not torch.equal(changed(), second)
    for module in layers(model).values():
        codes = next(t for t in stored_in(module).tensors if not t.is_floating_point()).data
        codes[:] = codes.flip(0)
    third = changed()
    gsd.unpatch(model)
    assert torch.equal(gsd.generate(model, **inputs, **GREEDY), third)


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")
@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes nf4"])
def test_adapters_on_top_keep_the_modules(name, made):
    peft = pytest.importorskip("peft")
    model, inputs = copy.deepcopy(made(name)), prompts(1, 9, vocab=96)
    call = {**GREEDY, "return_dict_in_generate": True, "graph_config": "chain"}
    before = gsd.generate(model, **inputs, **call).sequences
    config = peft.LoraConfig(target_modules=["up_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    out = gsd.generate(adapted, **inputs, **call)
    assert "up_proj" in out.stats.why_modules and not torch.equal(out.sequences, before)
    with adapted.disable_adapter():
        assert "up_proj" in gsd.generate(adapted, **inputs, **call).stats.why_modules
    out = gsd.generate(adapted.unload(), **inputs, **call)
    assert out.stats.why_modules is None and torch.equal(out.sequences, before)


def test_what_is_not_read_keeps_the_modules_and_says_why(made):
    pytest.importorskip("torchao")
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    def reason(*configs):
        model = original()
        for config, part in zip(configs, ("q_proj", "up_proj"), strict=False):
            quantize_(model, config, filter_fn=lambda module, name, part=part: part in name)
        return why_not(model, "auto")

    assert "q_proj is a Float8Tensor of torchao" in reason(Float8WeightOnlyConfig())
    model = original(torch.float32)
    up = SCHEMES["torchao int8"](original()).model.layers[0].mlp.up_proj
    model.model.layers[0].mlp.up_proj = up
    assert "up_proj stands for torch.bfloat16, the output matrix is torch.float32" in why_not(model, "auto")
    int8 = gptq("TorchInt8Linear", "uint8")(original())
    assert "q_proj is a TorchInt8Linear of gptqmodel" in why_not(int8, "auto")
    int4 = copy.deepcopy(made("torchao int4"))
    int4.model.layers[1].mlp.up_proj.weight.act_pre_scale = torch.ones(64)
    assert "layers.1.mlp.up_proj scales its activations" in why_not(int4, "auto")


# Models that multiply integers: the bits of the library's own layers, and one text with any draft or none.


DTYPES = (torch.bfloat16, torch.float32)


def first_of(model):
    return model.model.layers[0].self_attn.q_proj


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


def bitsandbytes(model, threshold=0.0, **how):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install -e '.[quantised]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[quantised]'")
    return by_bitsandbytes(model, load_in_8bit=True, llm_int8_threshold=threshold, **how)


INTEGERS = {"torchao": Scheme(torchao, "int8_dynamic"), "bitsandbytes": Scheme(bitsandbytes, "int8_vectorwise")}
each_integer = pytest.mark.parametrize("name", INTEGERS)


@pytest.fixture(scope="module")
def integer_model():
    """A quantised model by name and dtype, made once."""
    known = {}

    def of(name, dtype=torch.bfloat16):
        if (name, dtype) not in known:
            known[name, dtype] = INTEGERS[name].make(original(dtype))
        return known[name, dtype]

    return of


def integer_layers(model):
    return [module for module in model.modules() if stored_in(module) is not None]


@needs_cpu
@each_integer
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_have_the_bits_of_the_librarys_layers(name, dtype, integer_model):
    found = integer_layers(integer_model(name, dtype))
    assert len(found) == 14
    gen = torch.Generator().manual_seed(0)
    for module in found:
        matrix, x = matrix_of(module), torch.randn(128, module.in_features, generator=gen)
        assert matrix.kind.name == INTEGERS[name].kind
        x = (x * 10 ** (4 * torch.rand(128, 1, generator=gen) - 2)).to(dtype)
        x[5] = 0
        with torch.no_grad():
            for rows in (1, 2, 17, 128):
                assert torch.equal(row_linear(x[:rows], matrix), module(x[:rows]))
            alone = torch.cat([module(row[None]) for row in x[:8]])
        assert torch.equal(row_linear(x, matrix)[:8], alone)


@needs_cpu
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"granularity": "PerTensor"}, "q_proj quantises its activations with one scale for all rows"),
        ({"act_mapping_type": "ASYMMETRIC"}, "q_proj quantises its activations to codes with a zero point"),
        ({"reduce_range": True}, "q_proj quantises its activations to seven bits"),
    ],
)
def test_what_is_not_read_keeps_the_modules_and_says_why_of_codes(how, reason):
    assert reason in why_not(torchao(original(), **how), "auto")


@needs_cpu
def test_outlier_columns_are_refused_by_name_until_there_are_none():
    """A row's product depends on its neighbours then, which the library's own layer shows."""
    model, inputs = bitsandbytes(original(), threshold=6.0), prompts(1, 9, vocab=96)
    layer, x = first_of(model), 3 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        assert not torch.equal(layer(x)[:1], layer(x[:1]))
    assert "q_proj takes columns with a value beyond 6 out of the product of all rows" in why_not(model, "auto")
    with pytest.raises(ValueError, match=r"llm_int8_threshold=6\.0.*state\.threshold = 0\.0"):
        gsd.generate(model, **inputs, max_new_tokens=4, draft_sources=("history",))
    for module in integer_layers(model):
        module.state.threshold = 0.0
    call = {**inputs, "max_new_tokens": 16, "eos_token_id": None, "do_sample": False, "graph_config": "plain"}
    assert torch.equal(gsd.generate(model, **call), gsd.generate(bitsandbytes(original()), **call))
    layer.state.threshold = 5.0  # whatever the config says
    with pytest.raises(ValueError, match=r"llm_int8_threshold=5\.0"):
        gsd.generate(model, **inputs, max_new_tokens=4, draft_sources=("history",))


@needs_cpu
def test_layers_of_bitsandbytes_that_multiply_something_else_keep_the_modules():
    bnb = pytest.importorskip("bitsandbytes")
    model = bitsandbytes(original())
    layer = first_of(model)
    layer.train()
    assert "q_proj is in training mode, in which bitsandbytes multiplies floats" in why_not(model, "auto")
    layer.eval()
    assert why_not(model, "auto") is None
    fp16 = bnb.nn.Linear8bitLt(64, 64, bias=False).eval()
    assert stored_in(fp16).problem == "has weights that are quantised at every forward"
    assert stored_in(bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).eval()).problem == "is not quantised yet"
    head = bitsandbytes(original(), llm_int8_skip_modules=["none"])
    assert "output matrix" in why_not(head, "auto")


# Of compressed-tensors, kept packed: eight bits a token.

COMPRESSED = "needs compressed-tensors: pip install 'gsd-kernels[quantised]'"
FORM = "int-quantized"
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}


def rounded(dtype=torch.bfloat16, rows=TOKENS, strategy="channel", **weights):
    quantization = pytest.importorskip("compressed_tensors.quantization", reason=COMPRESSED)
    how = {} if rows is None else {"input_activations": quantization.QuantizationArgs(**rows)}
    return compressed(original(dtype), 8, strategy, form=FORM, **{"symmetric": True} | weights, **how)


@needs_cpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_weights_and_rows_have_the_librarys_bits(dtype, strategy):
    model = rounded(dtype, strategy=strategy)
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    integer_layers = {name: module for name, module in model.named_modules() if stored_in(module) is not None}
    dense = {name: decompressed(module, FORM) for name, module in integer_layers.items()}
    gen = torch.Generator().manual_seed(0)
    theirs = {}
    for name, module in integer_layers.items():
        x = (torch.randn(1, 40, module.in_features, generator=gen) * 10 ** torch.randn(40, 1, generator=gen)).to(dtype)
        x[0, 7] = 0
        theirs[name] = x, forward_quantize(module, x, "input", module.quantization_scheme.input_activations)
    assert gsd.keep_packed(model) is model and len(packed_in(model)) == 14 == len(dense)
    for name, weight in dense.items():
        module, (x, expected) = model.get_submodule(name), theirs[name]
        assert module.kind.name == "int8_rounded" and torch.equal(unpack_rows(module.matrix, dtype=dtype), weight)
        assert torch.equal(codes.rounded_rows(x), expected) and not torch.equal(expected, x)


@needs_cpu
@pytest.mark.parametrize(
    ("rows", "weights", "reason"),
    [
        ({**TOKENS, "strategy": "tensor"}, {}, "quantises its activations by tensor"),
        ({**TOKENS, "symmetric": False}, {}, "quantises its activations to something else than eight bits around 0"),
        ({**TOKENS, "num_bits": 4}, {}, "quantises its activations to something else than eight bits around 0"),
        (TOKENS, {"symmetric": False}, "has zero points"),
        (TOKENS, {"strategy": "group"}, "has scales by group"),
    ],
)
def test_what_is_not_read_is_refused_by_name(rows, weights, reason):
    with pytest.raises(ValueError, match=f"q_proj {reason}, so it cannot be kept packed"):
        gsd.keep_packed(rounded(rows=rows, **weights))
