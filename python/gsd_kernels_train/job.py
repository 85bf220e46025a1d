"""Frame of ``distill``, ``train-heads`` and ``train-drafter``: options, a run from text to result, its measurements."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels_hf.model.properties import positions
from gsd_kernels_hf.parallel import digest
from gsd_kernels_hf.progress import tracked

from .loop import (
    MEASURING_SHARE,
    WRITING_SHARE,
    Interval,
    NothingLearned,
    RunClock,
    RunFolder,
    build_optimizers,
    load_checkpoint,
    spoken,
    train,
)
from .options import Run
from .text import HeldOut, Stream, Streams, TrainingText, own_text, read_text, target_picks

logger = logging.getLogger("gsd_kernels")

MEASURING_FACTOR = 1.25
"""Times of the measurement before training that are kept for the one after it."""

USES_OF_OWN_TEXT = 4
"""Number of times that a token of it is trained on, in a run by ``steps``."""

WRITTEN_SEQUENCES = 64

MEASURED_WINDOWS = 8


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(Run):
    """Options of all trainings.

    Attributes:
        target: folder of the target.
        text: UTF-8 files to train on; or
        chats: files of chats, see :func:`~gsd_kernels_train.text.encode_chats`: only answers count.
        out: folder of the result; while training, of its checkpoints.
        held_out_text, held_out_chats: files to measure on; without, the last twentieth of ``text`` or ``chats``.
        steps, minutes: how long; one of them. In minutes everything counts, reading, measuring and writing too; the
            learning rate follows the clock.
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
        begun: from when on the minutes count, on ``time.monotonic``'s clock; ``None``: when the training is called.

    Raises:
        ValueError: an option out of range, by name.
    """

    lr: float
    dtype: torch.dtype
    device: torch.device
    checkpoint_every: Interval
    begun: float | None = None

    def __post_init__(self) -> None:
        if bool(self.text) == bool(self.chats):
            raise ValueError("text, chats: expected files of one of them")
        for name in ("text", "chats"):
            if getattr(self, f"held_out_{name}") and not getattr(self, name):
                raise ValueError(f"held_out_{name}: is for {name}, of which no file is named")
        if (self.steps is None) == (self.minutes is None):
            raise ValueError("steps, minutes: expected one of them")
        for name in ("steps", "minutes", "batch", "length", "micro_batch", "lr", "own_sequences"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name}: expected a positive number, got {value}")
        for name in ("warmup", "decay", "sequence_level", "token_level"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name}: expected a share 0 … 1, got {getattr(self, name)}")
        if not (self.weight_decay >= 0 and math.isfinite(self.weight_decay)):
            raise ValueError(f"weight_decay: expected a number of at least 0, got {self.weight_decay}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: expected an integer from 0 to 2⁶³ − 1, got {self.seed}")
        if self.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise ValueError(f"dtype: expected float32, bfloat16 or float64, got {str(self.dtype).split('.')[-1]}")

    @property
    def weights(self) -> torch.dtype:
        """Dtype of the trained weights."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def identity(self) -> dict[str, Any]:
        """Whatever decides the result but for models and text, as JSON values."""
        values = asdict(self)
        files = ("text", "held_out_text", "chats", "held_out_chats")
        for name in ("target", *files, "out", "checkpoint_every", "begun"):
            del values[name]
        return values | {"dtype": str(self.dtype).split(".")[-1], "device": self.device.type}

    def autocast(self) -> AbstractContextManager[Any]:
        """Matrix products in bfloat16, if that is the dtype; sums stay in float32."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.dtype == torch.bfloat16 else nullcontext()


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
    check_length(options, target, "target", 1)
    return target.requires_grad_(False), tokenizer


def check_length(options: TrainingOptions, model: PreTrainedModel, name: str, more: int) -> None:
    """Raise unless a model has positions for a window and so many tokens more.

    Raises:
        ValueError: it has not.
    """
    limit = positions(model)
    if limit is not None and options.length + more > limit:
        expected = f"expected at most {limit - more}, which the {name} has positions for"
        raise ValueError(f"length: {expected}, got {options.length}")


# ---- how good guesses are before and after


class Trainee:
    """A module in training.

    Attributes:
        kind: ``draft``, ``heads``, ``eagle3``, …
        module: what is trained.
        identity: what decides the result beside :class:`TrainingOptions`, as JSON values.
        dtype: of the weights that are written.
    """

    options: TrainingOptions
    kind: str
    module: nn.Module
    identity: dict[str, Any]
    dtype: torch.dtype

    def loss(self, windows: Tensor, counted: Tensor | None = None) -> Tensor:
        """Mean loss of int64 [windows, length + 1] on the device, of the guesses for tokens that count (bool alike)."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write the result, its weights in ``dtype``."""
        self.module.to(self.dtype).save_pretrained(folder)
        self.module.to(self.options.weights)

    @torch.no_grad()
    def measure(self, held_out: HeldOut) -> dict[str, Any]:
        """Measure on held-out text and on the target's own greedy continuations of it; JSON values by name."""
        self.module.eval()
        read, own = [], []
        with tracked("measuring", len(held_out.windows) + len(held_out.picks), "windows") as update:
            for part in held_out.windows.to(self.options.device).split(MEASURED_WINDOWS):
                read.append(self.of_text(part).cpu())
                update(len(read) * MEASURED_WINDOWS)
            for part in held_out.picks.to(self.options.device).split(MEASURED_WINDOWS):
                own.append(self.right(part, held_out.prefix - 1).cpu())
                update(len(held_out.windows) + len(own) * MEASURED_WINDOWS)
        return self.measures(torch.cat(read), torch.cat(own), held_out)

    def of_text(self, windows: Tensor) -> Tensor:
        """The measures of windows [B, N] of held-out text: [B, places, measures]."""
        raise NotImplementedError

    def right(self, windows: Tensor, first: int) -> Tensor:
        """Tell whether guesses are right: bool [B, places, …] of windows [B, N], from place ``first`` on."""
        raise NotImplementedError

    def measures(self, read: Tensor, own: Tensor, held_out: HeldOut) -> dict[str, Any]:
        """Sum up what :meth:`of_text` says of the text, and :meth:`right` of the target's own text."""
        raise NotImplementedError


class Guessing(Trainee):
    """A training of what guesses tokens after the next one.

    Attributes:
        guesses: tokens that one use of it guesses.
    """

    guesses: int

    def measures(self, read: Tensor, own: Tensor, held_out: HeldOut) -> dict[str, Any]:
        """Sum up first guesses.

        Returns:
            accuracy: by guess, how often it is the token of the text, where that counts. continuation_accuracy: the
            same where the target wrote the text (``None`` where it ended at once). accepted: guesses that a step of
            decoding those would accept.
        """
        depth = self.guesses
        lengths = (held_out.picked.sum(1) - depth).clamp(min=0)  # own: [texts, places, depth]
        counted = torch.arange(own.shape[1], device=lengths.device) < lengths[:, None]
        said = torch.ones_like(read)  # [windows, places, depth]
        if held_out.counted is not None:
            said = held_out.counted[:, 2:].unfold(1, depth, 1)[:, : read.shape[1]]
        return {
            "accuracy": [read[..., k][said[..., k]].double().mean().item() for k in range(depth)],
            "continuation_accuracy": own[counted].double().mean(0).tolist() if counted.any() else [None] * depth,
            "accepted": accepted_per_step(own, lengths),
        }

    def of_text(self, windows: Tensor) -> Tensor:
        return self.right(windows, 0)

    def right(self, windows: Tensor, first: int) -> Tensor:
        """Tell whether guesses are right: bool [B, places, guesses] of windows [B, N], from place ``first`` on.

        The guess for token i + 2 + k, made once the target has read token i, given that those before it were right.
        """
        places = windows.shape[1] - 1 - self.guesses - first
        if places < 1:
            return torch.zeros(len(windows), 0, self.guesses, dtype=torch.bool, device=windows.device)
        return self.guessed(windows, first, places) == windows[:, first + 2 :].unfold(1, self.guesses, 1)

    def guessed(self, windows: Tensor, first: int, places: int) -> Tensor:
        """First guesses from each of ``places`` places: target ids [B, places, guesses]."""
        raise NotImplementedError


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


def is_better(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether some measures are better than before (a divergence lower, others higher), no more worse."""
    gains = [
        earlier - now if name == "divergence" else now - earlier
        for name, value in before.items()
        for earlier, now in zip(np.ravel(value).tolist(), np.ravel(after[name]).tolist(), strict=True)
        if earlier is not None and now is not None
    ]
    better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return better > 0 and better >= worse


# ---- a run


def run(
    options: TrainingOptions,
    make: Callable[[PreTrainedModel, PreTrainedTokenizerBase, Callable[[], TrainingText]], Trainee],
) -> dict[str, Any]:
    """Train, on from where the same command was interrupted; what ``training.json`` holds.

    Args:
        options: of the training; all of it keeps to their minutes.
        make: the trainee, of the target, its tokenizer, and what reads the options' files, once.

    Raises:
        ValueError: options, text or models that cannot be used, by name, or ``out`` is of something else.
        OSError: a file or checkpoint cannot be read.
        RuntimeError: the loss is not finite, or the minutes were over before one step was done; nothing is left then.
    """
    clock = RunClock(options.minutes, options.begun)
    target, tokenizer = load_target(options)
    read = cache(lambda: read_text(options, tokenizer, clock))
    trainee, text = make(target, tokenizer, read), read()
    folder = RunFolder(
        options.out,
        {"target": f"{digest(target):016x}", **trainee.identity, **text.digests, **options.identity()},
    )
    if folder.report is not None:
        return folder.report
    try:
        clock.check("loading the models and reading the text")
        held_out, pace = target_picks(target, text, options.length, folder, clock)
        clock.check("while the target continued the held-out text")
        held_out = _measurable(trainee, held_out, folder, clock)
        before, measuring = folder.timed("before", lambda: trainee.measure(held_out), clock)
        window = measuring / (len(held_out.windows) + len(held_out.picks))
        streams, written = _streams(options, target, text, pace, folder, clock)
        batches = Streams(streams, options.seed, options.batch * options.length)

        def losses(step: int) -> Iterator[Tensor]:
            batch = batches.batch(step, options.length)
            # Nobody knows how long the first step takes: window by window it can be dropped on the way.
            at_once = 1 if step == 0 and clock.limited else options.micro_batch or options.batch
            for part in zip(*(tensor.split(at_once) for tensor in batch), strict=True):
                share = len(part[0]) / len(batch[0])
                yield trainee.loss(*(tensor.to(options.device) for tensor in part)) * share

        torch.manual_seed(options.seed)
        record = train(
            trainee.kind,
            trainee.module,
            losses,
            build_optimizers(trainee.module, lr=options.lr, weight_decay=options.weight_decay),
            folder.work,
            tokens_per_step=batches.tokens,
            steps=options.steps,
            seconds=_seconds(clock, folder, measuring, window),
            every=options.checkpoint_every,
            warmup=options.warmup,
            decay=options.decay,
        )
        if record.steps == 0:
            over = f"the {spoken(clock.seconds)} were over before the first step was done"
            raise NothingLearned(f"{over}; a smaller --batch or --length makes more steps")
        after = trainee.measure(held_out)
        return folder.finish(
            trainee.save,
            {
                "before": before,
                "after": after,
                "learned": is_better(before, after),
                "held_out": {"windows": len(held_out.windows), "continuations": len(held_out.picks)},
                "training": asdict(record),
                "own_text": written,
                "seconds": clock.used,
            },
        )
    except NothingLearned:
        folder.discard()
        raise


def _measurable(trainee: Trainee, held_out: HeldOut, folder: RunFolder, clock: RunClock) -> HeldOut:
    """The held-out text that a share of the minutes is enough to measure on; all of it in a run by steps."""
    if not clock.limited:
        return held_out

    def count() -> list[int]:
        allowed, probe = clock.share(MEASURING_SHARE), held_out.first(1, 1)
        took = math.inf
        for _ in range(2):  # the first warms up
            begin = time.monotonic()
            trainee.measure(probe)
            took = min(took, time.monotonic() - begin)
            if took > allowed:
                break
        if 2 * took >= clock.left:  # before the training, and after it
            raise NothingLearned(
                f"measuring one window takes {spoken(took)}, and {spoken(max(clock.left, 0.0))} of "
                f"{spoken(clock.seconds)} are left"
            )
        rows = max(2, int(2 * allowed / max(took, 1e-9)))
        picks = min(len(held_out.picks), max(1, rows // 3))
        return [min(len(held_out.windows), rows - picks), picks]

    return held_out.first(*folder.timed("measured_on", count, clock)[0])


def _streams(
    options: TrainingOptions,
    target: PreTrainedModel,
    text: TrainingText,
    pace: float,
    folder: RunFolder,
    clock: RunClock,
) -> tuple[list[tuple[float, Stream]], dict[str, Any]]:
    """The streams that are trained on, with their shares, and a report of what the target wrote of them.

    Args:
        pace: seconds that a token of the target takes.
    """
    if not options.sequence_level:
        return [(1.0, text.training)], {}
    sequences = options.own_sequences
    if sequences is None and options.steps is not None:
        sequences = math.ceil(options.steps * options.batch * options.sequence_level / USES_OF_OWN_TEXT)
    at_once, seconds = WRITTEN_SEQUENCES, None
    if clock.limited:
        seconds = clock.share(WRITING_SHARE)
        fits = min(WRITTEN_SEQUENCES, int(seconds / max(pace * options.length, 1e-9)))
        at_once = folder.remember("written_at_once", lambda: fits)
    own, took = Stream(np.empty(0, dtype=np.int32)), 0.0
    if at_once:
        limits = {"at_once": at_once, "sequences": sequences, "seconds": seconds}
        own, took = own_text(target, text.training, options.length, options.seed, folder, clock, **limits)
    written = {"tokens": len(own), "seconds": took}
    if len(own) <= options.length:
        logger.warning(
            "the target wrote %d tokens in its share of the time, less than a window of %d; the text alone is used",
            len(own),
            options.length,
        )
        return [(1.0, text.training)], written
    return [(1 - options.sequence_level, text.training), (options.sequence_level, own)], written


def _seconds(clock: RunClock, folder: RunFolder, measuring: float, window: float) -> float:
    """Seconds of the training: what is left of the minutes when as long as before is kept for measuring.

    Args:
        measuring: seconds that it took.
        window: seconds of one window of it; a window takes longer to train on.
    """
    if not clock.limited:
        return math.inf
    state = load_checkpoint(folder.work)
    trained = 0.0 if state is None else float(state["record"]["seconds"])
    clock.earlier += trained
    left = clock.left - MEASURING_FACTOR * measuring
    if not trained and left <= window:
        raise NothingLearned(
            f"of {spoken(clock.seconds)}, {spoken(max(left, 0.0))} are left to train in, less than a window takes"
        )
    return max(trained + left, 1e-6)


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


def stored_dtype(folder: str | Path) -> torch.dtype:
    """That of the weights in a checkpoint folder, by its config."""
    return AutoConfig.from_pretrained(folder).dtype or torch.float32
