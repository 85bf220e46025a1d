"""Small models whose weights a library quantised, and what that library dequantises them to."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import transformers
from models import tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 96}


def original(dtype: torch.dtype = torch.bfloat16, family: str = "llama-gqa", **sizes) -> PreTrainedModel:
    return tiny(family, dtype=dtype, **{**SIZES, **sizes})


class Scheme(NamedTuple):
    """A way to quantise.

    Attributes:
        package: that it needs.
        make: quantises a model, or a copy of it.
        dense: what the package dequantises a layer to, as the model has it now.
        kinds: of the packed matrices.
    """

    package: str
    make: Callable[[PreTrainedModel], PreTrainedModel]
    dense: Callable[[nn.Module], Tensor]
    kinds: set[str]

    def __call__(self, model: PreTrainedModel) -> PreTrainedModel:
        pytest.importorskip(self.package, reason=f"needs {self.package}: pip install 'gsd-kernels[quantised]'")
        return self.make(model).eval()


def torchao(config: Callable[[], object], kind: str, dense: Callable[[nn.Module], Tensor] | None = None) -> Scheme:
    def make(model: PreTrainedModel) -> PreTrainedModel:
        from torchao.quantization import quantize_

        quantize_(model, config(), filter_fn=lambda module, name: type(module) is nn.Linear and "lm_head" not in name)
        return model

    return Scheme("torchao", make, dense or (lambda module: module.weight.dequantize()), {kind})


def int8(**how) -> Callable[[], object]:
    def config() -> object:
        import torchao.quantization as ao

        how_now = {name: getattr(ao, value[0])(*value[1:]) for name, value in how.items()}
        return ao.Int8WeightOnlyConfig(**how_now)

    return config


def intx(bits: int, group: int | None, mapping: str = "SYMMETRIC") -> Callable[[], object]:
    def config() -> object:
        import torchao.quantization as ao

        granularity = ao.PerAxis(0) if group is None else ao.PerGroup(group)
        kind = getattr(torch, f"int{bits}")
        return ao.IntxWeightOnlyConfig(kind, granularity, getattr(ao.MappingType, mapping))

    return config


def int4() -> object:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    return PrototypeInt4WeightOnlyConfig(group_size=32)


def times_identity(module: nn.Module) -> Tensor:
    """The identity through the library's own product, where that is all that there is."""
    bias, module.bias = module.bias, None
    try:
        return module(torch.eye(module.in_features, dtype=module.weight.dtype)).T.contiguous()
    finally:
        module.bias = bias


def bitsandbytes(kind: str, *, double: bool = False, **how) -> Scheme:
    def make(model: PreTrainedModel) -> PreTrainedModel:
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            config = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_use_double_quant=double, **how
            )
            return transformers.AutoModelForCausalLM.from_pretrained(
                folder, quantization_config=config, device_map="cpu", dtype=model.dtype
            )

    return Scheme("bitsandbytes", make, dequantised, {kind})


def dequantised(module: nn.Module) -> Tensor:
    """By bitsandbytes, which puts rewritten weights back first."""
    from bitsandbytes import functional

    data, state = module.weight.data, copy.copy(module.weight.quant_state)
    if getattr(state, "packing_format_for_cpu", False):
        scales, state.original_nested = state.absmax.T.reshape(-1).float(), False
        data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
        state.absmax, state.dtype = scales, torch.bfloat16
    return functional.dequantize_4bit(data, state)


SCHEMES = {
    "torchao int8": torchao(int8(), "int8"),
    "torchao int8 groups": torchao(int8(granularity=("PerGroup", 32)), "int8"),
    "torchao int8 tensor": torchao(int8(granularity=("PerTensor",)), "int8"),
    "torchao int4": torchao(int4, "int4_offset", times_identity),
    "torchao intx": torchao(intx(4, 32), "int8"),
    "torchao intx zeros": torchao(intx(8, None, "ASYMMETRIC"), "uint8"),
    "bitsandbytes nf4": bitsandbytes("nf4"),
    "bitsandbytes nf4 double": bitsandbytes("nf4", double=True),
    "bitsandbytes fp4": bitsandbytes("fp4"),
}


def dense_of(model: PreTrainedModel, scheme: Scheme, plain: PreTrainedModel) -> PreTrainedModel:
    """``plain`` with the weights that ``model`` stands for."""
    for name, module in model.named_modules():
        mine = plain.get_submodule(name)
        if isinstance(mine, nn.Linear) and mine is not plain.lm_head:
            mine.weight.data.copy_(scheme.dense(module))
    plain.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # a cast rounds its frequencies, loading does not
    return plain
