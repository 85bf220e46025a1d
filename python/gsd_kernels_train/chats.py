"""Chats as text to train on: the target's own chat template, and the answers in it, which alone count."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from .clock import RunClock
from .streams import Stream, read_texts

MIN_COUNTED_TOKENS = 4
"""Tokens of a window that count, at least; of a longer chat's later windows those with fewer are left out."""


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
