"""``gsd-kernels bench generate``."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, redirect_stderr
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from gsd_kernels_cli import options, values
from gsd_kernels_cli.groups import with_groups

from ..lib.options import (
    RESULTS,
    Compare,
    Device,
    DtypeOption,
    Name,
    NewTokens,
    Out,
    PairName,
    PairOption,
    Quick,
    device_of,
    dtype_of,
    join,
    listed,
    quiet,
    show,
)

Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="DIR|ID|FILE.gguf", callback=values.model("--model"), help="Your own, in place of the pair."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="DIR|ID", callback=values.folder("--draft"), help="A draft model for it. Default: none."
    ),
]
TargetShape = Annotated[str, typer.Option("--target-shape", help="Inflate the target to it; or none.")]


@dataclass(frozen=True)
class Options:
    """Options of the command, and what a run goes by."""

    place: options.ModelPlace = None
    pair: PairOption = PairName.demo
    model: Model = None
    draft: Draft = None
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="FILE", help="Prompts for it, as of bench real, whose are the default."),
    ] = None
    target_shape: TargetShape = "250m"
    draft_shape: Annotated[str, typer.Option("--draft-shape", help="The same for the draft.")] = "none"
    text: Annotated[str, typer.Option("--text", help="Kind of prompts: code, copy, table or prose.")] = "code"
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="The first so many of that kind.")] = 20
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=2, help="Of every prompt, others behind it. Default: its own.")
    ] = None
    new_tokens: NewTokens = 128
    fresh: Annotated[bool, typer.Option("--fresh", help="The last ones, on which no setting was chosen.")] = False
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0
    competitors: Annotated[
        list[str] | None, typer.Option("--competitors", help="Comma-separated. Default: all but single sources.")
    ] = None
    backend: Annotated[str, typer.Option("--backend", callback=values.backend, help="Of our ops.")] = "auto"
    dtype: DtypeOption = None
    device: Device = None
    tp: Annotated[
        bool, typer.Option("--tp", help="Shard the target over torchrun's processes; the first one prints and writes.")
    ] = False
    tp_timeout: Annotated[
        float, typer.Option("--tp-timeout", metavar="SECONDS", min=1.0, help="After which a silent rank is lost.")
    ] = 600.0
    quick: Quick = False
    seconds: Annotated[float | None, typer.Option("--seconds", help="Begin no prompt beyond this.")] = None
    out: Out = RESULTS
    name: Name = None
    compare: Compare = None


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
    data = asdict(report)
    show(report.write(given.out, name), table(data, OF_A_PAIR), report.missing)
    if given.compare is not None:
        _show_changes(data, given.compare)


def _show_changes(data: dict[str, Any], path: Path) -> None:
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if earlier.get("case") != "generate":
        raise ValueError(f"--compare: {path} is not a result of gsd-kernels bench generate")
    # Results of before 2026-11-29 call a way a competitor.
    before = {row.get("way", row.get("competitor")): row["tokens_per_second"] for row in earlier["summary"]}
    commit = earlier["environment"]["commit"]
    typer.echo(f"\nagainst {commit} of {earlier['environment']['date']} (above 1 is faster now):")
    for row in data["summary"]:
        if row["way"] in before:
            typer.echo(f"{row['tokens_per_second'] / before[row['way']]:.2f}  {row['way']}")
