"""Data of drafts and heads: text and chats as streams of tokens, windows of them, and what the target writes itself."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from gsd_kernels_hf.files import decode_utf8, read_file
from gsd_kernels_hf.progress import Update, tracked

from .loop import PICKING_SHARE, RunClock, RunFolder
from .options import Run

HELD_OUT_SHARE = 0.05
HELD_OUT_BLOCKS = 64  # at most, evenly spaced over the held-out text
PICKED_TEXTS, PICKED_TOKENS = 32, 64  # greedy continuations that drafts are measured on, and their length
SAMPLED_TEMPERATURE = 0.8  # of every other batch of the target's own text
PREFIX_DIVISOR = 4  # a quarter of a sequence is text, the rest is what the target makes of it


MIN_COUNTED_TOKENS = 4
"""Tokens of a window that count, at least; of a longer chat's later windows those with fewer are left out."""


def read_texts(name: str, files: list[Path], clock: RunClock, digest: Any) -> Iterator[tuple[Path, str]]:
    """Every file with its text, which goes into ``digest`` as well; ``name``: the option that named them.

    Raises:
        ValueError: a folder, or a file that is not UTF-8.
        OSError: a file cannot be read.
        RuntimeError: the clock's minutes are over.
    """
    with tracked(f"reading {name}", len(files), "files") as update:
        for number, file in enumerate(files):
            update(number)
            clock.check(f"reading {name}, {number} of {len(files)} files")
            if file.is_dir():
                raise ValueError(f"{name}: {file} is a folder; name its files (the shell expands {file}/*)")
            data = read_file(file, name)
            digest.update(hashlib.sha256(data).digest())
            yield file, decode_utf8(data, name, file)


@dataclass(frozen=True)
class Stream:
    """Tokens of one text after another.

    Attributes:
        tokens: int32 [N].
        counted: bool [N], tokens whose guesses are learned and measured; ``None``: all.
        starts: int64, ascending, where windows begin; ``None``: anywhere.
        answers: int64, ascending, where what the target would write begins; ``None``: anywhere.
    """

    tokens: np.ndarray
    counted: np.ndarray | None = None
    starts: np.ndarray | None = None
    answers: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def before_answers(self, length: int) -> Stream:
        """The same with windows that end where an answer begins; itself where there are none."""
        if self.answers is None:
            return self
        return Stream(self.tokens, self.counted, self.answers[self.answers >= length] - length)

    def places(self, length: int) -> np.ndarray:
        """Where whole windows of ``length`` tokens that do not overlap begin; those of ``starts`` may."""
        if self.starts is None:
            return np.arange(len(self) // length) * length
        return self.starts[self.starts + length <= len(self)]


def blocks(stream: Stream, length: int, most: int) -> tuple[Tensor, Tensor | None]:
    """At most ``most`` windows, evenly spaced.

    Returns:
        int64 [windows, length], and which of their tokens count, bool alike; ``None``: all.
    """
    places = stream.places(length)
    chosen = np.unique(np.linspace(0, len(places) - 1, min(len(places), most)).round().astype(int))
    index = places[chosen, None] + np.arange(length)  # [windows, length]
    counted = None if stream.counted is None else torch.from_numpy(stream.counted[index])
    return torch.from_numpy(stream.tokens[index].astype(np.int64)), counted


class Streams:
    """Token streams with a share each; a batch is a pure function of its step number, so a run can resume."""

    def __init__(self, streams: list[tuple[float, Stream]], seed: int, tokens: int) -> None:
        self.streams = streams
        self.tokens = tokens
        self.seed = seed

    def batch(self, step: int, length: int) -> tuple[Tensor, ...]:
        """Return random windows, ``tokens`` in all and one more per window.

        Returns:
            ([windows, length + 1],), int64; and bool alike, which of their tokens count, where not all of all do.
        """
        rng = np.random.default_rng([self.seed, step])
        windows = self.tokens // length
        choice = rng.choice(len(self.streams), size=windows, p=[share for share, _ in self.streams])
        rows, counted = [], []
        for index in choice:
            stream = self.streams[index][1]
            if stream.starts is None:
                start = rng.integers(0, len(stream) - length)
            else:
                places = stream.places(length + 1)
                start = places[rng.integers(len(places))]
            cut = slice(start, start + length + 1)
            rows.append(stream.tokens[cut].astype(np.int64))
            counted.append(np.ones(length + 1, dtype=bool) if stream.counted is None else stream.counted[cut])
        found = torch.from_numpy(np.stack(rows))
        if all(stream.counted is None for _, stream in self.streams):
            return (found,)
        return found, torch.from_numpy(np.stack(counted))


def mean_of(loss: Tensor, counted: Tensor | None) -> Tensor:
    """Mean of losses [...], of those that count (bool [...]; ``None``: all); 0 where none does."""
    return loss.mean() if counted is None else (loss * counted).sum() / counted.sum().clamp(min=1)


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


def encode_chats(
    name: str,
    files: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    clock: RunClock,
    held_out: float = 0.0,
) -> tuple[Stream, Stream, str]:
    """Chats by the tokenizer's template, one after another; windows begin where a chat does.

    A chat that is longer than a window has further ones, a window's length apart. What an assistant said counts, with
    the token that ends it.

    Args:
        name: of the option that named the files.
        files: JSON lines, each an object with ``messages``, a list of objects with ``role`` and ``content``.
        length: tokens of a window, but for one.
        held_out: share of the chats, the last ones, that the second stream has.

    Returns:
        Both streams, and a SHA-256 sum of the files.

    Raises:
        ValueError: a line is no such chat, nobody answers in it, or the tokenizer has no template for it.
        OSError: a file cannot be read.
        RuntimeError: the clock's minutes are over.
    """
    if not tokenizer.chat_template:
        raise ValueError(f"{name}: the target's tokenizer has no chat template; write text files and name them by text")
    chats, digest = [], hashlib.sha256()
    for file, text in read_texts(name, files, clock, digest):
        for line, chat in enumerate(text.split("\n"), 1):
            if chat.strip():
                clock.check(f"reading {name}, line {line} of {file}")
                where = f"{name}: {file}, line {line}"
                chats.append(_encoded(_messages(chat, where), tokenizer, where))
    if not chats:
        raise ValueError(f"{name}: no chat in {', '.join(map(str, files[:3])) or 'no file'}")
    first = len(chats) - (max(1, round(held_out * len(chats))) if held_out else 0)
    return _stream(chats[:first], length), _stream(chats[first:], length), digest.hexdigest()


def _messages(text: str, where: str) -> list[dict[str, Any]]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    messages = data.get("messages") if isinstance(data, dict) else None
    right = isinstance(messages, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in messages
    )
    if not right:
        raise ValueError(f'{where}: expected an object with "messages", a list of objects with "role" and "content"')
    if not any(turn["role"] == "assistant" for turn in messages):
        raise ValueError(f'{where}: nobody with the "role" assistant says anything, so there is nothing to learn')
    return messages


def _encoded(
    messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[list[int], list[bool]]:
    """Ids of a chat, and which of them an assistant said.

    An answer is encoded by itself, as the target writes it: the prompt before it is encoded when it begins.
    """
    ids: list[int] = []
    counted: list[bool] = []
    done = ""

    def add(through: str, *, said: bool) -> None:
        nonlocal done
        if not through.startswith(done):
            raise ValueError(
                f"{where}: the target's chat template writes earlier turns otherwise once later ones follow; give "
                "chats of one answer each"
            )
        new = tokenizer(through[len(done) :], add_special_tokens=False, verbose=False)["input_ids"]
        end = tokenizer.eos_token_id
        last = new.index(end) if said and end in new else len(new) - 1
        ids.extend(new)
        counted.extend(said and place <= last for place in range(len(new)))
        done = through

    for number, turn in enumerate(messages):
        if turn["role"] == "assistant":
            before = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
            add(before, said=False)
            add(tokenizer.apply_chat_template(messages[: number + 1], tokenize=False), said=True)
    return ids, counted


def _stream(chats: list[tuple[list[int], list[bool]]], length: int) -> Stream:
    starts: list[int] = []
    answers: list[int] = []
    at = 0
    for _, counted in chats:
        counts = np.asarray(counted)
        for begin in range(0, len(counts), length):
            if begin == 0 or counts[begin : begin + length].sum() >= MIN_COUNTED_TOKENS:
                starts.append(at + begin)
        answers.extend(at + np.flatnonzero(counts & ~np.append(False, counts[:-1])))
        at += len(counts)
    return Stream(
        np.asarray([token for ids, _ in chats for token in ids], dtype=np.int32),
        np.asarray([one for _, counted in chats for one in counted], dtype=bool),
        np.asarray(starts, dtype=np.int64),
        np.asarray(answers, dtype=np.int64),
    )


def encode_text(
    name: str,
    files: list[Path],
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    clock: RunClock,
    held_out: float = 0.0,
) -> tuple[Stream, Stream, str]:
    """Encode text as :func:`encode_chats` does chats; the share is of tokens, or a block.

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

    def over(tokens: Tensor, scores: Tensor, **_: object) -> Tensor:
        """Tell how many tokens there are, and stop when the time is over."""
        update(before + len(prefix) * (tokens.shape[1] - prefix.shape[1]))
        return torch.full((len(tokens),), time.monotonic() > until, device=tokens.device, dtype=torch.bool)

    tokens = target.generate(
        prefix,
        attention_mask=torch.ones_like(prefix),
        max_new_tokens=new_tokens,
        pad_token_id=0 if pad is None else pad,
        stopping_criteria=StoppingCriteriaList([over]),
        do_sample=bool(sampling),
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
            return _continue(target, prefix, new_tokens, update=update)
        begin, seconds = time.monotonic(), clock.share(PICKING_SHARE)
        drawn = torch.Generator().manual_seed(0)
        order = torch.randperm(len(prefix), generator=drawn, device="cpu")  # from all of the text
        rows = _continue(target, prefix[order[:1]], new_tokens, update=update, seconds=seconds)
        new_tokens = rows.shape[1] - prefix.shape[1]  # fewer where it took too long
        more = order[1 : int(seconds / max(time.monotonic() - begin, 1e-9))]  # each takes as long at most
        if not len(more):
            return rows
        others = _continue(target, prefix[more], new_tokens, update=update, before=new_tokens)
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
        sampling = {"temperature": SAMPLED_TEMPERATURE, "top_k": 0, "top_p": 1.0}
        with torch.random.fork_rng(devices=[target.device] if target.device.type == "cuda" else []):
            torch.manual_seed(seed + number)
            tokens = _continue(
                target,
                windows[:, :prefix],
                length - prefix,
                update=lambda _: update(number * at_once),
                seconds=math.inf if seconds is None else max(seconds - used, 0.0),
                **(sampling if number % 2 else {}),
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
