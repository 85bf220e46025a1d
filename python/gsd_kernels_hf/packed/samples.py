"""A few elements of tensors, by which changes show that PyTorch does not count."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SAMPLES = 16  # elements of a tensor that are compared


def samples(tensors: Iterable[Tensor]) -> bytes:
    """A few elements of every tensor that has any here."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_meta or not tensor.numel() or tensor.is_complex():
            continue
        step, values = max(1, tensor.numel() // SAMPLES), tensor.detach()
        if values.is_contiguous():
            found = values.view(-1)[::step]
        else:
            at = torch.arange(0, values.numel(), step, device=values.device)
            found = values[torch.unravel_index(at, values.shape)]
        by_device.setdefault(tensor.device, []).append(found[:SAMPLES].double())
    return b"".join(torch.cat(found).cpu().numpy().tobytes() for found in by_device.values())


def versions(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """How often each was changed in place, as far as PyTorch counts."""
    return tuple(-1 if t.is_inference() else t._version for t in tensors)
