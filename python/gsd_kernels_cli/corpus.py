"""Building an index of texts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gsd_kernels.ops.corpus import MAX_MATCH, sort_corpus
from gsd_kernels_hf.files import path_of, write_folder
from gsd_kernels_hf.sources.corpus import HEADER, Header, describe, file_of, fingerprint, read_header

BATCH_TEXTS = 32  # texts that are tokenized at once, fewer where they are long
BATCH_CHARACTERS = 1 << 20


def build_corpus(
    folder: str | os.PathLike[str],
    documents: Iterable[Sequence[int] | np.ndarray],
    *,
    tokenizer: Any = None,
) -> Header:
    """Index token sequences; the folder is there as a whole or not at all, whenever this is interrupted.

    Takes about 40 bytes of memory a token, and writes 12.

    Args:
        folder: must not exist.
        documents: token ids of each; no context reaches from one into the next.
        tokenizer: that made them, so that targets of another one are refused.

    Returns:
        The header.

    Raises:
        ValueError: the folder exists, or there is nothing to index.
    """
    folder = path_of(folder)
    if folder.exists():
        raise ValueError(f"corpus: {folder} exists; remove it, or name another folder")
    text, count = _joined(documents)
    order, following = sort_corpus(text)
    if not len(order):
        raise ValueError("corpus: no text of two tokens or more; name files that have some")
    with write_folder(folder) as partial:
        for name, array in (("text", text), ("order", order), ("following", following)):
            np.save(file_of(partial, name), array, allow_pickle=False)
        about = {
            "tokens": len(text) - count,
            "entries": len(order),
            "documents": count,
            "max_match": MAX_MATCH,
            "vocab_size": 0 if tokenizer is None else len(tokenizer),
            "largest_token": int(text.max()),
            "tokenizer": fingerprint(tokenizer),
        }
        (partial / HEADER).write_text(describe(partial, about), encoding="utf-8")
    return read_header(folder)


def _joined(documents: Iterable[Sequence[int] | np.ndarray]) -> tuple[np.ndarray, int]:
    """All documents with a border behind each, int32 [T], and how many there are; empty ones are left out."""
    parts, border = [], np.full(1, -1, dtype=np.int32)
    for document in documents:
        tokens = np.asarray(document)
        if not tokens.size:
            continue
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= 2**31 - 1:
            raise ValueError(f"corpus: expected a sequence of token ids, got {tokens.dtype} {list(tokens.shape)}")
        parts += [tokens.astype(np.int32), border]
    text = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    if len(text) >= 2**31:
        raise ValueError(f"corpus: {len(text)} tokens; an index holds fewer than 2³¹, so write several")
    return text, len(parts) // 2


def tokenized(texts: Iterable[str], tokenizer: Any) -> Iterator[Any]:
    """Token ids of each text, without special tokens; texts are read one batch at a time."""
    batch: list[str] = []
    for text in texts:
        batch.append(text)
        if len(batch) == BATCH_TEXTS or sum(map(len, batch)) >= BATCH_CHARACTERS:
            yield from _tokens(batch, tokenizer)
            batch = []
    if batch:
        yield from _tokens(batch, tokenizer)


def _tokens(texts: list[str], tokenizer: Any) -> Iterator[np.ndarray]:
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    for ids in tokenizer(texts, **options)["input_ids"]:
        yield np.asarray(ids, dtype=np.int32)


def files_of(names: Iterable[str | os.PathLike[str]], suffixes: Sequence[str] = ()) -> list[Path]:
    """The files that names stand for: a folder for all under it whose names end with one of ``suffixes``, or for all.

    Raises:
        ValueError: a name is neither a file nor a folder, or nothing is left.
    """
    paths: dict[Path, None] = {}
    for name in names:
        path = path_of(name)
        if path.is_dir():
            under = sorted(file for file in path.rglob("*") if file.is_file())
            paths |= dict.fromkeys(f for f in under if not suffixes or f.name.endswith(tuple(suffixes)))
        elif path.is_file():
            paths[path] = None
        else:
            raise ValueError(f"FILES: no such file or folder: {path}")
    if not paths:
        raise ValueError("FILES: no file to index")
    return list(paths)
