"""compressed-tensors' dynamic int8 of tokens, kept packed: its rounding of rows, and one text with any draft."""

from __future__ import annotations

import pytest
import torch
from models import noised, prompts
from quantised import compressed, decompressed, original

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.packed import codes, unpack_rows
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.packed.adapters import stored_in
from gsd_kernels_hf.packed.modules import packed_in

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install 'gsd-kernels[quantised]'")
pytestmark = pytest.mark.skipif(
    unavailable_reason("cpu", torch.device("cpu")) is not None, reason="packed weights are for the operator"
)
FORM = "int-quantized"
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
SHAPE = gsd.GraphConfig(depth=3, width=3, branch=2, max_rows=16, history_depth=2)
DTYPES = (torch.bfloat16, torch.float32)


def made(dtype=torch.bfloat16, rows=TOKENS, strategy="channel", **weights):
    from compressed_tensors.quantization import QuantizationArgs

    how = {} if rows is None else {"input_activations": QuantizationArgs(**rows)}
    return compressed(original(dtype), 8, strategy, form=FORM, **{"symmetric": True} | weights, **how)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_weights_and_rows_have_the_librarys_bits(dtype, strategy):
    from compressed_tensors.quantization.lifecycle.forward import forward_quantize

    model = made(dtype, strategy=strategy)
    layers = {name: module for name, module in model.named_modules() if stored_in(module) is not None}
    dense = {name: decompressed(module, FORM) for name, module in layers.items()}
    gen = torch.Generator().manual_seed(0)
    theirs = {}
    for name, module in layers.items():
        x = (torch.randn(1, 40, module.in_features, generator=gen) * 10 ** torch.randn(40, 1, generator=gen)).to(dtype)
        x[0, 7] = 0
        theirs[name] = x, forward_quantize(module, x, "input", module.quantization_scheme.input_activations)
    assert gsd.keep_packed(model) is model and len(packed_in(model)) == 14 == len(dense)
    for name, weight in dense.items():
        module, (x, rounded) = model.get_submodule(name), theirs[name]
        assert module.kind.name == "int8_rounded" and torch.equal(unpack_rows(module.matrix, dtype=dtype), weight)
        assert torch.equal(codes.rounded_rows(x), rounded) and not torch.equal(rounded, x)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_any_draft_and_begins_as_the_librarys(dtype, sampled):
    inputs = prompts(3, 9, vocab=96)
    call = {"max_new_tokens": 24, "eos_token_id": None, "do_sample": sampled, "return_dict_in_generate": True}
    call |= {"temperature": 0.8, "seed": 7} if sampled else {}
    model, library = gsd.keep_packed(made(dtype)), made(dtype)
    assert why_not(model, "auto") is None
    expected = gsd.generate(model, **inputs, **call, graph_config="plain").sequences
    for way in (
        {"assistant_model": noised(original(dtype), 0.02), "graph_config": SHAPE},
        {"draft_sources": ("history",), "graph_config": SHAPE},
        {},
    ):
        out = gsd.generate(model, **inputs, **call, **way)
        assert out.stats.why_modules is None and torch.equal(out.sequences, expected), way
    assert len(set(expected[:, 9:].flatten().tolist())) > 15
    with torch.no_grad():
        own, ours, plain = (m(**inputs).logits.double() for m in (library, model, original(dtype)))
    spread = (own - own.mean(-1, keepdim=True)).norm()
    assert (ours - own).norm() / spread < 0.3 * (ours - plain).norm() / spread, "the rows are not rounded"


def test_bytes_without_activations_are_plain_int8():
    model = made(rows=None)
    dense = {
        name: decompressed(module, FORM) for name, module in model.named_modules() if stored_in(module) is not None
    }
    gsd.keep_packed(model)
    for name, weight in dense.items():
        module = model.get_submodule(name)
        assert module.kind.name == "int8" and torch.equal(module.weight, weight)


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
        gsd.keep_packed(made(rows=rows, **weights))
