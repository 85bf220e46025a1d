"""Ways of decoding one prompt: ours, and everything transformers brings for the same purpose."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import CompileConfig, PreTrainedModel

from gsd_kernels_cli import comparison
from gsd_kernels_hf.engine import engine
from gsd_kernels_hf.sources.load import source_of

from ..lib.report import Missing, lacking, reason
from .configs import PROMPT_LOOKUP_TOKENS, fixed_configs
from .options import OfGenerate
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
NO_DRAFT = "no draft model was given"
SOURCES = ("model", "heads", "eagle3", "dflash", "history")
DEFAULT = (*THEIRS, PLAIN, "chain", "tree", "graph", "history", AUTO)
"""Others are raced where they are asked for."""


Decode = Callable[[Tensor, int, int], comparison.Run]
"""(prompt [1, P], new tokens, seed) → what was decoded."""


Ways = dict[str, Decode]
"""Ways of decoding by name; one that cannot take part raises, and says why."""


def timed(decode: Decode, ids: Tensor, new_tokens: int, seed: int) -> comparison.Run:
    """Decode a prompt, and note the seconds that it took."""
    comparison.wait_for(ids.device)
    begin = time.perf_counter()
    decoded = decode(ids, new_tokens, seed)
    comparison.wait_for(ids.device)
    return decoded if decoded.seconds is not None else replace(decoded, seconds=time.perf_counter() - begin)


def warmed_up(ways: Ways, ids: Tensor, tokens: Callable[[str], int]) -> tuple[Ways, dict[str, str], dict[str, float]]:
    """Let every way decode so many ``tokens`` once; an error of ours is raised.

    Returns: the ways that work, why the others do not, and the seconds that the first took.
    """
    racing, missing, seconds = {}, {}, {}
    for name, decode in ways.items():
        print(f"warming up {name}", file=sys.stderr, flush=True)
        begin = time.perf_counter()
        try:
            decode(ids, tokens(name), 0)
        except Exception as error:
            if not isinstance(error, Missing) and (is_ours(name) or name.startswith("gsd-")):
                raise
            missing[name] = reason(error)
        else:
            racing[name], seconds[name] = decode, time.perf_counter() - begin
    return racing, missing, seconds


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


def competitors(given: OfGenerate, pair: Pair, names: Sequence[str]) -> Ways:
    """The named ones, in the given order."""
    sampling: dict[str, Any] = {"do_sample": given.temperature > 0}
    if given.temperature > 0:
        sampling |= {"temperature": given.temperature, "top_k": 0}
    found: Ways = {}
    for name in names:
        try:
            if is_ours(name):
                found[name] = _ours(name, pair, backend=given.backend, **sampling)
            else:
                found[name] = _theirs(name, pair, sampling, given.quick)
        except Missing as error:
            found[name] = lacking(str(error))
    return found


def _theirs(name: str, pair: Pair, options: dict[str, Any], quick: bool) -> Decode:
    if name in ASSISTED:
        if pair.draft is None:
            raise Missing(NO_DRAFT)
        return decoding(comparison.assisted(pair.target, pair.draft, ASSISTED[name], **options))
    if name == LOOKUP:
        options = {**options, "prompt_lookup_num_tokens": PROMPT_LOOKUP_TOKENS}
    if name == STATIC:
        if quick:
            raise Missing("compiling it takes longer than --quick allows")
        config = CompileConfig()
        if pair.target.device.type == "cpu":
            config._compile_all_devices = True
            config.mode = "default"  # the other modes are about CUDA graphs
        options = {**options, "cache_implementation": "static", "compile_config": config}
    return decoding(comparison.plain(pair.target, counted=name != STATIC, **options))


def decoding(contender: comparison.Contender) -> Decode:
    """A contender as a way, with the seed for transformers' own random numbers."""

    def decode(ids: Tensor, new_tokens: int, seed: int) -> comparison.Run:
        torch.manual_seed(seed)
        return contender(inputs_of(ids), new_tokens)

    return decode


def inputs_of(ids: Tensor) -> comparison.Inputs:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


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
        raise Missing(NO_DRAFT)
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
