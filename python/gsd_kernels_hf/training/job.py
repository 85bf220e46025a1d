"""Frame of ``distill``, ``train-heads`` and ``train-drafter``: options, a run from text to result, its measurements."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..parallel import digest
from .loop import Budget, Interval, RunFolder, Streams, build_optimizers, learning_rate_factor, train
from .text import HeldOut, Text, own_text, read_text, target_picks

__all__ = [
    "Trainee",
    "TrainingOptions",
    "accepted_per_step",
    "check_output_matrix",
    "load_target",
    "measure_guesses",
    "output_logits",
    "run",
]

WRITING_SHARE = 0.2
"""Largest share of ``minutes`` in which the target may write its own text."""

USES_OF_OWN_TEXT = 4
"""Number of times that a token of it is trained on, in a run by ``steps``."""

WRITTEN_AT_ONCE = 64  # sequences
MEASURED_AT_ONCE = 8  # windows


@dataclass(frozen=True)
class TrainingOptions:
    """Options of all trainings.

    Attributes:
        target: folder of the target.
        text: UTF-8 files to train on.
        out: folder of the result; while training, of its checkpoints.
        held_out_text: files to measure on; without, the last twentieth of ``text``.
        steps, minutes: how long; one of them. In a run by minutes the learning rate follows the clock.
        batch, length: windows of a step and their tokens.
        micro_batch: windows that go through the models at once; less memory, the same step.
        lr: the highest learning rate.
        warmup, decay: shares of the run in which it rises to that, and falls to zero in the end.
        weight_decay: of the layers' matrices.
        sequence_level: share of the windows that the target wrote itself (arXiv 1606.07947).
        token_level: weight of the target's distribution at every position (arXiv 1503.02531, 2310.08461); the rest of
            the loss is the windows' own next token.
        own_sequences: how many sequences the target writes; default: so many that each is used about four times, in a
            run by minutes what it can write in a fifth of them.
        dtype: float32, bfloat16 (weights that are trained stay float32) or float64.
        checkpoint_every: does not change the result.

    Raises:
        ValueError: an option out of range, by name.
    """

    target: str
    text: list[Path]
    out: Path
    held_out_text: list[Path]
    steps: int | None
    minutes: float | None
    batch: int
    length: int
    micro_batch: int | None
    lr: float
    warmup: float
    decay: float
    weight_decay: float
    sequence_level: float
    token_level: float
    own_sequences: int | None
    seed: int
    dtype: torch.dtype
    device: torch.device
    checkpoint_every: Interval

    def __post_init__(self) -> None:
        if not self.text:
            raise ValueError("text: expected at least one file")
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("steps, minutes: expected one of them")
        for name in ("steps", "minutes", "batch", "length", "micro_batch", "lr", "own_sequences"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}: expected a positive number, got {value}")
        for name in ("warmup", "decay", "sequence_level", "token_level"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: expected a share 0 … 1, got {getattr(self, name)}")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise ValueError(f"dtype: expected float32, bfloat16 or float64, got {str(self.dtype).split('.')[-1]}")

    @property
    def weights(self) -> torch.dtype:
        """Dtype of the trained weights."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def identity(self) -> dict[str, Any]:
        """Whatever decides the result but for models and text, as JSON values."""
        values = asdict(self)
        for name in ("target", "text", "held_out_text", "out", "checkpoint_every"):
            del values[name]
        return values | {"dtype": str(self.dtype).split(".")[-1], "device": self.device.type}

    def autocast(self) -> AbstractContextManager[Any]:
        """Matrix products in bfloat16, if that is the dtype; sums stay in float32."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.dtype == torch.bfloat16 else nullcontext()


class Trainee(Protocol):
    """Protocol of a module in training.

    Attributes:
        kind: ``draft``, ``heads``, ``eagle3`` or ``dflash``.
        module: its parameters.
        identity: what decides the result beside :class:`TrainingOptions`, as JSON values.
    """

    kind: str
    module: nn.Module
    identity: dict[str, Any]

    def loss(self, windows: Tensor) -> Tensor:
        """Mean loss of int64 [windows, length + 1] on the device."""

    def measure(self, held_out: HeldOut) -> dict[str, Any]:
        """Quality of the guesses, as JSON values."""

    def save(self, folder: Path) -> None:
        """Write the result."""


def load_target(options: TrainingOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target, frozen, and its tokenizer.

    Raises:
        ValueError: no such folder, or more positions asked for than it has.
        OSError: a checkpoint cannot be read.
    """
    if not Path(options.target).is_dir():
        raise ValueError(f"target: no such folder: {options.target}")
    tokenizer = AutoTokenizer.from_pretrained(options.target)
    target = AutoModelForCausalLM.from_pretrained(options.target, dtype=options.dtype).to(options.device).eval()
    limit = getattr(target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and options.length + 1 > limit:
        raise ValueError(
            f"length: expected at most {limit - 1}, which the target has positions for, got {options.length}"
        )
    return target.requires_grad_(False), tokenizer


def run(
    options: TrainingOptions,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    trainee: Trainee,
    text: Text | None = None,
) -> dict[str, Any]:
    """Train, on from where the same command was interrupted; what ``training.json`` holds.

    ``text`` is what :func:`read_text` made of the options' files, where the caller has read them already.

    Raises:
        ValueError: too little text, or ``out`` is of something else.
        RuntimeError: the loss is not finite.
    """
    if text is None:
        text = read_text(options.text, options.held_out_text, tokenizer, options.length)
    folder = RunFolder(
        options.out,
        {"target": f"{digest(target):016x}", **trainee.identity, **text.digests, **options.identity()},
    )
    if folder.report is not None:
        return folder.report
    held_out = target_picks(target, text, options.length, folder)
    before = folder.remember("before", lambda: trainee.measure(held_out))

    streams, written, budget = [(1.0, text.training)], {}, Budget(options.steps, options.minutes)
    checkpoints = folder.checkpoints
    if options.sequence_level:
        sequences = options.own_sequences
        if sequences is None and options.steps is not None:
            sequences = math.ceil(options.steps * options.batch * options.sequence_level / USES_OF_OWN_TEXT)
        own, seconds = own_text(
            target,
            text.training,
            options.length,
            options.seed,
            folder.work,
            at_once=WRITTEN_AT_ONCE,
            sequences=sequences,
            seconds=None if options.minutes is None else 60 * options.minutes * WRITING_SHARE,
            may_write=lambda: not checkpoints.steps(),
        )
        streams = [(1 - options.sequence_level, text.training), (options.sequence_level, own)]
        written = {"tokens": len(own), "seconds": seconds}
        if options.minutes is not None:
            budget = Budget(minutes=max(options.minutes - seconds / 60, 0.0) or 1e-6)

    batches = Streams(streams, options.seed, options.batch * options.length)

    def losses(step: int, _: float) -> Iterator[Tensor]:
        (windows,) = batches.batch(step, options.length)
        for part in windows.split(options.micro_batch or options.batch):
            yield trainee.loss(part.to(options.device)) * (len(part) / len(windows))

    torch.manual_seed(options.seed)
    record = train(
        trainee.kind,
        trainee.module,
        losses,
        build_optimizers(trainee.module, matrix_lr=options.lr, lr=options.lr, weight_decay=options.weight_decay),
        budget,
        checkpoints,
        tokens_per_step=batches.tokens,
        every=options.checkpoint_every,
        schedule=lambda progress: learning_rate_factor(progress, options.warmup, options.decay),
    )
    training = asdict(record)
    del training["extended_at"]
    return folder.finish(
        trainee.save,
        {"before": before, "after": trainee.measure(held_out), "training": training, "own_text": written},
    )


def output_logits(options: TrainingOptions, target: PreTrainedModel, states: Tensor) -> Tensor:
    """[..., D] → [..., V] by the target's own output matrix."""
    head = target.get_output_embeddings()
    with options.autocast():
        return head(states.to(head.weight.dtype)).to(options.weights)


@torch.no_grad()
def check_output_matrix(what: str, options: TrainingOptions, target: PreTrainedModel) -> None:
    """Raise unless the output matrix is all that is behind the target's last hidden state.

    Raises:
        ValueError: it is not, and ``what`` goes through that matrix alone.
    """
    tokens = torch.zeros(1, 4, dtype=torch.long, device=options.device)
    with options.autocast():
        states = target.base_model(tokens, use_cache=False).last_hidden_state
    expected, got = target(tokens, use_cache=False).logits.float(), output_logits(options, target, states).float()
    if not torch.allclose(got, expected, rtol=0.02, atol=0.02 * expected.abs().max().item()):
        raise ValueError(
            f"target: {type(target).__name__} changes its logits after the output matrix (a scale or a soft cap), "
            f"which {what} do not"
        )


def measure_guesses(right: Callable[[Tensor, int], Tensor], depth: int, held_out: HeldOut) -> dict[str, Any]:
    """Measure first guesses on held-out text and on the target's own greedy continuations of it.

    Args:
        right: (windows [B, N], first place) → bool [B, places, depth]: whether the guess for token i + 2 + k, made once
            the target has read token i of a window, is the window's, given that those before it were.
        depth: guesses a place.

    Returns:
        accuracy: by guess, how often it is the token of the text. continuation_accuracy: the same where the target
        wrote the text (``None`` where it ended at once). accepted: guesses that a step of decoding those would accept.
    """
    text = [right(part, 0).flatten(0, 1) for part in held_out.windows.split(MEASURED_AT_ONCE)]
    own = torch.cat([right(part, held_out.prefix - 1) for part in held_out.picks.split(MEASURED_AT_ONCE)])
    lengths = (held_out.picked.sum(1) - depth).clamp(min=0)  # own: [texts, places, depth]
    counted = torch.arange(own.shape[1]) < lengths[:, None]
    return {
        "accuracy": torch.cat(text).double().mean(0).tolist(),
        "continuation_accuracy": own[counted].double().mean(0).tolist() if counted.any() else [None] * depth,
        "accepted": accepted_per_step(own, lengths),
    }


def accepted_per_step(right: Tensor, lengths: Tensor) -> float | None:
    """Drafted tokens that greedy decoding of these texts accepts in a step, on average.

    Args:
        right: bool [texts, places, depth]; [:, i, k] whether the guess for token i + 1 + k, made when token i was
            the newest, is the target's.
        lengths: int [texts], places of each text that count.

    Returns:
        Between 0 and depth; ``None`` if no text has a place.
    """
    runs = right.long().cumprod(-1).sum(-1)
    accepted = steps = 0
    for row, length in zip(runs.tolist(), lengths.tolist(), strict=True):
        place = 0
        while place < length:
            accepted += row[place]
            steps += 1
            place += row[place] + 1
    return accepted / steps if steps else None


def stored_dtype(folder: str | Path, default: torch.dtype = torch.float32) -> torch.dtype:
    """That of the weights in a checkpoint folder, by its config."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    name = config.get("dtype") or config.get("torch_dtype")
    return getattr(torch, name) if isinstance(name, str) else default
