"""How each way decodes: ours, transformers' own, and what OpenVINO GenAI and llama.cpp make of the same model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from gsd_kernels_cli import comparison
from gsd_kernels_hf.sources.learned import shipped_file

from ..competitors import Competitor, Decode, inputs_of
from ..configs import PROMPT_LOOKUP_TOKENS
from ..names import (
    HF,
    HF_ASSISTED,
    HF_LOOKUP,
    HISTORY,
    LLAMA_CPP_WEIGHTS,
    OPENVINO_WEIGHTS,
    OURS,
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
    own = [NAMED[real.model.dtype]] if real.model.dtype in NAMED else []
    file = [""] if real.gguf is not None else []
    weights = (*own, *file, *LLAMA_CPP_WEIGHTS)
    return [*engines, *(LlamaServer(place, each, real.gguf, real.ends) for each in weights)]


def own_ways(real: Real) -> dict[str, Competitor]:
    """The ways of this model that run in this process, by name: transformers' and ours."""
    model, packed, history = real.model, real.packed, {"draft_sources": ("history",)}
    ways = {
        HF: comparison.plain(model),
        HF_LOOKUP: comparison.plain(model, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
    }
    if real.draft is not None:
        ways[HF_ASSISTED] = comparison.assisted(model, real.draft, **real.tokenizers)
    ways |= {PLAIN: comparison.undrafted(model), HISTORY: comparison.graph(model, **history)}
    if packed is not None:
        ways |= {PACKED: comparison.undrafted(packed), PACKED_HISTORY: comparison.graph(packed, **history)}
    for way, of in ((UNLEARNED, model), (PACKED_UNLEARNED, packed)):
        if of is not None and shipped_file(of) is not None:
            ways[way] = comparison.graph(of, **history, learned=False)
    ways |= {way: comparison.graph(model, **options) for way, options in real.drafts.items()}
    return {name: Competitor(name, _decode(contender)) for name, contender in ways.items()}


def names_of(real: Real, own: Iterable[str], engines: Sequence[Engine]) -> list[str]:
    """All ways that there are for this model, transformers' first, ours last."""
    kinds = ("plain", "lookup", *(("draft",) if real.shared_draft is not None else ()))
    theirs = [name_of(engine, kind) for engine in engines for kind in kinds]
    return sorted([*own, *theirs], key=lambda way: 0 if way.startswith(HF) else 2 if way in OURS else 1)


def _decode(contender: comparison.Contender) -> Decode:
    return lambda ids, new_tokens, seed: contender(inputs_of(ids), new_tokens)
