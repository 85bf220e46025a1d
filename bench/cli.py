"""``gsd-kernels bench``: each case writes its numbers as JSON and CSV, and a plot.

Measurements import torch and transformers when they run, so ``--help`` answers at once.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack, redirect_stderr
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from .generate import GenerateReport
    from .report import Report

app = typer.Typer(no_args_is_help=True, help="Measure the kernels and whole generations beside their peers.")

RESULTS = Path("bench/results")


class Dtype(str, Enum):
    """Of the tensors, or of both models."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


Out = Annotated[Path, typer.Option("--out", help="Folder for the results.")]
Compare = Annotated[
    Path | None, typer.Option("--compare", metavar="FILE", help="An earlier result (.json): print the changes.")
]
Quick = Annotated[bool, typer.Option("--quick", help="A small grid, under a minute on a CPU.")]
Device = Annotated[str | None, typer.Option("--device", help="Default: the first GPU if there is one.")]
DtypeOption = Annotated[Dtype | None, typer.Option("--dtype", help="Default: bfloat16 on a GPU, float32 on a CPU.")]
Backends = Annotated[
    list[str] | None, typer.Option("--backend", help="Ours to measure; repeatable. Default: all that run here.")
]
Peers = Annotated[
    list[str] | None, typer.Option("--peer", help="Peers to measure; repeatable, or none. Default: all that run here.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="Named after a model: llama-2-7b, …; repeatable. Default: several."),
]
Rows = Annotated[list[int] | None, typer.Option("--rows", help="Repeatable. Default: a grid.")]
Prefixes = Annotated[list[int] | None, typer.Option("--prefix", help="Cached tokens; repeatable. Default: a grid.")]
Seconds = Annotated[float, typer.Option("--seconds", min=0.0, help="For each measurement.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the written files.")]


@app.command()
def attention(
    shapes: Shapes = None,
    rows: Rows = None,
    prefixes: Prefixes = None,
    backends: Backends = None,
    peers: Peers = None,
    dtype: DtypeOption = None,
    device: Device = None,
    quick: Quick = False,
    seconds: Seconds = 0.5,
    out: Out = RESULTS,
    name: Name = None,
    compare: Compare = None,
) -> None:
    """One layer's attention under a tree mask; peers: SDPA with a mask, FlexAttention, flash-attn, FlashInfer."""
    _kernel_case(
        "attention", shapes, rows, prefixes, backends, peers, dtype, device, quick, seconds, out, name, compare
    )


@app.command()
def merge(
    rows: Rows = None,
    backends: Backends = None,
    dtype: DtypeOption = None,
    device: Device = None,
    quick: Quick = False,
    seconds: Seconds = 0.5,
    out: Out = RESULTS,
    name: Name = None,
    compare: Compare = None,
) -> None:
    """The graph ops of one step: merging of all levels, unrolling, verification."""
    _kernel_case("merge", None, rows, None, backends, None, dtype, device, quick, seconds, out, name, compare)


@app.command()
def sample(
    shapes: Shapes = None,
    rows: Rows = None,
    backends: Backends = None,
    peers: Peers = None,
    dtype: DtypeOption = None,
    device: Device = None,
    quick: Quick = False,
    seconds: Seconds = 0.5,
    out: Out = RESULTS,
    name: Name = None,
    compare: Compare = None,
) -> None:
    """Picking tokens; peers: torch argmax, multinomial, sort, topk, and FlashInfer's sampling."""
    _kernel_case("sample", shapes, rows, None, backends, peers, dtype, device, quick, seconds, out, name, compare)


@app.command()
def commit(
    shapes: Shapes = None,
    rows: Annotated[list[int] | None, typer.Option("--rows", help="Accepted rows; repeatable.")] = None,
    backends: Backends = None,
    peers: Peers = None,
    dtype: DtypeOption = None,
    device: Device = None,
    quick: Quick = False,
    seconds: Seconds = 0.5,
    out: Out = RESULTS,
    name: Name = None,
    compare: Compare = None,
) -> None:
    """Keeping the accepted keys and values of all layers; peer: a copy a layer with torch."""
    _kernel_case("commit", shapes, rows, None, backends, peers, dtype, device, quick, seconds, out, name, compare)


@app.command()
def generate(
    pair: Annotated[str, typer.Option("--pair", help="demo (embedded), or tiny (random weights).")] = "demo",
    target_shape: Annotated[str, typer.Option("--target-shape", help="Inflate the target to it; or none.")] = "250m",
    draft_shape: Annotated[str, typer.Option("--draft-shape", help="The same for the draft.")] = "none",
    text: Annotated[str, typer.Option("--text", help="Kind of prompts: code, copy, table or prose.")] = "code",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="The first so many of that kind.")] = 20,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    names: Annotated[
        list[str] | None, typer.Option("--competitors", help="Comma-separated. Default: all but single sources.")
    ] = None,
    backend: Annotated[str, typer.Option("--backend", help="Of our ops.")] = "auto",
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
    from gsd_kernels_hf.cli.ranks import is_first

    from .competitors import DEFAULT
    from .generate import Settings, run

    where, processes = _join(device, tp_timeout) if tp else (_device(device), 1)
    kind = _dtype(dtype, str(where))
    if quick:
        target_shape, prompts, new_tokens = "none", min(prompts, 2), min(new_tokens, 16)
    chosen = tuple(part.strip() for given in names or () for part in given.split(",")) or DEFAULT
    parts = ["generate", target_shape, str(kind).removeprefix("torch."), *([f"tp{processes}"] * tp)]
    file = name or "-".join([*parts, *(["quick"] * quick)])
    _quiet()
    settings = Settings(
        device=where,
        dtype=kind,
        pair=pair,
        target_shape=target_shape,
        draft_shape=draft_shape,
        text=text,
        prompts=prompts,
        new_tokens=new_tokens,
        temperature=temperature,
        competitors=chosen,
        backend=backend,
        quick=quick,
        seconds=float("inf") if seconds is None else seconds,
        ranks=processes,
    )
    with ExitStack() as silence:
        if first := is_first():
            report = run(settings, folder=out, name=file)
        else:
            silence.enter_context(redirect_stderr(silence.enter_context(open(os.devnull, "w"))))
            run(settings)
    if not first:
        return
    _finish(report.write(out, file), report.table(), report.missing)
    for floor in report.floors:
        ratio = floor["ratio"]
        verdict = "met" if floor["met"] else "NOT met"
        typer.echo(
            f"auto against {floor['against']}: {ratio['value']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f}), "
            f"floor {floor['floor']}: {verdict}"
        )
    if compare is not None:
        _compare_generate(report, compare)


@app.command()
def tree(
    pair: Annotated[str, typer.Option("--pair", help="demo (embedded), or tiny (random weights).")] = "demo",
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Of every text.")] = 10,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 64,
    quick: Quick = False,
    out: Out = RESULTS,
) -> None:
    """Tokens per step of chain, tree and graph over a grid of draft and target rows. Resumes where it was stopped."""
    from .tree_table import QUICK, Grid, run

    _quiet()
    grid = QUICK if quick else Grid()
    table = run(grid, pair=pair, prompts=min(prompts, 2) if quick else prompts, new_tokens=new_tokens, folder=out)
    typer.echo(table)


def _kernel_case(
    case: str,
    shapes: list[str] | None,
    rows: list[int] | None,
    prefixes: list[int] | None,
    backends: list[str] | None,
    peers: list[str] | None,
    dtype: Dtype | None,
    device: str | None,
    quick: bool,
    seconds: float,
    out: Path,
    name: str | None,
    compare: Path | None,
) -> None:
    from importlib import import_module

    from .report import Report
    from .runner import Settings, run

    settings = Settings(
        device=_device(device),
        dtype=_dtype(dtype, device),
        shapes=shapes or (),
        rows=rows or (),
        prefixes=prefixes or (),
        backends=backends,
        peers=[] if peers == ["none"] else peers,
        quick=quick,
        seconds=min(seconds, 0.05) if quick else seconds,
    )
    earlier = None if compare is None else Report.read(compare)
    file = name or case + ("-quick" if quick else "")
    report = run(import_module(f".{case}", __package__), settings)
    _finish(report.write(out, file), _table(report), report.missing())
    if earlier is not None:
        _compare(report, earlier)


def _table(report: Report) -> str:
    from .report import markdown, micros

    rows = [
        [
            f"{row.operation}, {row.shape}, " + ", ".join(f"{k} {v}" for k, v in row.parameters.items()),
            row.contestant,
            micros(row.median or 0),
            f"{micros(row.p20 or 0)}–{micros(row.p80 or 0)}",
            f"{row.bandwidth_fraction:.2f}",
        ]
        for row in report.measured()
    ]
    return markdown(["", "by", "median", "p20–p80", "of copy bandwidth"], rows)


def _finish(files: list[Path], table: str, missing: dict[str, str]) -> None:
    typer.echo(table)
    for name, reason in missing.items():
        typer.echo(f"missing: {name}: {reason}", err=True)
    typer.echo("written: " + ", ".join(map(str, files)), err=True)


def _compare(report: Report, earlier: Report) -> None:
    if earlier.environment["device"] != report.environment["device"] or earlier.dtype != report.dtype:
        typer.echo("the earlier result is of another device or dtype", err=True)
    changes = report.compare(earlier)
    typer.echo(f"\nagainst {earlier.environment['commit']} of {earlier.environment['date']} (above 1 is faster now):")
    for row, ratio in sorted(changes, key=lambda change: change[1]):
        where = ", ".join([row.operation, row.shape, *(f"{k} {v}" for k, v in row.parameters.items())])
        typer.echo(f"{ratio:.2f}  {where}: {row.contestant}")
    if not changes:
        typer.echo("the two results have no row in common")


def _compare_generate(report: GenerateReport, path: Path) -> None:
    earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if earlier.get("case") != "generate":
        raise ValueError(f"--compare: {path} is not a result of gsd-kernels bench generate")
    before = {row["competitor"]: row["tokens_per_second"] for row in earlier["summary"]}
    commit = earlier["environment"]["commit"]
    typer.echo(f"\nagainst {commit} of {earlier['environment']['date']} (above 1 is faster now):")
    for row in report.summary:
        if row["competitor"] in before:
            typer.echo(f"{row['tokens_per_second'] / before[row['competitor']]:.2f}  {row['competitor']}")


def _device(name: str | None) -> torch.device:
    from gsd_kernels_hf.cli.pair import pick_device

    return pick_device(name)


def _join(device: str | None, timeout: float) -> tuple[torch.device, int]:
    """This process's device and the number of processes that torchrun started, after they have met.

    Raises:
        ValueError: torchrun did not, or a device was asked for.
    """
    if device is not None:
        raise ValueError("--tp: takes no --device: the GPUs, or the CPU of a machine without one")
    import torch.distributed as dist

    from gsd_kernels_hf.cli import ranks
    from gsd_kernels_hf.cli.console import only_first_rank_prints

    only_first_rank_prints()
    return ranks.join(timeout), dist.get_world_size()


def _dtype(dtype: Dtype | None, device: str | None) -> torch.dtype:
    import torch

    if dtype is not None:
        return getattr(torch, dtype.value)
    return torch.bfloat16 if _device(device).type == "cuda" else torch.float32


def _quiet() -> None:
    from gsd_kernels_hf.cli.pair import quiet_transformers

    quiet_transformers()


if __name__ == "__main__":
    sys.exit(app())
