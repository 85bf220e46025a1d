from __future__ import annotations

import torch
from torch import Tensor

from ...graph import TokenGraph
from .index import SortedCorpus


def corpus_recall(
    corpus: SortedCorpus,
    graph: TokenGraph,
    nodes: Tensor,
    tokens: Tensor,
    out_len: Tensor,
    kv_start: Tensor,
    branch: int,
    vocab: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """csrc/algorithms/corpus.h"""
    index = (corpus.text, corpus.order, corpus.following)
    text = (graph.token_ids, graph.parents, tokens, out_len, kv_start)
    return torch.ops.gsd_kernels.corpus_recall(*index, *text, nodes.contiguous(), branch, vocab)
