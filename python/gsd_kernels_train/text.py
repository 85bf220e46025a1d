"""Data of drafts and heads: text files as token streams, and text that the target writes itself."""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from gsd_kernels_hf.progress import Update, tracked

from .chats import encode_chats
from .clock import PICKING_SHARE, RunClock
from .loop import RunFolder
from .options import Run
from .streams import Stream, Streams, blocks, read_texts

HELD_OUT_SHARE = 0.05
HELD_OUT_BLOCKS = 64  # at most, evenly spaced over the held-out text
PICKED_TEXTS, PICKED_TOKENS = 32, 64  # greedy continuations that drafts are measured on, and their length
SAMPLED_TEMPERATURE = 0.8  # of every other batch of the target's own text
PREFIX_DIVISOR = 4  # a quarter of a sequence is text, the rest is what the target makes of it


@dataclass(frozen=True)
class TrainingText:
    """Token streams to train on and to measure on, and SHA-256 sums of the files they come from."""

    training: Stream
    held_out: Stream
    digests: dict[str, str]


@dataclass(frozen=True)
class HeldOut:
    """Text of the measurements before and after.

    Attributes:
        windows: int64 [n, length + 1], of the held-out text.
        picks: int64 [m, prefix + new tokens], text and the target's own greedy continuation.
        picked: bool [m, new tokens], not behind an end-of-text token.
        counted: bool [n, length + 1], tokens of the windows that count; ``None``: all.
    """

    windows: Tensor
    picks: Tensor
    picked: Tensor
    counted: Tensor | None = None

    @property
    def prefix(self) -> int:
        """Tokens of text before each continuation."""
        return self.picks.shape[1] - self.picked.shape[1]

    def first(self, windows: int, picks: int) -> HeldOut:
        """So many of both, evenly spaced."""
        counted = None if self.counted is None else _spaced(self.counted, windows)
        return HeldOut(_spaced(self.windows, windows), _spaced(self.picks, picks), _spaced(self.picked, picks), counted)


def _spaced(rows: Tensor, count: int) -> Tensor:
    if count >= len(rows):
        return rows
    return rows[torch.linspace(0, len(rows) - 1, count, dtype=torch.float32, device=rows.device).round().long()]


def encode_text(
    name: str,
    files: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    clock: RunClock,
    held_out: float = 0.0,
) -> tuple[Stream, Stream, str]:
    """Encode text as :func:`~gsd_kernels_train.chats.encode_chats` does chats; the share is of tokens, or a block.

    Each file has the tokenizer's own beginning, and an end-of-text token behind it.
    """
    rows, digest = [], hashlib.sha256()
    for _, text in read_texts(name, files, clock, digest):
        if not text.strip():
            continue
        ids = tokenizer(text, verbose=False)["input_ids"]
        if tokenizer.eos_token_id is not None and ids[-1] != tokenizer.eos_token_id:
            ids = [*ids, tokenizer.eos_token_id]
        rows.append(np.asarray(ids, dtype=np.int32))
    if not rows:
        raise ValueError(f"{name}: no text in {', '.join(map(str, files[:3])) or 'no file'}")
    tokens = np.concatenate(rows)
    share = max(length + 1, round(held_out * len(tokens))) if held_out else 0
    cut = max(0, len(tokens) - share)
    return Stream(tokens[:cut]), Stream(tokens[cut:]), digest.hexdigest()


def read_text(options: Run, tokenizer: PreTrainedTokenizerBase, clock: RunClock) -> TrainingText:
    """Encode the text or the chats of a run; where no file is held out, the last twentieth is, one block at least.

    Raises:
        ValueError: no text, text that is not UTF-8, or too little for one block of ``length`` + 1 tokens on each side.
        OSError: a file that cannot be read.
        RuntimeError: the clock's minutes are over.
    """
    name, encode = ("chats", encode_chats) if options.chats else ("text", encode_text)
    files, held_out_files = getattr(options, name) or [], getattr(options, f"held_out_{name}")
    length, block = options.length, options.length + 1
    last = 0.0 if held_out_files else HELD_OUT_SHARE
    training, held_out, digest = encode(name, files, tokenizer, length, clock, last)
    digests = {name: digest}
    if held_out_files:
        other = f"held_out_{name}"
        held_out, _, digests[other] = encode(other, held_out_files, tokenizer, length, clock)
    for which, stream in ((name, training), (f"held_out_{name}", held_out)):
        if not len(stream.places(block)):
            share = "" if held_out_files else " after the held-out part"
            raise ValueError(
                f"{which}: {len(stream)} tokens{share} are less than a block of {block}; give more text or a smaller "
                "length"
            )
    if not len(held_out.before_answers(own := beginning(length)).places(own)):
        raise ValueError(f"held_out_{name}: no answer has {own} tokens before it; give more chats or a smaller length")
    return TrainingText(training, held_out, digests)


def beginning(length: int) -> int:
    """Tokens of a window that the target continues."""
    return max(1, length // PREFIX_DIVISOR)


class _UntilTime(StoppingCriteria):
    """Tells how many tokens there are, and stops when the time is over."""

    def __init__(self, update: Update, prefix: int, before: int, each: int, until: float) -> None:
        self.update, self.prefix, self.before, self.each, self.until = update, prefix, before, each, until

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        self.update(self.before + self.each * (input_ids.shape[1] - self.prefix))
        return torch.full((len(input_ids),), time.monotonic() > self.until, device=input_ids.device, dtype=torch.bool)


@torch.no_grad()
def _continue(
    target: PreTrainedModel,
    prefix: Tensor,
    new_tokens: int,
    *,
    update: Update,
    before: int = 0,
    seconds: float = math.inf,
    **sampling: object,
) -> Tensor:
    """``prefix`` int64 [n, P] → [n, P + new_tokens] on the CPU; behind an end of text is padding.

    ``update`` is told of n tokens more a step, from ``before`` on. Fewer new tokens only where ``seconds`` are over.
    """
    pad = target.generation_config.pad_token_id
    until = time.monotonic() + seconds
    prefix = prefix.to(target.device)
    tokens = target.generate(
        prefix,
        attention_mask=torch.ones_like(prefix),
        max_new_tokens=new_tokens,
        pad_token_id=0 if pad is None else pad,
        stopping_criteria=StoppingCriteriaList([_UntilTime(update, prefix.shape[1], before, len(prefix), until)]),
        **sampling,
    ).cpu()
    if time.monotonic() > until:
        return tokens
    return torch.nn.functional.pad(tokens, (0, prefix.shape[1] + new_tokens - tokens.shape[1]))


def _real(target: PreTrainedModel, new: Tensor) -> Tensor:
    """Mask of new tokens [n, N] up to the first end of text, itself included."""
    ends = target.generation_config.eos_token_id
    ends = torch.tensor([] if ends is None else ends, dtype=torch.long, device=new.device).reshape(-1)
    return (torch.isin(new, ends).cumsum(1) - torch.isin(new, ends).long()) == 0


def target_picks(
    target: PreTrainedModel, text: TrainingText, length: int, remember: RunFolder, clock: RunClock
) -> tuple[HeldOut, float]:
    """Held-out windows, and what the target greedily makes of their beginnings (written once in a run).

    Returns:
        Both, fewer and shorter continuations where a share of the clock's minutes is not enough for all; and the
        seconds that a token of them took.
    """
    windows, counted = blocks(text.held_out, length + 1, HELD_OUT_BLOCKS)
    own = beginning(length)
    answered = text.held_out.before_answers(own)
    prefix = blocks(answered, length + 1 if answered is text.held_out else own, PICKED_TEXTS)[0][:, :own]

    def pick() -> list[list[int]]:
        return _picked(target, prefix, min(PICKED_TOKENS, length), clock).tolist()

    found, seconds = remember.timed("picks", pick, clock)
    picks = torch.tensor(found, dtype=torch.int64, device="cpu")
    picked = _real(target, picks[:, prefix.shape[1] :])
    return HeldOut(windows, picks, picked, counted), seconds / picked.numel()


def _picked(target: PreTrainedModel, prefix: Tensor, new_tokens: int, clock: RunClock) -> Tensor:
    """Greedy continuations of the beginnings [n, P], all at once, or as many as the clock's share is enough for."""
    with tracked("the target continues held-out text", len(prefix) * new_tokens, "tokens") as update:
        if not clock.limited:
            return _continue(target, prefix, new_tokens, update=update, do_sample=False)
        begin, seconds = time.monotonic(), clock.share(PICKING_SHARE)
        drawn = torch.Generator().manual_seed(0)
        order = torch.randperm(len(prefix), generator=drawn, device="cpu")  # from all of the text
        rows = _continue(target, prefix[order[:1]], new_tokens, update=update, seconds=seconds, do_sample=False)
        new_tokens = rows.shape[1] - prefix.shape[1]  # fewer where it took too long
        more = order[1 : int(seconds / max(time.monotonic() - begin, 1e-9))]  # each takes as long at most
        if not len(more):
            return rows
        others = _continue(target, prefix[more], new_tokens, update=update, before=new_tokens, do_sample=False)
        return torch.cat([rows, others])


def own_text(
    target: PreTrainedModel,
    training: Stream,
    length: int,
    seed: int,
    folder: RunFolder,
    clock: RunClock,
    *,
    at_once: int,
    sequences: int | None,
    seconds: float | None,
) -> tuple[Stream, float]:
    """Let the target continue beginnings from the text: sequence-level distillation (arXiv 1606.07947, section 3.2).

    Every other batch is greedy, the others are sampled at temperature 0.8. A batch is a function of the seed and its
    number, and is remembered, so that a run that was killed goes on with the next; once training has begun, what was
    written is all.

    Args:
        training: where the beginnings are drawn from; of chats, they end where an answer begins.
        length: of a sequence, the beginning (a quarter) included.
        at_once: sequences of a batch.
        sequences: how many; with ``seconds`` too, whichever comes first.
        seconds: that it may take; the sequences of a first batch that takes longer are shorter.

    Returns:
        The sequences one after another, of chats what is new counts; and the seconds that writing took.
    """
    prefix = beginning(length)
    streams = Streams([(1.0, training.before_answers(prefix))], seed + 1, at_once * prefix)
    written: list[dict[str, list[int]]] = []
    used = 0.0

    def write() -> dict[str, list[int]]:
        windows = streams.batch(number, prefix)[0]
        sampling = {"do_sample": True, "temperature": SAMPLED_TEMPERATURE, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(seed + number)
            tokens = _continue(
                target,
                windows[:, :prefix],
                length - prefix,
                update=lambda _: update(number * at_once),
                seconds=math.inf if seconds is None else max(seconds - used, 0.0),
                **(sampling if number % 2 else {"do_sample": False}),
            )
        real = torch.nn.functional.pad(_real(target, tokens[:, prefix:]), (prefix, 0), value=True)
        new = (torch.arange(tokens.shape[1], device=tokens.device) >= prefix).expand_as(tokens)[real]
        return {"tokens": tokens[real].tolist(), "new": new.int().tolist()}

    with tracked("the target writes", sequences, "sequences") as update:
        while sequences is None or len(written) * at_once < sequences:
            number = len(written)
            name, over = f"own-text-{number:05d}", seconds is not None and used + used / max(number, 1) > seconds
            if not folder.knows(name) and (folder.trains or (number and over)):
                break
            batch, took = folder.timed(name, write, clock)
            written.append(batch)
            used += took
            update(len(written) * at_once)
    tokens, new = (np.concatenate([np.asarray(batch[part]) for batch in written]) for part in ("tokens", "new"))
    return Stream(tokens.astype(np.int32), None if training.counted is None else new.astype(bool)), used
