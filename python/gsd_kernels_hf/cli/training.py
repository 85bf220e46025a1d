"""``gsd-kernels distill``, ``train-heads`` and ``train-drafter``: drafts that fit their target."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..console import values
from ..console.output import FAILURE, err, out, print_json, progress, table
from .options import Device, Dtype
from .training_options import (
    MODELS,
    OPTIMIZER,
    Batch,
    BlockSize,
    Chats,
    CheckpointEvery,
    Decay,
    Depth,
    DraftVocabulary,
    DtypeOption,
    HeldOutChats,
    HeldOutText,
    HiddenLayers,
    IntermediateSize,
    Json,
    Kind,
    Length,
    MarkovHead,
    MarkovRank,
    MaskTokenId,
    MicroBatch,
    Minutes,
    MoreText,
    Out,
    OwnSequences,
    Seed,
    SequenceLevel,
    Steps,
    Target,
    TargetHead,
    TextOption,
    TokenLevel,
    Warmup,
    WeightDecay,
)


def distill_command(
    target: Target,
    draft: Annotated[
        str,
        typer.Option(
            "--draft",
            metavar="DIR",
            callback=values.folder("--draft"),
            rich_help_panel=MODELS,
            help="Of the same tokenizer. A folder of a config.json alone is initialised from the seed.",
        ),
    ],
    out_folder: Out,
    more_text: MoreText = None,
    text: TextOption = None,
    held_out_text: HeldOutText = None,
    chats: Chats = None,
    held_out_chats: HeldOutChats = None,
    steps: Steps = None,
    minutes: Minutes = None,
    checkpoint_every: CheckpointEvery = "60s",
    seed: Seed = 0,
    dtype: DtypeOption = Dtype.auto,
    device: Device = None,
    sequence_level: SequenceLevel = 0.5,
    token_level: TokenLevel = 1.0,
    own_sequences: OwnSequences = None,
    batch: Batch = 16,
    length: Length = 256,
    micro_batch: MicroBatch = None,
    lr: Annotated[
        float | None,
        typer.Option(
            "--lr", rich_help_panel=OPTIMIZER, help="Highest. Default: 3e-4; 4e-3 for a draft without weights."
        ),
    ] = None,
    warmup: Warmup = 0.02,
    decay: Decay = 0.6,
    weight_decay: WeightDecay = 0.05,
    as_json: Json = False,
) -> None:
    """Train a draft to predict the tokens of its target.

    The draft learns the target's distribution on the text and on what the target makes of its beginnings. Interrupted,
    even killed, the same command goes on from the last checkpoint.
    """
    begun = time.monotonic()
    with progress("loading"):
        from gsd_kernels_hf.training.distill import distill, has_weights

    if not Path(draft).is_dir():
        raise ValueError(f"draft: no such folder: {draft}")
    rate = lr if lr is not None else 3e-4 if has_weights(draft) else 4e-3
    _print(
        lambda options: distill(draft, options),
        _options(locals() | {"lr": rate}, begun),
        as_json,
        {
            "agreement": "greedy agreement on held-out text",
            "divergence": "divergence from the target, nats a token",
            "continuation_agreement": "greedy agreement on the target's own text",
            "accepted": "accepted of a chain of 5",
        },
    )


def heads_command(
    target: Target,
    out_folder: Out,
    more_text: MoreText = None,
    text: TextOption = None,
    heads: Annotated[
        int, typer.Option("--heads", min=1, rich_help_panel=MODELS, help="Tokens to guess after the next one.")
    ] = 4,
    layers: Annotated[
        int, typer.Option("--layers", min=1, rich_help_panel=MODELS, help="Residual blocks of each head.")
    ] = 1,
    held_out_text: HeldOutText = None,
    chats: Chats = None,
    held_out_chats: HeldOutChats = None,
    steps: Steps = None,
    minutes: Minutes = None,
    checkpoint_every: CheckpointEvery = "60s",
    seed: Seed = 0,
    dtype: DtypeOption = Dtype.auto,
    device: Device = None,
    sequence_level: SequenceLevel = 0.5,
    token_level: TokenLevel = 1.0,
    own_sequences: OwnSequences = None,
    batch: Batch = 16,
    length: Length = 256,
    micro_batch: MicroBatch = None,
    lr: Annotated[float, typer.Option("--lr", rich_help_panel=OPTIMIZER, help="Highest.")] = 1e-3,
    warmup: Warmup = 0.02,
    decay: Decay = 0.6,
    weight_decay: WeightDecay = 0.05,
    as_json: Json = False,
) -> None:
    """Train heads by which a target drafts for itself.

    Each head guesses a later token from the target's last hidden state. The target is not changed. Interrupted, even
    killed, the same command goes on from the last checkpoint.
    """
    begun = time.monotonic()
    with progress("loading"):
        from gsd_kernels_hf.training.heads import train_heads

    _print(
        lambda options: train_heads(heads, layers, options),
        _options(locals(), begun),
        as_json,
        {
            "accuracy": "accuracy on held-out text",
            "continuation_accuracy": "accuracy on the target's own text",
            "accepted": f"accepted of {heads} guesses",
        },
    )


def drafter_command(
    target: Target,
    kind: Kind,
    out_folder: Out,
    more_text: MoreText = None,
    text: TextOption = None,
    layers: Annotated[int, typer.Option("--layers", rich_help_panel=MODELS, help="Its decoder layers.")] = 1,
    intermediate_size: IntermediateSize = None,
    hidden_layers: HiddenLayers = None,
    draft_vocabulary: DraftVocabulary = None,
    target_head: TargetHead = False,
    depth: Depth = None,
    block_size: BlockSize = None,
    mask_token_id: MaskTokenId = None,
    markov_rank: MarkovRank = None,
    markov_head: MarkovHead = None,
    held_out_text: HeldOutText = None,
    chats: Chats = None,
    held_out_chats: HeldOutChats = None,
    steps: Steps = None,
    minutes: Minutes = None,
    checkpoint_every: CheckpointEvery = "60s",
    seed: Seed = 0,
    dtype: DtypeOption = Dtype.auto,
    device: Device = None,
    sequence_level: SequenceLevel = 0.5,
    token_level: TokenLevel = 1.0,
    own_sequences: OwnSequences = None,
    batch: Batch = 16,
    length: Length = 256,
    micro_batch: MicroBatch = None,
    lr: Annotated[float, typer.Option("--lr", rich_help_panel=OPTIMIZER, help="Highest.")] = 3e-3,
    warmup: Warmup = 0.02,
    decay: Decay = 0.6,
    weight_decay: WeightDecay = 0.05,
    as_json: Json = False,
) -> None:
    """Train an EAGLE-3, DFlash, JetSpec or DSpark drafter, or a multi-token-prediction head (mtp), for a target.

    It reads the target's hidden states, and is written as published ones are: --drafter takes it, as other engines do.
    The target is not changed. Interrupted, even killed, the same command goes on from the last checkpoint.
    """
    begun = time.monotonic()
    with progress("loading"):
        from gsd_kernels_hf.training.drafters import DrafterOptions, train_drafter

    drafter = DrafterOptions(
        kind,
        layers=layers,
        intermediate_size=intermediate_size,
        hidden_layers=_numbers("hidden_layers", hidden_layers),
        draft_vocabulary=draft_vocabulary,
        target_head=target_head or None,
        depth=depth,
        block_size=block_size,
        mask_token_id=mask_token_id,
        markov_rank=markov_rank,
        markov_head=markov_head,
    )
    _print(
        lambda options: train_drafter(drafter, options),
        _options(locals(), begun),
        as_json,
        {
            "accuracy": "accuracy on held-out text",
            "continuation_accuracy": "accuracy on the target's own text",
            "accepted": "accepted of these guesses",
        },
    )


def _numbers(name: str, text: str | None) -> tuple[int, ...] | None:
    """Integers between commas.

    Raises:
        ValueError: something else.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ValueError(f"{name}: expected numbers between commas, as 2,16,29, got {text!r}") from error


def _options(given: dict[str, Any], begun: float) -> Any:
    """:class:`TrainingOptions` from a command's arguments.

    Raises:
        ValueError: an option out of range.
    """
    import torch

    from gsd_kernels_hf.training.job import TrainingOptions
    from gsd_kernels_hf.training.loop import Interval

    from ..console.pair import pick_device, quiet_transformers

    quiet_transformers()
    device = pick_device(given["device"])
    name = given["dtype"].value
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    names = "target batch length micro_batch lr warmup decay weight_decay sequence_level token_level own_sequences seed"
    minutes = 10.0 if given["steps"] is None and given["minutes"] is None else given["minutes"]
    return TrainingOptions(
        **{option: given[option] for option in names.split()},
        text=[*(given["text"] or []), *(given["more_text"] or [])],
        held_out_text=list(given["held_out_text"] or []),
        chats=list(given["chats"] or []),
        held_out_chats=list(given["held_out_chats"] or []),
        out=given["out_folder"],
        steps=given["steps"],
        minutes=minutes,
        dtype=getattr(torch, name),
        device=device,
        checkpoint_every=Interval.parse(given["checkpoint_every"]),
        begun=begun,
    )


def _print(work: Callable[[Any], dict[str, Any]], options: Any, as_json: bool, rows: dict[str, str]) -> None:
    """Do it; the report as JSON, or before and after in a table. A run that learned nothing exits with 1."""
    report = work(options)
    learned = report.get("learned", True)
    if as_json:
        print_json(report)
    else:
        _print_table(report, options, rows)
    if not learned:
        err.print(
            "gsd-kernels: nothing was learned: on held-out text the guesses are no better than before; they are in "
            f"{options.out} all the same; train for longer, or on more text",
            markup=False,
            soft_wrap=True,
        )
        raise typer.Exit(FAILURE)


def _print_table(report: dict[str, Any], options: Any, rows: dict[str, str]) -> None:
    result = table("held out", "before", "after")
    for name, title in rows.items():
        result.add_row(title, *(_number(report[when][name]) for when in ("before", "after")))
    out.print(result)
    used, measured, whole = report["training"], report.get("held_out"), report.get("seconds")
    told = f"{used['steps']} steps, {used['tokens']:,} tokens, {used['seconds']:.0f} s"
    if whole is not None:
        told += f" of {whole:.0f}"
    if measured is not None:
        told += f", measured on {measured['windows']} windows and {measured['continuations']} continuations"
    out.print(f"{told} → {options.out}", markup=False, soft_wrap=True)


def _number(value: float | list[float] | None) -> str:
    if isinstance(value, list):
        return "  ".join(map(_number, value))
    return "–" if value is None else f"{value:.3f}"
