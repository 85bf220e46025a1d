"""What the target said before: a draft source that costs no draft forward."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from gsd_kernels import NgramTable, Rows, TokenGraph, ngram_insert, ngram_lookup, perturb_candidates
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.ops.sampling.reference import is_off, warp

from .weights import Mixture, Worth

# How far a remembered continuation is believed before anything was seen, by matched context of 0, 1, 2, … tokens:
# alone, and its share where another source has a say too.
WORTH = (0.0, 0.5, 0.7, 0.85, 0.95)
TRUST = (0.0, 0.3, 0.5, 0.7, 0.85)
PROMPT_PROBABILITY = 0.6  # of a continuation that was read in the prompt


class History:
    """The target's most likely tokens after every context that it was shown, by the last 1 … 4 tokens.

    Filled from the prompt and from every verified row, accepted or not. Read for every node that the draft model
    expands, whose candidates it is mixed with, and for leaves beyond the draft's depth.
    """

    def __init__(
        self,
        table: NgramTable,
        seed: Tensor,
        sequence_ids: Tensor,
        warpers: dict[str, float],
        mixture: Mixture,
        worth: Worth,
        backend: str = "auto",
    ) -> None:
        self.table, self.seed, self.sequence_ids, self.warpers = table, seed, sequence_ids, warpers
        self.mixture, self.worth, self.backend = mixture, worth, backend

    def read(self, tokens: Tensor, kv_start: Tensor) -> None:
        """Remember the continuations in a text that was not verified here; tokens int64 [B, P], left-padded."""
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
        ngram_insert(
            self.table, contexts.contiguous(), following, log_probs, contexts[..., 0] >= 0, backend=self.backend
        )

    def remember(self, rows: Rows, tail: Tensor, logits: Tensor) -> None:
        """Remember the target's best tokens at every verified row. tail int32 [B, C]: the tokens before the root."""
        k = self.table.tokens.shape[2]
        logits = logits.float()
        if not is_off(self.warpers["temperature"], 0.0):
            logits = warp(logits, **self.warpers)
        log_probs, tokens = logits.log_softmax(-1).topk(min(k, logits.shape[-1]), dim=-1)
        missing = k - tokens.shape[-1]  # a vocabulary smaller than branch
        tokens = torch.nn.functional.pad(tokens, (0, missing), value=-1)
        log_probs = torch.nn.functional.pad(log_probs, (0, missing), value=-math.inf)
        contexts = row_contexts(rows, tail, self.table.max_context)
        place = torch.arange(rows.token_ids.shape[1], device=tokens.device)
        ngram_insert(
            self.table,
            contexts,
            tokens.to(torch.int32),
            log_probs,
            place < rows.num_rows[:, None],
            backend=self.backend,
        )

    def candidates(
        self, graph: TokenGraph, frontier: Tensor, positions: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Tensor]:
        """What followed the same tokens as each frontier node's.

        positions int32 [B, W]: index of the token after the node, which keys the sampling noise. Returns tokens and
        remembered log-probabilities [B, W, K], and the length of the matched context [B, W], 0 for none.
        """
        node = frontier.clamp(min=0).long()
        before = graph.contexts.gather(1, node[:, :, None].expand(-1, -1, MAX_CONTEXT))[..., :-1]
        contexts = torch.cat([graph.token_ids.gather(1, node)[..., None], before], -1)
        tokens, log_probs, matched = ngram_lookup(self.table, contexts, backend=self.backend)
        tokens, log_probs = tokens[..., : graph.branch], log_probs[..., : graph.branch]
        if not is_off(self.warpers["temperature"], 0.0):
            log_probs = perturb_candidates(
                tokens, log_probs, positions, seed=self.seed, sequence_ids=self.sequence_ids, backend=self.backend
            )
        return (tokens, torch.where(tokens >= 0, log_probs, -math.inf)), matched


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
