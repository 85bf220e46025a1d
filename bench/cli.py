"""``gsd-kernels bench NAME``: the registry of benchmarks. Each writes its numbers to the folder ``--out``.

Measurements import torch and transformers when they run, so ``--help`` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .generation import commands as generation
from .gpu.stages import ROOT, main
from .kernels import commands as kernels


def gpu(context: typer.Context) -> None:
    """Build, test and measure on one GPU, in stages in order of worth that can be interrupted and resumed."""
    raise typer.Exit(main(context.args))


def tune_attention(
    prefix: Annotated[int, typer.Option(help="Committed positions of the measured problem.")] = 4096,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the entries, write nothing.")] = False,
) -> None:
    """Measure launch configurations of the Triton attention on this GPU and write them to the package's table."""
    from .gpu.tune_attention import run

    run(prefix, dry_run=dry_run)


def readme(
    files: Annotated[list[Path] | None, typer.Option("--readme", help="Repeatable. Default: README.md.")] = None,
    results: Annotated[Path, typer.Option(show_default=False, help="Default: bench/results.")] = ROOT / "bench/results",
    check: Annotated[bool, typer.Option("--check", help="Change nothing, fail if a file is out of date.")] = False,
) -> None:
    """Write the measured table of README.md from the results."""
    from .readme import rewrite

    if not all([rewrite(file, results, check=check) for file in files or [ROOT / "README.md"]]):
        raise typer.Exit(1)


#: Of the command whose options are read by another parser: a bare machine, which has no typer, runs the same.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
ROOMS = {
    "Kernels": [
        kernels.attention,
        kernels.merge,
        kernels.sample,
        kernels.commit,
        kernels.step_overhead,
        kernels.rows,
    ],
    "Generation": [generation.real, generation.sources, generation.prompt, generation.generate],
    "GPU": [gpu, tune_attention],
    "Results": [readme],
}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure the kernels and whole generations beside their peers."
)
for _room, _commands in ROOMS.items():
    for _command in _commands:
        app.command(rich_help_panel=_room, context_settings=PASSED_ON if _command is gpu else None)(_command)
