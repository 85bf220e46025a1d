"""``gsd-kernels bench gpu | tune-attention``."""

from __future__ import annotations

from typing import Annotated

import typer

from .stages import main

PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Of a command whose options are read by another parser: a bare machine, which has no typer, runs the same."""


def stages(context: typer.Context) -> None:
    """Build, test and measure on one GPU, in stages in order of worth that can be interrupted and resumed."""
    if code := main(context.args):
        raise typer.Exit(code)


def tune_attention(
    prefix: Annotated[int, typer.Option("--prefix", help="Committed positions of the measured problem.")] = 4096,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the entries, write nothing.")] = False,
) -> None:
    """Measure launch configurations of the Triton attention on this GPU and write them to the package's table."""
    from .tune_attention import run

    run(prefix, dry_run=dry_run)
