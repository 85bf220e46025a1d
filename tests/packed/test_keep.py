"""Layers kept packed that a library would rewrite: compressed-tensors' and those of bitsandbytes."""

from __future__ import annotations

import pytest
import torch
from models import noised, prompts
from quantised import compressed, decompressed, original
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.ops.packed import unpack_rows
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.packed.modules import Packed, packed_in

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
