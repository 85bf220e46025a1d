"""Small models whose weights a library quantised, and what that library dequantises them to."""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
import transformers
from models import tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 96}


def original(dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    return tiny(dtype=dtype, **SIZES)


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
        pytest.importorskip(self.package, reason=f"needs {self.package}: pip install -e '.[quantised]'")
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


def times_identity(module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """The identity, in the weights' or another dtype, through the library's own product, where that is all there is."""
    bias, module.bias = module.bias, None
    try:
        return module(torch.eye(module.in_features, dtype=dtype or module.weight.dtype)).T.contiguous()
    finally:
        module.bias = bias


def bitsandbytes(kind: str, *, double: bool = False) -> Scheme:
    def make(model: PreTrainedModel) -> PreTrainedModel:
        how = {"load_in_4bit": True, "bnb_4bit_quant_type": kind, "bnb_4bit_use_double_quant": double}
        return by_bitsandbytes(model, **how)

    return Scheme("bitsandbytes", make, dequantised, {kind})


def by_bitsandbytes(model: PreTrainedModel, **how) -> PreTrainedModel:
    """``model`` as transformers loads it from a folder; ``how``: of BitsAndBytesConfig."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # every product of int8 says that it casts to float16
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            quantization_config=transformers.BitsAndBytesConfig(**how),
            device_map="cpu",
            dtype=model.dtype,
        )


def dequantised(module: nn.Module) -> Tensor:
    """By bitsandbytes, which puts rewritten weights back first."""
    from bitsandbytes import functional

    data, state = module.weight.data, copy.copy(module.weight.quant_state)
    if getattr(state, "packing_format_for_cpu", False):
        scales, state.original_nested = state.absmax.T.reshape(-1).float(), False
        data, state = functional._convert_weight_packed_for_cpu_inverse(data, state)
        state.absmax, state.dtype = scales, torch.bfloat16
    return functional.dequantize_4bit(data, state)


def gptq(layer: str, *kinds: str, **how: int) -> Scheme:
    """Layers that stand in for those of gptqmodel."""

    def make(model: PreTrainedModel) -> PreTrainedModel:
        its = stand_ins()
        for layer_of in model.model.layers:
            for part in (layer_of.self_attn, layer_of.mlp):
                for name, module in list(part.named_children()):
                    if isinstance(module, nn.Linear):
                        bias = None if module.bias is None else module.bias.detach()
                        setattr(part, name, getattr(its, layer)(module.weight.detach(), bias, **how))
        return model

    def dense(module: nn.Module) -> Tensor:
        if not getattr(module, "_cpu_transformed", False):
            return module.dequantize_weight().T.contiguous()
        return times_identity(module, module.scales.dtype)

    return Scheme("torch", make, dense, set(kinds))


@lru_cache(maxsize=1)
def stand_ins() -> ModuleType:
    """``gptq_layers.py`` under the package's name, by which its layers are known."""
    file = Path(__file__).with_name("gptq_layers.py")
    spec = importlib.util.spec_from_file_location("gptqmodel.stand_ins", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where copies of its layers find their classes
    spec.loader.exec_module(module)
    return module


def compressed(
    model: PreTrainedModel, bits: int, strategy: str, *, symmetric: bool, form: str = "pack-quantized", **how
) -> PreTrainedModel:
    """``model`` as compressed-tensors keeps it in a format, before its first forward."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    size = {"group_size": 32} if strategy == "group" else {}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, strategy=strategy, **size)
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=args, **how)}
    apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            _calibrate(module, bits, symmetric=symmetric)
    ModelCompressor.from_pretrained_model(model, form).compress_model(model)
    return model


def _calibrate(module: nn.Module, bits: int, *, symmetric: bool) -> None:
    groups = module.weight_scale.numel() // module.out_features or 1
    weights = module.weight.data.float().reshape(-1, module.in_features // groups)
    if module.weight_scale.numel() == 1:
        weights = weights.reshape(1, -1)
    low, high, most = weights.amin(-1), weights.amax(-1), (1 << bits) - 1
    scale = torch.maximum(-low, high) * 2 / most if symmetric else (high - low) / most
    module.weight_scale.data = scale.view(module.weight_scale.shape).to(module.weight_scale.dtype)
    if not symmetric:
        zero = (-(1 << (bits - 1)) - low / scale).round().clamp(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
        module.weight_zero_point.data = zero.view(module.weight_scale.shape).to(torch.int8)


def decompressed(module: nn.Module, form: str = "pack-quantized") -> Tensor:
    """By compressed-tensors."""
    from compressed_tensors.compressors import BaseCompressor

    compressor = BaseCompressor.get_value_from_registry(form)
    return compressor.decompress(dict(module.named_parameters()), module.quantization_scheme)["weight"]


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
    "gptqmodel 4": gptq("TorchLinear", "int4"),
    "gptqmodel 8": gptq("TorchLinear", "uint8", bits=8),
    "gptqmodel product": gptq("TorchAtenLinear", "int4", "int4_offset"),
    "gptqmodel awq": gptq("AwqTorchLinear", "int4"),
    "gptqmodel awq product": gptq("TorchAtenAwqLinear", "int4", "int4_offset"),
}


def dense_of(model: PreTrainedModel, scheme: Scheme, plain: PreTrainedModel) -> PreTrainedModel:
    """``plain`` with the weights that ``model`` stands for."""
    for name, module in model.named_modules():
        mine = plain.get_submodule(name)
        if isinstance(mine, nn.Linear) and mine is not plain.lm_head:
            mine.weight.data.copy_(scheme.dense(module))
    plain.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)  # a cast rounds its frequencies, loading does not
    return plain
