"""Models packed in place: the bytes of the gguf package, and the promises of any packed model."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from models import noised, prompts, tiny
from torch import nn

import gsd_kernels as gsd
from gsd_kernels.ops.packed import KINDS, PACKERS, pack_matrix
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.packed.modules import Packed, packed_in

SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("kind", PACKERS)
def test_the_gguf_package_packs_the_same_bytes(kind):
    gguf = pytest.importorskip("gguf")
    gen = torch.Generator().manual_seed(1)
    dense = torch.randn(257, 96, generator=gen) * torch.rand(257, 1, generator=gen).exp2()
    dense[3], dense[5, :32] = 0.0, 0.7
    dense[7] = (dense[7] * 4).round() / 4  # ties
    theirs = gguf.quants.quantize(dense.numpy(), gguf.GGMLQuantizationType[kind.upper()])
    assert torch.equal(pack_matrix(dense, kind).data, torch.from_numpy(theirs))


@pytest.mark.parametrize("kind", PACKERS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_text_is_that_of_the_matrices_it_stands_for(kind, tied):
    dense = tiny(tie_word_embeddings=tied, **SIZES).to(torch.bfloat16)
    draft = noised(dense, 0.01)
    packed = gsd.pack(copy.deepcopy(dense), kind)
    assert len(packed_in(packed)) == sum(isinstance(m, (nn.Linear, nn.Embedding)) for m in dense.modules())
    for name, module in packed.named_modules():
        if isinstance(module, Packed):
            dense.get_submodule(name).weight.data.copy_(module.weight)
    assert why_not(packed, "auto") is None and why_not(dense, "auto") is None
    call = prompts(2, 9) | {"max_new_tokens": 24, "do_sample": True, "seed": 4, "eos_token_id": None}
    expected = gsd.generate(dense, **call, graph_config="plain")
    for way in ({"graph_config": "plain"}, {}, {"assistant_model": draft, "graph_config": "graph"}):
        assert torch.equal(gsd.generate(packed, **call, **way), expected), way
    tied_now = packed.lm_head.packed.data_ptr() == packed.model.embed_tokens.packed.data_ptr()
    assert tied_now is tied
    with pytest.raises(ValueError, match="save_pretrained: packed weights"):
        packed.save_pretrained("nowhere")


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
