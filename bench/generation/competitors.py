"""Ways of decoding one prompt: ours, and everything transformers brings for the same purpose."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels_cli import comparison
from gsd_kernels_hf.engine import engine
from gsd_kernels_hf.sources.load import source_of

from ..lib.missing import Missing, reason
from .configs import PROMPT_LOOKUP_TOKENS, fixed_configs
from .pairs import Pair

NEW = "-new"  # behind the names of ours that begin every call with a new session, in which nothing is captured yet
GREEDY, STATIC, LOOKUP, PLAIN, AUTO = "hf-greedy", "hf-static-compile", "hf-prompt-lookup", "plain", "auto"
#: transformers' assisted generation: drafted tokens, ``None`` by its own schedule
ASSISTED = {"hf-assisted-3": 3, "hf-assisted-5": 5, "hf-assisted-8": 8, "hf-assisted-dynamic": None}
UNDRAFTED = (PLAIN, "gsd-plain", "gsd-packed")  # a row a step
THEIRS = (GREEDY, STATIC, *ASSISTED, LOOKUP)
#: Ours by name: ``SOURCE+SOURCE@SHAPE``. ``model`` alone is what a user has who names a draft model and nothing else.
#: ``merged`` joins recurring sequences inside a step, ``graph`` across steps too, through the history. ``history``
#: verifies as many rows as prompt lookup does, ``history-auto`` what pays of any.
OURS = {
    PLAIN: "@plain",
    "chain": "model@chain",
    "tree": "model@tree",
    "merged": "model@merged",
    "graph": "model@graph",
    "history": "history@history",
    "history-auto": "history@auto",
    AUTO: "model@auto",
}
SOURCES = ("model", "heads", "eagle3", "dflash", "history")
DEFAULT = (*THEIRS, PLAIN, "chain", "tree", "graph", "history", AUTO)
"""Others are raced where they are asked for."""


Decode = Callable[[Tensor, int, int], comparison.Run]
"""(prompt [1, P], new tokens, seed) → what was decoded."""


@dataclass(frozen=True)
class Competitor:
    """A way of decoding, or why it is missing."""

    name: str
    decode: Decode | None = None
    missing: str | None = None

    def timed(self, ids: Tensor, new_tokens: int, seed: int) -> tuple[list[int], float, comparison.Run]:
        """Decode: the new tokens, the seconds that it took, and everything else."""
        assert self.decode is not None
        comparison.wait_for(ids.device)
        begin = time.perf_counter()
        decoded = self.decode(ids, new_tokens, seed)
        comparison.wait_for(ids.device)
        seconds = time.perf_counter() - begin if decoded.seconds is None else decoded.seconds
        return decoded.tokens, seconds, decoded


class Kept(Protocol):
    """A report's part on who takes part."""

    missing: dict[str, str]
    setup_seconds: dict[str, float]


def warmed_up(
    ways: Iterable[Competitor], ids: Tensor, tokens: Callable[[Competitor], int], kept: Kept
) -> list[Competitor]:
    """Let every way decode so many ``tokens`` once; those that work. An error of ours is raised."""
    racing = []
    for way in ways:
        if way.decode is None:
            kept.missing[way.name] = way.missing or ""
            continue
        print(f"warming up {way.name}", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        try:
            way.decode(ids, tokens(way), 0)
        except Exception as error:
            if is_ours(way.name) or way.name.startswith("gsd-"):
                raise
            kept.missing[way.name] = reason(error)
            continue
        kept.setup_seconds[way.name] = time.perf_counter() - begin
        racing.append(way)
    return racing


def is_ours(name: str) -> bool:
    return name.removesuffix(NEW) in OURS or "@" in name


def parsed(name: str) -> tuple[list[str], str]:
    """Sources and shape of one of ours."""
    sources, _, shape = OURS.get(name.removesuffix(NEW), name.removesuffix(NEW)).partition("@")
    return sources.split("+") if sources else [], shape


def check_names(names: Sequence[str]) -> None:
    """Raise a ValueError that names the first of ``names`` which is no competitor."""
    shapes = (PLAIN, AUTO, *fixed_configs(torch.device("cpu")))
    for name in names:
        sources, shape = parsed(name)
        if name not in THEIRS and not (is_ours(name) and set(sources) <= {*SOURCES} and shape in shapes):
            raise ValueError(
                f"--competitors: {name!r} is none of {', '.join((*THEIRS, *OURS))}, and no SOURCE+SOURCE@SHAPE of the "
                f"sources {', '.join(SOURCES)} and the shapes {', '.join(shapes)}"
            )


def competitors(
    pair: Pair,
    names: Sequence[str],
    *,
    temperature: float = 0.0,
    backend: str = "auto",
    quick: bool = False,
) -> list[Competitor]:
    """The named ones, in the given order.

    Raises:
        ValueError: an unknown name.
    """
    check_names(names)
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    found = []
    for name in dict.fromkeys(names):
        try:
            ours = is_ours(name)
            decode = _ours(name, pair, backend=backend, **sampling) if ours else _theirs(name, pair, sampling, quick)
            found.append(Competitor(name, decode))
        except Missing as error:
            found.append(Competitor(name, missing=reason(error)))
    return found


def _theirs(name: str, pair: Pair, options: dict[str, Any], quick: bool) -> Decode:
    target = pair.target
    if name == STATIC:
        return _static(target, options, quick)
    if name in ASSISTED:
        if pair.draft is None:
            raise Missing("no draft model was given")
        return _seeded(comparison.assisted(target, pair.draft, ASSISTED[name], **options))
    lookup = {"prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS} if name == LOOKUP else {}
    return _seeded(comparison.plain(target, **options, **lookup))


def _seeded(contender: comparison.Contender) -> Decode:
    """Decode with transformers' own random numbers."""

    def decode(ids: Tensor, new_tokens: int, seed: int) -> comparison.Run:
        torch.manual_seed(seed)
        return contender(inputs_of(ids), new_tokens)

    return decode


def inputs_of(ids: Tensor) -> comparison.Inputs:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _static(target: PreTrainedModel, options: dict[str, Any], quick: bool) -> Decode:
    if quick:
        raise Missing("compiling it takes longer than --quick allows")
    from transformers import CompileConfig

    config = CompileConfig()
    if target.device.type == "cpu":
        config._compile_all_devices = True
        config.mode = "default"  # the other modes are about CUDA graphs
    options = {**options, "cache_implementation": "static", "compile_config": config}
    return _seeded(comparison.plain(target, counted=False, **options))


@contextmanager
def new_sessions(target: PreTrainedModel) -> Iterator[None]:
    """Keep what other calls of a target left from those inside, and nothing that these leave."""
    kept, engine._unpatched[target] = engine.engines_of(target), engine.Engines()
    try:
        yield
    finally:
        engine._unpatched[target] = kept


def _ours(name: str, pair: Pair, **options: Any) -> Decode:
    sources, shape = parsed(name)
    if pair.draft is None and "model" in sources and name.removesuffix(NEW) != AUTO:  # which then has the history
        raise Missing("no draft model was given")
    own: dict[str, Any] = {kind: source_of(drafter) for kind, drafter in pair.drafters.items()}
    own |= {"heads": "heads"} if pair.heads is not None else {}
    missing = [source for source in sources if source not in ("model", "history", *own)]
    if missing:
        raise Missing(f"the pair has no trained {', '.join(missing)}: --target-shape none has")
    options["graph_config"] = fixed_configs(pair.target.device).get(shape, shape)
    options |= {"assistant_model": pair.draft} if "model" in sources else {}
    options |= {"draft_heads": pair.heads} if "heads" in sources else {}
    if sources not in ([], ["model"]):
        options["draft_sources"] = tuple(own.get(source, source) for source in sources)

    def decode(ids: Tensor, new_tokens: int, seed: int) -> comparison.Run:
        with new_sessions(pair.target) if name.endswith(NEW) else nullcontext():
            return comparison.graph(pair.target, seed=seed, **options)(inputs_of(ids), new_tokens)

    return decode
