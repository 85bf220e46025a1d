"""``gsd-kernels bench NAME``: the registry of benchmarks. Each writes its numbers to the folder ``--out``.

Measurements import torch and transformers when they run, so ``--help`` answers at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .generation import commands as generation
from .gpu import commands as gpu
from .kernels import commands as kernels

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def readme(
    files: Annotated[list[Path] | None, typer.Option("--readme", help="Repeatable. Default: README.md.")] = None,
    results: Annotated[Path, typer.Option("--results", show_default=False, help="Default: bench/results.")] = RESULTS,
    check: Annotated[bool, typer.Option("--check", help="Change nothing, fail if a file is out of date.")] = False,
) -> None:
    """Write the measured table of README.md from the results."""
    from .readme import rewrite

    done = [rewrite(file, results, check=check) for file in files or [ROOT / "README.md"]]
    if not all(done):
        raise typer.Exit(1)


#: room → name → command
BENCHMARKS = {
    "Kernels": {
        "attention": kernels.attention,
        "merge": kernels.merge,
        "sample": kernels.sample,
        "commit": kernels.commit,
        "step-overhead": kernels.step_overhead,
        "rows": kernels.rows,
    },
    "Generation": {
        "real": generation.real,
        "sources": generation.sources,
        "prompt": generation.prompt,
        "generate": generation.generate,
    },
    "GPU": {"gpu": gpu.stages, "tune-attention": gpu.tune_attention},
    "Results": {"readme": readme},
}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Measure the kernels and whole generations beside their peers."
)
for _room, _commands in BENCHMARKS.items():
    for _name, _command in _commands.items():
        _settings = gpu.PASSED_ON if _command is gpu.stages else None
        app.command(_name, rich_help_panel=_room, context_settings=_settings)(_command)
