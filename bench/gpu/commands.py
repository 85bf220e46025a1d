"""``gsd-kernels bench gpu | tune-attention``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .stages import FILES, begin


def stages(
    out: Annotated[Path | None, typer.Option("--out", help="Folder for results; default: bench/results/gpu.")] = None,
    former: Annotated[Path | None, typer.Option("--former", help="Results of earlier calls; default: --out.")] = None,
    only: Annotated[list[str] | None, typer.Option("--only", metavar="STAGE", help="This stage; repeatable.")] = None,
    budget: Annotated[float, typer.Option("--budget", metavar="SECONDS", help="For this call.")] = float("inf"),
    files: Annotated[int, typer.Option("--files", min=1, help="Left by this call, at most.")] = FILES,
    again: Annotated[bool, typer.Option("--again", help="Also what is done.")] = False,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="On the CPU with tiny shapes.")] = False,
    list_stages: Annotated[bool, typer.Option("--list", help="Name the stages and leave.")] = False,
) -> None:
    """Build, test and measure on one GPU, in stages in order of worth that can be interrupted and resumed."""
    options = {"rehearse": rehearse, "again": again, "budget": budget, "files": files, "list_stages": list_stages}
    try:
        code = begin(out, former, only, **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if code:
        raise typer.Exit(code)


def tune_attention(
    prefix: Annotated[int, typer.Option("--prefix", help="Committed positions of the measured problem.")] = 4096,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the entries, write nothing.")] = False,
) -> None:
    """Measure launch configurations of the Triton attention on this GPU and write them to the package's table."""
    from .tune_attention import run

    run(prefix, dry_run=dry_run)
