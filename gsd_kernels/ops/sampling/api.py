from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..table import Op
from . import reference


def flat(logits: Tensor, *rest: Any) -> tuple[Any, ...]:
    """The operator's warpers: four numbers, then four optional tensors float32 [B], which take precedence."""
    *rest, temperature, top_k, top_p, min_p = rest
    numbers, tensors = [], []
    for value, neutral in ((temperature, 0.0), (top_k, 0), (top_p, 1.0), (min_p, 0.0)):
        each = isinstance(value, Tensor)
        numbers.append(neutral if each else type(neutral)(value))
        tensors.append(value.to(torch.float32).expand(logits.shape[0]).contiguous() if each else None)
    return (logits, *rest, *numbers, *tensors)


# Of lines.
DRAWN = "seed:int64[] sequence_ids[B]"
WARPERS = (
    "temperature:float=t top_k:int=k top_p:float=p min_p:float=m temperatures?:float32[B] top_ks?:float32[B] "
    "top_ps?:float32[B] min_ps?:float32[B]"
)

SAMPLE = Op(
    "sample_rows",
    f"logits:float[B,R,V] positions[B,R] {DRAWN} {WARPERS} -> [B,R]",
    reference.sample_rows,
    ranked=("cpu", "triton", "cuda"),
    flat=flat,
)
DRAFT = Op(
    "draft_candidates",
    f"logits:float[B,R,V] positions[B,R] branch:int=K {DRAWN} {WARPERS} noise:bool=n -> [B,R,K] float32[B,R,K]",
    reference.draft_candidates,
    ranked=("cpu", "triton", "cuda"),
    flat=lambda *given: (*flat(*given[:-1]), given[-1]),
    tolerance=1e-5,
)
LOG_PROBS = Op(
    "warped_log_probs",
    f"logits:float[B,R,V] {WARPERS} -> float32[B,R,V]",
    reference.warped_log_probs,
    ranked=("cpu", "triton", "cuda"),
    flat=flat,
    tolerance=1e-5,
)


def sample_rows(
    logits: Tensor,
    positions: Tensor,
    *,
    seed: Tensor,
    sequence_ids: Tensor,
    temperature: float | Tensor = 0.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Pick the target's token at every row in parallel: argmax(log p + g) with noise g keyed by position.

    p is the distribution after temperature → top-k → top-p → min-p, in transformers' order; ties at a cut are all
    kept. The noise depends on (seed, token, position, sequence) only, so the pick at a position is the same with any
    draft or none (drafter-invariant speculative decoding, arXiv 2408.07978).

    Args:
        logits: float [B, R, V].
        positions: int32 [B, R], index of the token being picked, padding excluded.
        seed: int64 [], on the logits' device.
        sequence_ids: int32 [B].
        temperature: 0 is argmax. Like the next three, one number or a tensor [B].
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off.

    Returns:
        int32 [B, R]; −1 where the logits hold NaN, or have no distribution to draw from at a temperature above 0: +∞,
        or nothing but −∞. Ties go to the lowest id.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    warpers = checked_warpers(logits, temperature, top_k, top_p, min_p)
    return SAMPLE.checked(logits, positions, seed, sequence_ids, *warpers, backend=backend)


def draft_candidates(
    logits: Tensor,
    positions: Tensor,
    *,
    branch: int,
    seed: Tensor,
    sequence_ids: Tensor,
    temperature: float | Tensor = 0.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    noise: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The ``branch`` best candidates after each frontier node, and their log-probabilities.

    With a temperature the candidates are ranked by log_softmax(log q + g), q being the warped draft distribution and g
    the very noise that the target will use at that position: what the target is likely to pick, not what is likely.

    Args: as :func:`sample_rows`, with logits [B, W, V], positions [B, W], and ``branch`` ≥ 1. Without ``noise`` it is
    what is likely: the best of the warped distribution, and its log-probabilities; positions and seed say nothing.

    Returns:
        tokens int32 [B, W, branch] and log-probabilities float32, best first. A token that the warpers cut has −inf;
        where the vocabulary is smaller than ``branch``, ids are −1.
    """
    warpers = checked_warpers(logits, temperature, top_k, top_p, min_p)
    if branch < 1:
        raise ValueError(f"branch: expected at least 1, got {branch}")
    return DRAFT.checked(logits, positions, branch, seed, sequence_ids, *warpers, noise, backend=backend)


def warped_log_probs(
    logits: Tensor,
    *,
    temperature: float | Tensor = 0.0,
    top_k: int | Tensor = 0,
    top_p: float | Tensor = 1.0,
    min_p: float | Tensor = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Log-probabilities of the distribution that :func:`sample_rows` draws from; only the reference sorts for it.

    Args: as :func:`sample_rows`. At temperature 0 it is the bare logits' distribution.

    Returns:
        float32 [B, R, V], −∞ for what the warpers cut; NaN in a row that holds NaN, or has no distribution.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    return LOG_PROBS.checked(logits, *checked_warpers(logits, temperature, top_k, top_p, min_p), backend=backend)


def checked_warpers(logits: Tensor, temperature: Any, top_k: Any, top_p: Any, min_p: Any) -> tuple[Any, ...]:
    """The warpers, if they are in range (tensors are taken at their word) and there is something to pick from."""
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[-1] == 0:
        raise ValueError("logits: expected a tensor [batch, rows, vocabulary]")
    for name, value, low, high in (
        ("temperature", temperature, 0.0, float("inf")),
        ("top_k", top_k, 0, float("inf")),
        ("top_p", top_p, 0.0, 1.0),
        ("min_p", min_p, 0.0, 1.0),
    ):
        if isinstance(value, Tensor):
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name}: expected a number or a tensor [batch], got {value!r}")
        if not low <= value <= high or (name == "temperature" and value == high):
            raise ValueError(f"{name}: expected {low} … {high}, got {value}")
    return temperature, top_k, top_p, min_p
