"""History: a draft source without a forward, from the text and what the target picked and nearly picked before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gsd_kernels import GraphConfig, NgramTable, ngram_insert
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.ops.learn import Asked
from gsd_kernels.ops.ngram import ngram_recall, ngram_remember
from gsd_kernels.ops.recall_levels import recall_levels

from ..records import Verified
from .base import DraftSource, Level, Proposal, Text

PROMPT_PROBABILITY = 0.6  # of a continuation that was read in the prompt


class History(DraftSource):
    """The target's most likely tokens after every context that it was given, by the last 1 … 4 tokens.

    Filled from the prompt and from every verified row, accepted or not. Looked up for every expanded node: at the
    levels of a draft model, with whose candidates it is mixed, and at ``history_depth`` levels beyond.
    """

    name = "history"
    # Priors by the length of the matched context: 0, 1, 2, … tokens.
    shares = (0.0, 0.3, 0.5, 0.7, 0.85)
    reliability = (0.0, 0.5, 0.7, 0.85, 0.95)

    def begin(self, text: Text) -> None:
        self.text, self.state, self.sampler = text, text.state, text.sampler
        self.table = NgramTable.empty(self.state.tokens.shape[0], text.branch, self.state.tokens.device)

    def restart(self) -> None:
        self.unread = True  # the text so far is read when it is first needed
        if not self.text.continues:
            self.table.clear()
            if self.text.memory is not None:
                self.text.memory.restore(self.table)
        reference = self.text.reference_ids
        if reference is not None:
            texts = per_sequence(reference.to(self.state.tokens.device), self.state.tokens.shape[0])
            self.read(texts, torch.zeros_like(self.state.kv_start))

    def prepare(self, config: GraphConfig) -> None:
        """Read the text so far."""
        self._read_text()

    def _read_text(self) -> None:
        if self.unread:
            self.read(self.state.tokens[:, : int(self.state.out_len.min())], self.state.kv_start)
            self.unread = False

    def end(self) -> None:
        """Leave what is known now to later calls."""
        if self.text.memory is not None:
            self._read_text()
            self.text.memory.add(self.table)

    def read(self, tokens: Tensor, kv_start: Tensor) -> None:
        """Remember the continuations in a text that was not verified here.

        Args:
            tokens: int64 [B, P], left-padded.
            kv_start: int32 [B], padding.
        """
        length = tokens.shape[1]
        if length < 2:
            return
        place = torch.arange(length, device=tokens.device)
        real = torch.where(place >= kv_start[:, None], tokens, -1).to(torch.int32)
        padded = torch.nn.functional.pad(real, (MAX_CONTEXT - 1, 0), value=-1)
        contexts = padded.unfold(1, MAX_CONTEXT, 1)[:, :-1].flip(-1)  # [B, P − 1, C], nearest first
        k = self.table.tokens.shape[2]
        following = torch.nn.functional.pad(real[:, 1:, None], (0, k - 1), value=-1)
        log_probs = torch.full_like(following, math.log(PROMPT_PROBABILITY), dtype=torch.float32)
        self._insert(contexts.contiguous(), following, log_probs, contexts[..., 0] >= 0)

    def observe(self, verified: Verified) -> None:
        """Remember the target's best tokens at every verified row."""
        if verified.graph is None:
            return
        rows, k = verified.rows, self.table.tokens.shape[2]
        best = self.sampler.candidates(verified.logits, rows.depths, k, noise=False)
        ngram_remember(self.table, rows, verified.tail, *best, backend=self.sampler.backend)

    def _insert(self, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor) -> None:
        ngram_insert(self.table, contexts, tokens, log_probs, valid, backend=self.sampler.backend)

    def warm(self, level: Level, verified: Verified) -> Proposal:
        """Look up what the root is followed by, and remember no row."""
        self.observe(verified)
        return self.propose(level)

    def propose(self, level: Level) -> Proposal:
        """Continuations of the longest context of each frontier node that is known; its length is the index."""
        nodes, backend = level.frontier.node_ids, self.sampler.backend
        return Proposal(*ngram_recall(self.table, level.graph, nodes, **self._noise(level), backend=backend))

    def propose_rest(self, level: Level, log_ratio: Tensor | None) -> tuple[Asked, Tensor] | None:
        """Look up level after level in one call, where there is one."""
        config, backend = level.config, self.sampler.backend
        if backend not in ("auto", "cpu") or unavailable_reason("cpu", self.table.keys.device) is not None:
            return None
        found = recall_levels(
            self.table,
            level.graph,
            level.frontier.node_ids,
            log_ratio,
            level=level.number,
            levels=config.depth + config.history_depth - level.number,
            width=config.history_width,
            merge_context=config.merge_context,
            log_sibling_ratio=config.log_sibling_ratio,
            log_min_prob=config.log_min_prob,
            **self._noise(level),
            backend=backend,
        )
        return Asked(found.node_ids, found.tokens, found.log_probs, found.matched), found.calibrated

    def _noise(self, level: Level) -> dict[str, Tensor]:
        sampler = self.sampler
        if sampler.greedy:
            return {}
        return {"first_pick": level.first_pick, "seed": sampler.seed, "sequence_ids": sampler.sequence_ids}


def per_sequence(reference_ids: Tensor, batch: int) -> Tensor:
    """One text a sequence, int64 [batch, L]; several sequences of one prompt have the prompt's.

    reference_ids: int [L], or [prompts, L] of as many prompts as divide the batch.
    """
    texts = reference_ids.long().reshape(-1, reference_ids.shape[-1])
    return texts.repeat_interleave(batch // texts.shape[0], 0)
