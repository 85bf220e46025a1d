"""A few elements of tensors, by which changes show that PyTorch does not count."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SAMPLES = 16  # elements of a tensor that are compared


def samples(tensors: Iterable[Tensor]) -> bytes:
    """A few elements of every tensor that has any here."""
    alike: dict[torch.device, dict[torch.dtype, list[Tensor]]] = {}  # of which one operation takes many
    for tensor in tensors:
        size = tensor.numel()
        if tensor.is_meta or not size or tensor.is_complex():
            continue
        step, values = max(1, size // SAMPLES), tensor.detach()
        if values.is_contiguous():
            found = values.as_strided((min(SAMPLES, -(-size // step)),), (step,))
        else:
            at = torch.arange(0, size, step, device=values.device)[:SAMPLES]
            found = values[torch.unravel_index(at, values.shape)]
        alike.setdefault(tensor.device, {}).setdefault(tensor.dtype, []).append(found)
    by_device = [torch.cat([torch.cat(found).view(torch.uint8) for found in each.values()]) for each in alike.values()]
    return b"".join(values.cpu().numpy().tobytes() for values in by_device)


def versions(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """How often each was changed in place, as far as PyTorch counts."""
    return tuple(-1 if t.is_inference() else t._version for t in tensors)
