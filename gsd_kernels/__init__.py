"""Graph-structured speculative decoding: the same output from a LLaMA-family model, sooner.

``patch(model, assistant_model=draft)`` makes the model's own ``generate`` graph-speculative; ``generate`` is the same
without patching. The operations of one step (draft → merge → flatten → attend → verify → commit) are plain functions
on tensors. Importing this package loads torch only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._version import __version__
from .backends import BACKENDS, BackendUnavailableError
from .config import GraphConfig
from .graph import Acceptance, Frontier, Rows, TokenGraph
from .ops.commit_kv import commit_kv
from .ops.dag_attention import dag_attention
from .ops.flatten import flatten
from .ops.merge import merge
from .ops.ngram import NgramTable, mix_candidates, ngram_insert, ngram_lookup, perturb_candidates
from .ops.sampling import draft_candidates, sample_rows
from .ops.verify import verify
from .ops.write_kv import write_kv

if TYPE_CHECKING:
    from gsd_kernels_hf import (
        Automatic,
        Corpus,
        DFlash,
        DraftHeads,
        DraftSource,
        Eagle3,
        Gemma4Assistant,
        GraphDecoder,
        LayerSkip,
        Level,
        Mtp,
        OnlineLearner,
        Prefilled,
        Proposal,
        Typical,
        Verified,
        custom_generate,
        custom_generate_folder,
        from_gguf,
        generate,
        keep_packed,
        learn,
        pack,
        patch,
        unpatch,
    )

__all__ = [
    "BACKENDS",
    "Acceptance",
    "Automatic",
    "BackendUnavailableError",
    "Corpus",
    "DFlash",
    "DraftHeads",
    "DraftSource",
    "Eagle3",
    "Frontier",
    "Gemma4Assistant",
    "GraphConfig",
    "GraphDecoder",
    "LayerSkip",
    "Level",
    "Mtp",
    "NgramTable",
    "OnlineLearner",
    "Prefilled",
    "Proposal",
    "Rows",
    "TokenGraph",
    "Typical",
    "Verified",
    "__version__",
    "commit_kv",
    "custom_generate",
    "custom_generate_folder",
    "dag_attention",
    "draft_candidates",
    "flatten",
    "from_gguf",
    "generate",
    "keep_packed",
    "learn",
    "merge",
    "mix_candidates",
    "ngram_insert",
    "ngram_lookup",
    "pack",
    "patch",
    "perturb_candidates",
    "sample_rows",
    "unpatch",
    "verify",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    """The Hugging Face bindings, imported on first use: they need transformers, the kernels do not."""
    if name in __all__:
        import gsd_kernels_hf

        return getattr(gsd_kernels_hf, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
