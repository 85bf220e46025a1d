"""Parts of verification on the host: stopping criteria, what is kept for the output, and its ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import Acceptance, Rows

from ..records import At, DecodeState
from .criteria import ExactMatch
from .sampling import SamplingPlan


class OnHost:
    """An :class:`~gsd_kernels_hf.acceptance.rule.AcceptanceRule` where user code is called for every token.

    Args:
        criterion: which token follows a row.
        state: of the texts, just begun.
        plan: processors and fused warpers.
        eos_ids: end-of-text tokens.
        criteria: stopping criteria, called for every token.
        pads_finished: whether a sequence that ended is padded while others go on.
        keep_scores, keep_logits: whether they are for the output.

    Attributes:
        history: int64 [B, L or more], the texts, padded.
        scores, logits: noted for the output.
        taken_back: tokens of earlier steps that a criterion took back.
    """

    on_device = False
    history: Tensor
    scores: Any
    logits: Any
    taken_back = 0

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
        self.warped_criterion = criterion.of_warped()
        self.batch, self.prompt = state.tokens.shape[0], int(state.out_len[0])
        self.pad = int(state.tokens[0, -1])  # behind the longest text there is room for another step
        self.pads_finished = pads_finished or self.batch == 1
        self.keep_scores, self.keep_logits = keep_scores, keep_logits
        self.done = [False] * self.batch
        self.stopped = [False] * self.batch  # without an eos id, a stopped sequence runs on until all have stopped

    def pick(self, rows: Rows, history: Tensor, scores: Tensor, position: Tensor, at: At) -> Tensor:
        """The token after one row, int32 []; −1 where nothing can be picked.

        Args:
            rows: all rows.
            history: int64 [1, L], the row's text.
            scores: [1, V], processed. Of another dtype than float32 they are compared and cut in their own, as
                transformers does: in float32, scores of float64 would be tied.
            position: int32 [1, 1], index of the token being picked.
            at: the sequence and the row.
        """
        if scores.dtype == torch.float32:
            return self.criterion.picks(rows, scores[None], position, at).view(())
        if self.plan.temperature == 0.0:
            return torch.where(scores.isnan().any(), -1, scores.argmax()).to(torch.int32)
        log_probs = self.plan.warpers(history, scores).double().log_softmax(-1).float()  # [1, V]
        return self.warped_criterion.picks(rows, log_probs[None], position, at).view(())

    def settle(self) -> None:
        """Carry the verdicts to the device state, after the commit."""
        state = self.state
        state.done.logical_or_(torch.tensor(self.done, device=state.done.device, dtype=torch.bool))

    @property
    def final_length(self) -> int:
        """Length of the longest sequence."""
        raise NotImplementedError

    def kept(self, steps: int) -> dict[str, tuple[Tensor, ...] | None]:
        """transformers' ``scores`` and ``logits`` of the first ``steps`` positions, [B, V] each."""
        return {
            "scores": self.stacked(self.scores, steps) if self.keep_scores else None,
            "logits": self.stacked(self.logits, steps) if self.keep_logits else None,
        }

    def stacked(self, noted: Any, steps: int) -> tuple[Tensor, ...]:
        """Of what was noted the first ``steps`` positions, [B, V] each."""
        raise NotImplementedError

    def verdicts(self, ids: Tensor, scores: tuple[Tensor, ...] | None) -> list[bool]:
        """Ask the criteria which sequences end, as transformers asks them: ids [B, L], scores [B, V] a position."""
        stops = torch.zeros(self.batch, dtype=torch.bool, device=ids.device)  # [B]
        for criterion in self.criteria:
            stops = stops | criterion(ids, scores)
            if stops.shape != (self.batch,):
                raise ValueError(
                    f"stopping_criteria: {type(criterion).__name__} must return a bool for every sequence, "
                    f"[{self.batch}], or one for all; together with the others' that has shape {list(stops.shape)}"
                )
        return stops.bool().tolist()


def children(rows: Rows, ended: Sequence[bool]) -> list[dict[tuple[int, int], int]]:
    """The row of every row and token after it, by sequence; of those that ``ended``, the chain of their padding."""
    tokens, parents, sizes = rows.token_ids.tolist(), rows.parent_rows.tolist(), rows.num_rows.tolist()
    ends = [len(tokens[b]) if ended[b] else size for b, size in enumerate(sizes)]
    return [{(parents[b][r], tokens[b][r]): r for r in range(1, end)} for b, end in enumerate(ends)]


def accepted(paths: Sequence[list[int]], tokens: Sequence[int], width: int, device: torch.device) -> Acceptance:
    """A step's rows of every sequence, their number, and the token behind them; 0 where nothing is accepted."""
    rows = [path + [-1] * (width - len(path)) for path in paths]
    last = [token if path else 0 for path, token in zip(paths, tokens, strict=True)]
    found = rows, [len(path) for path in paths], last
    return Acceptance(*(torch.tensor(values, dtype=torch.int32, device=device) for values in found))


class NothingToPick(ValueError):
    """Scores from which nothing can be picked, of which no processor is known to be the cause."""


def check_pick(token: int) -> None:
    """Raise for the mark of scores from which nothing can be picked."""
    if token < 0:
        raise NothingToPick(
            "logits: NaN, or while sampling an infinite score or none that is finite, from the target or a "
            "logits_processor; check the weights, their dtype and the processors, or pass remove_invalid_values=True"
        )
