"""The lessons that a call leaves to a draft that learns while serving, and the losses on them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels_hf.model import properties
from gsd_kernels_hf.model.hidden import LAST
from gsd_kernels_hf.records import Verified
from gsd_kernels_hf.sources.heads import DraftHeads

HEAD_WEIGHT = 0.8
"""Weight of a head's loss, to the power of its number: later tokens are harder (arXiv 2401.10774, section 2.2.1)."""


@dataclass(frozen=True, eq=False)
class Lesson:
    """The end of one sequence as its call verified it, on the host.

    Attributes:
        tokens: int64 [N], the last n of which were emitted.
        labels: int64 [n, K], the target's likeliest tokens at the places of those.
        log_probs: float32 [n, K], theirs.
        hidden: [n, D], what the output matrix read to pick each of the n; ``None`` where nobody asked for it.
    """

    tokens: Tensor
    labels: Tensor
    log_probs: Tensor
    hidden: Tensor | None


class Notes:
    """Takes down what every step of a call verified; on the device until the call is over.

    Args:
        window: last tokens of a sequence that count; as many steps are kept, each of which emits one or more.
        top: K, labels of a token.
        vocab: tokens that target and draft both have.
        hidden: whether hidden states are needed.
    """

    def __init__(self, window: int, top: int, vocab: int, *, hidden: bool) -> None:
        self._window, self._top, self._vocab, self._hidden = window, min(top, vocab), vocab, hidden
        self._steps: deque[tuple[Tensor, ...]] = deque(maxlen=window)
        self._count = 0

    def beside(self, observer: Callable[[Verified], None] | None) -> Callable[[Verified], None]:
        """An observer that does what ``observer`` does, and takes notes."""
        if observer is None:
            return self.take

        def both(verified: Verified) -> None:
            observer(verified)
            self.take(verified)

        return both

    def take(self, verified: Verified) -> None:
        """Take down a step: a few numbers of every accepted row, nothing of which waits for the device."""
        accepted = verified.accepted
        rows = accepted.accepted_rows.clamp(min=0).long()[..., None]  # [B, P, 1]
        logits = verified.logits[..., : self._vocab]
        logits = logits.gather(1, rows.expand(-1, -1, logits.shape[2])).float()
        likely = logits.topk(self._top)
        notes = [
            accepted.num_accepted.clone(),
            verified.tokens.clone(),
            likely.indices,
            likely.values - logits.logsumexp(-1, keepdim=True),
        ]
        if self._hidden:
            hidden = verified.hidden[LAST]
            notes.append(hidden.gather(1, rows.to(hidden.device).expand(-1, -1, hidden.shape[2])))
        self._steps.append(tuple(notes))
        self._count += 1

    def lessons(self, prompt: Tensor | None, attention_mask: Tensor | None) -> list[Lesson]:
        """One of each sequence that anything was emitted in.

        Args:
            prompt: int64 [b, length], of each sequence or of each group of as many; ``None``: none.
            attention_mask: [b, length], 0 where the prompt is padded.
        """
        steps = [[part.cpu() for part in step] for step in self._steps]
        lessons = []
        for row in range(len(steps[0][0]) if steps else 0):
            counts = [int(step[0][row]) for step in steps]
            tokens, labels, log_probs, *hidden = (
                torch.cat([step[part][row, :n] for step, n in zip(steps, counts, strict=True)])[-self._window :]
                for part in range(1, len(steps[0]))
            )
            tokens = tokens.long()
            if not len(tokens):
                continue
            # Where steps were dropped, so were the tokens that stood between the prompt and these.
            if prompt is not None and self._count == len(self._steps):
                at = row * len(prompt) // len(steps[0][0])
                own = prompt[at].cpu().long()
                if attention_mask is not None:
                    own = own[attention_mask[at].cpu().bool()]
                tokens = torch.cat([own, tokens])[-self._window :]
            lessons.append(Lesson(tokens, labels.long(), log_probs, hidden[0] if hidden else None))
        return lessons


def soft_loss(logits: Tensor, labels: Tensor, log_probs: Tensor) -> Tensor:
    """Mean cross-entropy of the target's likeliest tokens, their probabilities scaled to a sum of 1.

    Args:
        logits: float [n, V], of the draft.
        labels: int64 [n, K].
        log_probs: float32 [n, K].
    """
    weights = log_probs.to(logits.device, logits.dtype).softmax(-1)
    return -(weights * logits.log_softmax(-1).gather(1, labels.to(logits.device))).sum(-1).mean()


def draft_loss(draft: PreTrainedModel, lesson: Lesson) -> Tensor | None:
    """Loss of a draft model on the emitted tokens, or ``None`` where there is none with a token before it."""
    count = min(len(lesson.labels), len(lesson.tokens) - 1)
    if count < 1:
        return None
    vocab = properties.vocabulary(draft)
    tokens = torch.where(lesson.tokens < vocab, lesson.tokens, 0)[None, :-1].to(draft.device)
    logits = draft(tokens, use_cache=False).logits[0, -count:, :vocab]
    return soft_loss(logits, lesson.labels[-count:], lesson.log_probs[-count:])


def heads_loss(heads: DraftHeads, target: PreTrainedModel, lesson: Lesson) -> Tensor | None:
    """Sum over heads k of 0.8^k times their loss: head k at one token's place guesses the one k + 1 behind it."""
    assert lesson.hidden is not None
    lm_head = target.get_output_embeddings()
    total = None
    states = heads.states(lesson.hidden.to(heads.weight.device))  # [n, H, D]
    for k in range(min(heads.num_heads, len(states) - 1)):
        state = states[: len(states) - k - 1, k]
        if heads.output is not None:
            logits = state @ heads.output[k].T
        else:
            logits = lm_head(state.to(lm_head.weight.dtype)).to(state.dtype)
        loss = HEAD_WEIGHT**k * soft_loss(logits, lesson.labels[k + 1 :], lesson.log_probs[k + 1 :])
        total = loss if total is None else total + loss
    return total
