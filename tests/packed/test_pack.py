"""Models packed in place, and layers kept packed that a library would rewrite: its bits, or refused and left."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from models import noised, prompts, tiny
from quantised import compressed, decompressed, original
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.ops.packed import KINDS, PACKERS, pack_matrix, unpack_rows
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.packed.modules import Packed, packed_in

SIZES = {"hidden_size": 64, "intermediate_size": 96}


@functools.cache
def packed_once():
    return gsd.pack(tiny(dtype=torch.float32, **SIZES))


@pytest.mark.parametrize("kind", PACKERS)
def test_the_gguf_package_packs_the_same_bytes(kind):
    gguf = pytest.importorskip("gguf")
    gen = torch.Generator().manual_seed(1)
    dense = torch.randn(257, 96, generator=gen) * torch.rand(257, 1, generator=gen).exp2()
    dense[3], dense[5, :32] = 0.0, 0.7
    dense[7] = (dense[7] * 4).round() / 4  # ties
    theirs = gguf.quants.quantize(dense.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    assert torch.equal(pack_matrix(dense, kind).data, torch.from_numpy(theirs))


@pytest.mark.parametrize("patched", [True, False])
def test_a_kind_that_is_changed_in_place_is_noticed(patched):
    """The same bytes stand for other weights then."""
    model = gsd.pack(tiny(dtype=torch.float32, **SIZES), "q4_0")
    call = prompts(1, 12) | {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    other = copy.deepcopy(model)
    for module in packed_in(other):
        module.kind = next(kind for kind in KINDS if kind.name == "iq4_nl")
    texts = [type(turn).generate(turn, **call) for turn in (model, other)]
    assert not torch.equal(*texts)
    if patched:
        gsd.patch(model, graph_config="tree")
    generate = model.generate if patched else functools.partial(gsd.generate, model)
    assert torch.equal(generate(**call), texts[0])
    for module, changed in zip(packed_in(model), packed_in(other), strict=True):
        module.kind = changed.kind
    assert torch.equal(generate(**call), texts[1])


WRITES = {
    "copy_": lambda layer: layer.weight.copy_(torch.zeros_like(layer.weight)),
    ".data": lambda layer: layer.weight.data.add_(1),
    "an element": lambda layer: layer.weight.__setitem__((0, 0), 1.0),
    "a row": lambda layer: layer.weight[0].zero_(),
    "a view": lambda layer: layer.weight.detach().view(-1)[3:].fill_(0),
    "a part": lambda layer: layer.weight.chunk(2)[0].T.mul_(2),
    "itself in another dtype that is its own": lambda layer: layer.weight.float().zero_(),
    "init": lambda layer: nn.init.normal_(layer.weight),
    "out": lambda layer: torch.add(layer.weight, 1, out=layer.weight),
    "in place by name": lambda layer: nn.functional.relu(layer.weight, inplace=True),
    "a list": lambda layer: torch._foreach_mul_([layer.weight], 2),
    "NumPy": lambda layer: layer.weight.numpy().__setitem__(0, 1),
    "+=": lambda layer: exec("layer.weight += 1", {"layer": layer}),
    "another": lambda layer: setattr(layer, "weight", torch.zeros_like(layer.weight)),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros_like(layer.weight))),
    "other data": lambda layer: setattr(layer.weight, "data", torch.zeros_like(layer.weight)),
}


@pytest.mark.parametrize("embeds", [False, True])
@pytest.mark.parametrize("write", WRITES)
def test_writing_to_a_packed_weight_is_refused(write, embeds):
    """It is unpacked at every access, so that nobody would read what was written."""
    model = packed_once()
    layer = model.get_input_embeddings() if embeds else model.model.layers[0].mlp.up_proj
    before = layer.weight.clone()
    with pytest.raises(ValueError, match=r"weight: |read-only"), torch.no_grad():
        WRITES[write](layer)
    assert torch.equal(layer.weight, before)


def test_what_cannot_be_packed_is_refused_and_stays():
    model = tiny(dtype=torch.float32, **SIZES)
    with pytest.raises(ValueError, match="kind: expected one of q8_0"):
        gsd.pack(model, "q3_k")
    with pytest.raises(TypeError, match="model: expected a transformers model, got Linear"):
        gsd.pack(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=r"model: model\.layers\.0\.mlp\.down_proj has rows of 90 weights"):
        gsd.pack(tiny(dtype=torch.float32, hidden_size=64, intermediate_size=90))
    handle = model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"model: model\.layers\.1\.mlp\.up_proj has a hook"):
        gsd.pack(model)
    handle.remove()
    gsd.patch(model)
    with pytest.raises(ValueError, match="model: it is patched"):
        gsd.pack(model)
    gsd.unpatch(model)
    with pytest.raises(ValueError, match=r"torch\.float64 on cpu; expected float32"):
        gsd.pack(tiny(dtype=torch.float64, **SIZES))
    assert not packed_in(model)
    with pytest.raises(ValueError, match="has no dense matrices to pack"):
        gsd.pack(gsd.pack(model))


GREEDY = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": False}
WAYS = {
    "4 by group": (4, "group", True, "int4"),
    "4 by group, zeros": (4, "group", False, "int4"),
    "4 by channel, zeros": (4, "channel", False, "int4"),
    "8 by channel": (8, "channel", True, "uint8"),
    "8 by group, zeros": (8, "group", False, "uint8"),
    "8 by tensor": (8, "tensor", True, "uint8"),
}


def text_of(model, **how):
    return gsd.generate(model, **prompts(2, 9, vocab=96), **GREEDY, return_dict_in_generate=True, **how)


@pytest.mark.parametrize("way", WAYS)
def test_compressed_layers_are_those_that_the_library_decompresses_to(way):
    pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install 'gsd-kernels[quantised]'")
    bits, strategy, symmetric, kind = WAYS[way]
    model = compressed(original(), bits, strategy, symmetric=symmetric)
    expected = {n: decompressed(m) for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    words = model.model.layers[0].mlp.up_proj.weight_packed
    assert gsd.keep_packed(model) is model and len(expected) == 14 == len(packed_in(model))
    dense = original()
    for name, weight in expected.items():
        module = model.get_submodule(name)
        assert module.kind.name == kind and torch.equal(module.weight, weight), name
        assert torch.equal(unpack_rows(module.matrix, dtype=torch.bfloat16, backend="reference"), weight), name
        dense.get_submodule(name).weight.data.copy_(weight)
    assert model.model.layers[0].mlp.up_proj.packed.data_ptr() == words.data_ptr(), "it was copied"
    assert isinstance(model.lm_head, nn.Linear) and why_not(model, "auto") is None
    plain = text_of(dense, graph_config="plain").sequences
    for how in ({"graph_config": "plain"}, {"assistant_model": noised(dense, 0.02)}, {}):
        out = text_of(model, **how)
        assert torch.equal(out.sequences, plain) and out.stats.why_modules is None
    assert len(set(plain[:, 9:].flatten().tolist())) > 15
    assert all(isinstance(model.get_submodule(name), Packed) for name in expected), "a forward decompressed them"
    with pytest.raises(ValueError, match="save_pretrained: packed weights"):
        model.save_pretrained("nowhere")


def test_what_cannot_be_kept_is_refused_and_stays():
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs

    model = compressed(original(), 3, "channel", symmetric=True)
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.q_proj has codes of 3 bits, so it cannot"):
        gsd.keep_packed(model)
    assert not packed_in(model) and text_of(model).sequences.shape == (2, 33), "the library serves it"
    with pytest.raises(ValueError, match="has no layers that a library quantised; this comes before its first forward"):
        gsd.keep_packed(model)
    activations = QuantizationArgs(num_bits=8, type="int", symmetric=True, dynamic=True, strategy="token")
    model = compressed(original(), 8, "channel", symmetric=True, input_activations=activations)
    with pytest.raises(ValueError, match="q_proj quantises its activations, so it cannot be kept packed"):
        gsd.keep_packed(model)
    model = compressed(original(), 8, "channel", symmetric=True)
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj has a hook"):
        gsd.keep_packed(model)
    with pytest.raises(TypeError, match="model: expected a transformers model, got Linear"):
        gsd.keep_packed(nn.Linear(2, 2))
    gsd.patch(model)
    with pytest.raises(ValueError, match="model: it is patched"):
        gsd.keep_packed(model)
