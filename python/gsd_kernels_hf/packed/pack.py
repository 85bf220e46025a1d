"""Packed layers put into a model: a dense model's matrices packed, or a library's weights as they lie."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels.ops.packed import PACKERS, PackedMatrix, pack_matrix
from gsd_kernels.ops.packed.api import FLOATS

from .adapters import compressed_tensors
from .modules import Packed, packed_layer, stored_in


@torch.no_grad()
def pack(model: PreTrainedModel, kind: str = "q8_0") -> PreTrainedModel:
    """Round a model's matrices to a packed format, in place, by round to nearest: for who has no file of one.

    It is another model afterwards: its text may differ from that of the model it was. Of the packed model every promise
    holds: one text with any draft or none, that of the dense matrices that its own stand for. There is no way back.

    Args:
        model: a dense one on a CPU, in float32, bfloat16 or float16. Its linear layers and its embedding are replaced;
            norms, biases and what else it has stay. Weights that are shared stay shared.
        kind: ``"q8_0"``, ``"q5_1"``, ``"q5_0"``, ``"q4_1"`` or ``"q4_0"``, as GGUF names them.

    Returns:
        ``model``, in evaluation mode. It cannot be trained or saved.

    Raises:
        TypeError, ValueError: another kind, or a model that cannot be packed; it is left as it was.
    """
    if kind not in PACKERS:
        raise ValueError(f"kind: expected one of {', '.join(PACKERS)}, got {kind!r}")
    check_model(model)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, nn.Embedding))}
    for name, module in layers.items():
        _check(name, module)
    if not layers:
        raise ValueError(f"model: {type(model).__name__} has no dense matrices to pack")
    matrices: dict[int, PackedMatrix] = {}
    for module in layers.values():
        if id(module.weight) not in matrices:
            matrices[id(module.weight)] = pack_matrix(module.weight, kind)
    packed = {
        name: packed_layer(module, matrices[id(module.weight)], module.weight.dtype) for name, module in layers.items()
    }
    return replace(model, packed)


@torch.no_grad()
def keep_packed(model: PreTrainedModel) -> PreTrainedModel:
    """Put packed layers in the place of those that a library quantised, as their weights lie now; nothing is rounded.

    For libraries that would rewrite them at the first forward: compressed-tensors makes all of them dense, bitsandbytes
    rounds their scales to bfloat16 on CPUs with AVX512_BF16. :func:`~gsd_kernels_hf.api.patch` and ``generate`` read
    all others in place; they need no call of this.

    Args:
        model: on a CPU, with layers of torchao, bitsandbytes, compressed-tensors (pack-quantized,
            int-quantized) or gptqmodel, before its first forward. Those layers are replaced; what else it has stays.

    Returns:
        ``model``, in evaluation mode: that of the dense matrices that the library would dequantise its weights to, in
        the model's dtype. Where those round activations to eight bits, so do these. It cannot be trained or saved.

    Raises:
        TypeError, ValueError: no quantised layers, or some that are not read; the model is left as it was.
    """
    check_model(model)
    layers: dict[str, Packed] = {}
    for name, module in model.named_modules():
        stored = stored_in(module)
        if stored is None or isinstance(module, Packed):
            continue
        if stored.problem is not None:
            raise ValueError(f"model: {name} {stored.problem}, so it cannot be kept packed")
        fits = stored.any_dtype or stored.dtype == model.dtype
        if not fits or any(tensor.device.type != "cpu" for tensor in stored.tensors):
            raise ValueError(
                f"model: {name} stands for {stored.dtype} on {stored.device}; expected {model.dtype} on a CPU"
            )
        _check_hooks(name, module)
        layers[name] = packed_layer(module, stored.read(), model.dtype)
    if not layers:
        raise ValueError(
            f"model: {type(model).__name__} has no layers that a library quantised; this comes before its first "
            "forward, and gsd_kernels.pack packs a dense model"
        )
    replace(model, layers)
    compressed_tensors.release(model)
    return model


def check_model(model: Any) -> None:
    """Raise unless layers of ``model`` may be replaced."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    if "generate" in vars(model):
        raise ValueError("model: it is patched; gsd_kernels.unpatch(model) first, and patch it when it is packed")


def replace(model: PreTrainedModel, modules: Mapping[str, Packed]) -> PreTrainedModel:
    """Put packed layers into a model in the place of those of the same names; it is for inference from there on."""
    for name, module in modules.items():
        model.set_submodule(name, module)
    if modules and not any(parameter.is_floating_point() for parameter in model.parameters()):
        next(iter(modules.values())).stand_in()
    forbid_saving(model, "packed weights have no checkpoint format here; save the model before it is so")
    return model.eval()


def _check(name: str, module: nn.Linear | nn.Embedding) -> None:
    """Raise for a matrix that cannot be packed."""
    weight: Tensor = module.weight
    plain = type(module) in (nn.Linear, nn.Embedding)
    if not plain or type(weight) is not nn.Parameter:
        kind = type(weight) if plain else type(module)
        raise ValueError(f"model: {name} is no plain layer of PyTorch with dense weights but {kind.__qualname__}")
    if weight.dtype not in FLOATS or weight.device.type != "cpu":
        raise ValueError(
            f"model: {name} is {weight.dtype} on {weight.device}; expected float32, bfloat16 or float16 on a CPU"
        )
    if weight.shape[1] % 32:
        raise ValueError(f"model: {name} has rows of {weight.shape[1]} weights; blocks of 32 are packed")
    _check_hooks(name, module, "forward" in vars(module))


def _check_hooks(name: str, module: nn.Module, wrapped: bool = False) -> None:
    """Raise for a module with a hook; ``wrapped``: it counts as one that the module's forward is its own."""
    if wrapped or module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(f"model: {name} has a hook, which a packed layer would lose; remove it first")


def forbid_saving(model: PreTrainedModel, why: str) -> None:
    """Have ``save_pretrained`` raise, and say why."""
    model.save_pretrained = partial(refuse_to_save, why)


def refuse_to_save(why: str, *args: Any, **kwargs: Any) -> NoReturn:
    """Raise in the place of a model's ``save_pretrained``, which its argument ``why`` says."""
    raise ValueError(f"save_pretrained: {why}")
