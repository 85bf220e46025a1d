"""A dense model's matrices packed in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels.ops.packed import PACKERS, PackedMatrix, pack_matrix
from gsd_kernels.ops.packed.api import FLOATS

from .modules import Packed, PackedEmbedding, PackedLinear


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
    return replace(model, {name: _packed(module, matrices[id(module.weight)]) for name, module in layers.items()})


def check_model(model: Any) -> None:
    """Raise unless layers of ``model`` may be replaced."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a transformers model, got {type(model).__name__}")
    if "generate" in vars(model):
        raise ValueError("model: it is patched; gsd_kernels.unpatch(model) first, and patch it when it is packed")


def replace(model: PreTrainedModel, modules: Mapping[str, Packed]) -> PreTrainedModel:
    """Put packed layers into a model in the place of those of the same names; it is for inference from there on."""
    for name, module in modules.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    if modules and not any(parameter.is_floating_point() for parameter in model.parameters()):
        next(iter(modules.values())).stand_in()
    vars(model)["save_pretrained"] = _refuse
    return model.eval()


def _check(name: str, module: nn.Linear | nn.Embedding) -> None:
    """Raise for a matrix that cannot be packed."""
    weight: Tensor = module.weight
    if type(module) not in (nn.Linear, nn.Embedding) or type(weight) is not nn.Parameter:
        kind = type(module) if type(module) not in (nn.Linear, nn.Embedding) else type(weight)
        raise ValueError(f"model: {name} is no plain layer of PyTorch with dense weights but {kind.__qualname__}")
    if weight.dtype not in FLOATS or weight.device.type != "cpu":
        raise ValueError(
            f"model: {name} is {weight.dtype} on {weight.device}; expected float32, bfloat16 or float16 on a CPU"
        )
    if weight.shape[1] % 32:
        raise ValueError(f"model: {name} has rows of {weight.shape[1]} weights; blocks of 32 are packed")
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        raise ValueError(f"model: {name} has a hook, which a packed layer would lose; remove it first")


def _packed(module: nn.Linear | nn.Embedding, matrix: PackedMatrix) -> Packed:
    if isinstance(module, nn.Embedding):
        return PackedEmbedding(matrix, module.weight.dtype, module.padding_idx)
    return PackedLinear(matrix, module.weight.dtype, None if module.bias is None else module.bias.detach())


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuses: no checkpoint holds such weights."""
    raise ValueError("save_pretrained: packed weights have no checkpoint format here; save the model before it is so")
