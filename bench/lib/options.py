"""Options that several benchmarks share, what their values mean, and how a result is shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gsd_kernels_cli import options

if TYPE_CHECKING:
    import torch

RESULTS = Path("bench/results")


DTYPES = options.DTYPES[1:]  # without auto

Out = Annotated[Path, typer.Option(help="Folder for the results.")]
Quick = Annotated[bool, typer.Option("--quick", help="A small grid, under a minute on a CPU.")]
DtypeOption = Annotated[str | None, options.choice(None, "Default: bfloat16 on a GPU, float32 on a CPU.", DTYPES)]
Name = Annotated[str | None, typer.Option(help="Name of the written files.")]


def quiet() -> None:
    """Silence transformers: a benchmark reports its own progress."""
    from gsd_kernels_cli.pair import quiet_transformers

    quiet_transformers()


def device_of(name: str | None) -> torch.device:
    """The device that ``--device`` names; by default the first GPU if there is one."""
    from gsd_kernels_cli.pair import pick_device

    return pick_device(name)


def dtype_of(dtype: str | None, device: str | None) -> torch.dtype:
    """The dtype that ``--dtype`` names; by default bfloat16 on a GPU, float32 on a CPU."""
    import torch

    if dtype is not None:
        return getattr(torch, dtype)
    return torch.bfloat16 if device_of(device).type == "cuda" else torch.float32


def listed(names: list[str] | None) -> tuple[str, ...]:
    """Comma-separated values of an option that may be repeated."""
    return tuple(part.strip() for given in names or () for part in given.split(","))


def keep(folder: Path, name: str, result: Any, table: str, missing: dict[str, str]) -> None:
    """Write a result, and print its table on stdout, what is missing and the file on stderr."""
    from .report import write

    file = write(folder, name, result)
    typer.echo(table)
    for each, reason in missing.items():
        typer.echo(f"missing: {each}: {reason}", err=True)
    typer.echo(f"written: {file}", err=True)


def join(device: str | None, timeout: float) -> tuple[torch.device, int]:
    """This process's device and the number of processes that torchrun started, after they have met.

    Raises:
        ValueError: torchrun did not, or a device was asked for.
    """
    if device is not None:
        raise ValueError("--tp: takes no --device: the GPUs, or the CPU of a machine without one")
    import torch.distributed as dist

    from gsd_kernels_cli import ranks
    from gsd_kernels_cli.output import only_first_rank_prints

    only_first_rank_prints()
    return ranks.join(timeout), dist.get_world_size()
