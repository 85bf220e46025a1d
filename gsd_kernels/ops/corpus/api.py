from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve
from ...checks import check_tensor
from ...graph import TokenGraph
from . import compiled, reference
from .index import SortedCorpus

IMPLEMENTATIONS = implementations_of("corpus_recall", cpu=compiled, reference=reference)


def corpus_recall(
    corpus: SortedCorpus,
    graph: TokenGraph,
    nodes: Tensor,
    tokens: Tensor,
    out_len: Tensor,
    kv_start: Tensor,
    *,
    vocab: int,
    backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """What followed nodes' contexts in a corpus, with probabilities by counts.

    The context of a node is its token and those before it, along primary paths and on into the text, 16 at most. Of n
    tokens, the most that occur, c(t) of C occurrences (64 at most are counted, evenly spaced) were followed by t, by D
    different tokens in all: P(t) = c(t) / (C + D/n) + (D/n) / (C + D/n) · P′(t), where P′ is the same of ⌊n/2⌋ tokens.
    After three lengths, or 32 occurrences, nothing is left to shorter ones. This is interpolation by the method C of
    Witten and Bell (1991), with less left over the longer the context is.

    There is no GPU kernel: on a GPU, where the index lies in its memory, these are PyTorch's operators, which wait for
    nothing and can be captured. ``backend="cuda"`` and ``"triton"`` take what ``"auto"`` does.

    Args:
        corpus: the index, on the device of the others.
        graph: the graph so far.
        nodes: int32 [B, W], −1 for padding.
        tokens: int64 [B, S], the emitted text; the root is its last token.
        out_len, kv_start: int32 [B], the text's end and its left padding.
        vocab: the target's vocabulary size; no other token is proposed.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        tokens int32 [B, W, K] (−1 for none) by probability, of equal ones the lowest id first, log-probabilities
        float32 [B, W, K] (−∞ for none), and the length of the matched context int32 [B, W], 0 for none.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    device, batch = tokens.device, tokens.shape[0]
    check_tensor("nodes", nodes, (batch, None), (torch.int32,), device)
    check_tensor("tokens", tokens, (batch, None), (torch.int64,), device)
    check_tensor("out_len", out_len, (batch,), (torch.int32,), device)
    check_tensor("kv_start", kv_start, (batch,), (torch.int32,), device)
    for name in ("text", "order", "following"):
        check_tensor(f"corpus.{name}", getattr(corpus, name), (None,), (torch.int32,), device)
    if vocab < 1:
        raise ValueError(f"vocab: expected a vocabulary size, got {vocab}")
    function = resolve("auto" if backend in ("cuda", "triton") else backend, device, IMPLEMENTATIONS)
    return function(corpus, graph, nodes, tokens, out_len, kv_start, graph.branch, vocab)
