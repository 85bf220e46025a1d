"""Corpus: a draft source without a forward, from texts that were indexed on disk.

The files of an index, docs/drafts.md: three arrays that are mapped into memory, and a header that describes them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from gsd_kernels.ops.corpus import MAX_MATCH, SortedCorpus, corpus_recall

from ..files import path_of
from ..model import properties
from .base import Level, OwnSource, Proposal, Text

HEADER = "corpus.json"
FORMAT = "gsd_kernels corpus"
VERSION = 1
ARRAYS = ("text", "order", "following")
MAX_HEADER_BYTES = 1 << 20  # bytes: it has some hundred
BLOCK_BYTES = 4096  # bytes
COMPARED_BLOCKS = 16  # of every array that are compared when it is opened, the first and the last among them
PROBE = "def f(x):\n    return {'a': [1.5, \"é\"]}  # 東京\n"


@dataclass(frozen=True)
class Header:
    """The head of a corpus, which says how it was made.

    Attributes:
        tokens: of all documents.
        entries: positions that can be found: all but the last of each document.
        documents: how many texts.
        max_match: tokens of context by which it is sorted.
        vocab_size: of the tokenizer, 0 where none is known.
        largest_token: the largest id in it.
        tokenizer: its fingerprint, see :func:`fingerprint`; empty where none is known.
        arrays: bytes of each file, and a hash of :data:`COMPARED_BLOCKS` blocks of it, by name.
    """

    tokens: int
    entries: int
    documents: int
    max_match: int
    vocab_size: int
    largest_token: int
    tokenizer: str
    arrays: dict[str, dict[str, Any]]


def fingerprint(tokenizer: Any) -> str:
    """A hash of a tokenizer's vocabulary and of what it makes of a probe; "" for none."""
    if tokenizer is None:
        return ""
    vocabulary = sorted((index, token) for token, index in tokenizer.get_vocab().items())
    probe = list(tokenizer(PROBE, add_special_tokens=False)["input_ids"])
    return hashlib.sha256(json.dumps([vocabulary, probe]).encode()).hexdigest()[:32]


def describe(folder: Path, about: Mapping[str, Any]) -> str:
    """The header's text, of arrays that lie in ``folder``."""
    arrays = {name: _content(folder, name) for name in ARRAYS}
    values = {"format": FORMAT, "version": VERSION, **about, "arrays": arrays}
    return json.dumps({**values, "sha256": _digest(values)}, indent=1) + "\n"


def open_corpus(folder: Path, tokenizer: Any = None) -> tuple[Header, SortedCorpus]:
    """Map an index into memory, whatever its size; every process that opens it shares the same pages.

    The size of every file and a sample of its blocks are compared with the header.

    Args:
        folder: where ``gsd-kernels index`` wrote it.
        tokenizer: of the target; ``None`` where it is not at hand.

    Raises:
        ValueError: no index, one of another tokenizer, of a newer version, or a damaged one, by name.
    """
    header = read_header(folder)
    if tokenizer is not None and header.tokenizer and (own := fingerprint(tokenizer)) != header.tokenizer:
        raise ValueError(
            f"corpus: {folder} was made with another tokenizer (fingerprint {header.tokenizer}, the target's has "
            f"{own}); index the files anew with the target's"
        )
    arrays = {name: torch.from_numpy(_mapped(folder, name, header.arrays[name])) for name in ARRAYS}
    return header, SortedCorpus(**arrays)


def read_header(folder: Path) -> Header:
    """The header of an index.

    Raises:
        ValueError: see :func:`open_corpus`.
    """
    file = folder / HEADER
    if not file.is_file():
        raise ValueError(f"corpus: {folder} holds no index ({HEADER} is not there); write one with gsd-kernels index")
    damaged = f"corpus: {file} is damaged; index the files anew"
    try:
        with file.open("rb") as opened:
            values = json.loads(opened.read(MAX_HEADER_BYTES).decode())  # what is cut is no JSON
        digest, kind, version = values.pop("sha256"), values.pop("format"), values.pop("version")
    except Exception as error:
        raise ValueError(damaged) from error
    if kind != FORMAT or not isinstance(version, int):
        raise ValueError(f"corpus: {file} is no index of gsd_kernels; write one with gsd-kernels index")
    if version > VERSION:
        raise ValueError(f"corpus: {folder} has version {version}, newer than {VERSION}; update gsd_kernels")
    if digest != _digest({"format": kind, "version": version, **values}) or values.get("max_match") != MAX_MATCH:
        raise ValueError(damaged)
    return Header(**values)  # as it was written, or the digest would be another


def file_of(folder: Path, name: str) -> Path:
    """The file of an array."""
    return folder / f"{name}.npy"


def _mapped(folder: Path, name: str, expected: Mapping[str, Any]) -> np.ndarray:
    file = file_of(folder, name)
    if not file.is_file():
        raise ValueError(f"corpus: {file} is not there; index the files anew")
    if _content(folder, name) != expected:
        raise ValueError(f"corpus: {file} is damaged; index the files anew")
    # Copy-on-write, and never written: the pages are those of the file, and PyTorch wants memory that may be written.
    return np.load(file, mmap_mode="c", allow_pickle=False)


def _content(folder: Path, name: str) -> dict[str, Any]:
    """Bytes of a file, and a hash of evenly spaced blocks of it, its first and last ones among them."""
    digest = hashlib.sha256()
    with file_of(folder, name).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        last = max(0, size - BLOCK_BYTES)
        for at in sorted({last * i // (COMPARED_BLOCKS - 1) for i in range(COMPARED_BLOCKS)}):
            file.seek(at)
            digest.update(file.read(BLOCK_BYTES))
    return {"bytes": size, "sample": digest.hexdigest()}


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


class Corpus(OwnSource):
    """A source of what followed the longest known context in a corpus that ``gsd-kernels index`` wrote, by counts.

    Retrieval as in REST (arXiv 2311.08252), at every node of the graph: each backs off by itself to shorter contexts.
    The index is mapped into memory, read only, by any number of processes; where the target takes its input on a GPU,
    a copy in the GPU's memory is made at the first call, 12 bytes a token.

    Args:
        folder: of the index.
        tokenizer: of the target; with it, an index of another tokenizer is refused. Without it only one whose ids the
            target does not have is.
        name: in statistics; of several corpora each needs its own.

    Attributes:
        header: tokens, documents and origin, see :class:`Header`.

    Raises:
        ValueError: no index, a damaged one, one of another tokenizer or of a newer version.
    """

    # Priors by the length of the matched context: 0, 1, 2, … 16 tokens.
    shares = (0.0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, *(0.4,) * (MAX_MATCH - 8))
    reliability = (0.0, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, *(0.85,) * (MAX_MATCH - 8))

    def __init__(self, folder: str | os.PathLike[str], *, tokenizer: Any = None, name: str = "corpus") -> None:
        self.folder, self.name = path_of(folder), name
        self.header, self.index = open_corpus(self.folder, tokenizer)
        self.copies: dict[torch.device, SortedCorpus] = {self.index.text.device: self.index}  # by device

    def __repr__(self) -> str:
        about = f"{self.header.tokens:,} tokens of {self.header.documents:,} documents"
        return f"<Corpus {self.name!r}: {about}, in {self.folder}>"

    def __copy__(self) -> Corpus:
        other = object.__new__(type(self))  # a session's: of the same mapping
        vars(other).update(vars(self))
        return other

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Corpus, str(self.folder.absolute()), name=self.name), ()

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that lacks tokens of the corpus."""
        vocabulary, needed = properties.vocabulary(target), max(self.header.largest_token + 1, self.header.vocab_size)
        if needed > vocabulary:
            raise ValueError(
                f"corpus: {self.folder} was made with a tokenizer of {needed} tokens, the target has {vocabulary}; "
                "index the files anew with the target's"
            )

    def start(self, text: Text) -> None:
        """Make a copy of the index on the target's device, if there is none."""
        self.vocab, device = text.target.vocab_size, text.state.tokens.device
        if device not in self.copies:
            arrays = (self.index.text, self.index.order, self.index.following)
            self.copies[device] = SortedCorpus(*(array.to(device) for array in arrays))
        self.here = self.copies[device]

    def propose(self, level: Level) -> Proposal:
        """Propose what followed each frontier node's longest context in the corpus; its length is the index."""
        state, sampler = self.state, self.sampler
        tokens, log_probs, matched = corpus_recall(
            self.here,
            level.graph,
            level.frontier.node_ids,
            state.tokens,
            state.out_len,
            state.kv_start,
            vocab=self.vocab,
            backend=sampler.backend,
        )
        return Proposal(tokens, sampler.perturb(tokens, log_probs, level.positions), matched)
