from __future__ import annotations

import torch
from torch import Tensor

Parameter = float | Tensor  # one for all, or one a sequence: [] or [B]


def sample_rows(logits: Tensor, positions: Tensor, seed: Tensor, sequence_ids: Tensor, *warpers: Parameter) -> Tensor:
    """csrc/cpu/sampling_ops.cpp or csrc/algorithms/sampling.h: one op on the CPU and the GPU, as the others here."""
    given = (logits.contiguous(), positions.contiguous(), seed, sequence_ids.contiguous())
    return torch.ops.gsd_kernels.sample_rows(*given, *_warpers(logits.shape[0], *warpers))


def draft_candidates(
    logits: Tensor, positions: Tensor, branch: int, seed: Tensor, sequence_ids: Tensor, *rest: Parameter
) -> tuple[Tensor, Tensor]:
    *warpers, noise = rest
    given = (logits.contiguous(), positions.contiguous(), branch, seed, sequence_ids.contiguous())
    return torch.ops.gsd_kernels.draft_candidates(*given, *_warpers(logits.shape[0], *warpers), noise)


def warped_log_probs(logits: Tensor, *warpers: Parameter) -> Tensor:
    return torch.ops.gsd_kernels.warped_log_probs(logits.contiguous(), *_warpers(logits.shape[0], *warpers))


def _warpers(
    batch: int, temperature: Parameter, top_k: Parameter, top_p: Parameter, min_p: Parameter
) -> tuple[float | Tensor | None, ...]:
    """The schema's four numbers, then its four optional tensors float32 [B], which take precedence."""
    numbers, tensors = [], []
    for value, neutral in ((temperature, 0.0), (top_k, 0), (top_p, 1.0), (min_p, 0.0)):
        if isinstance(value, Tensor):
            numbers.append(neutral)
            tensors.append(value.to(torch.float32).expand(batch).contiguous())
        else:
            numbers.append(type(neutral)(value))
            tensors.append(None)
    return (*numbers, *tensors)
