"""Verification on the host, for logits processors and stopping criteria that are called per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import Acceptance, Rows

from ..records import DecodeState
from .criteria import ExactMatch
from .sampling import RowProcessors, SamplingPlan


class TokenByToken:
    """The rule where transformers' processors and stopping criteria are called per token.

    It walks the rows that :func:`gsd_kernels.verify` would; the token after a row is picked only once its history is
    known.

    Stopping criteria are called as transformers calls them: once for every position, in order, with the whole batch.
    Sequences advance at different speeds here, so a position is judged as soon as the slowest sequence has reached
    it, and what others have emitted beyond a position that turns out to be their last is taken back. In a step the
    shortest sequence goes first, so that little is.
    """

    on_device = False

    def __init__(
        self,
        criterion: ExactMatch,
        state: DecodeState,
        plan: SamplingPlan,
        eos_ids: set[int],
        criteria: list[Callable[..., Any]],
        *,
        pads_finished: bool,
        keep_scores: bool,
        keep_logits: bool,
    ) -> None:
        self.criterion, self.state, self.plan, self.eos, self.criteria = criterion, state, plan, eos_ids, criteria
        batch = state.tokens.shape[0]
        self.processors = RowProcessors(plan.processors, batch)
        self.pads_finished = pads_finished or batch == 1
        self.keep_scores, self.keep_logits = keep_scores, keep_logits
        self.scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self.logits: list[list[Tensor]] = [[] for _ in range(batch)]
        self.history = state.tokens.clone()  # int64 [B, S]; the texts, padded
        self.pad = int(self.history[0, -1])  # behind the longest text there is room for another step
        self.lengths: list[int] = state.out_len.tolist()
        self.done = [False] * batch
        self.prompt = self.judged = self.lengths[0]  # how far the criteria have been called
        self.judged_scores: tuple[Tensor, ...] = ()  # [B, V] for every position that they were called at
        self.stopped = [False] * batch  # without an eos id, a stopped sequence runs on until all have stopped
        self.taken_back = 0  # tokens of earlier steps

    def accept(self, rows: Rows, logits: Tensor, positions: Tensor, max_path: int) -> Acceptance:
        """See :class:`~gsd_kernels_hf.acceptance.rule.AcceptanceRule`; marks sequences that end."""
        width = max_path + 1
        more = self.state.tokens.shape[1] - self.history.shape[1]  # the text's storage grows with it
        if more > 0:
            self.history = torch.nn.functional.pad(self.history, (0, more), value=self.pad)
        tokens, parents = rows.token_ids.tolist(), rows.parent_rows.tolist()
        sizes, remaining = rows.num_rows.tolist(), self.state.remaining.tolist()
        before = list(self.lengths)
        paths = [[] if done else [0] for done in self.done]
        children = [{(parents[b][r], tokens[b][r]): r for r in range(1, size)} for b, size in enumerate(sizes)]
        walking = {b for b, path in enumerate(paths) if path}
        while walking:
            b = min(walking, key=lambda sequence: (self.lengths[sequence], sequence))
            row = paths[b][-1]
            token = self._pick(rows, (b, row), logits[b, row].float(), positions[b : b + 1, row : row + 1])
            self.done[b] = token in self.eos or self.lengths[b] - before[b] >= remaining[b]
            self._judge()
            child = children[b].get((row, token))
            if child is None:
                walking.remove(b)
            else:
                paths[b].append(child)
            walking = {sequence for sequence in walking if not self.done[sequence]}
        return self._acceptance(paths, before, width, rows.token_ids.device)

    def settle(self) -> None:
        """Carry the verdicts to the device state, after the commit."""
        state = self.state
        state.done.logical_or_(torch.tensor(self.done, device=state.done.device))

    @property
    def final_length(self) -> int:
        """Length of the longest sequence."""
        return max(self.lengths)

    def stacked(self, per_row: list[list[Tensor]], steps: int) -> tuple[Tensor, ...]:
        """Per-sequence lists of [V] → transformers' tuple of [B, V], one a position."""
        blank = torch.zeros_like(next(t for row in per_row for t in row))
        return tuple(torch.stack([row[i] if i < len(row) else blank for row in per_row]) for i in range(steps))

    def _pick(self, rows: Rows, at: tuple[int, int], logits: Tensor, position: Tensor) -> int:
        b, row = at
        history = self.history[b, : self.lengths[b]]
        scores = self.processors(b, history, logits) if self.processors else logits
        only = (slice(b, b + 1), slice(row, row + 1))
        token = int(self.criterion.picks(rows, scores.view(1, 1, -1), position, only))
        check_pick(token)
        if self.keep_logits:
            self.logits[b].append(logits.clone())
        if self.keep_scores:
            warped = self.plan.warpers(history[None], scores[None].clone())[0]
            self.scores[b].append(warped)
        self.history[b, self.lengths[b]] = token
        self.lengths[b] += 1
        return token

    def _acceptance(self, paths: list[list[int]], before: list[int], width: int, device: torch.device) -> Acceptance:
        """The step's paths up to the ends of sequences; one that ended before the step began accepts nothing."""
        kept, picks = [], []
        for b, path in enumerate(paths):
            count = self.lengths[b] - before[b]
            self.taken_back += max(0, -count)
            kept.append(path[: max(0, count)] + [-1] * (width - min(len(path), max(0, count))))
            picks.append(int(self.history[b, self.lengths[b] - 1]) if count > 0 else 0)
        accepted_rows = torch.tensor(kept, dtype=torch.int32, device=device)
        num_accepted = (accepted_rows >= 0).sum(1, dtype=torch.int32)
        return Acceptance(accepted_rows, num_accepted, torch.tensor(picks, dtype=torch.int32, device=device))

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
        batch = len(self.done)
        if self.keep_scores:
            blank = torch.zeros_like(next(row[0] for row in self.scores if row))
            at = length - self.prompt - 1
            known = [row[at] if at < len(row) else blank for row in self.scores]
            self.judged_scores += (torch.stack(known),)
        ids = self.history[:, :length].clone()  # a criterion may keep it
        stops = torch.zeros(batch, dtype=torch.bool, device=ids.device)
        for criterion in self.criteria:
            stops = stops | criterion(ids, self.judged_scores if self.keep_scores else None)
            if stops.shape != (batch,):
                raise ValueError(
                    f"stopping_criteria: {type(criterion).__name__} must return a bool for every sequence, [{batch}], "
                    f"or one for all; together with the others' that has shape {list(stops.shape)}"
                )
        return stops.bool().tolist()

    def _end(self, b: int, length: int) -> None:
        """End a sequence at ``length``, whatever it emitted beyond."""
        self.done[b] = True
        self.history[b, length : self.lengths[b]] = self.pad
        self.lengths[b] = length
        del self.scores[b][length - self.prompt :], self.logits[b][length - self.prompt :]


def check_pick(token: int) -> None:
    """Raise for the mark of scores from which nothing can be picked."""
    if token < 0:
        raise ValueError(
            "logits: NaN, or while sampling an infinite score or none that is finite, from the target or a "
            "logits_processor; check the weights, their dtype and the processors, or pass remove_invalid_values=True"
        )
