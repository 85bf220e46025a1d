"""The model that works: SmolLM2 out of its package, or the user's own; what may draft for it, and who decodes it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels_cli import comparison
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_hf.files import GGUF, model_place
from gsd_kernels_hf.model.vocabulary import Translation
from gsd_kernels_hf.packed.gguf import from_gguf, load_model, load_tokenizer
from gsd_kernels_hf.packed.modules import packed_in
from gsd_kernels_hf.sources.load import load_drafter
from gsd_kernels_hf.sources.memory import shipped_file

from ..competitors import Ways, decoding
from ..configs import PROMPT_LOOKUP_TOKENS
from ..names import (
    DRAFT,
    DRAFTER,
    DRAFTER_ALONE,
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


@dataclass(frozen=True)
class Real:
    """A model at work.

    Attributes:
        name: as it is reported.
        tokenizer_folder: where other engines read the tokenizer, if it is a folder.
        gguf: the file that it came from.
        packed: the same model with its weights as they lie in that file; its text is the same.
        ends: tokens that end a text.
        tokenizers: arguments of any ``generate`` for a draft of another tokenizer; empty where it is the target's.
        drafts: options of :func:`gsd_kernels.generate` by way, for what was given to draft with.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tokenizer_folder: Path | None
    gguf: Path | None
    ends: tuple[int, ...]
    packed: PreTrainedModel | None = None
    draft: PreTrainedModel | None = None
    tokenizers: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def shared_draft(self) -> PreTrainedModel | None:
        """The draft for other engines, which take one of the target's tokenizer."""
        return None if self.tokenizers else self.draft

    def engines(self, binaries: Path | None) -> list[Engine]:
        """Other engines, one a kind of weights; ``binaries``: where llama.cpp was built, see :func:`find_binaries`."""
        dtype, folder = self.model.dtype, self.tokenizer_folder
        engines: list[Engine] = [OpenVino(weights, folder) for weights in OPENVINO_WEIGHTS]
        if dtype == torch.float32:  # elsewhere they are floats anyway
            engines += [OpenVino(weights, folder, floats=True) for weights in OPENVINO_WEIGHTS if weights]
        place, own = find_binaries(binaries), {torch.bfloat16: ["bf16"], torch.float32: ["f32"]}.get(dtype, [])
        file = [""] if self.gguf is not None else []
        return engines + [LlamaServer(place, each, self.gguf, self.ends) for each in (*own, *file, *LLAMA_CPP_WEIGHTS)]

    def ways(self) -> Ways:
        """The ways of this model that run in this process: transformers' and ours."""
        model, packed, history = self.model, self.packed, {"draft_sources": ("history",)}
        ways = {
            HF: comparison.plain(model),
            HF_LOOKUP: comparison.plain(model, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS),
        }
        if self.draft is not None:
            ways[HF_ASSISTED] = comparison.assisted(model, self.draft, **self.tokenizers)
        ways |= {PLAIN: comparison.undrafted(model), HISTORY: comparison.graph(model, **history)}
        if packed is not None:
            ways |= {PACKED: comparison.undrafted(packed), PACKED_HISTORY: comparison.graph(packed, **history)}
        for way, of in ((UNLEARNED, model), (PACKED_UNLEARNED, packed)):
            if of is not None and shipped_file(of) is not None:
                ways[way] = comparison.graph(of, **history, learned=False)
        ways |= {way: comparison.graph(model, **options) for way, options in self.drafts.items()}
        return {name: decoding(contender) for name, contender in ways.items()}

    def names(self, own: Iterable[str], engines: Sequence[Engine]) -> list[str]:
        """All ways that there are for this model, transformers' first, ours last."""
        kinds = ("plain", "lookup", *(("draft",) if self.shared_draft is not None else ()))
        theirs = [name_of(engine, kind) for engine in engines for kind in kinds]
        return sorted([*own, *theirs], key=lambda way: 0 if way.startswith(HF) else 2 if way in OURS else 1)


def load_real(model: str | None, draft: str | None, drafter: str | None, dtype: torch.dtype) -> Real:
    """Load in ``dtype``: loaded, not cast, which would round the rotary frequencies as well.

    Raises:
        MissingModelError: no model is named, and SmolLM2's package is not installed.
        OSError, ValueError: a model cannot be found or read.
    """
    name, place, gguf = smollm2.NAME, None, None
    if model is None:
        place, gguf = smollm2.folder(), smollm2.gguf_path()
        target, tokenizer = smollm2.load(dtype)
    elif (found := model_place(model, "--model")).endswith(GGUF):
        gguf = Path(found)
        name, target, tokenizer = gguf.stem, load_model(gguf, dtype), load_tokenizer(gguf)
    else:
        name = model.rstrip("/").rpartition("/")[2]
        place = Path(found) if Path(found).is_dir() else None
        target = AutoModelForCausalLM.from_pretrained(found, dtype=dtype).eval()
        tokenizer = AutoTokenizer.from_pretrained(found)
    drafts: dict[str, dict[str, Any]] = {}
    small, tokenizers = None, {}
    if draft is not None:
        small = AutoModelForCausalLM.from_pretrained(draft, dtype=dtype).eval()
        tokenizers = _tokenizers(tokenizer, draft)
        drafts[DRAFT] = {"assistant_model": small, **tokenizers}
    if drafter is not None:
        loaded = load_drafter(drafter, target)
        for way, sources in ((DRAFTER_ALONE, ("drafter",)), (DRAFTER, ("drafter", "history"))):
            drafts[way] = {"drafter": loaded, "draft_sources": sources}
    if target.generation_config.pad_token_id is None:
        target.generation_config.pad_token_id = tokenizer.pad_token_id or tokenizer.eos_token_id
    target.generation_config.do_sample = False  # what a model samples with by default is none of a greedy race's
    for setting in ("temperature", "top_p", "top_k"):
        setattr(target.generation_config, setting, None)
    packed = None if gguf is None else from_gguf(gguf, dtype=dtype)
    if packed is not None:
        packed.generation_config = copy.deepcopy(target.generation_config)
    end = target.generation_config.eos_token_id
    ends = () if end is None else (end,) if isinstance(end, int) else tuple(end)
    return Real(name, target, tokenizer, place, gguf, ends, packed, small, tokenizers, drafts)


def _tokenizers(tokenizer: PreTrainedTokenizerBase, draft: str) -> dict[str, Any]:
    """Both tokenizers, where the draft in folder or hub id ``draft`` has another one than the target's."""
    try:
        own = AutoTokenizer.from_pretrained(draft)
    except (OSError, ValueError):
        return {}  # weights alone: their sizes are compared
    if Translation.between(tokenizer, own) is None:
        return {}
    return {"tokenizer": tokenizer, "assistant_tokenizer": own}


def bits_of(packed: PreTrainedModel) -> float:
    """Bits a weight of its matrices."""
    matrices = [module.matrix for module in packed_in(packed)]
    return 8 * sum(matrix.nbytes for matrix in matrices) / sum(matrix.shape.numel() for matrix in matrices)
