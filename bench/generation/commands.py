"""``gsd-kernels bench real | generate``."""

from __future__ import annotations

import os
from contextlib import ExitStack, redirect_stderr
from dataclasses import asdict, replace
from pathlib import Path

import typer

from gsd_kernels_cli import values
from gsd_kernels_cli.groups import with_groups
from gsd_kernels_cli.output import INTERRUPTED

from ..lib.options import device_of, dtype_of, join, listed, quiet, show
from .names import check_ways
from .options import Options
from .real.options import Options as RealOptions


@with_groups
def real(*, given: RealOptions) -> None:
    """Everyday work for a real chat model, beside transformers, OpenVINO GenAI and llama.cpp in the same rounds.

    After the first prompt an estimate is told. Ctrl-C and SIGTERM end with the table of the prompts so far.
    """
    given = replace(given, model=values.named_once(given.place, given.model))
    ways = listed(given.ways)
    check_ways(ways)
    from .real.run import name_of, run
    from .report import kinds_table, lengths_table, remarks, table, verdicts

    quiet()
    if given.quick:
        given = replace(given, new_tokens=min(given.new_tokens, 32), limit=1)
    called = given.name or name_of(given)
    result = run(given, ways, given.out, called)
    files, data = result.write(given.out, called), asdict(result)
    known, said = ("".join(f"{line}\n" for line in lines(data)) for lines in (remarks, verdicts))
    lengths = f"\n\n{lengths_table(data)}" if given.prompts is not None else ""
    show(files, f"{known}{table(data)}\n\n{said}\n{kinds_table(data)}{lengths}", result.missing)
    if result.stopped:
        raise typer.Exit(INTERRUPTED)


@with_groups
def generate(*, given: Options) -> None:
    """Whole generations in one interleaved run: plain, chain, tree, graph, auto, and transformers' own modes."""
    given = replace(given, model=values.named_once(given.place, given.model))
    from gsd_kernels_cli.ranks import is_first

    from .generate import OF_A_PAIR, run, table

    where, processes = join(given.device, given.tp_timeout) if given.tp else (device_of(given.device), 1)
    kind = dtype_of(given.dtype, str(where))
    if given.quick:
        given = replace(given, target_shape="none", prompts=min(given.prompts, 2), new_tokens=min(given.new_tokens, 16))
    if given.model is not None:
        given = replace(given, target_shape="none")
    parts = [
        "generate",
        given.target_shape if given.model is None else Path(given.model).stem,
        str(kind).removeprefix("torch."),
        *([f"tp{processes}"] * given.tp),
        *(["quick"] * given.quick),
    ]
    quiet()
    name = given.name or "-".join(parts)
    if not is_first():
        with ExitStack() as silence:
            silence.enter_context(redirect_stderr(silence.enter_context(open(os.devnull, "w"))))
            run(given, where, kind, processes, listed(given.competitors))
        return
    report = run(given, where, kind, processes, listed(given.competitors), folder=given.out, name=name)
    show(report.write(given.out, name), table(asdict(report), OF_A_PAIR), report.missing)
