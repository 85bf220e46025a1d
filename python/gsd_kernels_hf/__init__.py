"""Hugging Face bindings of gsd_kernels. Private: import what you need from :mod:`gsd_kernels`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gsd_kernels_train.online import OnlineLearner

    from .acceptance.criteria import Typical
    from .api import generate, patch, unpatch
    from .engine.decoder import GraphDecoder
    from .engine.output import GraphGenerateOutput
    from .engine.stats import GenerationStats
    from .exported.folder import custom_generate, custom_generate_folder
    from .learning import learn
    from .packed.gguf import from_gguf
    from .packed.pack import keep_packed, pack
    from .policy.settings import Automatic
    from .records import Verified
    from .sources.base import DraftSource, Level, Prefilled, Proposal
    from .sources.corpus import Corpus
    from .sources.dflash import DFlash
    from .sources.feature_drafter import Eagle3, Mtp
    from .sources.heads import DraftHeads, Gemma4Assistant
    from .sources.layer_skip import LayerSkip

_HOMES = {
    "Automatic": "policy.settings",
    "Corpus": "sources.corpus",
    "DFlash": "sources.dflash",
    "DraftHeads": "sources.heads",
    "Eagle3": "sources.feature_drafter",
    "Gemma4Assistant": "sources.heads",
    "GenerationStats": "engine.stats",
    "GraphDecoder": "engine.decoder",
    "GraphGenerateOutput": "engine.output",
    "LayerSkip": "sources.layer_skip",
    "Mtp": "sources.feature_drafter",
    "OnlineLearner": "gsd_kernels_train.online",
    "Typical": "acceptance.criteria",
    "Verified": "records",
    "DraftSource": "sources.base",
    "Level": "sources.base",
    "Prefilled": "sources.base",
    "Proposal": "sources.base",
    "custom_generate": "exported.folder",
    "custom_generate_folder": "exported.folder",
    "from_gguf": "packed.gguf",
    "generate": "api",
    "keep_packed": "packed.pack",
    "learn": "learning",
    "pack": "packed.pack",
    "patch": "api",
    "unpatch": "api",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Names of the bindings, imported on first use: transformers takes seconds, which ``--help`` need not wait for."""
    if name in _HOMES:
        home = _HOMES[name]
        return getattr(import_module(home if home.startswith("gsd_kernels") else f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
