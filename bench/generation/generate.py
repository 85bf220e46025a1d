"""Whole generations in one interleaved run: ours beside everything that transformers brings for the same purpose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from gsd_kernels_cli.ranks import is_first

from ..lib.environment import environment
from .competitors import (
    AUTO,
    DEFAULT,
    GREEDY,
    PLAIN,
    STATIC,
    check_names,
    competitors,
    is_ours,
    warmed_up,
)
from .configs import fixed_configs
from .options import OfGenerate
from .pairs import Pair, endless, load_pair
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
    given: OfGenerate, device: torch.device, dtype: torch.dtype, ranks: int, names: Sequence[str]
) -> tuple[str, Report]:
    """Race the competitors; after every prompt the first process writes the results so far.

    Args:
        given: the command's options.
        device, dtype: of the models.
        ranks: processes that share the target, this one among them.
        names: of the competitors; empty: the usual ones.

    Returns: the name of the file of results, and what is in it.
    """
    names = tuple(names or DEFAULT)
    check_names(names)
    if given.model is None and (given.draft is not None or given.prompt_file is not None):
        raise ValueError("--draft, --prompt-file: need --model; the embedded pair has its own")
    dtype_name, shape = str(dtype).removeprefix("torch."), given.target_shape
    what = shape if given.model is None else Path(given.model).stem
    parts = [NAME, what, dtype_name, *[f"tp{ranks}"] * given.tp, *["quick"] * given.quick]
    name = given.name or "-".join(parts)
    if given.model is None:
        pair = load_pair(given, device, dtype, tensor_parallel=ranks > 1)
    else:
        pair = _own_pair(given, device, dtype)
    report = Report(
        NAME,
        settings={
            **{key: value for key, value in asdict(given).items() if key not in UNSAID},
            "pair": pair.name,
            "prompt_file": None if given.prompt_file is None else given.prompt_file.name,
            "dtype": dtype_name,
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
    longest = max((prompt.input_ids for prompt in pair.prompts), key=lambda ids: ids.shape[1])

    def tokens(name: str) -> int:
        """A whole text of what compiles as it goes: one, and on a GPU everybody, for the rows of a step."""
        return given.new_tokens if name == STATIC or longest.is_cuda else WARM_UP_TOKENS

    racing, report.missing, report.setup_seconds = warmed_up(competitors(given, pair, names), longest, tokens)
    # The baseline of speedups: transformers' plain decoding; on a GPU our own, which is captured.
    report.settings["against"] = PLAIN if device.type == "cuda" and PLAIN in racing else GREEDY
    reference = GREEDY if given.temperature == 0 and GREEDY in racing else PLAIN
    race = Race(
        pair.target,
        report,
        given.new_tokens,
        references=lambda way: {"same": reference} if given.temperature == 0 or is_ours(way) else {},
        seconds=math.inf if given.seconds is None else given.seconds,
        temperature=given.temperature,
        with_stats=True,
        folder=given.out if is_first() else None,
        name=name,
    )
    race.run(racing, pair.prompts)
    return name, report


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
