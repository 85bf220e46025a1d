"""Options of ``distill``, ``train-heads`` and ``train-drafter``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_cli import values
from gsd_kernels_cli.options import Device, Dtype

MODELS, TEXT, RUN, METHOD, OPTIMIZER = "Models", "Text", "Run", "Distillation", "Optimisation"


@dataclass(frozen=True)
class Training:
    """Options that every training takes."""

    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="DIR",
            callback=values.folder("--target"),
            rich_help_panel=MODELS,
            help="It is not changed.",
        ),
    ]
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            metavar="DIR",
            rich_help_panel=RUN,
            help="Of the result, and until then of the checkpoints, from which the same command goes on.",
        ),
    ]
    more_text: Annotated[
        list[Path] | None, typer.Argument(metavar="FILES", show_default=False, help="More of --text.")
    ] = None
    text: Annotated[
        list[Path] | None,
        typer.Option("--text", metavar="FILE", rich_help_panel=TEXT, help="UTF-8 text to train on. Repeatable."),
    ] = None
    held_out_text: Annotated[
        list[Path] | None,
        typer.Option(
            "--held-out-text",
            metavar="FILE",
            rich_help_panel=TEXT,
            help="Text to measure on. Repeatable; default: the last twentieth of --text.",
        ),
    ] = None
    chats: Annotated[
        list[Path] | None,
        typer.Option(
            "--chats",
            metavar="FILE.jsonl",
            rich_help_panel=TEXT,
            help="Instead of --text: a chat a line, with messages; answers are learned. Repeatable.",
        ),
    ] = None
    held_out_chats: Annotated[
        list[Path] | None,
        typer.Option(
            "--held-out-chats",
            metavar="FILE.jsonl",
            rich_help_panel=TEXT,
            help="Chats to measure on. Repeatable; default: the last twentieth of --chats.",
        ),
    ] = None
    steps: Annotated[int | None, typer.Option("--steps", rich_help_panel=RUN, help="How long: steps, or …")] = None
    minutes: Annotated[
        float | None,
        typer.Option("--minutes", rich_help_panel=RUN, help="… minutes of wall time, all told. Default: 10."),
    ] = None
    checkpoint_every: Annotated[
        str, typer.Option("--checkpoint-every", metavar="STEPS|SECONDSs", rich_help_panel=RUN, help="500, or 60s.")
    ] = "60s"
    seed: Annotated[int, typer.Option("--seed", min=0, rich_help_panel=RUN)] = 0
    dtype: Annotated[
        Dtype,
        typer.Option(
            "--dtype",
            rich_help_panel=MODELS,
            case_sensitive=False,
            help="Of the computation: float32, bfloat16 or float64. auto: bfloat16 on a GPU that has it, else float32.",
        ),
    ] = Dtype.auto
    device: Device = None
    sequence_level: Annotated[
        float,
        typer.Option(
            "--sequence-level",
            metavar="SHARE",
            rich_help_panel=METHOD,
            help="Of the training windows, so many are the target's own continuations of the text.",
        ),
    ] = 0.5
    token_level: Annotated[
        float,
        typer.Option(
            "--token-level",
            metavar="WEIGHT",
            rich_help_panel=METHOD,
            help="Of the target's distribution at every position; the rest goes to the text's next token.",
        ),
    ] = 1.0
    own_sequences: Annotated[
        int | None,
        typer.Option(
            "--own-sequences",
            rich_help_panel=METHOD,
            help="Continuations that the target writes. Default: each is used about four times; with --minutes, what "
            "it can write in a fifth of them.",
        ),
    ] = None
    batch: Annotated[int, typer.Option("--batch", rich_help_panel=OPTIMIZER, help="Windows of a step.")] = 16
    length: Annotated[int, typer.Option("--length", rich_help_panel=OPTIMIZER, help="Tokens of a window.")] = 256
    micro_batch: Annotated[
        int | None,
        typer.Option("--micro-batch", rich_help_panel=OPTIMIZER, help="Windows at once, to save memory. Default: all."),
    ] = None
    warmup: Annotated[
        float, typer.Option("--warmup", rich_help_panel=OPTIMIZER, help="Share of the run in which the rate rises.")
    ] = 0.02
    decay: Annotated[
        float, typer.Option("--decay", rich_help_panel=OPTIMIZER, help="Share of the run, its last, in which it falls.")
    ] = 0.6
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0.0, rich_help_panel=OPTIMIZER)] = 0.05
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON on stdout, instead of a table.")] = False


@dataclass(frozen=True)
class Parts:
    """The parts that train-drafter makes."""

    kind: Annotated[
        str,
        typer.Option(
            "--kind", metavar="eagle3|dflash|jetspec|dspark|mtp", rich_help_panel=MODELS, help="What is trained."
        ),
    ]
    layers: Annotated[int, typer.Option("--layers", rich_help_panel=MODELS, help="Its decoder layers.")] = 1
    intermediate_size: Annotated[
        int | None,
        typer.Option("--intermediate-size", rich_help_panel=MODELS, help="Of its layers. Default: the target's."),
    ] = None
    hidden_layers: Annotated[
        str | None,
        typer.Option(
            "--hidden-layers",
            metavar="I,J,…",
            rich_help_panel=MODELS,
            help="The target's hidden states that it reads; 0 is the embedding. Default: as in published ones.",
        ),
    ] = None
    draft_vocabulary: Annotated[
        int | None,
        typer.Option(
            "--draft-vocabulary",
            rich_help_panel=MODELS,
            help="eagle3: it drafts the text's so many most frequent tokens. Default: 32,000 at most.",
        ),
    ] = None
    target_head: Annotated[
        bool,
        typer.Option(
            "--target-head",
            rich_help_panel=MODELS,
            help="eagle3: it drafts by the target's output matrix, of which nothing is stored or trained.",
        ),
    ] = False
    depth: Annotated[
        int | None,
        typer.Option(
            "--depth",
            rich_help_panel=METHOD,
            help="eagle3, mtp: levels that it is unrolled in training, each reading the last one's output. Default: 5.",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            "--block-size",
            rich_help_panel=MODELS,
            help="dflash, jetspec, dspark: rows, the last token's too. Default: those of 7 guesses.",
        ),
    ] = None
    mask_token_id: Annotated[
        int | None,
        typer.Option(
            "--mask-token-id",
            rich_help_panel=MODELS,
            help="With a block: stands for tokens to be drafted. Default: the tokenizer's mask, padding or end of "
            "text.",
        ),
    ] = None
    markov_rank: Annotated[
        int | None,
        typer.Option(
            "--markov-rank", rich_help_panel=MODELS, help="dspark: of the head for the token before. Default: 256."
        ),
    ] = None
    markov_head: Annotated[
        str | None,
        typer.Option(
            "--markov-head",
            metavar="vanilla|gated|rnn",
            rich_help_panel=MODELS,
            help="dspark: what it is. Default: vanilla.",
        ),
    ] = None
