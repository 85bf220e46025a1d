"""Noticing that a model was changed since it was last used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SAMPLES = 16  # elements of a weight that are compared
FLAGS = ("active_adapter", "active_adapters", "_active_adapter", "_disable_adapters", "merged_adapters", "scaling")


@dataclass(frozen=True)
class ModelState:
    """What a model was at some time; equal while nothing was changed.

    Attributes:
        structure: of modules, hooks and tensors: what captured steps and prepared weights depend on.
        content: of weights and adapters: what keys and values in a cache depend on. Versions that PyTorch counts at
            changes in place, and a few elements of every tensor, for changes that it does not count (``.data``).
    """

    structure: tuple[Any, ...]
    content: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state now. Reads a few elements of every tensor, so it waits for the device once."""
        modules, tensors = list(model.modules()), [*model.parameters(), *model.buffers()]
        structure = (
            tuple(
                (type(m), m.training, tuple(m._forward_hooks), tuple(m._forward_pre_hooks), "forward" in vars(m))
                for m in modules
            ),
            tuple((t.data_ptr(), t.dtype, t.device, tuple(t.shape)) for t in tensors if not t.is_meta),
            str(getattr(model.config, "_attn_implementation", None)),
        )
        flags = tuple(repr(vars(m)[name]) for m in modules for name in FLAGS if name in vars(m))
        versions = tuple(-1 if t.is_inference() else t._version for t in tensors)
        return cls(structure, (flags, versions, samples(tensors)))


def samples(tensors: list[torch.Tensor]) -> bytes:
    """A few elements of every tensor that has any here."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        local = getattr(tensor.detach(), "to_local", tensor.detach)()
        if local.is_meta or not local.numel() or not local.is_floating_point():
            continue
        flat = local.reshape(-1) if local.is_contiguous() else local.flatten()[:SAMPLES]
        by_device.setdefault(local.device, []).append(flat[:: max(1, flat.numel() // SAMPLES)][:SAMPLES].double())
    return b"".join(torch.cat(found).cpu().numpy().tobytes() for found in by_device.values())
