"""``gsd-kernels bench real | sources | prompt | generate``."""

from __future__ import annotations

import os
from contextlib import ExitStack, redirect_stderr
from dataclasses import asdict, replace
from typing import Any

import typer

from gsd_kernels_cli import values
from gsd_kernels_cli.groups import with_groups
from gsd_kernels_cli.output import INTERRUPTED

from ..lib.options import device_of, dtype_of, join, keep, listed, quiet
from .names import check_ways
from .options import OF_PROMPTS, OfGenerate, OfPrompt, OfReal, OfSources


@with_groups
def real(*, given: OfReal) -> None:
    """Everyday work for a real chat model, beside transformers, OpenVINO GenAI and llama.cpp in the same rounds.

    After the first prompt an estimate is told. Ctrl-C and SIGTERM end with the table of the prompts so far.
    """
    given = _named(given)
    ways = listed(given.ways)
    check_ways(ways)
    from .real import run
    from .report import engines_table, kinds_table, lengths_table, remarks, verdicts

    quiet()
    if given.quick:
        given = replace(given, new_tokens=min(given.new_tokens, 32), limit=1)
    name, result = run.real(given, ways)
    data = asdict(result)
    known, said = ("".join(f"{line}\n" for line in lines(data)) for lines in (remarks, verdicts))
    lengths = f"\n\n{lengths_table(data)}" if given.prompts is not None else ""
    keep(given.out, name, data, f"{known}{engines_table(data)}\n\n{said}\n{kinds_table(data)}{lengths}", result.missing)
    if result.stopped:
        raise typer.Exit(INTERRUPTED)


@with_groups
def sources(*, given: OfSources) -> None:
    """Tokens a step of the history alone on everyday work, with what was learned of the model and without.

    Counts, which no other load changes, but for auto, whose rows follow the clock. Every way begins cold.
    """
    given = _named(given)
    rows = _numbers("--rows", given.rows, "8,16,64,auto", range(2, 129), "numbers from 2 to 128 or auto", "auto")
    from .real import run

    quiet()
    name, data = run.sources(given, rows)
    keep(given.out, given.name or name, data, run.sources_table(data["counts"]), {})


@with_groups
def prompt(*, given: OfPrompt) -> None:
    """Milliseconds to the first token by a prompt's length, and tokens a second behind it, everyone in turn.

    Prompts are pieces of the long texts among the chats of real; all texts have the same length.
    """
    given = _named(given)
    ways = listed(given.ways)
    check_ways(ways)
    lengths = _numbers(
        "--lengths", given.lengths, "16,64,256,1024,4096", range(2, 1 << 31), "numbers of tokens, at least 2"
    )
    from .real import run

    quiet()
    name, data = run.prompt(given, lengths, ways or OF_PROMPTS)
    keep(given.out, given.name or name, data, run.prompt_table(data), data["missing"])


@with_groups
def generate(*, given: OfGenerate) -> None:
    """Whole generations in one interleaved run: plain, chain, tree, graph, auto, and transformers' own modes."""
    given = _named(given)
    from gsd_kernels_cli.ranks import is_first

    from .generate import run
    from .report import pair_table

    where, processes = join(given.device, given.tp_timeout) if given.tp else (device_of(given.device), 1)
    kind = dtype_of(given.dtype, str(where))
    if given.quick:
        given = replace(given, target_shape="none", prompts=min(given.prompts, 2), new_tokens=min(given.new_tokens, 16))
    if given.model is not None:
        given = replace(given, target_shape="none")
    quiet()
    with ExitStack() as silence:
        if not is_first():
            silence.enter_context(redirect_stderr(silence.enter_context(open(os.devnull, "w"))))
        name, report = run(given, where, kind, processes, listed(given.competitors))
    if is_first():
        keep(given.out, name, report, pair_table(asdict(report)), report.missing)


def _named(given: Any) -> Any:
    """The same options, the model in its one place."""
    return replace(given, place=None, model=values.named_once(given.place, given.model))


def _numbers(
    option: str, given: list[str] | None, usual: str, known: range, expected: str, *others: str
) -> list[int | str]:
    """Numbers of an option, or ``usual``; ``others``: words that may stand among them.

    Raises:
        ValueError: one is none.
    """
    found = listed(given) or listed([usual])
    for each in found:
        if each not in others and not (each.isdecimal() and int(each) in known):
            raise ValueError(f"{option}: expected {expected}, got {each!r}")
    return [each if each in others else int(each) for each in found]
