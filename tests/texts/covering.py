"""The covering array of texts: every subject (a family, a source, a kind of weights) in three rows, all pairs once.

A row is what a user may combine: how rows are shaped, the batch, what is asked of the text, and the door. A subject
gets the three rows that cover most pairs of values not seen together before; a seed breaks ties.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hybrids
import torch
from models import FAMILIES, endless, noised, prompts, tiny
from packed.test_kinds_of_weights import ROWS as WEIGHTS
from sources.rows import ROWS as SOURCES

import gsd_kernels as gsd
from gsd_kernels import GraphConfig

LEVELS = {"depth": 3, "width": 3, "branch": 3, "max_rows": 24}
SHAPES: dict[str, GraphConfig | str] = {
    "chain": GraphConfig.preset("chain", depth=4),
    "tree": GraphConfig(**LEVELS, merge_context=-1),
    "graph": GraphConfig(**LEVELS, merge_context=2, history_depth=2, history_width=4),
    "lattice": GraphConfig(**LEVELS | {"depth": 4, "max_rows": 32}, merge_context=0, history_depth=1, history_width=4),
    "auto": "auto",
}
SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "seed": 5}
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "ends": {"do_sample": False, "eos_token_id": [2, 5]},
    "repetition": {"do_sample": False, "repetition_penalty": 1.3},
    "n-grams": {"do_sample": False, "no_repeat_ngram_size": 3, "eos_token_id": [5]},
    "sampled": SAMPLED,
    "bad words": {**SAMPLED, "min_new_tokens": 6, "bad_words_ids": [[7]], "eos_token_id": [2]},
    "warped": {"do_sample": True, "temperature": 1.1, "top_k": 20, "min_p": 0.02, "seed": 2},
}
DOORS = ("generate", "patch", "custom_generate")
BATCHES = (1, 3)
AXES = (tuple(SHAPES), BATCHES, tuple(CALLS), DOORS)
ROWS_OF_A_SUBJECT = 3


@dataclass(frozen=True)
class Subject:
    """What decodes.

    Attributes:
        made: of an empty folder, the target, the options that name its drafts, and its prompts, padded on the left.
        own: the text is transformers' own; else that of our plain decoding, in the same arithmetic.
    """

    made: Callable[[Path], tuple[Any, dict[str, Any], dict[str, torch.Tensor]]]
    own: bool = True


def _family(name: str, dtype: torch.dtype, number: int) -> Subject:
    def made(_: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
        target = tiny(name, dtype=dtype)
        return target, {"assistant_model": noised(target), "draft_sources": ("model",)}, prompts(3, 12, seed=number)

    return Subject(made, dtype.itemsize >= 4)


def _longrope() -> Subject:
    """Texts that cross the border between its factors."""

    def made(_: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
        factors = {"short_factor": [1.0, 1.3, 1.1, 1.7], "long_factor": [3.0, 9.0, 5.0, 20.0]}
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24, **factors}
        target = endless(num_attention_heads=4, max_position_embeddings=96, rope_parameters=rope)
        return target, {"assistant_model": noised(target, 0.02), "draft_sources": ("model",)}, prompts(3, 14)

    return Subject(made)


def _hybrid(name: str, dtype: torch.dtype) -> Subject:
    def made(_: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
        target = hybrids.build(name).to(dtype)
        return target, {"assistant_model": noised(target, 0.02), "draft_sources": ("model",)}, hybrids.inputs_of(3)

    return Subject(made, dtype.itemsize >= 4)


def _source(name: str, number: int) -> Subject:
    def made(folder: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
        row = SOURCES[name]
        return row.target(), row.options(folder), row.inputs(number)

    return Subject(made)


def _weights(name: str, number: int) -> Subject:
    def made(folder: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
        case = WEIGHTS[name](folder)
        drafts = {"assistant_model": case.draft, "draft_sources": ("model",)}
        return case.model, drafts, prompts(3, 9, seed=number, vocab=90)

    return Subject(made, own=False)


SUBJECTS: dict[str, Subject] = {
    **{
        f"{name}, {str(dtype).removeprefix('torch.')}": _family(name, dtype, number)
        for number, (name, dtype) in enumerate(
            itertools.product(FAMILIES, (torch.float64, torch.float32, torch.bfloat16))
        )
    },
    **{f"hybrid {name}": _hybrid(name, torch.float64) for name in hybrids.FAMILIES},
    **{f"source {name}": _source(name, number) for number, name in enumerate(SOURCES)},
    **{f"weights {name}": _weights(name, number) for number, name in enumerate(WEIGHTS)},
    **{f"{name}, float16": _family(name, torch.float16, 20) for name in ("qwen3", "mistral-window")},
    **{f"hybrid {name}, bfloat16": _hybrid(name, torch.bfloat16) for name in ("qwen3.5", "falcon-h1", "lfm2")},
    "longrope": _longrope(),
}

Row = tuple[str, int, str, str]  # shape, batch, call, door


@functools.cache
def rows() -> dict[str, list[Row]]:
    """The rows of every subject."""
    seen: set[Any] = set()
    draws, every = random.Random(0), list(itertools.product(*AXES))
    found: dict[str, list[Row]] = {}
    for subject in SUBJECTS:
        found[subject] = []
        for _ in range(ROWS_OF_A_SUBJECT):
            draws.shuffle(every)
            best = max(every, key=lambda row: len(_pairs(subject, row) - seen))
            seen |= _pairs(subject, best)
            found[subject].append(best)
    return found


def _pairs(subject: str, row: Row) -> set[Any]:
    """Pairs of values, and the subject with each."""
    placed = list(enumerate(row))
    return {*itertools.combinations(placed, 2), *((subject, value) for value in placed)}


TEXT = {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}


def asked(inputs: dict[str, torch.Tensor], row: Row) -> dict[str, Any]:
    """The arguments of ``generate``, but for drafts."""
    _, batch, call, _ = row
    return {**TEXT, **{name: value[:batch] for name, value in inputs.items()}, **CALLS[call]}


def plain_text(subject: Subject, target: Any, options: dict[str, Any]) -> torch.Tensor:
    """What the text has to be: transformers' own, or plain decoding's; int64 [batch, length]."""
    if subject.own and not options["do_sample"]:
        return target.generate(**options)
    return gsd.generate(target, **options, graph_config="plain")


def drafted(target: Any, given: dict[str, Any], options: dict[str, Any], row: Row) -> Any:
    """The text by the row's shape and door, with its statistics; a source of tokens has the history beside it."""
    shape, _, _, door = row
    sources = given["draft_sources"]
    beside = sources if "history" in sources or shape in ("chain", "tree") else (*sources, "history")
    drafts = {**given, "draft_sources": beside, "graph_config": SHAPES[shape]}
    options = {**options, "return_dict_in_generate": True}
    if door == "generate":
        return gsd.generate(target, **options, **drafts)
    seed = {"seed": options.pop("seed")} if door == "custom_generate" and "seed" in options else {}
    if door == "custom_generate":
        return target.generate(**options, custom_generate=gsd.GraphDecoder(**drafts, **seed))
    with gsd.patch(target, **drafts):
        return target.generate(**options)
