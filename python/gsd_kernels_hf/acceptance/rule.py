"""The rule that decides what a step accepts: on the device for all rows at once, or token by token on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import Acceptance, Rows, verify
from gsd_kernels.graph import pack_bits

from ..records import At, DecodeState, Unverified
from .criteria import ExactMatch
from .sampling import SamplingPlan, processed

UNUSABLE = "logits: NaN, or while sampling an infinite score or none that is finite"


class OnDevice:
    """The rule where end-of-text tokens and lengths alone end a sequence.

    Args:
        criterion: which token follows a row.
        state: of the texts.
        eos_ids: int32 [E], end-of-text tokens.
        backend: of the op.

    Attributes:
        on_device: whether nothing in :meth:`accept` and :meth:`settle` waits for the device.
        done: the sequences that :meth:`settle` marks; ``None``: it marks none.
    """

    on_device = True
    done = None

    def __init__(self, criterion: ExactMatch, state: DecodeState, eos_ids: Tensor, backend: str) -> None:
        self.criterion, self.state, self.eos_ids, self.backend = criterion, state, eos_ids, backend

    def accept(self, step: Unverified, max_path: int) -> Acceptance:
        """Accept a path of rows in every sequence: a criterion's picks, then :func:`gsd_kernels.verify`.

        Args:
            step: the drafted rows, and the target's logits at them.
            max_path: depth of the deepest row that may be accepted, P − 1.

        Returns:
            Accepted rows int32 [B, P], their number and the bonus token int32 [B].
        """
        return verify(
            step.rows,
            self.criterion.picks(step.rows, step.logits, step.positions),
            eos_ids=self.eos_ids,
            remaining=self.state.remaining,
            done=self.state.done,
            max_path=max_path,
            backend=self.backend,
        )

    def settle(self) -> None:
        """Mark, after the commit, sequences that ended for a reason which the device state does not know: none."""


class OnHost:
    """The rule where user code is called for every token.

    It walks the rows that :func:`gsd_kernels.verify` would; the token after a row is picked only once its history is
    known. Processors of transformers look at one sequence at a time
    (:attr:`~gsd_kernels_hf.acceptance.sampling.SamplingPlan.row_wise`), so each is asked for at its own speed. Others
    may be anybody's: they count calls, combine sequences, hold what cannot be copied. Then all sequences are asked for
    ``together``, once for every position, in order, with texts int64 [B, L] and scores float32 [B, V] of the whole
    batch. A step goes on as long as all of them have a row, and ends where a sequence does. One that ended is padded,
    and its rows are that padding (:func:`padded`).

    Stopping criteria are called as transformers calls them: once for every position, in order, with the whole batch.
    Where sequences advance at different speeds, a position is judged as soon as the slowest sequence has reached it,
    and what others have emitted beyond a position that turns out to be their last is taken back. In a step the
    shortest sequence goes first, so that little is.

    Args:
        criterion: which token follows a row.
        state: of the texts, just begun.
        plan: processors and fused warpers.
        eos_ids: end-of-text tokens.
        criteria: stopping criteria, called for every token.
        together: whether all sequences are asked for at once.
        pads_finished: whether a sequence that ended is padded while others go on.
        keep_scores, keep_logits: whether they are for the output.

    Attributes:
        history: int64 [B, S], the texts, padded.
        lengths: of the texts.
        noted: scores and logits for the output, as far as they are kept, [V] by sequence and position.
        judged: how far the criteria have been called.
        judged_scores: [B, V] for every position that they were called at.
        taken_back: tokens of earlier steps that a criterion took back.
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
        together: bool,
        pads_finished: bool,
        keep_scores: bool,
        keep_logits: bool,
    ) -> None:
        self.criterion, self.state, self.plan, self.eos, self.criteria = criterion, state, plan, eos_ids, criteria
        self.warped_criterion = criterion.of_warped()
        self.batch, self.prompt = state.tokens.shape[0], int(state.out_len[0])
        self.together = together
        self.pad = state.pad
        self.pads_finished = pads_finished or self.batch == 1
        self.done = [False] * self.batch
        self.stopped = [False] * self.batch  # without an eos id, a stopped sequence runs on until all have stopped
        self.history = state.tokens.clone()
        self.lengths: list[int] = state.out_len.tolist()
        asked = {"scores": keep_scores, "logits": keep_logits}
        self.noted: dict[str, list[list[Tensor]]] = {
            name: [[] for _ in range(self.batch)] for name in asked if asked[name]
        }
        self.judged, self.judged_scores = self.prompt, ()
        self.taken_back = 0

    def accept(self, step: Unverified, max_path: int) -> Acceptance:
        """See :meth:`OnDevice.accept`; marks sequences that end."""
        more = self.state.tokens.shape[1] - self.history.shape[1]  # the text's storage grows with it
        if more > 0:
            self.history = torch.nn.functional.pad(self.history, (0, more), value=self.pad)
        ended, before, remaining = list(self.done), list(self.lengths), self.state.remaining.tolist()
        if self.together:  # those that ended had more left
            remaining = [min(remaining)] * self.batch
        below = children(step.rows, [self.together and done for done in ended])
        paths = [[0] for _ in ended]
        walking = [list(range(self.batch))] if self.together else [[b] for b, done in enumerate(ended) if not done]
        while walking:
            group = min(walking, key=lambda some: (self.lengths[some[0]], some[0]))
            tokens = self._pick(step, group, [paths[b][-1] for b in group])
            for b, token in zip(group, tokens, strict=True):
                full = self.lengths[b] - before[b] >= remaining[b]
                self.done[b] = self.done[b] or full or (self.pads_finished and token in self.eos)
            self._judge()
            following = [below[b].get((paths[b][-1], token)) for b, token in zip(group, tokens, strict=True)]
            if None in following or len(paths[group[0]]) > max_path or (self.together and self.done != ended):
                walking.remove(group)
            else:
                for b, row in zip(group, following, strict=True):
                    paths[b].append(row)
            walking = [some for some in walking if self.together or not self.done[some[0]]]
        # Up to the ends of sequences, which criteria may have taken back to before the step.
        counts = [now - then for now, then in zip(self.lengths, before, strict=True)]
        self.taken_back += sum(max(0, -count) for count in counts)
        kept = [[] if over else path[: max(0, n)] for over, path, n in zip(ended, paths, counts, strict=True)]
        last = [int(text[length - 1]) for text, length in zip(self.history, self.lengths, strict=True)]
        return accepted(kept, last, max_path + 1, step.rows.token_ids.device)

    def settle(self) -> None:
        """Carry the verdicts to the device state, after the commit."""
        state = self.state
        state.done.logical_or_(torch.tensor(self.done, device=state.done.device, dtype=torch.bool))

    def kept(self, steps: int) -> dict[str, tuple[Tensor, ...]]:
        """transformers' ``scores`` and ``logits`` of the first ``steps`` positions, [B, V] each."""
        return {name: tuple(_noted(rows, at) for at in range(steps)) for name, rows in self.noted.items()}

    def _pick(self, step: Unverified, group: list[int], at: list[int]) -> list[int]:
        """Append the token after the row of each sequence of a group, which are of one length; padding where it ended.

        Returns:
            The tokens.
        """
        logits = step.logits
        index = tuple(torch.tensor(places, device=logits.device, dtype=torch.int64) for places in (group, at))
        length = self.lengths[group[0]]
        history = self.history[group, :length]  # [n, L]; a copy, since user code may keep it
        raw = logits[index].float()  # [n, V]; a copy, which processors may write to and keep
        scores, after = raw, []
        for processor in self.plan.processors:
            scores = checked(named(processor), processed(processor, group, self.batch, history, scores), raw.shape)
            after.append((named(processor), scores))
        picks = []
        for i, (b, row) in enumerate(zip(group, at, strict=True)):
            if not self.done[b]:
                only = (slice(b, b + 1), slice(row, row + 1))
                picks.append(self._pick_one(step, history[i : i + 1], scores[i : i + 1], only))
        picked = iter(torch.stack(picks).tolist())
        tokens = [self.pad if self.done[b] else next(picked) for b in group]
        if min(tokens) < 0:
            i = min(range(len(group)), key=tokens.__getitem__)
            self._blame(group[i], logits[group[i], at[i]], [(name, some[i]) for name, some in after])
        warped = self.plan.warpers(history, scores.clone()) if "scores" in self.noted else scores
        told = {"scores": warped, "logits": raw}  # transformers' own is what processors wrote to as well
        for i, b in enumerate(group):
            for name, rows in self.noted.items():
                rows[b].append(told[name][i])
            self.history[b, length] = tokens[i]
            self.lengths[b] += 1
        return tokens

    def _pick_one(self, step: Unverified, history: Tensor, scores: Tensor, at: At) -> Tensor:
        """The token after one row, int32 []; −1 where nothing can be picked.

        Args:
            step: whose rows are decided on.
            history: int64 [1, L], the row's text.
            scores: [1, V], processed. Of another dtype than float32 they are compared and cut in their own, as
                transformers does: in float32, scores of float64 would be tied.
            at: the sequence and the row.
        """
        if scores.dtype == torch.float32:
            return self.criterion.picks(step.rows, scores[None], step.positions[at], at).view(())
        if self.plan.temperature == 0.0:
            return torch.where(scores.isnan().any(), -1, scores.argmax()).to(torch.int32)
        log_probs = self.plan.warpers(history, scores).double().log_softmax(-1).float()  # [1, V]
        return self.warped_criterion.picks(step.rows, log_probs[None], step.positions[at], at).view(())

    def _judge(self) -> None:
        """Call the criteria at every position that all sequences have reached; finished ones are padded."""
        growing = [n for n, done in zip(self.lengths, self.done, strict=True) if not (done and self.pads_finished)]
        while self.criteria and self.judged < min(growing, default=max(self.lengths)):
            self.judged += 1
            stops = self._verdicts(self.judged)
            if not self.pads_finished:
                self.stopped = [a or b for a, b in zip(self.stopped, stops, strict=True)]
                stops = [all(self.stopped)] * self.batch
            for b, stop in enumerate(stops):
                if stop and self.lengths[b] >= self.judged:
                    self._end(b, self.judged)

    def _verdicts(self, length: int) -> list[bool]:
        """Ask the criteria which sequences end, as transformers asks them: ids [B, L], scores [B, V] a position."""
        scores = self.noted.get("scores")
        if scores is not None:
            self.judged_scores += (_noted(scores, length - self.prompt - 1),)
        ids = self.history[:, :length].clone()  # a criterion may keep it
        stops = torch.zeros(self.batch, dtype=torch.bool, device=ids.device)  # [B]
        for criterion in self.criteria:
            stops = stops | criterion(ids, None if scores is None else self.judged_scores)
            if stops.shape != (self.batch,):
                raise ValueError(
                    f"stopping_criteria: {type(criterion).__name__} must return a bool for every sequence, "
                    f"[{self.batch}], or one for all; together with the others' that has shape {list(stops.shape)}"
                )
        return stops.bool().tolist()

    def _end(self, b: int, length: int) -> None:
        """End a sequence at ``length``, whatever it emitted beyond."""
        self.done[b] = True
        self.history[b, length : self.lengths[b]] = self.pad
        self.lengths[b] = length
        for rows in self.noted.values():
            del rows[b][length - self.prompt :]

    def _blame(self, b: int, logits: Tensor, after: list[tuple[str, Tensor]]) -> None:
        """Raise for scores of sequence ``b`` from which nothing can be picked, naming where they come from."""
        culprits = [name for name, scores in after if self._unusable(scores)]
        if culprits and not self._unusable(logits):
            raise ValueError(
                f"{UNUSABLE}, in sequence {b} after the logits_processor {culprits[0]}; mend it, or pass "
                "remove_invalid_values=True"
            )
        check_pick(-1)

    def _unusable(self, scores: Tensor) -> bool:
        """Return whether nothing can be picked from scores [V]."""
        drawn = self.plan.temperature > 0 and bool(scores.isneginf().all() | (scores == math.inf).any())
        return drawn or bool(scores.isnan().any())


AcceptanceRule = OnDevice | OnHost
"""Decides which rows a step accepts."""


def _noted(of_rows: list[list[Tensor]], at: int) -> Tensor:
    """Of what was noted of every sequence [V] one position, [B, V]; 0 of sequences that ended before."""
    blank = torch.zeros_like(next(noted for row in of_rows for noted in row))
    return torch.stack([row[at] if at < len(row) else blank for row in of_rows])


def named(processor: object) -> str:
    """The name of a processor in an error: a function's own, any other object's class."""
    return getattr(processor, "__name__", type(processor).__name__)


def checked(name: str, scores: object, shape: torch.Size) -> Tensor:
    """The scores that a processor returned.

    Raises:
        TypeError, ValueError: they are not float scores of every sequence and token.
    """
    expected = f"logits_processor: {name} must return float scores of every sequence and token, {list(shape)}, got"
    if not isinstance(scores, Tensor):
        raise TypeError(f"{expected} {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(f"{expected} {scores.dtype}")
    if scores.shape != shape:
        raise ValueError(f"{expected} {list(scores.shape)}")
    return scores


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
            f"{UNUSABLE}, from the target or a logits_processor; check the weights, their dtype and the processors, or "
            "pass remove_invalid_values=True"
        )


def padded(rows: Rows, state: DecodeState, kv_len: Tensor) -> Rows:
    """The rows that are forwarded where padding is: of a finished sequence, what its text has behind ``kv_len`` [B].

    Where logits processors see the whole batch, they are shown what follows a text that ended, too. All on the device.
    There is nothing to learn from such rows, so none counts in ``num_rows``.
    """
    count, device = rows.token_ids.shape[1], rows.token_ids.device
    place = torch.arange(count, dtype=torch.int32, device=device)  # [R]
    behind = (kv_len[:, None].long() + place).clamp(max=state.tokens.shape[1] - 1)  # [B, R]
    done = state.done[:, None]  # [B, 1]
    return replace(
        rows,
        token_ids=torch.where(done, state.tokens.gather(1, behind).to(torch.int32), rows.token_ids),
        parent_rows=torch.where(done, place - 1, rows.parent_rows),
        depths=torch.where(done, place, rows.depths),
        ancestor_mask=torch.where(done[..., None], pack_bits(place <= place[:, None]), rows.ancestor_mask),
        num_rows=torch.where(state.done, 0, rows.num_rows),
    )


def padded_path(accepted: Acceptance, done: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [B, P] whose keys and values stay, and their number [B]: of sequences that are ``done``, as much padding."""
    count = torch.where(done, accepted.num_accepted.max(), accepted.num_accepted)  # [B]
    place = torch.arange(accepted.accepted_rows.shape[1], dtype=torch.int32, device=done.device)  # [P]
    chain = torch.where(place < count[:, None], place, -1)  # [B, P]
    return torch.where(done[:, None], chain, accepted.accepted_rows), count
