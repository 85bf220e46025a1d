"""Corpora, contexts in them, and what must follow: shared by the tests of corpus_recall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.corpus import MAX_MATCH, SortedCorpus, sort_corpus

VOCAB = 50


def joined(documents: Sequence[Sequence[int]]) -> np.ndarray:
    return np.array([token for document in documents for token in (*document, -1)], dtype=np.int32)


def indexed(documents: Sequence[Sequence[int]]) -> SortedCorpus:
    text = joined(documents)
    return SortedCorpus(*(torch.from_numpy(array) for array in (text, *sort_corpus(text))))


def graph_of(paths: Sequence[Sequence[int]]) -> gsd.TokenGraph:
    """A graph of one sequence a path: root first, each node below the one before."""
    length = max(len(path) for path in paths)
    graph = gsd.TokenGraph.empty(len(paths), gsd.GraphConfig(depth=1, width=1, branch=4, max_rows=8), "cpu")
    graph.token_ids = torch.full((len(paths), length), 9, dtype=torch.int32)
    graph.parents = (torch.arange(length, dtype=torch.int32) - 1).repeat(len(paths), 1)
    for number, path in enumerate(paths):
        graph.token_ids[number, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return graph


def arguments(corpus: SortedCorpus, texts: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> list[object]:
    """Texts, left-padded, each with nodes drafted below its root; all nodes and one of padding are asked."""
    length = max(len(text) for text in texts) + 1
    tokens = torch.full((len(texts), length), 7)  # padding that would match
    for row, text in enumerate(texts):
        tokens[row, length - 1 - len(text) : length - 1] = torch.tensor(text)
    start = torch.tensor([length - 1 - len(text) for text in texts], dtype=torch.int32)
    end = torch.full((len(texts),), length - 1, dtype=torch.int32)
    graph = graph_of([[text[-1], *below] for text, below in zip(texts, drafted, strict=True)])
    width = graph.token_ids.shape[1]
    nodes = torch.arange(-1, width, dtype=torch.int32).repeat(len(texts), 1)
    for row, below in enumerate(drafted):
        nodes[row, len(below) + 2 :] = -1
    return [corpus, graph, nodes, tokens, end, start]


def expected(documents: Sequence[Sequence[int]], context: Sequence[int], vocab: int = VOCAB) -> tuple[dict, int]:
    """Probabilities of what followed a context (nearest token last), as the op's docstring defines them; few enough
    occurrences that all are counted."""
    context = list(context)[-MAX_MATCH:]

    def following(n: int) -> list[int]:
        found = []
        for d in documents:
            found += [d[i + 1] for i in range(n - 1, len(d) - 1) if list(d[i - n + 1 : i + 1]) == context[-n:]]
        return found

    matched = max((n for n in range(1, len(context) + 1) if following(n)), default=0)
    probs, rest, n = Counter(), 1.0, matched
    for _ in range(3):
        if n == 0:
            break
        counts = Counter(token for token in following(n) if token < vocab)
        total, unseen = sum(counts.values()), len(counts) / n
        assert len(following(n)) <= 64, "too many to compare"
        for token, count in counts.items():
            probs[token] += rest * count / (total + unseen)
        rest *= unseen / (total + unseen) if total else 1.0
        n = 0 if total >= 32 else n // 2
    return dict(probs), matched if probs else 0


def contexts(texts: Sequence[Sequence[int]], drafted: Sequence[Sequence[int]]) -> list[list[list[int]]]:
    """The context of every asked node of :func:`arguments` but the first, which is padding."""
    return [[[*text, *below[:n]] for n in range(len(below) + 1)] for text, below in zip(texts, drafted, strict=True)]


def answers(found: tuple[Tensor, Tensor, Tensor], row: int, node: int) -> tuple[dict[int, float], int]:
    tokens, log_probs, matched = (t[row, node] for t in found)
    return {int(t): float(p.exp()) for t, p in zip(tokens, log_probs, strict=True) if t >= 0}, int(matched)
