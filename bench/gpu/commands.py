"""``gsd-kernels bench gpu | tune-attention``."""

from __future__ import annotations

from typing import Annotated

import typer

from .stages import command as stages

__all__ = ["stages", "tune_attention"]


def tune_attention(
    prefix: Annotated[int, typer.Option("--prefix", help="Committed positions of the measured problem.")] = 4096,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the entries, write nothing.")] = False,
) -> None:
    """Measure launch configurations of the Triton attention on this GPU and write them to the package's table."""
    from .tune_attention import run

    run(prefix, dry_run=dry_run)
