"""Hugging Face bindings of gsd_kernels. Private: import what you need from :mod:`gsd_kernels`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .criteria import Typical
    from .decoding import GraphDecoder, GraphGenerateOutput, StepRecord
    from .generation import generate, patch, unpatch
    from .heads import DraftHeads
    from .layer_skip import LayerSkip
    from .stats import GenerationStats
    from .tuning import StepCosts, tune

__all__ = [
    "DraftHeads",
    "GenerationStats",
    "GraphDecoder",
    "GraphGenerateOutput",
    "LayerSkip",
    "StepCosts",
    "StepRecord",
    "Typical",
    "generate",
    "patch",
    "tune",
    "unpatch",
]

_HOMES = {
    "DraftHeads": "heads",
    "GenerationStats": "stats",
    "GraphDecoder": "decoding",
    "GraphGenerateOutput": "decoding",
    "LayerSkip": "layer_skip",
    "StepCosts": "tuning",
    "StepRecord": "decoding",
    "Typical": "criteria",
    "generate": "generation",
    "patch": "generation",
    "tune": "tuning",
    "unpatch": "generation",
}


def __getattr__(name: str) -> Any:
    """Names of the bindings, imported on first use: transformers takes seconds, which ``--help`` need not wait for."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
