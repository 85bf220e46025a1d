"""Corpus: a draft source without a forward, from texts that were indexed on disk."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import PreTrainedModel

from gsd_kernels.ops.corpus import MAX_MATCH, SortedCorpus, corpus_recall

from ..corpus.index import open_corpus
from ..files import path_of
from ..model import properties
from .base import Level, OwnSource, Proposal, Text


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
        header: tokens, documents and origin, see :class:`~gsd_kernels_hf.corpus.index.Header`.

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
        return _reopened, (str(self.folder.absolute()), self.name)

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
        if not sampler.greedy:
            log_probs = sampler.perturb(tokens, log_probs, level.positions)
        return Proposal(tokens, log_probs, matched)


def _reopened(folder: str, name: str) -> Corpus:
    return Corpus(folder, name=name)
