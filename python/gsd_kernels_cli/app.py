"""The command line: ``gsd-kernels demo | chat | generate | serve | check | index | learn | export | distill | …``.

Nothing imports it. Commands of other packages (serving, training) are found by their entry points in the group
``gsd_kernels.commands``; ``bench`` is an application, looked up by name when it is called. Commands import torch and
transformers when they run, so ``--help`` answers at once.
"""

from __future__ import annotations

import logging
import pkgutil
from importlib.metadata import entry_points
from typing import Annotated

import typer

from . import chat, check, demo_command, doctor, export, generate, index, learn
from .commands import Commands
from .groups import with_groups
from .output import EXIT_CODES, show_progress

#: Loggers that warn while torchao is imported, before the first line of a command; ``--debug`` shows it.
CHATTY = ("torchao", "torch.utils._pytree")


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
for _module in (demo_command, chat, generate, check, index, export, learn, doctor):
    app.command(_module.__name__.rpartition(".")[2].removesuffix("_command"))(with_groups(_module.command))
for _entry in entry_points(group="gsd_kernels.commands"):
    app.command(_entry.name)(with_groups(_entry.load()))


@app.command(
    "bench",
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []},
)
def _bench(context: typer.Context) -> None:
    """Measure the kernels and whole generations."""
    try:
        application = pkgutil.resolve_name("gsd_kernels_bench.cli:app")
    except ModuleNotFoundError as error:
        if error.name != "gsd_kernels_bench":
            raise
        raise ImportError(
            "bench: is in a clone of gsd_kernels, not in its wheel: git clone it and run make install there"
        ) from error
    command = typer.main.get_command(application)
    with command.make_context("bench", context.args, parent=context.parent) as inner:
        command.invoke(inner)


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
    """Options of every command; ``debug`` is read by :class:`~gsd_kernels_cli.commands.Commands` as well."""
    show_progress()
    for name in CHATTY if not debug else ():
        logging.getLogger(name).setLevel(logging.ERROR)


def main() -> None:
    """Entry point of ``gsd-kernels`` and of ``python -m gsd_kernels_hf``."""
    app()
