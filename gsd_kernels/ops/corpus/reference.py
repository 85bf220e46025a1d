from __future__ import annotations

import torch
from torch import Tensor

from ...graph import TokenGraph
from .index import MAX_MATCH, SortedCorpus

COUNTED = 64  # occurrences of one context that are counted, evenly spaced among all
ORDERS = 3  # lengths of context that are mixed, each half the one before


def contexts_of(graph: TokenGraph, nodes: Tensor, tokens: Tensor, out_len: Tensor, kv_start: Tensor) -> Tensor:
    """The last tokens at nodes, their own first, and on into the emitted text: int32 [B, W, MAX_MATCH], −1 beyond."""
    at, back, context = nodes.long(), torch.zeros_like(nodes, dtype=torch.int64), []
    some = nodes >= 0
    for _ in range(MAX_MATCH):
        drafted = graph.token_ids.gather(1, at.clamp(min=0))
        place = out_len[:, None].long() - 2 - back
        emitted = tokens.gather(1, place.clamp(min=0)).int()
        emitted = torch.where(place >= kv_start[:, None], emitted, -1)
        context.append(torch.where(some, torch.where(at >= 0, drafted, emitted), -1))
        back = torch.where(at >= 0, back, back + 1)
        at = torch.where(at >= 0, graph.parents.gather(1, at.clamp(min=0)).long(), -1)
    return torch.stack(context, -1)


def common(corpus: SortedCorpus, entry: Tensor, context: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """How many of the first ``length`` tokens entries have in common with contexts, and whether they sort before.

    entry int64 [Q], context int32 [Q, MAX_MATCH], length int64 [Q].
    """
    back = torch.arange(MAX_MATCH, device=entry.device)
    place = corpus.order[entry.clamp(0, max(0, len(corpus.order) - 1))][:, None].long() - back
    inside = (place >= 0) & (place < len(corpus.text))
    theirs = torch.where(inside, corpus.text[place.clamp(0, len(corpus.text) - 1)], -1)
    differs = (theirs != context) & (back < length[:, None])
    any_differs = differs.any(1)
    first = differs.int().argmax(1)
    less = (theirs < context).gather(1, first[:, None]).squeeze(1)
    return torch.where(any_differs, first, length), any_differs & less


def bound(corpus: SortedCorpus, context: Tensor, length: Tensor, *, behind: bool) -> Tensor:
    """The first entry that does not sort before a context's first tokens, or sorts behind all that begin so."""
    low = torch.zeros_like(length)
    high = torch.full_like(length, len(corpus.order))
    for _ in range(len(corpus.order).bit_length()):
        middle = (low + high) // 2
        shared, before = common(corpus, middle, context, length)
        go_on = (before | (shared == length)) if behind else before
        low, high = torch.where((low < high) & go_on, middle + 1, low), torch.where((low < high) & ~go_on, middle, high)
    return low


def corpus_recall(
    corpus: SortedCorpus,
    graph: TokenGraph,
    nodes: Tensor,
    tokens: Tensor,
    out_len: Tensor,
    kv_start: Tensor,
    vocab: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Recall what followed nodes' contexts in a corpus, with probabilities by counts.

    The context of a node is its token and those before it, along primary paths and on into the text, 16 at most. Of n
    tokens, the most that occur, c(t) of C occurrences (64 at most are counted, evenly spaced) were followed by t, by D
    different tokens in all: P(t) = c(t) / (C + D/n) + (D/n) / (C + D/n) · P′(t), where P′ is the same of ⌊n/2⌋ tokens.
    After three lengths, or 32 occurrences, nothing is left to shorter ones. This is interpolation by the method C of
    Witten and Bell (1991), with less left over the longer the context is.

    There is no GPU kernel: on a GPU these are PyTorch's operators, which wait for nothing and can be captured.

    Args:
        corpus: the index, on the device of the others.
        graph: the graph so far.
        nodes: int32 [B, W], −1 for padding.
        tokens: int64 [B, S], the emitted text; the root is its last token.
        out_len, kv_start: int32 [B], the text's end and its left padding.
        vocab: the target's vocabulary size; no other token is proposed.

    Returns:
        tokens int32 [B, W, K] (−1 for none) by probability, of equal ones the lowest id first, log-probabilities
        float32 [B, W, K] (−∞ for none), and the length of the matched context int32 [B, W], 0 for none.
    """
    context = contexts_of(graph, nodes, tokens, out_len, kv_start).flatten(0, 1)  # [Q, C]
    entries, device = len(corpus.order), context.device
    length = (context >= 0).long().cumprod(1).sum(1)
    if entries == 0:
        none = torch.full((*nodes.shape, graph.branch), -1, dtype=torch.int32, device=device)
        return none, torch.full_like(none, -torch.inf, dtype=torch.float32), torch.zeros_like(nodes)
    place = bound(corpus, context, length, behind=False)
    before = torch.where(place > 0, common(corpus, place - 1, context, length)[0], 0)
    after = torch.where(place < entries, common(corpus, place, context, length)[0], 0)
    matched = torch.maximum(before, after)

    listed, shares, n = [], [], matched
    rest = torch.ones(len(n), device=device, dtype=torch.float32)
    enough = torch.zeros_like(n, dtype=torch.bool)
    for _ in range(ORDERS):
        low, high = (bound(corpus, context, n, behind=side) for side in (False, True))
        size = torch.where((n > 0) & ~enough, high - low, 0)[:, None]  # [Q, 1]
        count = size.clamp(max=COUNTED)
        i = torch.arange(COUNTED, device=device)
        at = (low[:, None] + i * size // count.clamp(min=1)).clamp(max=entries - 1)
        token = torch.where(i < count, corpus.following[at], -1)
        token = torch.where(token < vocab, token, -1)  # [Q, COUNTED]
        total = (token >= 0).sum(1)
        distinct = _first_of_its_kind(token).sum(1)
        unseen = distinct.float() / n.clamp(min=1).float()
        share = torch.where(total > 0, rest / (total.float() + unseen).clamp(min=torch.finfo(torch.float32).tiny), 0.0)
        listed.append(token)
        shares.append(share)
        rest = torch.where(total > 0, share * unseen, rest)
        enough = enough | (total >= COUNTED // 2)
        n = n // 2

    each = torch.cat(listed, 1)  # [Q, ORDERS · COUNTED]
    probs = torch.zeros_like(each, dtype=torch.float32)
    for token, share in zip(listed, shares, strict=True):
        counts = (each[:, :, None] == token[:, None, :]).sum(2)
        probs = probs + share[:, None] * counts.float()
    probs = torch.where(_first_of_its_kind(each), probs, -1.0)
    by_token = each.argsort(dim=1, stable=True)
    best = probs.gather(1, by_token).sort(dim=1, descending=True, stable=True)
    found = each.gather(1, by_token.gather(1, best.indices)), best.values
    picked, probs = (part[:, : graph.branch] for part in found)
    real, shape = probs >= 0, (*nodes.shape, -1)
    matched = torch.where((each >= 0).any(1), matched, 0).int()
    return (
        torch.where(real, picked, -1).view(shape),
        torch.where(real, probs, 0.0).log().view(shape),
        matched.view(nodes.shape),
    )


def _first_of_its_kind(token: Tensor) -> Tensor:
    """Mark those of [Q, n] that are tokens which no earlier one of their row equals."""
    n = token.shape[1]
    earlier = torch.ones(n, n, dtype=torch.bool, device=token.device).tril(-1)
    return (token >= 0) & ~((token[:, :, None] == token[:, None, :]) & earlier).any(2)
