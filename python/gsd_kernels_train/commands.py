"""``gsd-kernels distill``, ``train-heads`` and ``train-drafter``: drafts that fit their target."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from gsd_kernels_cli import values
from gsd_kernels_cli.options import option
from gsd_kernels_cli.output import FAILURE, err, out, print_json, progress, table

from .options import MODELS, OPTIMIZER, Parts, Training

GUESSING = {"accuracy": "accuracy on held-out text", "continuation_accuracy": "accuracy on the target's own text"}
"""What is measured of guesses, in words."""


def distill_command(
    *,
    training: Training,
    draft: Annotated[
        str,
        option(
            MODELS,
            "Of the same tokenizer. A folder of a config.json alone is initialised from the seed.",
            metavar="DIR",
            callback=values.folder,
        ),
    ],
    lr: Annotated[
        float | None,
        option(OPTIMIZER, "Highest. Default: 3e-4; 4e-3 for a draft without weights."),
    ] = None,
) -> None:
    """Train a draft to predict the tokens of its target.

    The draft learns the target's distribution on the text and on what the target makes of its beginnings. Interrupted,
    even killed, the same command goes on from the last checkpoint.
    """
    begun = time.monotonic()
    with progress("loading"):
        from .distill import distill, has_weights

    if not Path(draft).is_dir():
        raise ValueError(f"draft: no such folder: {draft}")
    rate = lr if lr is not None else 3e-4 if has_weights(draft) else 4e-3
    _print(
        lambda options: distill(draft, options),
        (training, rate, begun),
        {
            "agreement": "greedy agreement on held-out text",
            "divergence": "divergence from the target, nats a token",
            "continuation_agreement": "greedy agreement on the target's own text",
            "accepted": "accepted of a chain of 5",
        },
    )


def heads_command(
    *,
    training: Training,
    heads: Annotated[int, option(MODELS, "Tokens to guess after the next one.", min=1)] = 4,
    layers: Annotated[int, option(MODELS, "Residual blocks of each head.", min=1)] = 1,
    lr: Annotated[float, option(OPTIMIZER, "Highest.")] = 1e-3,
) -> None:
    """Train heads by which a target drafts for itself.

    Each head guesses a later token from the target's last hidden state. The target is not changed. Interrupted, even
    killed, the same command goes on from the last checkpoint.
    """
    begun = time.monotonic()
    with progress("loading"):
        from .drafters import train_heads

    _print(
        lambda options: train_heads(heads, layers, options),
        (training, lr, begun),
        GUESSING | {"accepted": f"accepted of {heads} guesses"},
    )


def drafter_command(
    *,
    training: Training,
    parts: Parts,
    lr: Annotated[float, option(OPTIMIZER, "Highest.")] = 3e-3,
) -> None:
    """Train an EAGLE-3, DFlash, JetSpec or DSpark drafter, or a multi-token-prediction head (mtp), for a target.

    It reads the target's hidden states, and is written as published ones are: --drafter takes it, as other engines do.
    The target is not changed. Interrupted, even killed, the same command goes on from the last checkpoint.
    """
    begun = time.monotonic()
    with progress("loading"):
        from .drafters import DrafterOptions, train_drafter

    hidden_layers = _numbers("hidden_layers", parts.hidden_layers)
    drafter = DrafterOptions(**asdict(parts) | {"hidden_layers": hidden_layers})
    _print(
        lambda options: train_drafter(drafter, options),
        (training, lr, begun),
        GUESSING | {"accepted": "accepted of these guesses"},
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


def _options(given: Training, lr: float, begun: float) -> Any:
    """:class:`TrainingOptions` from a command's arguments.

    Raises:
        ValueError: an option out of range.
    """
    import torch

    from gsd_kernels_cli.pair import pick_device, quiet_transformers

    from .job import TrainingOptions
    from .loop import Interval

    quiet_transformers()
    device = pick_device(given.device)
    dtype = given.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    options = {name: value for name, value in asdict(given).items() if name not in ("more_text", "as_json")}
    options |= {
        "text": [*(given.text or []), *(given.more_text or [])],
        "device": device,
        "dtype": getattr(torch, dtype),
        "checkpoint_every": Interval.parse(given.checkpoint_every),
    }
    if given.steps is None and given.minutes is None:
        options["minutes"] = 10.0
    return TrainingOptions(**options, lr=lr, begun=begun)


def _print(work: Callable[[Any], dict[str, Any]], given: tuple[Training, float, float], rows: dict[str, str]) -> None:
    """Do it by options, a rate and the time it began; the report as JSON, or before and after in a table.

    A run that learned nothing exits with 1.
    """
    options = _options(*given)
    report = work(options)
    if given[0].as_json:
        print_json(report)
    else:
        measures = [
            [title, *(_number(report[when][name]) for when in ("before", "after"))] for name, title in rows.items()
        ]
        out.print(table(["held out", "before", "after"], measures))
        used, measured, whole = report["training"], report.get("held_out"), report.get("seconds")
        summary = f"{used['steps']} steps, {used['tokens']:,} tokens, {used['seconds']:.0f} s"
        if whole is not None:
            summary += f" of {whole:.0f}"
        if measured is not None:
            summary += f", measured on {measured['windows']} windows and {measured['continuations']} continuations"
        out.print(f"{summary} → {options.out}")
    if not report.get("learned", True):
        err.print(
            "gsd-kernels: nothing was learned: on held-out text the guesses are no better than before; they are in "
            f"{options.out} all the same; train for longer, or on more text",
        )
        raise typer.Exit(FAILURE)


def _number(value: float | list[float] | None) -> str:
    if isinstance(value, list):
        return "  ".join(map(_number, value))
    return "–" if value is None else f"{value:.3f}"
