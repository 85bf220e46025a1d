"""Weights packed here, or by a library and kept: the library's bits, noticed where they change, refused by name."""

from __future__ import annotations

import copy
import functools
import operator
from types import SimpleNamespace

import pytest
import torch
from models import prompts, tiny
from ops.contracts.backends import needs_cpu
from quantised import SCHEMES, by_bitsandbytes, compressed, decompressed, dense_of, gptq, original
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.ops.packed import KINDS, PACKERS, codes, pack_matrix, unpack_rows
from gsd_kernels.ops.row_linear import row_linear
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.packed.modules import matrix_of, packed_in, stored_in

SIZES = {"hidden_size": 64, "intermediate_size": 96}
GREEDY = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
DTYPES = (torch.bfloat16, torch.float32)
ROWS = (1, 2, 17, 128)


def layers(model):
    return {name: module for name, module in model.named_modules() if stored_in(module) is not None}


@functools.cache
def made(name):
    """Forwarded once, since a library may rewrite its weights then."""
    model = SCHEMES[name](original())
    with torch.no_grad():
        model(**prompts(1, 5, vocab=96))
    return model


@pytest.mark.parametrize("name", SCHEMES)
def test_matrices_have_the_bits_of_the_librarys_dequantisation(name):
    for model in (SCHEMES[name](original()), made(name)):
        found = layers(model)
        assert len(found) == 14
        for place, module in found.items():
            matrix, dense = matrix_of(module), SCHEMES[name].dense(module)
            assert matrix.kind.name in SCHEMES[name].kinds
            assert torch.equal(unpack_rows(matrix, dtype=torch.bfloat16), dense), place
            x = torch.randn(ROWS[-1], matrix.inputs, generator=torch.Generator().manual_seed(0)).bfloat16()
            for rows in ROWS:
                assert torch.equal(row_linear(x[:rows], matrix), row_linear(x[:rows], dense))


@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes nf4 double", "gptqmodel 4"])
def test_a_patched_model_notices_changed_weights(name):
    model, scheme = copy.deepcopy(made(name)), SCHEMES[name]
    inputs = prompts(1, 9, vocab=96)
    gsd.patch(model, graph_config="chain")
    texts = [model.generate(**inputs, **GREEDY)]

    def changed():
        dense = dense_of(model, scheme, original())
        texts.append(model.generate(**inputs, **GREEDY))
        assert torch.equal(texts[-1], gsd.generate(dense, **inputs, **GREEDY, graph_config="plain"))
        assert not torch.equal(*texts[-2:])

    with torch.no_grad():  # another layer's weights in this one's place, then its scales in place
        for layer in model.model.layers:
            layer.mlp.down_proj = copy.deepcopy(model.model.layers[0].mlp.down_proj)
    changed()
    for module in layers(model).values():
        for tensor in stored_in(module).tensors:
            if tensor.is_floating_point():
                tensor.mul_(-1.5)
    changed()
    for module in layers(model).values():
        packed = next(t for t in stored_in(module).tensors if not t.is_floating_point()).data
        packed[:] = packed.flip(0)
    changed()


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated")
def test_adapters_on_top_keep_the_modules():
    peft = pytest.importorskip("peft")
    model, call = copy.deepcopy(made("torchao int8")), prompts(1, 9, vocab=96) | GREEDY
    before = gsd.generate(model, **call)
    config = peft.LoraConfig(target_modules=["up_proj"], r=2, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).eval()
    out = gsd.generate(adapted, **call, return_dict_in_generate=True)
    assert "up_proj" in out.stats.why_modules and not torch.equal(out.sequences, before)
    assert torch.equal(gsd.generate(adapted.unload(), **call), before)


# Models that multiply integers: the bits of the library's own layers.


def torchao(model):
    ao = pytest.importorskip("torchao.quantization", reason="needs torchao: pip install -e '.[quantised]'")
    config = ao.Int8DynamicActivationInt8WeightConfig()
    ao.quantize_(model, config, filter_fn=lambda module, name: type(module) is nn.Linear and "lm_head" not in name)
    return model


def bitsandbytes(model, threshold=0.0, **how):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes: pip install -e '.[quantised]'")
    pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[quantised]'")
    return by_bitsandbytes(model, load_in_8bit=True, llm_int8_threshold=threshold, **how)


INTEGERS = {"torchao": (torchao, "int8_dynamic"), "bitsandbytes": (bitsandbytes, "int8_vectorwise")}


@needs_cpu
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_have_the_bits_of_the_librarys_layers(name, dtype):
    make, kind = INTEGERS[name]
    found = layers(make(original(dtype)))
    assert len(found) == 14
    gen = torch.Generator().manual_seed(0)
    for module in found.values():
        matrix, x = matrix_of(module), torch.randn(ROWS[-1], module.in_features, generator=gen)
        assert matrix.kind.name == kind
        x = (x * 10 ** (4 * torch.rand(len(x), 1, generator=gen) - 2)).to(dtype)
        x[5] = 0
        with torch.no_grad():
            for rows in ROWS:
                assert torch.equal(row_linear(x[:rows], matrix), module(x[:rows]))


def changed(make, change):
    """A model, of which something is changed."""
    model = make()
    change(model.model.layers[0], model)
    return model


def float8():
    ao = pytest.importorskip("torchao.quantization")
    model = original()
    ao.quantize_(model, ao.Float8WeightOnlyConfig(), filter_fn=lambda module, name: "q_proj" in name)
    return model


def with_an_up_proj(layer, model):
    layer.mlp.up_proj = made("torchao int8").model.layers[0].mlp.up_proj


NOT_READ = {  # a model, and why its modules are kept
    "a library's other tensor": (float8, "q_proj is a Float8Tensor of torchao"),
    "a library's other layer": (
        lambda: gptq("TorchInt8Linear", "uint8")(original()),
        "q_proj is a TorchInt8Linear of gptqmodel",
    ),
    "another dtype": (
        lambda: changed(lambda: original(torch.float32), with_an_up_proj),
        "up_proj stands for torch.bfloat16, the output matrix is torch.float32",
    ),
    "an output matrix": (lambda: bitsandbytes(original(), llm_int8_skip_modules=["none"]), "output matrix"),
}


@needs_cpu
@pytest.mark.parametrize("what", NOT_READ)
def test_what_is_not_read_keeps_the_modules_and_says_why(what):
    make, words = NOT_READ[what]
    assert words in why_not(make(), "auto")


@needs_cpu
def test_outlier_columns_are_refused_by_name_until_there_are_none():
    """A row's product depends on its neighbours then."""
    model, inputs = bitsandbytes(original(), threshold=6.0), prompts(1, 9, vocab=96)
    with pytest.raises(ValueError, match=r"llm_int8_threshold=6\.0.*state\.threshold = 0\.0"):
        gsd.generate(model, **inputs, **GREEDY)
    for module in layers(model).values():
        module.state.threshold = 0.0
    assert torch.equal(
        gsd.generate(model, **inputs, **GREEDY), gsd.generate(bitsandbytes(original()), **inputs, **GREEDY)
    )


# Of compressed-tensors, kept packed.


TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
FORM = "int-quantized"


def rounded(dtype=torch.bfloat16, rows=TOKENS, strategy="channel", form=FORM, **weights):
    quantization = pytest.importorskip(
        "compressed_tensors.quantization", reason="needs compressed-tensors: pip install 'gsd-kernels[quantised]'"
    )
    how = {} if rows is None else {"input_activations": quantization.QuantizationArgs(**rows)}
    weights = {"bits": 8, "symmetric": True} | weights
    return compressed(original(dtype), weights.pop("bits"), strategy, form=form, **weights, **how)


def kept(model, dense, kind):
    """``model`` with its layers kept, which have the bits of ``dense``."""
    assert gsd.keep_packed(model) is model and len(packed_in(model)) == 14 == len(dense)
    for name, weight in dense.items():
        module = model.get_submodule(name)
        assert module.kind.name == kind, name
        assert torch.equal(unpack_rows(module.matrix, dtype=weight.dtype), weight), name
    assert why_not(model, "auto") is None


@needs_cpu
@pytest.mark.parametrize(("dtype", "strategy"), [(torch.bfloat16, "channel"), (torch.float32, "tensor")])
def test_weights_and_rows_have_the_librarys_bits(dtype, strategy):
    model = rounded(dtype, strategy=strategy)
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    gen = torch.Generator().manual_seed(0)
    for module in layers(model).values():
        x = (torch.randn(1, 40, module.in_features, generator=gen) * 10 ** torch.randn(40, 1, generator=gen)).to(dtype)
        x[0, 7] = 0
        theirs = forward_quantize(module, x, "input", module.quantization_scheme.input_activations)
        assert torch.equal(codes.rounded_rows(x), theirs) and not torch.equal(theirs, x)
    kept(model, {name: decompressed(module, FORM) for name, module in layers(model).items()}, "int8_rounded")


WAYS = {
    "4 by group": (4, "group", True, "int4"),
    "4 by channel, zeros": (4, "channel", False, "int4"),
    "8 by group, zeros": (8, "group", False, "uint8"),
    "8 by tensor": (8, "tensor", True, "uint8"),
}


@pytest.mark.parametrize("way", WAYS)
def test_compressed_layers_are_those_that_the_library_decompresses_to(way):
    bits, strategy, symmetric, kind = WAYS[way]
    model = rounded(rows=None, form="pack-quantized", bits=bits, strategy=strategy, symmetric=symmetric)
    dense = {n: decompressed(m) for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    words = model.model.layers[0].mlp.up_proj.weight_packed
    kept(model, dense, kind)
    assert model.model.layers[0].mlp.up_proj.packed.data_ptr() == words.data_ptr(), "it was copied"
    with pytest.raises(ValueError, match="save_pretrained: packed weights"):
        model.save_pretrained("nowhere")


def hooked(layer, model):
    layer.mlp.up_proj.register_forward_hook(lambda *_: None)


def patched(layer, model):
    gsd.patch(model)


def packing(rows=None, **how):
    return rounded(rows=rows, form="pack-quantized", **how)


dense_floats = functools.partial(tiny, dtype=torch.float32, **SIZES)
REFUSED = {  # a function, its argument, and the words
    "three bits": ("keep_packed", lambda: packing(bits=3), r"q_proj has codes of 3 bits, so it cannot be kept packed"),
    "no layers": ("keep_packed", original, "has no layers that a library quantised; this comes before its first"),
    "a hook": ("keep_packed", lambda: changed(packing, hooked), r"layers\.0\.mlp\.up_proj has a hook"),
    "another dtype": ("keep_packed", NOT_READ["another dtype"][0], "up_proj stands for .*; expected torch.float32 on"),
    "a hook on floats": ("pack", lambda: changed(dense_floats, hooked), r"up_proj has a hook"),
    "a patch": ("keep_packed", lambda: changed(packing, patched), "model: it is patched"),
    "no model": ("keep_packed", lambda: nn.Linear(2, 2), "model: expected a transformers model, got Linear"),
    "odd rows": (
        "pack",
        lambda: dense_floats(intermediate_size=90),
        r"model: model\.layers\.0\.mlp\.down_proj has rows of 90 weights",
    ),
    "doubles": ("pack", lambda: dense_floats(dtype=torch.float64), r"torch\.float64 on cpu; expected float32"),
    "what is packed": ("pack", lambda: gsd.pack(dense_floats()), "has no dense matrices to pack"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_packed_or_kept_is_refused_and_stays(what):
    name, make, words = REFUSED[what]
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises((ValueError, TypeError), match=words):
        getattr(gsd, name)(model)
    assert [type(module) for module in model.modules()] == before


COMPRESSED = {
    "torchao dynamic": lambda: torchao(original()),
    "bitsandbytes int8": lambda: bitsandbytes(original()),
    "bytes": rounded,
    "words": packing,
}
SETTINGS = {  # of a layer by a scheme: what is set, to what, and the words
    "torchao int8": [
        ("weight.act_quant_scale", 1.0, "with a scale of its own"),
        ("weight.act_pre_scale", 1.0, "scales its activations"),
        ("weight.block_size", [2, 64], "has scales for blocks of 2 × 64 weights"),
    ],
    "torchao intx": [("weight.activation_quantization", "int8", "quantises its activations")],
    "torchao intx zeros": [("weight.zero_point", torch.tensor([0.5]), "has zero points that are no integers")],
    "torchao int4": [
        ("weight.act_mapping_type", "symmetric", "quantises its activations"),
        ("weight.qdata", torch.zeros(3, 32), "has 3 rows of codes for 128 outputs"),
        ("weight.scale_and_zero", torch.zeros(2, 128, 2), "scales of torch.float32"),
        ("weight.qdata", torch.zeros(128, 32), "codes of torch.float32, [128, 32]"),
    ],
    "bitsandbytes nf4": [("weight.quant_state.shape", (99,), "is [99] in blocks of 64")],
    "gptqmodel 4": [
        ("adapter", "lora", "has an adapter"),
        ("online_full_had", True, "turns its activations"),
        ("bits", 3, "has codes of 3 bits"),
        ("g_idx", torch.arange(64).flip(0), "groups of inputs that do not lie together"),
        ("qzero_format", lambda: 1, "has zero points of GPTQ's first format"),
        ("qweight", torch.zeros(8, 128).long(), "has words of torch.int64, [8, 128]"),
    ],
    "gptqmodel awq": [("bits", 8, "has AWQ's codes of eight bits")],
    "torchao dynamic": [
        ("weight.act_quant_kwargs.granularity", None, "quantises its activations with one scale for all rows"),
        ("weight.act_quant_kwargs.mapping_type", SimpleNamespace(name="NO"), "to codes with a zero point"),
        ("weight.act_quant_kwargs.reduce_range", True, "to seven bits"),
        ("weight.block_size", [2, 64], "has scales for blocks of 2 × 64 weights"),
    ],
    "bitsandbytes int8": [
        ("state.threshold", 6.0, "takes columns with a value beyond 6 out of the product of all rows"),
        ("state.has_fp16_weights", True, "has weights that are quantised at every forward"),
        ("training", True, "is in training mode, in which bitsandbytes multiplies floats"),
    ],
    "bytes": [
        ("quantization_scheme.input_activations.strategy", "tensor", "its activations by tensor"),
        ("quantization_scheme.input_activations.num_bits", 4, "something else than eight bits"),
        ("quantization_scheme.weights.strategy", "group", "has scales by group"),
        ("quantization_scheme.format", "float-quantized", "is compressed as float-quantized"),
        ("quantization_scheme.weights.symmetric", False, "has zero points"),
        ("quantization_scheme.output_activations", "int8", "quantises what it computes"),
        ("quantization_enabled", False, "has its quantisation switched off"),
    ],
    "words": [
        ("quantization_scheme.format", "marlin-24", "is compressed as marlin-24"),
        ("quantization_scheme.input_activations", "int8", "quantises its activations"),
        ("quantization_scheme.weights.strategy", "block", "has scales by block"),
        ("weight_g_idx", torch.zeros(64), "groups of inputs that do not lie together"),
        ("in_features", 63, "scales for 63 inputs"),
        ("weight_scale", None, "has no scales"),
    ],
}


@pytest.mark.parametrize("scheme", SETTINGS)
def test_a_layer_with_a_setting_that_is_not_read_says_so(scheme):
    model = COMPRESSED[scheme]() if scheme in COMPRESSED else made(scheme)
    for place, value, words in SETTINGS[scheme]:
        layer = copy.deepcopy(model.model.layers[0].mlp.up_proj)
        assert stored_in(layer).problem is None
        *owner, name = place.split(".")
        owner = operator.attrgetter(".".join(owner))(layer) if owner else layer
        own = owner._parameters if isinstance(owner, nn.Module) and name in owner._parameters else vars(owner)
        own[name] = value
        assert words in stored_in(layer).problem


# Packed here.


@pytest.mark.parametrize("kind", PACKERS)
def test_the_gguf_package_packs_the_same_bytes(kind):
    gguf = pytest.importorskip("gguf")
    gen = torch.Generator().manual_seed(1)
    dense = torch.randn(257, 96, generator=gen) * torch.rand(257, 1, generator=gen).exp2()
    dense[3], dense[5, :32] = 0.0, 0.7
    dense[7] = (dense[7] * 4).round() / 4  # ties
    theirs = gguf.quants.quantize(dense.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    assert torch.equal(pack_matrix(dense, kind).data, torch.from_numpy(theirs))


WRITES = {
    "zero_": lambda layer: layer.weight.zero_(),
    "an element": lambda layer: layer.weight.__setitem__((0, 0), 1.0),
    "a part": lambda layer: layer.weight.chunk(2)[0].T.mul_(2),
    "NumPy": lambda layer: layer.weight.numpy().__setitem__(0, 1),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(1))),
    "other data": lambda layer: setattr(layer.weight, "data", torch.zeros(1)),
}


def test_writing_to_a_packed_weight_is_refused():
    """It is unpacked at every access, so that nobody would read what was written."""
    model = gsd.pack(dense_floats())
    for layer in (model.get_input_embeddings(), model.model.layers[0].mlp.up_proj):
        before = layer.weight.clone()
        for name, write in WRITES.items():
            with pytest.raises(ValueError, match=r"weight: |read-only"), torch.no_grad():
                write(layer)
            assert torch.equal(layer.weight, before), name
        assert type(layer.weight.shape) is torch.Size


def test_a_kind_that_is_changed_in_place_is_noticed():
    """The same bytes stand for other weights then."""
    model, call = gsd.pack(dense_floats(), "q4_0"), prompts(1, 12) | GREEDY
    other = copy.deepcopy(model)
    for module in packed_in(other):
        module.kind = next(kind for kind in KINDS if kind.name == "iq4_nl")
    texts = [turn.generate(**call) for turn in (model, other)]
    assert not torch.equal(*texts)
    with gsd.patch(model, graph_config="tree"):
        assert torch.equal(model.generate(**call), texts[0])
        for module, one in zip(packed_in(model), packed_in(other), strict=True):
            module.kind = one.kind
        assert torch.equal(model.generate(**call), texts[1])
