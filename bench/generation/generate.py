"""Whole generations in one interleaved run: ours beside everything that transformers brings for the same purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from ..lib.environment import environment
from .competitors import (
    AUTO,
    DEFAULT,
    GREEDY,
    PLAIN,
    STATIC,
    Competitor,
    check_names,
    competitors,
    is_ours,
    warmed_up,
)
from .configs import fixed_configs
from .options import OfGenerate
from .pairs import Pair, endless, load_pair, of_length
from .race import Race, terminable
from .real.models import load_real
from .real.prompts import encoded, read_chats
from .report import Report

NAME = "generate"
WARM_UP_TOKENS = 8
#: Options that say nothing about what was measured.
UNSAID = ("place", "device", "seconds", "out", "name", "tp", "tp_timeout")


@terminable()
def run(
    given: OfGenerate,
    device: torch.device,
    dtype: torch.dtype,
    ranks: int,
    names: Sequence[str],
    *,
    folder: Path | None = None,
    name: str = NAME,
) -> Report:
    """Race the competitors; after every prompt the results so far are written to ``folder``.

    Args:
        given: the command's options.
        device, dtype: of the models.
        ranks: processes that share the target, this one among them.
        names: of the competitors; empty: the usual ones.
        folder, name: of the file of results; without a folder none is written.
    """
    names = tuple(names or DEFAULT)
    check_names(names)
    if given.model is None and (given.draft is not None or given.prompt_file is not None):
        raise ValueError("--draft, --prompt-file: need --model; the embedded pair has its own")
    pair = _pair(given, device, dtype, ranks)
    report = Report(
        NAME,
        settings={
            **{key: value for key, value in asdict(given).items() if key not in UNSAID},
            "pair": pair.name,
            "prompt_file": None if given.prompt_file is None else given.prompt_file.name,
            "dtype": str(dtype).removeprefix("torch."),
            "ranks": ranks,
            "competitors": names,
            "configs": {key: asdict(config) for key, config in fixed_configs(device).items()},
            "ours": AUTO,
        },
        environment=environment(device),
        parameters={
            "target": pair.target.num_parameters(),
            "draft": 0 if pair.draft is None else pair.draft.num_parameters(),
        },
        prompts={prompt.name: prompt.about() for prompt in pair.prompts},
    )
    racing = _prepared(given, pair, names, report)
    raced = [way.name for way in racing]
    # The baseline of speedups: transformers' plain decoding; on a GPU our own, which is captured.
    report.settings["against"] = PLAIN if device.type == "cuda" and PLAIN in raced else GREEDY
    reference = GREEDY if given.temperature == 0 and GREEDY in raced else PLAIN
    race = Race(
        pair.target,
        report,
        given.new_tokens,
        references=lambda way: {"same": reference} if given.temperature == 0 or is_ours(way) else {},
        judged=lambda way: True,
        ours=is_ours,
        seconds=math.inf if given.seconds is None else given.seconds,
        temperature=given.temperature,
        with_stats=True,
        folder=folder,
        name=name,
    )
    race.run(racing, pair.prompts)
    return report


def _pair(given: OfGenerate, device: torch.device, dtype: torch.dtype, ranks: int) -> Pair:
    """The pair with its prompts."""
    if given.model is not None:
        return _own_pair(given, device, dtype)
    pair = load_pair(given, device, dtype, tensor_parallel=ranks > 1)
    if given.prompt_tokens is None:
        return pair
    limit = pair.target.config.max_position_embeddings - given.new_tokens
    return replace(pair, prompts=of_length(pair.prompts, given.prompt_tokens, limit))


def _own_pair(given: OfGenerate, device: torch.device, dtype: torch.dtype) -> Pair:
    """A user's model and its draft, without an end of text: all texts get the same length.

    Raises:
        OSError, ValueError: a model or the prompts cannot be found or read.
    """
    real = load_real(given.model, given.draft, None, dtype)
    if real.tokenizers:
        raise ValueError("--draft: it has another tokenizer than the model; `bench real` races such a pair")
    target, small = real.model.to(device), None if real.draft is None else real.draft.to(device)
    endless(target, small)
    asked = encoded(read_chats(given.prompt_file)[0][: given.prompts], real.tokenizer)
    return Pair(real.name, target, small, [replace(p, input_ids=p.input_ids.to(device)) for p in asked])


def _prepared(given: OfGenerate, pair: Pair, names: Sequence[str], report: Report) -> list[Competitor]:
    """Compile and warm up; the competitors that work.

    What compiles as it goes writes a whole text: the compiled ones, and on a GPU everybody, whose kernels are compiled
    for the rows of a step when it first has so many.
    """
    longest = max((prompt.input_ids for prompt in pair.prompts), key=lambda ids: ids.shape[1])
    options = {"temperature": given.temperature, "backend": given.backend, "quick": given.quick}

    def tokens(competitor: Competitor) -> int:
        return given.new_tokens if competitor.name == STATIC or longest.is_cuda else WARM_UP_TOKENS

    return warmed_up(competitors(pair, names, **options), longest, tokens, report)
