"""``gsd-kernels bench attention | merge | sample | commit | step-overhead | rows``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from gsd_kernels_cli import options, values
from gsd_kernels_cli.groups import with_groups
from gsd_kernels_hf.files import write_json

from ..lib.options import DTYPES, RESULTS, DtypeOption, Name, Out, Quick, device_of, dtype_of, keep

Peers = Annotated[
    list[str] | None, typer.Option("--peer", help="Peers to measure; repeatable, or none. Default: all that run here.")
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="Named after a model: llama-2-7b, …; repeatable. Default: several."),
]
Rows = Annotated[list[int] | None, typer.Option(help="Repeatable. Default: a grid.")]


@dataclass(frozen=True)
class Case:
    """Options of all kernel cases."""

    backends: Annotated[
        list[str] | None, typer.Option("--backend", help="Ours to measure; repeatable. Default: all that run here.")
    ] = None
    dtype: DtypeOption = None
    device: options.Device = None
    quick: Quick = False
    seconds: Annotated[float, typer.Option(min=0.0, help="For each measurement.")] = 0.5
    out: Out = RESULTS
    name: Name = None


@with_groups
def attention(
    *,
    shapes: Shapes = None,
    rows: Rows = None,
    prefixes: Annotated[
        list[int] | None, typer.Option("--prefix", help="Cached tokens; repeatable. Default: a grid.")
    ] = None,
    peers: Peers = None,
    case: Case,
) -> None:
    """One layer's attention under a tree mask; peers: SDPA with a mask, FlexAttention, flash-attn, FlashInfer."""
    _run("attention", case, peers, shapes=shapes, rows=rows, prefixes=prefixes)


@with_groups
def merge(*, rows: Rows = None, case: Case) -> None:
    """The graph ops of one step: merging of all levels, unrolling, verification."""
    _run("merge", case, rows=rows)


@with_groups
def sample(*, shapes: Shapes = None, rows: Rows = None, peers: Peers = None, case: Case) -> None:
    """Picking tokens; peers: torch argmax, multinomial, sort, topk, and FlashInfer's sampling."""
    _run("sample", case, peers, shapes=shapes, rows=rows)


@with_groups
def commit(
    *,
    shapes: Shapes = None,
    rows: Annotated[list[int] | None, typer.Option(help="Accepted rows; repeatable.")] = None,
    peers: Peers = None,
    case: Case,
) -> None:
    """Keeping the accepted keys and values of all layers; peer: a copy a layer with torch."""
    _run("commit", case, peers, shapes=shapes, rows=rows)


def step_overhead(
    shape: Annotated[str, typer.Option(help="Of the target, named after a model: 250m, …")] = "250m",
    device: Annotated[str, typer.Option(callback=values.device)] = "cpu",
    dtype: Annotated[str, options.choice(None, "Of the model.", DTYPES)] = "float32",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the row here.")] = None,
) -> None:
    """Cost of one step's graph ops beside the target's forward: merge × depth + flatten + verify + commit."""
    import torch

    from .rows import step_overhead

    row = step_overhead(shape, device_of(device), getattr(torch, dtype), batch)
    typer.echo(json.dumps(row, indent=2))
    if file is not None:
        write_json(file, row, indent=2)


def rows(
    shape: Annotated[str, typer.Option(help="Named after a model: 250m, llama-2-7b, …")] = "250m",
    dtypes: Annotated[
        list[str] | None,
        typer.Option(
            "--dtype",
            metavar="|".join(DTYPES),
            callback=values.one_of(DTYPES),
            help="Repeatable. Default: bfloat16, and on a CPU float32.",
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            callback=values.device,
            help="On a GPU its operator is timed, whatever GSD_KERNELS_FUSED_ROWS says.",
        ),
    ] = "cpu",
    counts: Annotated[
        list[int] | None, typer.Option("--rows", min=1, max=256, help="Repeatable. Default: 1, 4, 8, 16, 32 and 64.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Default: torch's.")] = None,
    prefix: Annotated[int, typer.Option(min=1, help="Cached tokens.")] = 256,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of the prompt that is timed.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0.0, help="For each number of rows.")] = 3.0,
    busy: Annotated[
        int, typer.Option(min=0, help="Processes that keep a core busy each meanwhile; times are means then.")
    ] = 0,
    file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result here.")] = None,
) -> None:
    """A target's forward of rows beside its modules and the time that reading the weights takes."""
    import torch

    from .rows import run, table

    if threads is not None:
        torch.set_num_threads(threads)
    place = device_of(device)
    usual = ("bfloat16", "float32") if place.type == "cpu" else ("bfloat16",)
    named = [getattr(torch, dtype) for dtype in dtypes or usual]
    numbers = tuple(counts or (1, 4, 8, 16, 32, 64))
    report = run(shape, named, place, rows=numbers, prefix=prefix, prompt=prompt, seconds=seconds, busy=busy)
    typer.echo(table(report))
    if file is not None:
        write_json(file, report)


def _run(name: str, case: Case, peers: list[str] | None = None, **grid: list[Any] | None) -> None:
    """Measure a case over a grid of shapes, rows and prefixes, write the result and show it."""
    from ..lib.runner import Settings, run
    from .cases import CASES

    settings = Settings(
        device_of(case.device),
        dtype_of(case.dtype, case.device),
        **{axis: given or () for axis, given in grid.items()},
        backends=case.backends,
        peers=[] if peers == ["none"] else peers,
        quick=case.quick,
        seconds=min(case.seconds, 0.05) if case.quick else case.seconds,
    )
    report = run(name, CASES[name], settings)
    keep(case.out, case.name or name + ("-quick" if case.quick else ""), report, report.table(), report.missing())
