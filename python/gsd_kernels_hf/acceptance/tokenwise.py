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
        self.stopped_at: list[int | None] = [None] * batch  # without an eos id, rows run on until all have stopped
        self.history = state.tokens.clone()  # int64 [B, S]
        self.lengths = state.out_len.tolist()
        self.done = [False] * batch

    def accept(self, rows: Rows, logits: Tensor, positions: Tensor, max_path: int) -> Acceptance:
        """See :class:`~gsd_kernels_hf.acceptance.rule.AcceptanceRule`; marks sequences that a criterion stops."""
        state = self.state
        batch, width = rows.token_ids.shape[0], max_path + 1
        tokens, parents = rows.token_ids.tolist(), rows.parent_rows.tolist()
        sizes, remaining = rows.num_rows.tolist(), state.remaining.tolist()
        paths, picks = [], []
        for b in range(batch):
            if self.done[b]:
                paths.append([-1] * width)
                picks.append(0)
                continue
            children = {(parents[b][r], tokens[b][r]): r for r in range(1, sizes[b])}
            path = [0]
            while True:
                row = path[-1]
                token = self._pick(rows, (b, row), logits[b, row].float(), positions[b : b + 1, row : row + 1])
                over = token in self.eos or len(path) >= remaining[b]
                if self._stops(b):
                    if self.pads_finished:
                        over = self.done[b] = True
                    elif self.stopped_at[b] is None:
                        self.stopped_at[b] = self.lengths[b]
                child = children.get((row, token))
                if over or child is None:
                    break
                path.append(child)
            self.done[b] |= token in self.eos or len(path) >= remaining[b]
            paths.append(path + [-1] * (width - len(path)))
            picks.append(token)
        device = rows.token_ids.device
        accepted_rows = torch.tensor(paths, dtype=torch.int32, device=device)
        num_accepted = (accepted_rows >= 0).sum(1, dtype=torch.int32)
        return Acceptance(accepted_rows, num_accepted, torch.tensor(picks, dtype=torch.int32, device=device))

    def settle(self) -> None:
        """After the commit: carry the verdicts to the device state."""
        state = self.state
        if not self.pads_finished and None not in self.stopped_at:
            left = [max(s or 0 for s in self.stopped_at) - n for n in self.lengths]
            state.remaining.copy_(torch.tensor(left, dtype=torch.int32))
            self.done = [d or n <= 0 for d, n in zip(self.done, left, strict=True)]
        state.done.logical_or_(torch.tensor(self.done, device=state.done.device))

    @property
    def final_length(self) -> int:
        """Longest sequence; where rows ran on until all had stopped, the length at which the last one did."""
        if not self.pads_finished and None not in self.stopped_at:
            return max(s or 0 for s in self.stopped_at)
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

    def _stops(self, b: int) -> bool:
        if not self.criteria:
            return False
        batch = len(self.done)
        ids = self.history[b, : self.lengths[b]].expand(batch, -1)
        scores = tuple(s.expand(batch, -1) for s in self.scores[b]) if self.keep_scores else None
        verdicts = [torch.as_tensor(criterion(ids, scores)) for criterion in self.criteria]
        return any(bool(v if v.dim() == 0 else v[b]) for v in verdicts)


def check_pick(token: int) -> None:
    if token < 0:
        raise ValueError(
            "logits: the target produced NaN; check its weights and dtype, or pass remove_invalid_values=True"
        )
