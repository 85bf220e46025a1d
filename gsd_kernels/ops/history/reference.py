from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...graph import TokenGraph
from ..ngram import NgramTable, ngram_remember
from ..ngram.reference import context_keys, perturb_candidates, sets_of
from . import records as r
from .records import Recollection, Seen

Vote = list[tuple[int, float]]
"""Weights by their number, and the feature that each is multiplied by."""


@dataclass
class Evidence:
    """All that is known of one node.

    Attributes:
        votes: by candidate, in the order in which sources name them, one of each source that does.
        none: of "none of them".
        matched: see :func:`~gsd_kernels.ops.history.history_recall`.
    """

    votes: dict[int, list[Vote]] = field(default_factory=dict)
    none: Vote = field(default_factory=list)
    matched: int = 0

    def scores(self, weights: list[float]) -> tuple[list[float], float]:
        """Of every candidate, and of none."""
        found = [sum(_summed(vote, weights) for vote in votes) for votes in self.votes.values()]
        return found, _summed(self.none, weights)

    def hear(self, entry: list[tuple[int, float]], begin: int, *, longest: bool, pace: Vote, skipped: int = -1) -> None:
        """The votes of one list of candidates, whose weights begin at ``begin``."""
        alone, first = len(entry) < 2 or entry[1][0] < 0, True
        for token, log_prob in entry:
            if token < 0 or token == skipped:
                continue
            features = (1.0, log_prob, float(first), float(alone)) * (2 if longest else 1)
            vote = list(enumerate(features, begin))
            vote += pace if longest and first else []
            self.votes.setdefault(token, []).append(vote)
            first = False


def _summed(vote: Vote, weights: list[float]) -> float:
    return sum(weights[i] * value for i, value in vote)


def history_recall(
    known: Recollection,
    graph: TokenGraph,
    nodes: Tensor,
    first_pick: Tensor | None = None,
    seed: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The likeliest tokens after nodes of a graph, by all that is remembered.

    Candidates come from the contexts of 1 … 4 tokens that the table knows, from what followed the longest matches of
    the text itself (five tokens or more), from contexts of other texts, and after the root from what was nearly picked
    in its place. A log-linear mixture weighs them: a candidate's score is the sum of what every source that names it
    says, "none of them" has a score of its own, and the chances are their softmax. So a chance is how often such a
    candidate is right, whichever source it is from. :mod:`~gsd_kernels.ops.history.records` has the features.

    Args:
        known: of at least the graph's branch.
        graph: with the tokens before each node.
        nodes: int32 [B, W], −1 for padding, which is answered as the root.
        first_pick, seed, sequence_ids: as :func:`~gsd_kernels.ops.ngram.ngram_recall` takes them, all or none; the
            tables' candidates are weighed with the noise that the target will draw with.

    Returns:
        tokens int32 [B, W, K] (best first, −1 for none), log-probabilities float32 [B, W, K] (−∞ for none), and int32
        [B, W]: 0 where nothing is known, the length of the longest context, 5 for a match of five tokens or more, 6
        where only others than the text know something.
    """
    branch = graph.branch
    tokens = torch.full((*nodes.shape, branch), -1, dtype=torch.int32, device=nodes.device)
    log_probs = torch.full((*nodes.shape, branch), -torch.inf, dtype=torch.float32, device=nodes.device)
    matched, weights = torch.zeros_like(nodes), known.weights.tolist()
    for b, row in enumerate(nodes.clamp(min=0).tolist()):
        for w, node in enumerate(row):
            noise = None
            if first_pick is not None and seed is not None and sequence_ids is not None:
                position = first_pick[b] + graph.depths[b, node]
                noise = {"positions": position[None, None], "seed": seed, "sequence_ids": sequence_ids[b : b + 1]}
            found = evidence(known, graph, b, node, noise)
            recent = [int(graph.token_ids[b, node]), *graph.contexts[b, node].tolist()]
            learned = known.learned
            hear_learned(found, [] if learned is None else _lists(learned, 0, recent, r.LEARNED_ORDERS, noise))
            scores, none = found.scores(weights)
            total = torch.tensor([none, *scores], dtype=torch.float64, device="cpu").logsumexp(0)
            order = sorted(range(len(scores)), key=lambda i: -scores[i])[:branch]
            named = list(found.votes)
            tokens[b, w, : len(order)] = torch.tensor([named[i] for i in order], dtype=torch.int32, device="cpu")
            chances = torch.tensor([scores[i] for i in order], dtype=torch.float64, device="cpu") - total
            log_probs[b, w, : len(order)] = chances.float()
            matched[b, w] = found.matched
    return tokens, log_probs, matched


def evidence(
    known: Recollection, graph: TokenGraph, b: int, node: int, noise: dict[str, Tensor] | None = None
) -> Evidence:
    """All that sequence ``b``'s own text says of a node, with the noise that it will be drawn with."""
    depth, token = int(graph.depths[b, node]), int(graph.token_ids[b, node])
    context = _context(known, graph, b, node)
    recent = [token, *graph.contexts[b, node].tolist()]
    text = _lists(known.table, b, recent, r.ORDERS, noise)
    longest = _longest(text)
    pace, behind = math.log(max(int(known.emitted[b]), 1)), int(depth > 0)

    found = Evidence()
    found.none = [
        (r.NONE_WEIGHTS, 1.0),
        (r.NONE_TEXT + longest, 1.0),
        (r.NONE_DEPTH + bisect_right(r.DEPTHS, max(depth, 0)) - 1, 1.0),
        (r.NONE_PACE + behind, pace),
    ]
    for order, entry in enumerate(text, 1):
        more = [(r.PACE_WEIGHTS + 2 + behind, pace)]
        found.hear(entry, (order - 1) * r.LIST_FEATURES, longest=order == longest, pace=more)
    if longest:
        found.none.append((r.NONE_REST + longest - 1, _log_rest(text[longest - 1])))
    if depth == 0 and known.runners.shape[1] and int(known.runners[b, 0]) >= 0:
        entry = _clipped(known.runners[b], known.runner_log_probs[b])
        found.hear(entry, (r.LISTS - 1) * r.LIST_FEATURES, longest=False, pace=[], skipped=token)
        found.none += [(r.NONE_REST + r.ORDERS + 1, _log_rest(entry)), (r.NONE_RUNNER, entry[0][1])]
    copies = _copies(known, b, context)
    bucket = [bisect_right(r.COPY_LENGTHS, length) - 1 for _, length in copies]
    found.none.append((r.NONE_COPY + (1 + bucket[0] if copies else 0), 1.0))
    for i, (following, _) in enumerate(copies):
        vote = [(r.COPY_WEIGHTS + i * len(r.COPY_LENGTHS) + bucket[i], 1.0)]
        vote += [(r.PACE_WEIGHTS + behind, pace)] if i == 0 else []
        found.votes.setdefault(following, []).append(vote)
    found.matched = r.COPIED if copies else longest
    return found


def hear_learned(found: Evidence, lists: list[list[tuple[int, float]]]) -> None:
    """Add what was learned before of every length of the node's context to what its own text says."""
    longest = _longest(lists)
    for order, entry in enumerate(lists, 1):
        found.hear(entry, (r.ORDERS + order - 1) * r.LIST_FEATURES, longest=order == longest, pace=[])
    found.none.append((r.NONE_LEARNED + longest, 1.0))
    if longest:
        found.none.append((r.NONE_REST + r.ORDERS, _log_rest(lists[longest - 1])))
    found.matched = found.matched or (r.ELSEWHERE if found.votes else 0)


def _longest(lists: list[list[tuple[int, float]]]) -> int:
    return max((order for order, entry in enumerate(lists, 1) if entry), default=0)


def _context(known: Recollection, graph: TokenGraph, b: int, node: int) -> list[int]:
    """The last tokens at a node, its own first: up the graph, then on in the text before the root."""
    found = []
    while node >= 0 and len(found) < r.COPY_MOST:
        found.append(int(graph.token_ids[b, node]))
        node = int(graph.parents[b, node])
    for token in known.text[b, : max(int(known.length[b]) - 1, 0)].flip(0).tolist():
        if token < 0 or len(found) == r.COPY_MOST:
            break
        found.append(token)
    return found


def _clipped(tokens: Tensor, log_probs: Tensor) -> list[tuple[int, float]]:
    claimed = torch.where(log_probs > r.LEAST_EVIDENCE, log_probs.double(), r.LEAST_EVIDENCE).clamp(max=0.0)
    return list(zip(tokens[: r.REMEMBERED].tolist(), claimed[: r.REMEMBERED].tolist(), strict=True))


def _lists(
    table: NgramTable, b: int, recent: list[int], orders: int, noise: dict[str, Tensor] | None
) -> list[list[tuple[int, float]]]:
    """The lists that a table holds of every length of a context; empty lists where it holds nothing."""
    lengths = min(table.max_context, orders)
    keys = context_keys(torch.tensor([[recent[:lengths]]], dtype=torch.int32, device="cpu"), lengths)[0, 0]  # [lengths]
    sets = table.keys[b].view(-1, table.ways)
    found: list[list[tuple[int, float]]] = []
    for key in keys.tolist():
        home = int(sets_of(torch.tensor(key, dtype=torch.int64, device="cpu"), len(sets)))
        ways = [] if key == 0 else (sets[home] == key).nonzero()[:1].flatten().tolist()
        if not ways:
            found.append([])
            continue
        at = home * table.ways + ways[0]
        tokens, log_probs = (t[b, at, : r.REMEMBERED][None, None] for t in (table.tokens, table.log_probs))
        log_probs = torch.where(tokens >= 0, log_probs, -torch.inf)
        if noise is not None:
            log_probs = perturb_candidates(tokens, log_probs, **noise)
        found.append(_clipped(tokens[0, 0], log_probs[0, 0]))
    return found


def _log_rest(entry: list[tuple[int, float]]) -> float:
    """The logarithm of what candidates leave to all other tokens."""
    rest = 1.0
    for token, log_prob in entry:
        rest -= math.exp(log_prob) if token >= 0 else 0.0
    return math.log(max(rest, r.LEAST_REST))


def _hash(known: Recollection, nearest: list[int]) -> int:
    """Of five tokens, the nearest first; −1 where one is none."""
    if len(nearest) < r.COPY_CONTEXT or min(nearest) < 0:
        return -1
    key = context_keys(torch.tensor([[nearest]], dtype=torch.int32, device="cpu"), r.COPY_CONTEXT)[0, 0, -1]
    return int(sets_of(key, known.heads.shape[1]))


def _copies(known: Recollection, b: int, context: list[int]) -> list[tuple[int, int]]:
    """The tokens that followed the longest matches of a context, and their lengths; of equal ones the newest."""
    at = _hash(known, context[: r.COPY_CONTEXT])
    text, length, found = known.text[b].tolist(), int(known.length[b]), dict[int, int]()
    place = int(known.heads[b, at]) if at >= 0 else 0
    for _ in range(r.COPY_VISITS):
        if place <= 0:
            break
        here, place = place, int(known.previous[b, place - 1])
        if here >= length or text[here] < 0:
            continue  # nothing follows yet
        same = 0
        while same < min(len(context), here) and text[here - 1 - same] == context[same]:
            same += 1
        if same >= r.COPY_CONTEXT and same > found.get(text[here], 0):
            found.pop(text[here], None)  # of equal lengths that which was as long first
            found[text[here]] = same
    return sorted(found.items(), key=lambda item: -item[1])[: r.COPIES]


def history_append(known: Recollection, tokens: Tensor, counts: Tensor, seen: Seen | None = None) -> None:
    """Append what a step emitted to the text, in place, and remember what the target found likely at its rows.

    The runners-up are those where the last token was picked. Tokens for which there is no room are left out.

    Args:
        known: what they are appended to.
        tokens: int32 [B, M], −1 where no match may go across.
        counts: int32 [B], how many of each row; where there is none, the text and the runners-up stay as they are.
        seen: of the step; ``None`` where nothing was drafted: nothing is remembered, and there are no runners-up.
    """
    for b, row in enumerate(tokens.tolist()):
        count = min(max(int(counts[b]), 0), len(row))
        if count:
            known.emitted[b], known.runners[b] = count, -1
        if count and seen is not None:
            at, kept = max(int(seen.accepted_rows[b, count - 1]), 0), min(known.runners.shape[1], seen.tokens.shape[2])
            known.runners[b, :kept] = seen.tokens[b, at, :kept]
            known.runner_log_probs[b, :kept] = seen.log_probs[b, at, :kept]
        for token in row[:count]:
            place = int(known.length[b])
            if place >= known.text.shape[1]:
                break
            known.text[b, place], known.previous[b, place] = token, 0
            known.length[b] += 1
            at = _hash(known, known.text[b, max(0, place + 1 - r.COPY_CONTEXT) : place + 1].flip(0).tolist())
            if at >= 0:
                known.previous[b, place] = known.heads[b, at]
                known.heads[b, at] = place + 1
    if seen is not None:
        ngram_remember(known.table, seen.rows, seen.tail, seen.tokens, seen.log_probs, backend="reference")
