"""Hugging Face bindings of gsd_kernels. Private: import what you need from :mod:`gsd_kernels`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .acceptance.criteria import Typical
    from .api import generate, patch, unpatch
    from .engine.decoder import GraphDecoder, GraphGenerateOutput, StepRecord
    from .engine.stats import GenerationStats
    from .policy.tuning import StepCosts, tune
    from .sources.heads import DraftHeads
    from .sources.layer_skip import LayerSkip

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
    "DraftHeads": "sources.heads",
    "GenerationStats": "engine.stats",
    "GraphDecoder": "engine.decoder",
    "GraphGenerateOutput": "engine.decoder",
    "LayerSkip": "sources.layer_skip",
    "StepCosts": "policy.tuning",
    "StepRecord": "engine.decoder",
    "Typical": "acceptance.criteria",
    "generate": "api",
    "patch": "api",
    "tune": "policy.tuning",
    "unpatch": "api",
}


def __getattr__(name: str) -> Any:
    """Names of the bindings, imported on first use: transformers takes seconds, which ``--help`` need not wait for."""
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
