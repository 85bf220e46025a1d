"""History: a draft source without a forward, from the text and what the target picked and nearly picked before."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gsd_kernels import GraphConfig, NgramTable, Rows, ngram_insert, ngram_lookup
from gsd_kernels.config import MAX_CONTEXT

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
        reference = self.text.reference_ids
        if reference is not None:
            texts = per_sequence(reference.to(self.state.tokens.device), self.state.tokens.shape[0])
            self.read(texts, torch.zeros_like(self.state.kv_start))

    def prepare(self, config: GraphConfig) -> None:
        """Read the text so far."""
        if self.unread:
            self.read(self.state.tokens[:, : int(self.state.out_len.min())], self.state.kv_start)
            self.unread = False

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
        k, rows = self.table.tokens.shape[2], verified.rows
        log_probs, tokens = self.sampler.log_probs(verified.logits).topk(min(k, verified.logits.shape[-1]), dim=-1)
        missing = k - tokens.shape[-1]  # a vocabulary smaller than branch
        tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
        log_probs = torch.nn.functional.pad(log_probs, (0, missing), value=-math.inf)
        contexts = row_contexts(rows, verified.tail, self.table.max_context)
        place = torch.arange(rows.token_ids.shape[1], device=tokens.device)
        self._insert(contexts, tokens.to(torch.int32), log_probs, place < rows.num_rows[:, None])

    def _insert(self, contexts: Tensor, tokens: Tensor, log_probs: Tensor, valid: Tensor) -> None:
        ngram_insert(self.table, contexts, tokens, log_probs, valid, backend=self.sampler.backend)

    def propose(self, level: Level) -> Proposal:
        """Continuations of the longest context of each frontier node that is known; its length is the index."""
        graph, node = level.graph, level.frontier.node_ids.clamp(min=0).long()
        before = graph.contexts.gather(1, node[:, :, None].expand(-1, -1, MAX_CONTEXT))[..., :-1]
        contexts = torch.cat([graph.token_ids.gather(1, node)[..., None], before], -1)
        tokens, log_probs, matched = ngram_lookup(self.table, contexts, backend=self.sampler.backend)
        tokens, log_probs = tokens[..., : graph.branch], log_probs[..., : graph.branch]
        log_probs = self.sampler.perturb(tokens, log_probs, level.positions)
        return Proposal(tokens, torch.where(tokens >= 0, log_probs, -math.inf), matched)


def per_sequence(reference_ids: Tensor, batch: int) -> Tensor:
    """One text a sequence, int64 [batch, L]; several sequences of one prompt have the prompt's.

    reference_ids: int [L], or [prompts, L] of as many prompts as divide the batch.
    """
    texts = reference_ids.long().reshape(-1, reference_ids.shape[-1])
    return texts.repeat_interleave(batch // texts.shape[0], 0)


def row_contexts(rows: Rows, tail: Tensor, length: int) -> Tensor:
    """The last ``length`` tokens at every row, its own first, running on into the emitted text.

    tail int32 [B, C]: the tokens before the root. Returns int32 [B, R, length].
    """
    at = torch.arange(rows.token_ids.shape[1], device=tail.device).expand_as(rows.token_ids)
    context = []
    for back in range(length):
        drafted = rows.token_ids.gather(1, at.clamp(min=0))
        emitted = tail.gather(1, (back - 1 - rows.depths).clamp(0, tail.shape[1] - 1).long())
        context.append(torch.where(at >= 0, drafted, emitted))
        at = torch.where(at >= 0, rows.parent_rows.gather(1, at.clamp(min=0)).long(), -1)
    return torch.stack(context, -1)
