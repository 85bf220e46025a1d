"""How each way decodes: ours, transformers' own, and what OpenVINO GenAI and llama.cpp make of the same model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from gsd_kernels_cli import comparison
from gsd_kernels_hf.sources.shipped import shipped_file

from ..competitors import PROMPT_LOOKUP_TOKENS, Competitor, Decode, inputs_of
from ..names import (
    HF,
    HF_ASSISTED,
    HF_LOOKUP,
    HISTORY,
    LLAMA_CPP_WEIGHTS,
    OPENVINO_WEIGHTS,
    PACKED,
    PACKED_HISTORY,
    PACKED_UNLEARNED,
    PLAIN,
    UNLEARNED,
)
from ..peers.base import Engine
from ..peers.llama_server import LlamaServer, find_binaries
from ..peers.openvino import OpenVino
from ..peers.race import name_of
from .models import Real

NAMED = {torch.bfloat16: "bf16", torch.float32: "f32"}


def engines_for(real: Real, binaries: Path | None) -> list[Engine]:
    """Other engines, one a kind of weights.

    Args:
        real: the model.
        binaries: where llama.cpp was built; see :func:`find_binaries`.
    """
    engines: list[Engine] = [OpenVino(weights, real.tokenizer_folder) for weights in OPENVINO_WEIGHTS]
    if real.model.dtype == torch.float32:  # elsewhere they are floats anyway
        engines += [OpenVino(weights, real.tokenizer_folder, floats=True) for weights in OPENVINO_WEIGHTS if weights]
    place = find_binaries(binaries)
    own = NAMED.get(real.model.dtype)
    if own is not None:
        engines.append(LlamaServer(place, own, real.gguf, real.ends))
    if real.gguf is not None:
        engines.append(LlamaServer(place, "", real.gguf, real.ends))
    return [*engines, *(LlamaServer(place, weights, real.gguf, real.ends) for weights in LLAMA_CPP_WEIGHTS)]


def names_of(real: Real, engines: Sequence[Engine]) -> list[str]:
    """All ways that there are for this model, ours last."""
    kinds = ("plain", "lookup", *(("draft",) if real.shared_draft is not None else ()))
    theirs = [name_of(engine, kind) for engine in engines for kind in kinds]
    assisted = [HF_ASSISTED] if real.draft is not None else []
    packed = [] if real.packed is None else [PACKED, PACKED_HISTORY]
    models = {UNLEARNED: real.model, PACKED_UNLEARNED: real.packed}
    unlearned = [way for way, model in models.items() if model is not None and shipped_file(model) is not None]
    return [HF, HF_LOOKUP, *assisted, *theirs, PLAIN, HISTORY, *packed, *unlearned, *real.drafts]


def own_ways(real: Real, names: Sequence[str]) -> list[Competitor]:
    """The ways among ``names`` that run in this process: transformers' and ours."""
    model = real.model
    makers: dict[str, Callable[[], comparison.Contender]] = {
        HF: lambda: comparison.plain(model),
        HF_LOOKUP: lambda: comparison.plain(model, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
        HF_ASSISTED: lambda: comparison.assisted(model, real.draft, **real.tokenizers),
        PLAIN: lambda: comparison.undrafted(model),
        HISTORY: lambda: comparison.graph(model, draft_sources=("history",)),
        PACKED: lambda: comparison.undrafted(real.packed),
        PACKED_HISTORY: lambda: comparison.graph(real.packed, draft_sources=("history",)),
        UNLEARNED: lambda: comparison.graph(model, draft_sources=("history",), learned=False),
        PACKED_UNLEARNED: lambda: comparison.graph(real.packed, draft_sources=("history",), learned=False),
        **{way: _drafting(model, options) for way, options in real.drafts.items()},
    }
    return [Competitor(name, _decode(makers[name]())) for name in names if name in makers]


def _drafting(model: Any, options: dict[str, Any]) -> Callable[[], comparison.Contender]:
    return lambda: comparison.graph(model, **options)


def _decode(contender: comparison.Contender) -> Decode:
    return lambda ids, new_tokens, seed: contender(inputs_of(ids), new_tokens)
