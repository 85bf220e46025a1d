"""Warpers, Gumbel-max sampling and draft candidates."""

from __future__ import annotations

import torch
from torch import Tensor

from .philox import gumbel_noise

NEG_INF = float("-inf")
Parameter = float | Tensor  # one for all, or one a sequence: [B]


def sample_rows(
    logits: Tensor,  # [B, R, V]
    positions: Tensor,  # int32 [B, R]
    seed: Tensor,
    sequence_ids: Tensor,  # int32 [B]
    temperature: Parameter,
    top_k: Parameter,
    top_p: Parameter,
    min_p: Parameter,
) -> Tensor:
    """argmax(log p + g): an exact sample of p, the same whatever was drafted. Ties go to the lowest id."""
    logits = logits.float()
    spoiled = logits.isnan().any(-1)
    if is_off(temperature, 0.0):
        scores = logits
    else:
        noise = gumbel_noise(seed, positions, sequence_ids[:, None], logits.shape[-1])
        greedy = per_sequence(temperature, logits) <= 0.0
        warped = warp(logits, temperature, top_k, top_p, min_p)
        scores = torch.where(greedy, logits, warped + noise)
        spoiled = spoiled | ~(greedy.squeeze(-1) | logits.amax(-1).isfinite())  # there is nothing to draw from
    picked = scores.argmax(-1).to(torch.int32)
    return torch.where(spoiled, -1, picked)


def draft_candidates(
    logits: Tensor,  # [B, W, V]
    positions: Tensor,  # int32 [B, W]
    branch: int,
    seed: Tensor,
    sequence_ids: Tensor,  # int32 [B]
    temperature: Parameter,
    top_k: Parameter,
    top_p: Parameter,
    min_p: Parameter,
    noise: bool,
) -> tuple[Tensor, Tensor]:
    """The ``branch`` tokens that the target is most likely to pick, given the noise that it will use."""
    logits = logits.float()
    scores = logits
    if not is_off(temperature, 0.0):
        greedy = per_sequence(temperature, logits) <= 0.0
        warped = warp(logits, temperature, top_k, top_p, min_p).log_softmax(-1)
        if noise:
            warped = warped + gumbel_noise(seed, positions, sequence_ids[:, None], logits.shape[-1])
        scores = torch.where(greedy, logits, warped)
    log_probs, tokens = scores.log_softmax(-1).topk(min(branch, logits.shape[-1]), dim=-1)
    missing = branch - tokens.shape[-1]  # a vocabulary smaller than branch
    tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
    return tokens.to(torch.int32), torch.nn.functional.pad(log_probs, (0, missing), value=NEG_INF)


def warped_log_probs(
    logits: Tensor,  # [B, R, V]
    temperature: Parameter,
    top_k: Parameter,
    top_p: Parameter,
    min_p: Parameter,
) -> Tensor:
    """log_softmax of what the warpers leave; of the bare logits where the temperature is 0."""
    logits = logits.float()
    if is_off(temperature, 0.0):
        return logits.log_softmax(-1)
    greedy = per_sequence(temperature, logits) <= 0.0
    kept = torch.where(greedy, logits, warp(logits, temperature, top_k, top_p, min_p))
    # A cut compares, which takes a NaN for less than everything: the row is no distribution all the same.
    return kept.log_softmax(-1).masked_fill(logits.isnan().any(-1, keepdim=True), float("nan"))


def warp(logits: Tensor, temperature: Parameter, top_k: Parameter, top_p: Parameter, min_p: Parameter) -> Tensor:
    """temperature → top-k → top-p → min-p in transformers' order; what is cut gets −inf, ties at a cut are kept."""
    divisor = per_sequence(temperature, logits)
    x = logits / torch.where(divisor > 0.0, divisor, 1.0)
    if not is_off(top_k, 0):
        k = per_sequence(top_k, x).long().clamp(max=x.shape[-1])
        kth = x.sort(-1, descending=True).values.gather(-1, (k - 1).clamp(min=0).expand(*x.shape[:-1], 1))
        x = torch.where((x >= kth) | (k <= 0), x, NEG_INF)
    if not is_off(top_p, 1.0):
        p = per_sequence(top_p, x)
        ranked = x.sort(-1, descending=True).values
        probs = ranked.softmax(-1)
        needed = (probs.cumsum(-1) - probs) < p  # mass before the token has not reached p
        needed = needed | (torch.arange(x.shape[-1], device=x.device) == 0)
        cut = torch.where(needed, ranked, float("inf")).amin(-1, keepdim=True)
        x = torch.where((x >= cut) | (p >= 1.0), x, NEG_INF)
    if not is_off(min_p, 0.0):
        probs = x.softmax(-1)
        keep = probs >= per_sequence(min_p, x) * probs.amax(-1, keepdim=True)
        x = torch.where(keep, x, NEG_INF)
    return x


def per_sequence(value: Parameter, logits: Tensor) -> Tensor:
    """[] or [B] → broadcastable to [B, R, V]."""
    if not isinstance(value, Tensor):
        return torch.full((), value, dtype=torch.float32, device=logits.device)  # filled there: no copy from the host
    value = value.to(device=logits.device, dtype=torch.float32)
    return value.view(-1, 1, 1) if value.dim() else value


def is_off(value: Parameter, neutral: float) -> bool:
    """A parameter that the host knows to be neutral costs nothing; a device tensor is always applied."""
    return not isinstance(value, Tensor) and value == neutral
