"""``gsd-kernels bench ladder | policies``: what the automatic policy loses, by recorded acceptance and seconds."""

from __future__ import annotations

from typing import Annotated

import typer

from ..lib.options import RESULTS, Out


def ladder(
    record: Annotated[bool, typer.Option("--record", help="Record the profiles of acceptance anew.")] = False,
    choose: Annotated[bool, typer.Option("--choose", help="Look for ladders.")] = False,
    out: Out = RESULTS,
) -> None:
    """What the automatic policy's few shapes lose against 576, simulated over recorded acceptance."""
    from .ladder import run

    run(out, record_anew=record, look_for_ladders=choose, show=typer.echo)


def policies(
    quick: Annotated[bool, typer.Option("--quick", help="One prompt of one kind of text on one machine.")] = False,
    out: Out = RESULTS,
) -> None:
    """The automatic policy beside simpler ones, by real acceptance and recorded seconds."""
    from gsd_kernels_hf.console.pair import quiet_transformers

    from .policies_table import run

    quiet_transformers()
    run(out, quick=quick, show=typer.echo)
