"""compressed-tensors' dynamic int8 of tokens, kept packed: its rounding of rows, and one text with any draft."""

from __future__ import annotations

import pytest
import torch
from ops.contracts.backends import needs_cpu
from quantised import compressed, decompressed, original

import gsd_kernels as gsd
from gsd_kernels.ops.packed import codes, unpack_rows
from gsd_kernels_hf.packed.adapters import stored_in
from gsd_kernels_hf.packed.modules import packed_in

pytest.importorskip("compressed_tensors", reason="needs compressed-tensors: pip install 'gsd-kernels[quantised]'")
pytestmark = needs_cpu
FORM = "int-quantized"
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
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
