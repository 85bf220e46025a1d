"""Which implementation of an op runs, and why another cannot.

``reference`` is plain PyTorch on any device and the specification. ``auto`` picks the fastest that is available for a
tensor's device; naming a backend never falls back to another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BACKENDS = ("auto", "reference")


class BackendUnavailableError(ValueError):
    """The named backend cannot run here; the message says why."""


def unavailable_reason(backend: str, device: torch.device) -> str | None:
    """Why ``backend`` cannot run on ``device``; ``None`` if it can."""
    if backend == "reference":
        return None
    return f"unknown backend; expected one of {', '.join(BACKENDS)}"


def resolve(backend: str, device: torch.device, implementations: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """The implementation of one op that ``backend`` names.

    Args:
        backend: one of :data:`BACKENDS`.
        device: where the op's tensors live.
        implementations: the op's implementations by backend name, fastest first.

    Raises:
        BackendUnavailableError: a named backend is missing for this device, or does not implement the op.
    """
    if backend == "auto":
        for name, function in implementations.items():
            if unavailable_reason(name, device) is None:
                return function
    if backend not in implementations:
        raise BackendUnavailableError(f"backend: expected one of auto, {', '.join(implementations)}, got {backend!r}")
    reason = unavailable_reason(backend, device)
    if reason is not None:
        raise BackendUnavailableError(f"backend: {backend!r} cannot run on {device.type}: {reason}")
    return implementations[backend]
