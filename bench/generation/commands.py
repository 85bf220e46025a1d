"""``gsd-kernels bench generate``."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gsd_kernels_cli import options, values

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

if TYPE_CHECKING:
    from .generate import GenerateReport

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


def generate(
    place: options.ModelPlace = None,
    pair: PairOption = PairName.demo,
    model: Model = None,
    draft: Draft = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="FILE", help="Prompts for it, as of bench real, whose are the default."),
    ] = None,
    target_shape: TargetShape = "250m",
    draft_shape: Annotated[str, typer.Option("--draft-shape", help="The same for the draft.")] = "none",
    text: Annotated[str, typer.Option("--text", help="Kind of prompts: code, copy, table or prose.")] = "code",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="The first so many of that kind.")] = 20,
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=2, help="Of every prompt, others behind it. Default: its own.")
    ] = None,
    new_tokens: NewTokens = 128,
    fresh: Annotated[bool, typer.Option("--fresh", help="The last ones, on which no setting was chosen.")] = False,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    names: Annotated[
        list[str] | None, typer.Option("--competitors", help="Comma-separated. Default: all but single sources.")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", callback=values.backend, help="Of our ops.")] = "auto",
    dtype: DtypeOption = None,
    device: Device = None,
    tp: Annotated[
        bool, typer.Option("--tp", help="Shard the target over torchrun's processes; the first one prints and writes.")
    ] = False,
    tp_timeout: Annotated[
        float, typer.Option("--tp-timeout", metavar="SECONDS", min=1.0, help="After which a silent rank is lost.")
    ] = 600.0,
    quick: Quick = False,
    seconds: Annotated[float | None, typer.Option("--seconds", help="Begin no prompt beyond this.")] = None,
    out: Out = RESULTS,
    name: Name = None,
    compare: Compare = None,
) -> None:
    """Whole generations in one interleaved run: plain, chain, tree, graph, auto, and transformers' own modes."""
    model = values.named_once(place, model)
    from .competitors import DEFAULT
    from .generate import Settings

    where, processes = join(device, tp_timeout) if tp else (device_of(device), 1)
    kind = dtype_of(dtype, str(where))
    if quick:
        target_shape, prompts, new_tokens = "none", min(prompts, 2), min(new_tokens, 16)
    if model is not None:
        target_shape = "none"
    parts = [
        "generate",
        target_shape if model is None else Path(model).stem,
        str(kind).removeprefix("torch."),
        *([f"tp{processes}"] * tp),
    ]
    quiet()
    settings = Settings(
        device=where,
        dtype=kind,
        pair=pair.value,
        target_shape=target_shape,
        draft_shape=draft_shape,
        text=text,
        prompts=prompts,
        new_tokens=new_tokens,
        temperature=temperature,
        fresh=fresh,
        prompt_tokens=prompt_tokens,
        competitors=listed(names) or DEFAULT,
        backend=backend,
        quick=quick,
        seconds=float("inf") if seconds is None else seconds,
        ranks=processes,
        model=model,
        draft=draft,
        prompt_file=prompt_file,
    )
    _race(settings, out, name or "-".join([*parts, *(["quick"] * quick)]), compare)


def _race(settings: Any, folder: Path, name: str, compare: Path | None) -> None:
    """Run it on every rank; the first one writes and prints."""
    from gsd_kernels_cli.ranks import is_first

    from .generate import run

    if not is_first():
        with ExitStack() as silence:
            silence.enter_context(redirect_stderr(silence.enter_context(open(os.devnull, "w"))))
            run(settings)
        return
    report = run(settings, folder=folder, name=name)
    show(report.write(folder, name), report.table(), report.missing)
    if compare is not None:
        _show_changes(report, compare)


def _show_changes(report: GenerateReport, path: Path) -> None:
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if earlier.get("case") != "generate":
        raise ValueError(f"--compare: {path} is not a result of gsd-kernels bench generate")
    before = {row["competitor"]: row["tokens_per_second"] for row in earlier["summary"]}
    commit = earlier["environment"]["commit"]
    typer.echo(f"\nagainst {commit} of {earlier['environment']['date']} (above 1 is faster now):")
    for row in report.summary:
        if row["competitor"] in before:
            typer.echo(f"{row['tokens_per_second'] / before[row['competitor']]:.2f}  {row['competitor']}")
