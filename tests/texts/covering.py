"""The covering array of texts: every subject (a family, a source, a kind of weights) in three rows, all pairs once.

A row is what a user may combine: how rows are shaped, the batch, what is asked of the text, and the door. A subject
gets the three rows that cover most pairs of values not seen together before; a seed breaks ties.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import fake_cuda
import pytest
import tiny_configs
import torch
from models import FAMILIES, VOCAB, endless, noised, prompts, tiny
from packed.rows import ROWS as WEIGHTS
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
CPU, GPU, PIECES, DEFAULTS, INFERENCE = PLACES = (
    "cpu",
    "taken for a GPU",
    "a prompt in pieces",
    "other defaults",
    "inference mode",
)
"""A row has one: a subject's rows take its own in turn."""


class Made(NamedTuple):
    """A target, the options that name its drafts, its prompts (padded on the left), and the model whose text it is."""

    target: Any
    drafts: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    right: Any = None  # the target itself


@dataclass(frozen=True)
class Subject:
    """What decodes.

    Attributes:
        made: of an empty folder.
        own: the text is transformers' own; else that of our plain decoding, in the same arithmetic.
        places: where it has this text.
    """

    made: Callable[[Path], Made]
    own: bool = True
    places: tuple[str, ...] = PLACES


def _model(draft: Any) -> dict[str, Any]:
    return {"assistant_model": draft, "draft_sources": ("model",)}


def _family(name: str, dtype: torch.dtype, number: int) -> Subject:
    def made(_: Path) -> Made:
        target = tiny(name, dtype=dtype)
        return Made(target, _model(noised(target)), prompts(3, 12, seed=number))

    # Where a default device breaks transformers' masks, modules serve, which round by rows.
    half = dtype.itemsize < 4
    return Subject(made, not half, tuple(place for place in PLACES if not half or place != DEFAULTS))


def _longrope(name: str = "Llama") -> Subject:
    """Texts that cross the border between its factors, before and behind the end of a batch's shorter prompts."""

    def made(_: Path) -> Made:
        factors = {"short_factor": [1.0, 1.3, 1.1, 1.7], "long_factor": [3.0, 9.0, 5.0, 20.0]}
        rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24, **factors}
        given = {"num_attention_heads": 4, "max_position_embeddings": 96, "rope_parameters": rope}
        if name == "Llama":
            target = endless(**given)
        else:
            target = tiny_configs.build(name, 2, **given, hidden_size=32, vocab_size=VOCAB)
        return Made(target, _model(noised(target, 0.02)), prompts(3, 14))

    return Subject(made, places=(CPU, GPU, DEFAULTS))  # pieces are turned by other factors


def _hybrid(name: str, dtype: torch.dtype) -> Subject:
    def made(_: Path) -> Made:
        target = tiny_configs.build_hybrid(name).to(dtype)
        return Made(target, _model(noised(target, 0.02)), tiny_configs.hybrid_inputs(3))

    return Subject(made, dtype.itemsize >= 4)


def _source(name: str, number: int, dtype: torch.dtype | None = None) -> Subject:
    """A source of the table; in another dtype than float64 its layers and the target's are operators."""

    def made(folder: Path) -> Made:
        row = SOURCES[name]
        target, drafts = row.target(), row.options(folder)
        if dtype is not None:
            other = type(target)(target.config).to(dtype).eval()  # without the hooks that transformers leaves
            other.load_state_dict(target.state_dict())
            target = other
            drafts["drafter"] = copy.deepcopy(drafts["drafter"]).to(dtype)
        return Made(target, drafts, row.inputs(number))

    return Subject(made, dtype is None or dtype.itemsize >= 4)


def _weights(name: str, number: int) -> Subject:
    """Packed weights: not a bit of the text differs from that of the dense weights that they stand for."""

    def made(folder: Path) -> Made:
        case = WEIGHTS[name](folder)
        heads = {"draft_heads": gsd.DraftHeads.for_model(case.model, 2), "draft_sources": ("model", "heads")}
        return Made(case.model, _model(case.draft) | heads, prompts(3, 9, seed=number, vocab=90), case.right)

    # A GPU keeps the modules, which round by rows; gptqmodel's layers, as rebuilt here, use the default device.
    places = (CPU, PIECES, INFERENCE) if name.startswith("gptqmodel") else (CPU, PIECES, DEFAULTS, INFERENCE)
    return Subject(made, own=False, places=places)


SUBJECTS: dict[str, Subject] = {
    **{
        f"{name}, {str(dtype).removeprefix('torch.')}": _family(name, dtype, number)
        for number, (name, dtype) in enumerate(
            itertools.product(FAMILIES, (torch.float64, torch.float32, torch.bfloat16))
        )
    },
    **{f"hybrid {name}": _hybrid(name, torch.float64) for name in tiny_configs.HYBRIDS},
    **{f"source {name}": _source(name, number) for number, name in enumerate(SOURCES)},
    **{f"weights {name}": _weights(name, number) for number, name in enumerate(WEIGHTS)},
    **{f"{name}, float16": _family(name, torch.float16, 20) for name in ("qwen3", "mistral-window")},
    **{f"hybrid {name}, bfloat16": _hybrid(name, torch.bfloat16) for name in ("qwen3.5", "falcon-h1", "lfm2")},
    "longrope": _longrope(),
}
BESIDE: dict[str, Subject] = {
    "longrope phi3": _longrope("Phi3ForCausalLM"),
    **{
        f"source {name}, {str(dtype).removeprefix('torch.')}": _source(name, 0, dtype)
        for name, dtype in (
            *(("eagle3 plain", torch.float16), ("eagle3 layers", torch.float32), ("dflash shared", torch.float16)),
            *(("DSpark", torch.bfloat16), ("p-eagle norms", torch.float32)),
        )
    },
}
"""Subjects that came after the recorded texts."""

Row = tuple[str, int, str, str]  # shape, batch, call, door


@functools.cache
def rows() -> dict[str, list[Row]]:
    """The rows of every subject."""
    seen: set[Any] = set()
    draws, every = random.Random(0), list(itertools.product(*AXES))
    found: dict[str, list[Row]] = {}
    for subject in (*SUBJECTS, *BESIDE):
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


@contextlib.contextmanager
def placed(place: str) -> Iterator[None]:
    """One of :data:`PLACES`: on a GPU steps are captured, and have static shapes; meta stands for another device."""
    before = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch, torch.inference_mode(place == INFERENCE):
        if place == GPU:
            fake_cuda.install(patch)
        if place == DEFAULTS:
            torch.set_default_device("meta")
            torch.set_default_dtype(torch.float16)
        try:
            yield
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(before)


@contextlib.contextmanager
def opened(made: Made, row: Row) -> Iterator[Callable[..., Any]]:
    """The row's door, by which its shape drafts; a source of tokens has the history beside it."""
    shape, _, _, door = row
    target, sources = made.target, made.drafts["draft_sources"]
    beside = sources if "history" in sources or shape in ("chain", "tree") else (*sources, "history")
    drafts = {**made.drafts, "draft_sources": beside, "graph_config": SHAPES[shape]}

    def custom(**options: Any) -> Any:
        ours = {name: options.pop(name) for name in ("seed", "observer") if name in options}
        return target.generate(**options, custom_generate=gsd.GraphDecoder(**drafts, **ours))

    if door == "patch":
        with gsd.patch(target, **drafts):
            yield target.generate
    else:
        yield custom if door == "custom_generate" else functools.partial(gsd.generate, target, **drafts)
