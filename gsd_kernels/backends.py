"""Choice of the implementation that runs an op, and why another cannot.

``reference`` is plain PyTorch on any device and the specification. ``auto`` picks the fastest that is available for a
tensor's device; naming a backend never falls back to another.
"""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal, get_args

import torch

from .compiled import UNAVAILABLE as COMPILED_UNAVAILABLE

logger = logging.getLogger("gsd_kernels")

Backend = Literal["auto", "cpu", "cuda", "triton", "reference"]
"""What ``backend`` takes."""

BACKENDS: tuple[Backend, ...] = get_args(Backend)


class BackendUnavailableError(ValueError):
    """The named backend cannot run here; the message says why."""


def unavailable_reason(backend: str, device: torch.device) -> str | None:
    """Why ``backend`` cannot run on ``device``; ``None`` if it can."""
    if backend == "reference":
        return None
    if backend in COMPILED_UNAVAILABLE:  # "cpu" and "cuda", which are device types too
        if device.type != backend:
            return f"it takes {backend} tensors"
        return COMPILED_UNAVAILABLE[backend]
    if backend == "triton":
        return _triton_unavailable_reason(device)
    return f"unknown backend; expected one of {', '.join(BACKENDS)}"


_HAS_TRITON = importlib.util.find_spec("triton") is not None
_INTERPRETING = os.environ.get("TRITON_INTERPRET", "0") == "1"  # triton itself reads it once, when it is imported
_TRITON_MIN_CAPABILITY = (8, 0)


def _triton_unavailable_reason(device: torch.device) -> str | None:
    if not _HAS_TRITON:
        return "triton is not installed: pip install triton"
    if device.type == "cpu":
        if _INTERPRETING:
            return None
        return "it needs a GPU; on CPU tensors it runs in triton's slow interpreter only: set TRITON_INTERPRET=1 first"
    if device.type != "cuda":
        return "it needs an NVIDIA GPU"
    if torch.version.hip is not None:
        return "it needs an NVIDIA GPU; on AMD GPUs nothing has been tested"
    capability = torch.cuda.get_device_capability(device)
    if capability < _TRITON_MIN_CAPABILITY:
        return f"it needs compute capability 8.0 or newer, this GPU has {capability[0]}.{capability[1]}"
    return None


FIRST = ("triton", "compiled")
"""What ``GSD_KERNELS_CUDA_FIRST`` may say: which implementation of an op ``auto`` takes first on a GPU."""


@cache
def compiled_first() -> bool:
    """Return whether ``auto`` takes CUDA C++, compiled ahead for any size, before Triton, compiled for each size.

    Raises:
        ValueError: ``GSD_KERNELS_CUDA_FIRST`` is none of :data:`FIRST`.
    """
    value = os.environ.get("GSD_KERNELS_CUDA_FIRST", FIRST[0])
    if value not in FIRST:
        raise ValueError(f"GSD_KERNELS_CUDA_FIRST: expected {' or '.join(FIRST)}, got {value!r}; or unset it")
    return value == "compiled"


def compiles(backend: str, device: torch.device) -> bool:
    """Return whether ops of ``backend`` on ``device`` may be compiled when they are first used, as Triton's are."""
    own = "cuda" if device.type == "cuda" else "cpu"
    if COMPILED_UNAVAILABLE[own] is not None or backend not in ("auto", own):
        return True
    triton = (backend, own) == ("auto", "cuda") and _triton_unavailable_reason(device) is None
    return triton and not compiled_first()


def preferred(implementations: dict[str, Callable[..., Any]]) -> list[str]:
    """Names of an op's implementations in the order in which ``auto`` tries them on a GPU.

    CUDA C++ that stands behind the reference is taken on request only, whatever comes first.
    """
    names = list(implementations)
    if compiled_first() and "cuda" in names and names.index("cuda") < names.index("reference"):
        names.sort(key=lambda name: name != "cuda")
    return names


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
        for name in preferred(implementations) if device.type == "cuda" else implementations:
            interpreted = name == "triton" and device.type == "cpu"  # a debugging aid, never a choice
            if not interpreted and unavailable_reason(name, device) is None:
                if name == "reference" and device.type in implementations and COMPILED_UNAVAILABLE[device.type]:
                    _say_slow(device.type, COMPILED_UNAVAILABLE[device.type])
                return implementations[name]
    # Where a backend cannot run at all, that is what a user wants to know.
    if backend not in implementations and (backend not in BACKENDS or unavailable_reason(backend, device) is None):
        raise BackendUnavailableError(f"backend: expected one of auto, {', '.join(implementations)}, got {backend!r}")
    reason = unavailable_reason(backend, device)
    if reason is not None:
        raise BackendUnavailableError(f"backend: {backend!r} cannot run on {device.type}: {reason}")
    return implementations[backend]


@cache
def _say_slow(device: str, reason: str | None) -> None:
    logger.warning("on this %s PyTorch's operators compute steps, which is right and slow: %s", device.upper(), reason)
