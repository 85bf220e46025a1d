"""Verification on the host where logits processors are called with the whole batch, as transformers calls them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import Acceptance, Rows
from gsd_kernels.graph import pack_bits

from ..records import DecodeState
from .host import OnHost, accepted, check_pick, children


class Lockstep(OnHost):
    """The rule where processors may be anybody's: they count calls, combine sequences, hold what cannot be copied.

    They are called once for every position, in order, with the texts int64 [B, L] and the scores float32 [B, V] of the
    whole batch; stopping criteria after that. The scores of a position are known once every sequence has a row there,
    so a step goes on as long as all of them have: it brings every sequence the same number of tokens.

    A sequence that ended is padded, and its padding is forwarded too, since processors are shown scores after it. Its
    rows are that padding (:func:`padded`), so it holds no other sequence back. A step ends where a sequence does.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.room = int(self.state.remaining.max())
        self.history = self.state.tokens[:, : self.prompt].clone()
        self.scores: tuple[Tensor, ...] = ()
        self.logits: tuple[Tensor, ...] = ()

    def accept(self, rows: Rows, logits: Tensor, positions: Tensor, max_path: int) -> Acceptance:
        """See :class:`~gsd_kernels_hf.acceptance.rule.AcceptanceRule`; marks sequences that end."""
        ended = list(self.done)
        below = children(rows, ended)
        path = [[0] * self.batch]  # of every position, the row of each sequence
        while True:
            tokens = self._next(rows, logits, positions, path[-1])
            self._append(tokens)
            following = [below[b].get((row, tokens[b])) for b, row in enumerate(path[-1])]
            if self.done != ended or len(path) > max_path or None in following:
                break
            path.append(following)
        paths = [[] if over else [at[b] for at in path] for b, over in enumerate(ended)]
        return accepted(paths, tokens, max_path + 1, rows.token_ids.device)

    @property
    def final_length(self) -> int:
        """See :class:`OnHost`."""
        return self.history.shape[1]

    def stacked(self, noted: tuple[Tensor, ...], steps: int) -> tuple[Tensor, ...]:
        """See :class:`OnHost`; of a sequence that ended, what follows its padding."""
        return noted[:steps]

    def _next(self, rows: Rows, logits: Tensor, positions: Tensor, at: list[int]) -> list[int]:
        """The token after the row of each sequence; the padding where it ended."""
        index = (
            torch.arange(self.batch, device=logits.device),
            torch.tensor(at, device=logits.device, dtype=torch.int64),
        )
        raw = logits[index].float()  # [B, V]; a copy, which processors may write to and keep
        scores, after = raw, []
        for processor in self.plan.processors:
            scores = checked(named(processor), processor(self.history, scores), raw.shape)
            after.append((named(processor), scores))
        picks = []
        for b, row in enumerate(at):
            if not self.done[b]:
                only = (slice(b, b + 1), slice(row, row + 1))
                picks.append(self.pick(rows, self.history[b : b + 1], scores[b : b + 1], positions[only], only))
        picked = iter(torch.stack(picks).tolist())
        tokens = [self.pad if done else next(picked) for done in self.done]
        if min(tokens) < 0:
            b = min(range(self.batch), key=tokens.__getitem__)
            self._blame(b, logits[b, at[b]], after)
        if self.keep_logits:
            self.logits += (raw,)  # transformers' own is what processors wrote to as well
        if self.keep_scores:
            self.scores += (self.plan.warpers(self.history, scores),)
        return tokens

    def _append(self, tokens: list[int]) -> None:
        """Append a token to every text, and ask what ends there."""
        new = torch.tensor(tokens, dtype=self.history.dtype, device=self.history.device)
        self.history = torch.cat([self.history, new[:, None]], 1)  # anew, since user code may keep it
        stops = [False] * self.batch
        if self.criteria:
            stops = self.verdicts(self.history, self.scores if self.keep_scores else None)
        full = self.final_length - self.prompt >= self.room
        if self.pads_finished:
            ends = zip(self.done, tokens, stops, strict=True)
            self.done = [full or done or stop or token in self.eos for done, token, stop in ends]
            return
        self.stopped = [a or b for a, b in zip(self.stopped, stops, strict=True)]
        self.done = [full or all(self.stopped)] * self.batch

    def _blame(self, b: int, logits: Tensor, after: list[tuple[str, Tensor]]) -> None:
        """Raise for scores of sequence ``b`` from which nothing can be picked, naming where they come from."""
        culprits = [name for name, scores in after if self._unusable(scores[b])]
        if culprits and not self._unusable(logits):
            raise ValueError(
                f"logits: NaN, or while sampling an infinite score or none that is finite, in sequence {b} after the "
                f"logits_processor {culprits[0]}; mend it, or pass remove_invalid_values=True"
            )
        check_pick(-1)

    def _unusable(self, scores: Tensor) -> bool:
        """Return whether nothing can be picked from scores [V]."""
        drawn = self.plan.temperature > 0 and bool(scores.isneginf().all() | (scores == math.inf).any())
        return drawn or bool(scores.isnan().any())


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


def padded(rows: Rows, state: DecodeState, kv_len: Tensor) -> Rows:
    """The rows that are forwarded where padding is: of a finished sequence, what its text has behind ``kv_len`` [B].

    All on the device. There is nothing to learn from such rows, so none counts in ``num_rows``.
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
