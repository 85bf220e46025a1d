"""Records of what is remembered of a text and of others, and the layout of the mixture's weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...graph import Rows
from ..line import Line
from ..ngram import NgramTable

ORDERS = 4  # contexts of the text, 1 … 4 tokens
LEARNED_ORDERS = 3  # contexts of what was learned before
REMEMBERED = 8  # continuations of an entry that are read
COPY_CONTEXT = 5  # tokens from which on a match is looked for in the text itself
COPY_MOST = 48  # tokens of a match that are counted
COPY_VISITS = 64  # places of the text that are compared
COPIES = 2  # different tokens that followed a match
COPY_LENGTHS = (5, 6, 7, 9, 13, 21, 41)  # where buckets of a match's length begin
DEPTHS = (0, 1, 2, 3, 5, 9)  # where buckets of a node's depth begin
LISTS = ORDERS + LEARNED_ORDERS + 1  # by order of the text, of what was learned, and the runners-up
LEAST_EVIDENCE, LEAST_REST = -10.0, 1e-3

LIST_FEATURES = 8
"""Of a candidate in a list: that it is there, its log-probability, whether it is the first, whether it is alone; the
same four again where the list is that of the longest context known."""

# Where the weights of each part begin. Those of candidates: lists, copies by place and length, and two times two by the
# logarithm of the tokens that the step before emitted (pace), at the root and behind it: of the copy, of the longest
# context's first. Those of "none": 1, longest contexts, copy, depth, pace, and what lists leave to other tokens.
COPY_WEIGHTS = LISTS * LIST_FEATURES
PACE_WEIGHTS = COPY_WEIGHTS + COPIES * len(COPY_LENGTHS)
NONE_WEIGHTS = PACE_WEIGHTS + 4
NONE_TEXT = NONE_WEIGHTS + 1
NONE_LEARNED = NONE_TEXT + ORDERS + 1
NONE_COPY = NONE_LEARNED + LEARNED_ORDERS + 1
NONE_DEPTH = NONE_COPY + len(COPY_LENGTHS) + 1
NONE_PACE = NONE_DEPTH + len(DEPTHS)
NONE_REST = NONE_PACE + 2  # of the text's longest, by order; of the longest learned; of the runners-up
NONE_RUNNER = NONE_REST + ORDERS + 2
WEIGHTS = NONE_RUNNER + 1

COPIED, ELSEWHERE = ORDERS + 1, ORDERS + 2
"""What ``matched`` says behind the lengths of contexts: a match of five tokens or more; no context of the text."""


class Seen(NamedTuple):
    """The rows of a step, and what the target found likely after each."""

    rows: Rows
    tail: Tensor  # int32 [B, C], the tokens before the root, nearest first
    accepted_rows: Tensor  # int32 [B, P]
    tokens: Tensor  # int32 [B, R, K], of the table's K; best first
    log_probs: Tensor  # float32 [B, R, K]

    def tensors(self) -> list[Tensor]:
        """All of it, in the order of csrc/torch_ops/history.h."""
        rows = self.rows
        tree = rows.token_ids, rows.parent_rows, rows.depths, rows.num_rows
        return [t.contiguous() for t in (*tree, *self[1:])]


@dataclass
class Recollection:
    """All by which the history answers, one of each a sequence but for the last two, which all share.

    The text is kept beside the table so that matches have no longest length: the places of every five tokens in a row
    are linked, the newest first.
    """

    table: NgramTable  # the target's likeliest tokens after contexts of the text, of 1 … 4 tokens
    text: Tensor  # int32 [B, S]; what was read, −1 between texts
    length: Tensor  # int32 [B]
    heads: Tensor  # int32 [B, H]; 1 + the last place of a hash of five tokens, 0 for none
    previous: Tensor  # int32 [B, S]; 1 + the place before of the same hash, 0 for none
    runners: Tensor  # int32 [B, G]; the likeliest tokens where the root was picked, best first, −1 for none
    runner_log_probs: Tensor  # float32 [B, G]
    emitted: Tensor  # int32 [B]; tokens of the step before, at least 1
    weights: Tensor  # float64 [WEIGHTS]; of the mixture
    learned: NgramTable | None = None  # of one sequence, contexts of 1 … 3 tokens in other texts

    @classmethod
    def empty(
        cls,
        table: NgramTable,
        weights: Tensor,
        learned: NgramTable | None = None,
        *,
        room: int = 1 << 12,
        hashes: int = 1 << 14,
    ) -> Recollection:
        """Nothing read yet.

        Args:
            table: empty, whose storage is used.
            weights: float64 [WEIGHTS].
            learned: see the class.
            room: tokens of a text to begin with, see :meth:`reserve`.
            hashes: a power of two.

        Raises:
            TypeError, ValueError: an argument has the wrong type, shape or value.
        """
        batch, device = table.keys.shape[0], table.keys.device
        if hashes < 1 or hashes & (hashes - 1):
            raise ValueError(f"hashes: expected a power of two, got {hashes}")
        keys = None if learned is None else learned.keys
        Line(f"weights:float64[{WEIGHTS}] learned.keys?:int64[1,N]").check(weights, keys, device=device)

        def numbers(*shape: int, value: int = 0) -> Tensor:
            return torch.full((batch, *shape), value, dtype=torch.int32, device=device)

        runners = numbers(REMEMBERED, value=-1)
        return cls(
            table=table,
            text=numbers(room, value=-1),
            length=numbers(),
            heads=numbers(hashes),
            previous=numbers(room),
            runners=runners,
            runner_log_probs=torch.zeros_like(runners, dtype=torch.float32),
            emitted=numbers(value=1),
            weights=weights,
            learned=learned,
        )

    def written(self) -> list[Tensor]:
        """All that steps write, in the order of csrc/torch_ops/history.h."""
        known = [self.table.keys, self.table.tokens, self.table.log_probs]
        known += [self.text, self.length, self.heads, self.previous]
        return [*known, self.runners, self.runner_log_probs, self.emitted]

    def tensors(self) -> list[Tensor]:
        """All storage, in the order of csrc/torch_ops/history.h."""
        known, learned = [*self.written(), self.weights], self.learned
        return known if learned is None else [*known, learned.keys, learned.tokens, learned.log_probs]

    @property
    def sizes(self) -> list[int]:
        """Tokens of the longest context and entries of a set: of the table, and of what was learned."""
        table, learned = self.table, self.table if self.learned is None else self.learned
        return [table.max_context, table.ways, learned.max_context, learned.ways]

    def clear(self) -> None:
        """Forget the text, but not the table."""
        self.length.zero_()
        self.heads.zero_()
        self.runners.fill_(-1)
        self.emitted.fill_(1)

    def reserve(self, room: int) -> bool:
        """Make room for texts of so many tokens; return whether they lie elsewhere now."""
        added = room - self.text.shape[1]
        if added <= 0:
            return False
        self.text = torch.nn.functional.pad(self.text, (0, added), value=-1)
        self.previous = torch.nn.functional.pad(self.previous, (0, added))
        return True
