"""Options of ``distill``, ``train-heads`` and ``train-drafter``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gsd_kernels_cli import values
from gsd_kernels_cli.options import DTYPES, AsJson, Device, choice, option

Files = list[Path] | None
MODELS, TEXT, RUN, METHOD, OPTIMIZER = "Models", "Text", "Run", "Distillation", "Optimisation"


@dataclass(frozen=True, kw_only=True)
class Run:
    """Options of a training, by a command and by a call."""

    target: Annotated[
        str,
        option(MODELS, "It is not changed.", "--target", "--model", metavar="DIR", callback=values.folder),
    ]
    out: Annotated[
        Path,
        option(
            RUN,
            "Of the result, and until then of the checkpoints, from which the same command goes on.",
            metavar="DIR",
        ),
    ]
    text: Annotated[
        Files,
        option(TEXT, "UTF-8 text to train on. Repeatable.", metavar="FILE"),
    ] = None
    held_out_text: Annotated[
        Files,
        option(
            TEXT,
            "Text to measure on. Repeatable; default: the last twentieth of --text.",
            metavar="FILE",
        ),
    ] = None
    chats: Annotated[
        Files,
        option(
            TEXT,
            "Instead of --text: a chat a line, with messages; answers are learned. Repeatable.",
            metavar="FILE.jsonl",
        ),
    ] = None
    held_out_chats: Annotated[
        Files,
        option(
            TEXT,
            "Chats to measure on. Repeatable; default: the last twentieth of --chats.",
            metavar="FILE.jsonl",
        ),
    ] = None
    steps: Annotated[int | None, option(RUN, "How long: steps, or …")] = None
    minutes: Annotated[
        float | None,
        option(RUN, "… minutes of wall time, all told. Default: 10."),
    ] = None
    seed: Annotated[int, option(RUN, min=0)] = 0
    sequence_level: Annotated[
        float,
        option(
            METHOD,
            "Of the training windows, so many are the target's own continuations of the text.",
            metavar="SHARE",
        ),
    ] = 0.5
    token_level: Annotated[
        float,
        option(
            METHOD,
            "Of the target's distribution at every position; the rest goes to the text's next token.",
            metavar="WEIGHT",
        ),
    ] = 1.0
    own_sequences: Annotated[
        int | None,
        option(
            METHOD,
            "Continuations that the target writes. Default: each is used about four times; with --minutes, what "
            "it can write in a fifth of them.",
        ),
    ] = None
    batch: Annotated[int, option(OPTIMIZER, "Windows of a step.")] = 16
    length: Annotated[int, option(OPTIMIZER, "Tokens of a window.")] = 256
    micro_batch: Annotated[
        int | None,
        option(OPTIMIZER, "Windows at once, to save memory. Default: all."),
    ] = None
    warmup: Annotated[float, option(OPTIMIZER, "Share of the run in which the rate rises.")] = 0.02
    decay: Annotated[float, option(OPTIMIZER, "Share of the run, its last, in which it falls.")] = 0.6
    weight_decay: Annotated[float, option(OPTIMIZER, min=0.0)] = 0.05


@dataclass(frozen=True, kw_only=True)
class Training(Run):
    """Options that every training command takes."""

    more_text: Annotated[Files, typer.Argument(metavar="FILES", show_default=False, help="More of --text.")] = None
    checkpoint_every: Annotated[str, option(RUN, "500, or 60s.", metavar="STEPS|SECONDSs")] = "60s"
    dtype: Annotated[
        str,
        choice(
            MODELS,
            "Of the computation: float32, bfloat16 or float64. auto: bfloat16 on a GPU that has it, else float32.",
            DTYPES,
        ),
    ] = "auto"
    device: Device = None
    as_json: AsJson = False


@dataclass(frozen=True)
class Parts:
    """The parts that train-drafter makes."""

    kind: Annotated[
        str,
        option(MODELS, "What is trained.", metavar="eagle3|dflash|jetspec|dspark|mtp"),
    ]
    layers: Annotated[int, option(MODELS, "Its decoder layers.")] = 1
    intermediate_size: Annotated[
        int | None,
        option(MODELS, "Of its layers. Default: the target's."),
    ] = None
    hidden_layers: Annotated[
        str | None,
        option(
            MODELS,
            "The target's hidden states that it reads; 0 is the embedding. Default: as in published ones.",
            metavar="I,J,…",
        ),
    ] = None
    draft_vocabulary: Annotated[
        int | None,
        option(
            MODELS,
            "eagle3: it drafts the text's so many most frequent tokens. Default: 32,000 at most.",
        ),
    ] = None
    target_head: Annotated[
        bool,
        option(
            MODELS,
            "eagle3: it drafts by the target's output matrix, of which nothing is stored or trained.",
            "--target-head",
        ),
    ] = False
    depth: Annotated[
        int | None,
        option(
            METHOD,
            "eagle3, mtp: levels that it is unrolled in training, each reading the last one's output. Default: 5.",
        ),
    ] = None
    block_size: Annotated[
        int | None,
        option(MODELS, "dflash, jetspec, dspark: rows, the last token's too. Default: those of 7 guesses."),
    ] = None
    mask_token_id: Annotated[
        int | None,
        option(
            MODELS,
            "With a block: stands for tokens to be drafted. Default: the tokenizer's mask, padding or end of text.",
        ),
    ] = None
    markov_rank: Annotated[
        int | None,
        option(MODELS, "dspark: of the head for the token before. Default: 256."),
    ] = None
    markov_head: Annotated[
        str | None,
        option(MODELS, "dspark: what it is. Default: vanilla.", metavar="vanilla|gated|rnn"),
    ] = None
