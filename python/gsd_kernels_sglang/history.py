"""What followed which tokens: in each request, and in all of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from gsd_kernels import NgramTable, mix_candidates, ngram_insert, ngram_lookup

from .options import Options

PROMPT_PROBABILITY = 0.6  # of a continuation that was read in a text, not picked by the target
LONGEST_READ = 1 << 15  # tokens of a text, the last ones
RELIABILITY = (0.0, 0.5, 0.7, 0.85, 0.95)  # of a continuation, by the length of the context that it was found by
OTHERS = (0.4, 0.8, 0.1)  # weight of what other requests know by a context as long, a longer one, a shorter one

Candidates = tuple[Tensor, Tensor]


class History:
    """Two tables on the host: the contexts of every request apart from the others', and those of all together.

    The contexts of all requests lie in one table: a request's number stands in front of each, as the token nearest to
    the continuation. So no storage belongs to a request: one that ends leaves entries that nobody looks up, and the
    least recently used ones are pushed out.

    Args:
        options: length of contexts, capacity, whether requests share what they learn.
        branch: continuations of a context that are kept.
    """

    def __init__(self, options: Options, branch: int) -> None:
        self.context, self.branch = options.context, branch
        self.own = NgramTable.empty(1, branch, "cpu", capacity=options.capacity, max_context=options.context + 1)
        self.shared: NgramTable | None = None
        if options.shared:
            self.shared = NgramTable.empty(1, branch, "cpu", capacity=options.capacity, max_context=options.context)
        lengths = torch.arange(options.context + 1, device="cpu")
        reliability = torch.tensor(RELIABILITY, dtype=torch.float32, device="cpu").log()
        self.log_reliability = reliability[lengths.clamp(max=len(RELIABILITY) - 1)]
        weights = torch.tensor(OTHERS, dtype=torch.float32, device="cpu")[(lengths - lengths[:, None]).sign()]
        weights[0], weights[:, 0] = 1.0, 0.0  # [own match, others']
        self.weights = weights.flatten()  # [(context + 1)²], by the lengths of both matches

    def clear(self) -> None:
        """Forget everything."""
        self.own.clear()
        if self.shared is not None:
            self.shared.clear()

    def read(self, number: int, text: Tensor) -> None:
        """Remember the continuations in a request's text, for this request alone.

        Args:
            number: of the request.
            text: int32 [P].
        """
        text = text[-LONGEST_READ:]
        if len(text) < 2:
            return
        before = pad(text, (self.context - 1, 0), value=-1).unfold(0, self.context, 1)[:-1].flip(-1)  # [P − 1, C]
        tokens = pad(text[1:, None], (0, self.branch - 1), value=-1)  # [P − 1, K]
        log_probs = torch.full(tokens.shape, math.log(PROMPT_PROBABILITY), dtype=torch.float32, device="cpu")
        valid = torch.ones(1, len(tokens), dtype=torch.bool, device="cpu")
        whose = torch.tensor([number], dtype=torch.int32, device="cpu")
        self._insert(self.own, self._numbered(before[None], whose), tokens[None], log_probs[None], valid)

    def remember(self, numbers: Tensor, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor) -> None:
        """Remember the target's most likely continuations of verified rows.

        Args:
            numbers: int32 [B], of the requests.
            contexts: int32 [B, R, C], the tokens up to each row, nearest first, −1 where the text begins.
            tokens: int32 [B, R, K], best first.
            log_probs: float32 [B, R, K].
            valid: bool [B, R], rows that hold a token.
        """
        self._insert(self.own, self._numbered(contexts, numbers), tokens, log_probs, valid)
        if self.shared is not None:
            self._insert(self.shared, contexts, tokens, log_probs, valid)

    def recall(self, numbers: Tensor, contexts: Tensor) -> Candidates:
        """What followed each context, in the request and elsewhere, together.

        Args:
            numbers: int32 [B], of the requests.
            contexts: int32 [B, W, C], nearest token first, −1 where the text begins.

        Returns:
            tokens int32 [B, W, K], best first, −1 for none, and log-probabilities float32 [B, W, K].
        """
        *found, matched = self._lookup(self.own, self._numbered(contexts, numbers))
        matched = (matched - 1).clamp(min=0)  # the number is no token
        own = found[0], self._calibrated(found[1], matched)
        if self.shared is None:
            return own
        *found, elsewhere = self._lookup(self.shared, contexts)
        index = matched * (self.context + 1) + elsewhere
        return mix_candidates(*own, found[0], self._calibrated(found[1], elsewhere), self.weights, index=index)

    def _calibrated(self, log_probs: Tensor, matched: Tensor) -> Tensor:
        return log_probs + self.log_reliability[matched][..., None]

    def _lookup(self, table: NgramTable, contexts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = contexts.shape[:2]
        found = ngram_lookup(table, contexts.reshape(1, -1, contexts.shape[2]).contiguous())
        return tuple(tensor[0].unflatten(0, shape) for tensor in found)  # type: ignore[return-value]

    def _insert(self, table: NgramTable, *entries: Tensor) -> None:
        """Insert contexts, tokens, log-probabilities and validity, [B, R, …], one request after the other."""
        flat = (t.reshape(1, -1, *t.shape[2:]).contiguous() for t in entries)
        ngram_insert(table, *flat)

    def _numbered(self, contexts: Tensor, numbers: Tensor) -> Tensor:
        """Contexts int32 [B, R, C] with the number of their request, int32 [B], in front: [B, R, 1 + C]."""
        whose = numbers[:, None, None].expand(*contexts.shape[:2], 1)
        return torch.cat([whose, contexts[..., : self.context]], -1)
