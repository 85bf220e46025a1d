"""The Triton samplers as an opaque operator. Importing this imports no triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..launching import launching_op
from .reference import Parameter


@launching_op(
    "gsd_kernels::triton_best_tokens",
    mutates_args=(),
    schema=(
        "(Tensor logits, Tensor positions, int count, Tensor seed, Tensor sequence_ids, "
        "Tensor? temperatures, float temperature, Tensor? top_ks, float top_k, "
        "Tensor? top_ps, float top_p, Tensor? min_ps, float min_p, bool noise, bool with_log_probs) -> (Tensor, Tensor)"
    ),
)
def _best_tokens(*arguments: Any) -> tuple[Tensor, Tensor]:
    from .triton import best_tokens as launch

    return launch(*arguments)


@_best_tokens.register_fake
def _(logits: Tensor, positions: Tensor, count: int, *rest: object) -> tuple[Tensor, Tensor]:
    batch, rows, _ = logits.shape
    tokens = positions.new_empty(batch, rows, count)
    return tokens, logits.new_empty(batch, rows, count if rest[-1] else 0, dtype=torch.float32)


def sample_rows(logits: Tensor, positions: Tensor, seed: Tensor, sequence_ids: Tensor, *warpers: Parameter) -> Tensor:
    """One launch."""
    parameters = _parameters(logits.shape[0], *warpers)
    return _best_tokens(logits, positions, 1, seed, sequence_ids, *parameters, True, False)[0].squeeze(-1)


def draft_candidates(
    logits: Tensor, positions: Tensor, branch: int, seed: Tensor, sequence_ids: Tensor, *rest: Parameter
) -> tuple[Tensor, Tensor]:
    """As sample_rows, with ``branch`` tokens and the log-sum-exp; the warped distribution's own normaliser cancels."""
    *warpers, noise = rest
    parameters = _parameters(logits.shape[0], *warpers)
    return _best_tokens(logits, positions, branch, seed, sequence_ids, *parameters, noise, True)


@launching_op(
    "gsd_kernels::triton_log_probs",
    mutates_args=(),
    schema=(
        "(Tensor logits, Tensor? temperatures, float temperature, Tensor? top_ks, float top_k, "
        "Tensor? top_ps, float top_p, Tensor? min_ps, float min_p) -> Tensor"
    ),
)
def _log_probs(*arguments: Any) -> Tensor:
    from .triton_cut import log_probs as launch

    return launch(*arguments)


@_log_probs.register_fake
def _(logits: Tensor, *_: object) -> Tensor:
    return logits.new_empty(logits.shape, dtype=torch.float32)


def warped_log_probs(logits: Tensor, *warpers: Parameter) -> Tensor:
    """One launch."""
    return _log_probs(logits, *_parameters(logits.shape[0], *warpers))


def _parameters(batch: int, *values: Parameter) -> list[Tensor | float | None]:
    """Every parameter as a pair: a dense tensor [B] or None, and the number that counts if it is None."""
    pairs: list[Tensor | float | None] = []
    for value in values:
        if isinstance(value, Tensor):
            pairs += [value.expand(batch).contiguous(), 0.0]
        else:
            pairs += [None, float(value)]
    return pairs
