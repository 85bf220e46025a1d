"""``gsd-kernels bench scale-memory | scale-messages``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..lib.options import RESULTS, Dtype, NewTokens, Out, PairName, PairOption


def memory() -> None:
    """Memory that one GPU holds of a tensor-parallel target and a replicated draft, from their shapes alone."""
    from .memory import table

    typer.echo(table())


def messages(
    sizes: Annotated[str, typer.Option("--ranks", help="Numbers of processes, comma-separated.")] = "1,2,4",
    pair: PairOption = PairName.demo,
    target_shape: Annotated[str, typer.Option("--target-shape", help="Heads must divide.")] = "demo-mha",
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of both models.")] = Dtype.float32,
    prompts: Annotated[int, typer.Option("--prompts", min=1)] = 8,
    new_tokens: NewTokens = 64,
    out: Out = RESULTS,
    one_rank: Annotated[Path | None, typer.Option("--one-rank", hidden=True)] = None,
) -> None:
    """Messages between the ranks of a tensor-parallel target for an emitted token, by way of decoding."""
    from .messages import Settings, run, run_rank, table

    settings = Settings(pair.value, target_shape, dtype.value, prompts, new_tokens)
    if one_rank is not None:
        run_rank(settings, one_rank)
        return
    typer.echo(table(run(settings, ranks=[int(size) for size in sizes.split(",")], folder=out)))
