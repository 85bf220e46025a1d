"""Options of ``distill``, ``train-heads`` and ``train-drafter``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import values
from .options import Dtype

MODELS, TEXT, RUN, METHOD, OPTIMIZER = "Models", "Text", "Run", "Distillation", "Optimisation"

Target = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="DIR",
        callback=values.folder("--target"),
        rich_help_panel=MODELS,
        help="It is not changed.",
    ),
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        rich_help_panel=RUN,
        help="Of the result, and until then of the checkpoints, from which the same command goes on.",
    ),
]
TextOption = Annotated[
    list[Path] | None,
    typer.Option("--text", metavar="FILE", rich_help_panel=TEXT, help="UTF-8 text to train on. Repeatable."),
]
MoreText = Annotated[list[Path] | None, typer.Argument(metavar="FILES", show_default=False, help="More of --text.")]
HeldOutText = Annotated[
    list[Path] | None,
    typer.Option(
        "--held-out-text",
        metavar="FILE",
        rich_help_panel=TEXT,
        help="Text to measure on. Repeatable; default: the last twentieth of --text.",
    ),
]
Chats = Annotated[
    list[Path] | None,
    typer.Option(
        "--chats",
        metavar="FILE.jsonl",
        rich_help_panel=TEXT,
        help="Instead of --text: a chat a line, with messages; answers are learned. Repeatable.",
    ),
]
HeldOutChats = Annotated[
    list[Path] | None,
    typer.Option(
        "--held-out-chats",
        metavar="FILE.jsonl",
        rich_help_panel=TEXT,
        help="Chats to measure on. Repeatable; default: the last twentieth of --chats.",
    ),
]
Steps = Annotated[int | None, typer.Option("--steps", rich_help_panel=RUN, help="How long: steps, or …")]
Minutes = Annotated[
    float | None, typer.Option("--minutes", rich_help_panel=RUN, help="… minutes of wall time, all told. Default: 10.")
]
CheckpointEvery = Annotated[
    str, typer.Option("--checkpoint-every", metavar="STEPS|SECONDSs", rich_help_panel=RUN, help="500, or 60s.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, rich_help_panel=RUN)]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        rich_help_panel=MODELS,
        case_sensitive=False,
        help="Of the computation: float32, bfloat16 or float64. auto: bfloat16 on a GPU that has it, else float32.",
    ),
]
SequenceLevel = Annotated[
    float,
    typer.Option(
        "--sequence-level",
        metavar="SHARE",
        rich_help_panel=METHOD,
        help="Of the training windows, so many are the target's own continuations of the text.",
    ),
]
TokenLevel = Annotated[
    float,
    typer.Option(
        "--token-level",
        metavar="WEIGHT",
        rich_help_panel=METHOD,
        help="Of the target's distribution at every position; the rest goes to the text's next token.",
    ),
]
OwnSequences = Annotated[
    int | None,
    typer.Option(
        "--own-sequences",
        rich_help_panel=METHOD,
        help="Continuations that the target writes. Default: each is used about four times; with --minutes, what it "
        "can write in a fifth of them.",
    ),
]
Batch = Annotated[int, typer.Option("--batch", rich_help_panel=OPTIMIZER, help="Windows of a step.")]
Length = Annotated[int, typer.Option("--length", rich_help_panel=OPTIMIZER, help="Tokens of a window.")]
MicroBatch = Annotated[
    int | None,
    typer.Option("--micro-batch", rich_help_panel=OPTIMIZER, help="Windows at once, to save memory. Default: all."),
]
Warmup = Annotated[
    float, typer.Option("--warmup", rich_help_panel=OPTIMIZER, help="Share of the run in which the rate rises.")
]
Decay = Annotated[
    float, typer.Option("--decay", rich_help_panel=OPTIMIZER, help="Share of the run, its last, in which it falls.")
]
WeightDecay = Annotated[float, typer.Option("--weight-decay", min=0.0, rich_help_panel=OPTIMIZER)]
Json = Annotated[bool, typer.Option("--json", help="The report as JSON on stdout, instead of a table.")]

# Of train-drafter alone.
Kind = Annotated[
    str,
    typer.Option("--kind", metavar="eagle3|dflash|jetspec|dspark|mtp", rich_help_panel=MODELS, help="What is trained."),
]
IntermediateSize = Annotated[
    int | None,
    typer.Option("--intermediate-size", rich_help_panel=MODELS, help="Of its layers. Default: the target's."),
]
HiddenLayers = Annotated[
    str | None,
    typer.Option(
        "--hidden-layers",
        metavar="I,J,…",
        rich_help_panel=MODELS,
        help="The target's hidden states that it reads; 0 is the embedding. Default: as in published ones.",
    ),
]
DraftVocabulary = Annotated[
    int | None,
    typer.Option(
        "--draft-vocabulary",
        rich_help_panel=MODELS,
        help="eagle3: it drafts the text's so many most frequent tokens. Default: 32,000 at most.",
    ),
]
TargetHead = Annotated[
    bool,
    typer.Option(
        "--target-head",
        rich_help_panel=MODELS,
        help="eagle3: it drafts by the target's output matrix, of which nothing is stored or trained.",
    ),
]
Depth = Annotated[
    int | None,
    typer.Option(
        "--depth",
        rich_help_panel=METHOD,
        help="eagle3, mtp: levels that it is unrolled in training, each reading the last one's output. Default: 5.",
    ),
]
BlockSize = Annotated[
    int | None,
    typer.Option(
        "--block-size",
        rich_help_panel=MODELS,
        help="dflash, jetspec, dspark: rows, the last token's too. Default: those of 7 guesses.",
    ),
]
MaskTokenId = Annotated[
    int | None,
    typer.Option(
        "--mask-token-id",
        rich_help_panel=MODELS,
        help="With a block: stands for tokens to be drafted. Default: the tokenizer's mask, padding or end of text.",
    ),
]
MarkovRank = Annotated[
    int | None,
    typer.Option(
        "--markov-rank", rich_help_panel=MODELS, help="dspark: of the head for the token before. Default: 256."
    ),
]
MarkovHead = Annotated[
    str | None,
    typer.Option(
        "--markov-head",
        metavar="vanilla|gated|rnn",
        rich_help_panel=MODELS,
        help="dspark: what it is. Default: vanilla.",
    ),
]
