"""Weights that libraries quantised, read packed: the bits of the library's own dequantisation, and the dense text."""

from __future__ import annotations

import copy

import pytest
import torch
from models import prompts
from quantised import SCHEMES, dense_of, gptq, original

import gsd_kernels as gsd
from gsd_kernels.ops.packed import unpack_rows
from gsd_kernels.ops.row_linear import row_linear
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.packed.adapters import stored_in
from gsd_kernels_hf.packed.modules import matrix_of

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
