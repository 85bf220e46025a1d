"""A corpus sorted by contexts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

MAX_MATCH = 16
"""Tokens of a context that are compared."""


@dataclass(frozen=True)
class SortedCorpus:
    """A text and its positions, sorted by the tokens up to each, the nearest first: a suffix array of the text read
    backwards, cut at :data:`MAX_MATCH` tokens. Occurrences of a context are neighbours in it."""

    text: Tensor  # int32 [T]; −1 behind every document
    order: Tensor  # int32 [E]; positions of a token that another follows in its document
    following: Tensor  # int32 [E]; the token after each


def sort_corpus(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sort the positions of a text by their contexts, by doubling the number of tokens that ranks stand for.

    The method of Manber and Myers (1993), with numpy's sort for its radix sort: 1 + log₂ 16 sorts of T integers, and
    about 40 bytes a token while it runs.

    Args:
        text: int32 [T], −1 behind every document, the last one included; T < 2³¹.

    Returns:
        ``order`` and ``following`` of :class:`SortedCorpus`; equal contexts by position.
    """
    count = len(text)
    rank = text.astype(np.int64) + 1  # a border is 0, and is ranked as what lies before it is not there
    span, most = 1, int(rank.max(initial=0))
    while span < MAX_MATCH:
        keys = rank * (most + 1)
        keys[span:] += rank[:-span] if span < count else 0
        keys[text < 0] = 0  # no context reaches over a border
        rank, most = _ranks(keys)
        span *= 2
    real = np.flatnonzero((text[:-1] >= 0) & (text[1:] >= 0)) if count > 1 else np.zeros(0, np.int64)
    order = real[np.argsort(rank[real], kind="stable")].astype(np.int32)
    return order, text[order + 1]


def _ranks(keys: np.ndarray) -> tuple[np.ndarray, int]:
    """Each key's number among the different ones in ascending order, and the largest of these numbers."""
    order = np.argsort(keys)
    keys = keys[order]
    new = np.empty(len(keys), dtype=bool)
    new[:1] = False
    np.not_equal(keys[1:], keys[:-1], out=new[1:])
    ranks = np.empty(len(keys), dtype=np.int64)
    ranks[order] = np.cumsum(new)
    return ranks, int(np.count_nonzero(new))
