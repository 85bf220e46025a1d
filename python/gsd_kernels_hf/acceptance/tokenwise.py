"""Verification on the host, for processors and stopping criteria that are called per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gsd_kernels import Acceptance, Rows

from .host import OnHost, accepted, check_pick, children
from .sampling import processed


class TokenByToken(OnHost):
    """The rule where transformers' own processors and stopping criteria are called per token.

    It walks the rows that :func:`gsd_kernels.verify` would; the token after a row is picked only once its history is
    known. Processors look at one sequence at a time (:attr:`~gsd_kernels_hf.acceptance.sampling.SamplingPlan.row_wise`;
    others: :class:`~gsd_kernels_hf.acceptance.lockstep.Lockstep`), so every sequence is asked for at its own speed.

    Stopping criteria are called as transformers calls them: once for every position, in order, with the whole batch.
    Sequences advance at different speeds here, so a position is judged as soon as the slowest sequence has reached
    it, and what others have emitted beyond a position that turns out to be their last is taken back. In a step the
    shortest sequence goes first, so that little is.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        batch = self.batch
        self.scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self.logits: list[list[Tensor]] = [[] for _ in range(batch)]
        self.history = self.state.tokens.clone()  # int64 [B, S]
        self.lengths: list[int] = self.state.out_len.tolist()
        self.judged = self.prompt  # how far the criteria have been called
        self.judged_scores: tuple[Tensor, ...] = ()  # [B, V] for every position that they were called at

    def accept(self, rows: Rows, logits: Tensor, positions: Tensor, max_path: int) -> Acceptance:
        """See :class:`~gsd_kernels_hf.acceptance.rule.AcceptanceRule`; marks sequences that end."""
        more = self.state.tokens.shape[1] - self.history.shape[1]  # the text's storage grows with it
        if more > 0:
            self.history = torch.nn.functional.pad(self.history, (0, more), value=self.pad)
        before, remaining = list(self.lengths), self.state.remaining.tolist()
        paths = [[] if done else [0] for done in self.done]
        below = children(rows, [False] * self.batch)  # those that ended are not walked
        walking = {b for b, path in enumerate(paths) if path}
        while walking:
            b = min(walking, key=lambda sequence: (self.lengths[sequence], sequence))
            row = paths[b][-1]
            token = self._pick(rows, (b, row), logits[b, row].float(), positions[b : b + 1, row : row + 1])
            self.done[b] = token in self.eos or self.lengths[b] - before[b] >= remaining[b]
            self._judge()
            child = below[b].get((row, token))
            if child is None:
                walking.remove(b)
            else:
                paths[b].append(child)
            walking = {sequence for sequence in walking if not self.done[sequence]}
        # Up to the ends of sequences, which criteria may have taken back to before the step.
        counts = [now - then for now, then in zip(self.lengths, before, strict=True)]
        self.taken_back += sum(max(0, -count) for count in counts)
        kept = [path[: max(0, count)] for path, count in zip(paths, counts, strict=True)]
        tokens = [int(text[length - 1]) for text, length in zip(self.history, self.lengths, strict=True)]
        return accepted(kept, tokens, max_path + 1, rows.token_ids.device)

    @property
    def final_length(self) -> int:
        """See :class:`OnHost`."""
        return max(self.lengths)

    def stacked(self, per_row: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
        """See :class:`OnHost`; of lists of [V], a sequence each, with 0 beyond its end."""
        blank = torch.zeros_like(next(t for row in per_row for t in row))
        return tuple(torch.stack([row[i] if i < len(row) else blank for row in per_row]) for i in range(steps))

    def _pick(self, rows: Rows, at: tuple[int, int], logits: Tensor, position: Tensor) -> int:
        b, row = at
        history = self.history[b : b + 1, : self.lengths[b]]  # [1, L]
        scores = processed(self.plan.processors, b, self.batch, history, logits[None])  # [1, V]
        only = (slice(b, b + 1), slice(row, row + 1))
        token = int(self.pick(rows, history, scores, position, only))
        check_pick(token)
        if self.keep_logits:
            self.logits[b].append(logits.clone())
        if self.keep_scores:
            warped = self.plan.warpers(history, scores.clone())[0]
            self.scores[b].append(warped)
        self.history[b, self.lengths[b]] = token
        self.lengths[b] += 1
        return token

    def _judge(self) -> None:
        """Call the criteria at every position that all sequences have reached; finished ones are padded."""
        while self.criteria and self.judged < self._reach():
            self.judged += 1
            length = self.judged
            verdicts = self._verdicts(length)
            if self.pads_finished:
                for b, stops in enumerate(verdicts):
                    if stops and self.lengths[b] >= length:
                        self._end(b, length)
                continue
            self.stopped = [a or b for a, b in zip(self.stopped, verdicts, strict=True)]
            if all(self.stopped):
                for b in range(len(verdicts)):
                    self._end(b, length)

    def _reach(self) -> int:
        """The length up to which the whole batch is known."""
        growing = [n for n, done in zip(self.lengths, self.done, strict=True) if not (done and self.pads_finished)]
        return min(growing, default=max(self.lengths))

    def _verdicts(self, length: int) -> list[bool]:
        if self.keep_scores:
            blank = torch.zeros_like(next(row[0] for row in self.scores if row))
            at = length - self.prompt - 1
            known = [row[at] if at < len(row) else blank for row in self.scores]
            self.judged_scores += (torch.stack(known),)  # [B, V]
        ids = self.history[:, :length].clone()  # a criterion may keep it
        return self.verdicts(ids, self.judged_scores if self.keep_scores else None)

    def _end(self, b: int, length: int) -> None:
        """End a sequence at ``length``, whatever it emitted beyond."""
        self.done[b] = True
        self.history[b, length : self.lengths[b]] = self.pad
        self.lengths[b] = length
        del self.scores[b][length - self.prompt :], self.logits[b][length - self.prompt :]
