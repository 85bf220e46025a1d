"""Options of ``gsd-kernels bench generate``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_cli import options, values

from ..lib.options import RESULTS, Device, DtypeOption, Name, NewTokens, Out, PairName, PairOption, Quick


class Text(str, Enum):
    """Kinds of prompts: held-out Python source, or a function of it, and again."""

    code = "code"
    copy = "copy"


Model = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="DIR|ID|FILE.gguf", callback=values.model("--model"), help="Your own, in place of the pair."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--draft", metavar="DIR|ID", callback=values.folder("--draft"), help="A draft model for it. Default: none."
    ),
]
TargetShape = Annotated[str, typer.Option("--target-shape", help="Inflate the target to it; or none.")]


@dataclass(frozen=True)
class Options:
    """Options of the command, and what a run goes by."""

    place: options.ModelPlace = None
    pair: PairOption = PairName.demo
    model: Model = None
    draft: Draft = None
    prompt_file: Annotated[
        Path | None,
        typer.Option("--prompt-file", metavar="FILE", help="Prompts for it, as of bench real, whose are the default."),
    ] = None
    target_shape: TargetShape = "250m"
    draft_shape: Annotated[str, typer.Option("--draft-shape", help="The same for the draft.")] = "none"
    text: Annotated[Text, typer.Option("--text", help="Kind of prompts.")] = Text.code
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="The first so many of that kind.")] = 20
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", min=2, help="Of every prompt, others behind it. Default: its own.")
    ] = None
    new_tokens: NewTokens = 128
    fresh: Annotated[bool, typer.Option("--fresh", help="The last ones, on which no setting was chosen.")] = False
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0
    competitors: Annotated[
        list[str] | None, typer.Option("--competitors", help="Comma-separated. Default: all but single sources.")
    ] = None
    backend: Annotated[str, typer.Option("--backend", callback=values.backend, help="Of our ops.")] = "auto"
    dtype: DtypeOption = None
    device: Device = None
    tp: Annotated[
        bool, typer.Option("--tp", help="Shard the target over torchrun's processes; the first one prints and writes.")
    ] = False
    tp_timeout: Annotated[
        float, typer.Option("--tp-timeout", metavar="SECONDS", min=1.0, help="After which a silent rank is lost.")
    ] = 600.0
    quick: Quick = False
    seconds: Annotated[float | None, typer.Option("--seconds", help="Begin no prompt beyond this.")] = None
    out: Out = RESULTS
    name: Name = None
