"""A step's drafts: histories → token graph → rows, in the form in which SGLang verifies a tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gsd_kernels import Rows, TokenGraph, flatten, merge
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.graph import unpack_bits
from gsd_kernels.ops.ngram.reference import node_contexts, real_rows, row_contexts

from .history import History
from .load import RowPolicy
from .options import Options
from .statistics import Statistics

TAIL = MAX_CONTEXT + 1  # tokens of a text that a step reads: the root and its context


@dataclass(frozen=True)
class Text:
    """A request as a step needs it.

    Args:
        key: SGLang's id of the request.
        tail: its last :data:`TAIL` tokens, in order; fewer where it is shorter.
        whole: returns all its tokens; asked once, when the request is new.
    """

    key: str
    tail: Sequence[int]
    whole: Callable[[], Sequence[int]]


@dataclass(frozen=True)
class Drafted:
    """The rows of a step, B requests with R of them each."""

    rows: Rows
    graph: TokenGraph
    tail: Tensor  # int32 [B, C], the tokens before the root, nearest first
    numbers: Tensor  # int32 [B]

    @property
    def num_rows(self) -> int:
        return self.rows.token_ids.shape[1]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """What SGLang's n-gram worker verifies: tokens int64 [B·R] and ancestors bool [B·R·R], request by request."""
        tokens = self.rows.token_ids.long().flatten()
        return tokens.numpy(), unpack_bits(self.rows.ancestor_mask, self.num_rows).flatten().numpy()


class Drafter:
    """Drafts for a batch of requests that changes from step to step, and learns from what was verified. On the host.

    Args:
        options: of the user.
        rows: of a request at most.
        branch: candidates after a token.
        policy: how many rows a step has.
    """

    def __init__(self, options: Options, rows: int, branch: int, policy: RowPolicy) -> None:
        self.config, self.policy = options.graph_config(rows, branch), policy
        self.history = History(options, branch)
        self.statistics = Statistics()
        self.numbers: dict[str, int] = {}  # of the requests being served, by SGLang's id
        self.next_number = 0
        self.graph: TokenGraph | None = None  # storage, of as many requests as there were at once

    def clear(self) -> None:
        """Forget all texts."""
        self.history.clear()
        self.numbers.clear()

    def forget(self, keys: Sequence[str]) -> None:
        """Forget requests that have gone; one that comes back is read anew."""
        for key in keys:
            self.numbers.pop(key, None)

    def draft(self, texts: Sequence[Text]) -> Drafted:
        """Grow and unroll the graphs of a step.

        Args:
            texts: B requests, each with at least one token.
        """
        numbers = torch.tensor([self._number(text) for text in texts], dtype=torch.int32, device="cpu")
        tails = torch.full((len(texts), TAIL), -1, dtype=torch.int32, device="cpu")
        for i, text in enumerate(texts):
            tails[i, : len(text.tail)] = torch.tensor(text.tail[::-1], dtype=torch.int32, device="cpu")
        roots, tail = tails[:, 0], tails[:, 1:].contiguous()
        budget = self.policy.budget(len(texts))
        graph = self._grown(roots, tail, numbers, min(self.config.history_depth, budget - 1))
        rows = flatten(graph, budget, min(int(self.config.max_path or 1), budget - 1))
        rows = rows.first(self.policy.used(budget, int(rows.num_rows.max())))
        return Drafted(rows, graph, tail, numbers)

    def observe(self, drafted: Drafted, candidates: tuple[Tensor, Tensor], tokens: Tensor, counts: Tensor) -> None:
        """Learn from a verified step.

        Args:
            drafted: its rows.
            candidates: the target's most likely tokens after each row, int32 [B, R, K], best first, and their
                log-probabilities, float32.
            tokens: int [B, R], what each request was given; its first ``counts`` ones count.
            counts: int [B], at least 1.
        """
        rows = drafted.rows
        contexts = row_contexts(rows, drafted.tail, self.history.context)
        self.history.remember(drafted.numbers, contexts, *candidates, real_rows(rows))
        self.statistics.add(drafted.rows, drafted.graph, tokens, counts)

    def _number(self, text: Text) -> int:
        """The number of a request; a new one is read."""
        number = self.numbers.get(text.key)
        if number is None:
            number = self.numbers[text.key] = self.next_number
            self.next_number = (self.next_number + 1) % (1 << 31)
            self.history.read(number, torch.tensor(text.whole(), dtype=torch.int32, device="cpu"))
        return number

    def _grown(self, roots: Tensor, tail: Tensor, numbers: Tensor, levels: int) -> TokenGraph:
        """The graphs of a step, from what the histories know."""
        config, batch = self.config, len(roots)
        if self.graph is None or len(self.graph.num_nodes) < batch:
            self.graph = TokenGraph.empty(batch, config, "cpu")
        graph = TokenGraph(*(tensor[:batch] for tensor in self.graph.tensors()))
        graph.reset(roots, tail)
        nodes = graph.root_frontier()
        for level in range(levels):
            frontier = merge(
                graph,
                nodes,
                *self.history.recall(numbers, node_contexts(graph, nodes)),
                level=level,
                width=config.history_width,
                config=config,
            )
            nodes = frontier.node_ids
            if not bool((nodes >= 0).any()):
                break
        return graph
