"""The command line: ``gsd-kernels demo | generate | check | bench | distill | train-heads | doctor``.

Commands import torch and transformers when they run, so ``--help`` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from gsd_kernels_bench.cli import app as bench

from . import check, demo, doctor, generate, training
from .console import EXIT_CODES, Commands

__all__ = ["app", "main"]

app = typer.Typer(
    name="gsd-kernels",
    cls=Commands,
    help="Graph-structured speculative decoding for LLaMA-family models: the same output, sooner.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.command)
app.command("generate")(generate.command)
app.command("check")(check.command)
app.add_typer(bench, name="bench")
app.command("distill")(training.distill_command)
app.command("train-heads")(training.heads_command)
app.command("doctor")(doctor.command)


def _print_version(value: bool) -> None:
    if value:
        from gsd_kernels import __version__

        typer.echo(f"gsd-kernels {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks instead of one-line errors.")] = False,
) -> None:
    """Options of every command; :class:`~.console.Commands` reads ``debug``."""


def main() -> None:
    """Entry point of ``gsd-kernels`` and of ``python -m gsd_kernels_hf``."""
    app()
