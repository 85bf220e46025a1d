"""Records that travel through one generation: state of the texts, keys of the noise, a verified step.

May import :mod:`gsd_kernels` only; every room may import it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from gsd_kernels import Acceptance, Rows, TokenGraph, draft_candidates, perturb_candidates, sample_rows
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.ops.sampling import warped_log_probs
from gsd_kernels.ops.sampling.reference import is_off
from gsd_kernels.ops.step import accepted_path

Candidates = tuple[Tensor, Tensor]
"""Tokens int32 and log-probabilities float32 [B, W, K], best first; −1 and −inf for none."""

At = tuple[slice, slice]
"""Which sequences and which rows of a tensor [B, R]."""

EVERY: At = (slice(None), slice(None))


@dataclass
class DecodeState:
    """State of every sequence; static shapes, on the target's device. A text's last token is the next step's root."""

    tokens: Tensor  # int64 [B, S]; padded prompt, then emitted tokens
    out_len: Tensor  # int32 [B]; tokens so far, left padding included
    kv_start: Tensor  # int32 [B]; left padding
    remaining: Tensor  # int32 [B]; tokens that may still be emitted
    done: Tensor  # bool [B]
    emitted: Tensor  # int32 [B, E]; what the last step emitted, first token first
    num_emitted: Tensor  # int32 [B]
    report: Tensor  # int32 [n]; the last three, one behind the other, which the host reads once a step
    pad: int = 0  # what lies behind a text's end

    @classmethod
    def empty(cls, batch: int, length: int, width: int, device: torch.device) -> DecodeState:
        """Storage for ``length`` tokens a sequence (S) and ``width`` emitted tokens a step (E)."""
        numbers = partial(torch.zeros, dtype=torch.int32, device=device)
        report = numbers(sum(report_sizes(batch, width)))
        done, num_emitted, emitted = report.split(report_sizes(batch, width))
        return cls(
            tokens=numbers(batch, length, dtype=torch.int64),
            out_len=numbers(batch),
            kv_start=numbers(batch),
            remaining=numbers(batch),
            done=done.view(torch.bool)[:batch],
            emitted=emitted.view(batch, width),
            num_emitted=num_emitted,
            report=report,
        )

    def restart(self, input_ids: Tensor, kv_start: Tensor, room: int, pad: int) -> None:
        """Begin a text, in place.

        Args:
            input_ids: int64 [B, P], left-padded.
            kv_start: int32 [B], padding.
            room: tokens that may be emitted.
            pad: the token behind a text's end.
        """
        prompt, self.pad = input_ids.shape[1], pad
        self.tokens.fill_(pad)
        self.tokens[:, :prompt] = input_ids
        self.out_len.fill_(prompt)
        self.kv_start.copy_(kv_start)
        self.remaining.fill_(room)
        self.report.zero_()

    def grow(self, length: int) -> None:
        """Make room for ``length`` tokens a sequence; what is there stays, in the same tensor at another address."""
        new = self.tokens.new_full((self.tokens.shape[0], length), self.pad)
        new[:, : self.tokens.shape[1]] = self.tokens
        self.tokens.set_(new)

    def root_tokens(self) -> Tensor:
        """The last token of every sequence, int64 [B]."""
        return self.tokens.gather(1, self.out_len[:, None].long() - 1).squeeze(1)

    def tail(self) -> Tensor:
        """The tokens before the root, nearest first, −1 where the text begins: int32 [B, C]."""
        place = self.out_len[:, None].long() - 2 - torch.arange(MAX_CONTEXT, device=self.tokens.device)
        tail = self.tokens.gather(1, place.clamp(min=0))
        return torch.where(place >= self.kv_start[:, None], tail, -1).to(torch.int32)


def report_sizes(batch: int, width: int) -> list[int]:
    """Elements of ``DecodeState.report``: of ``done`` (four flags each), ``num_emitted``, ``emitted``."""
    return [-(-batch // 4), batch, batch * width]


@dataclass(frozen=True)
class Sampler:
    """Everything that a draw depends on besides logits and position, and the backend of the ops that draw.

    Attributes:
        seed: int64 [], of the noise.
        sequence_ids: int32 [B], index in the batch, which keys the noise too.
        warpers: ``temperature`` (0 is greedy), ``top_k``, ``top_p``, ``min_p``.
        backend: of the ops, see :mod:`gsd_kernels.backends`.
    """

    seed: Tensor
    sequence_ids: Tensor
    warpers: Mapping[str, float]
    backend: str = "auto"

    @property
    def greedy(self) -> bool:
        """Return whether the best token is taken and nothing is drawn."""
        return is_off(self.warpers["temperature"], 0.0)

    def on(self, device: torch.device) -> Sampler:
        """The same draws on another device."""
        if self.seed.device == device == self.sequence_ids.device:
            return self
        return replace(self, seed=self.seed.to(device), sequence_ids=self.sequence_ids.to(device))

    def pick(self, logits: Tensor, positions: Tensor, at: At = EVERY) -> Tensor:
        """The target's own token after each row, see :func:`gsd_kernels.sample_rows`.

        Args:
            logits: float [b, r, V], of the sequences and rows ``at``.
            positions: int32 [b, r], index of the token being picked.
            at: which sequences and rows these are.

        Returns:
            int32 [b, r]; −1 where the logits hold NaN, or have no distribution to sample: +∞, or nothing but −∞.
        """
        here = self.on(logits.device)
        return sample_rows(
            logits,
            positions,
            seed=here.seed,
            sequence_ids=here.sequence_ids[at[0]],
            backend=self.backend,
            **self.warpers,
        )

    def candidates(self, logits: Tensor, positions: Tensor, branch: int, *, noise: bool = True) -> Candidates:
        """The ``branch`` tokens that the target most likely picks, see :func:`gsd_kernels.draft_candidates`.

        Args:
            logits: float [B, W, V], a draft's after every node.
            positions: int [B, W], index of the token after each node.
            branch: K, candidates after a node.
            noise: know the noise that it will draw with; without it, positions say nothing.

        Returns:
            Tokens int32 and log-probabilities float32 [B, W, K], on the device of ``logits``.
        """
        here = self.on(logits.device)
        return draft_candidates(
            logits,
            positions.to(logits.device, torch.int32),
            branch=branch,
            seed=here.seed,
            sequence_ids=here.sequence_ids,
            noise=noise,
            backend=self.backend,
            **self.warpers,
        )

    def perturb(self, tokens: Tensor, log_probs: Tensor, positions: Tensor) -> Tensor:
        """Log-probabilities with the noise that the target will draw with, see :func:`gsd_kernels.perturb_candidates`.

        Args:
            tokens: int32 [B, W, K].
            log_probs: float32 [B, W, K], without noise.
            positions: int32 [B, W], index of the tokens in the text.

        Returns:
            float32 [B, W, K]; as given with greedy decoding.
        """
        if self.greedy:
            return log_probs
        return perturb_candidates(
            tokens, log_probs, positions, seed=self.seed, sequence_ids=self.sequence_ids, backend=self.backend
        )

    def log_probs(self, logits: Tensor) -> Tensor:
        """Log-probabilities after temperature, top-k, top-p, min-p, float32 [B, R, V]; greedy: of the bare logits."""
        return warped_log_probs(logits, backend=self.backend, **self.warpers)


@dataclass
class Unverified:
    """A step before anything of it is accepted.

    Attributes:
        graph, rows, logits, hidden, tail: see :class:`Verified`.
        positions: int32 [B, R], index of the token picked after each row, padding excluded.
    """

    graph: TokenGraph | None
    rows: Rows
    logits: Tensor
    hidden: Mapping[int, Tensor]
    positions: Tensor
    tail: Tensor


@dataclass
class Verified:
    """One verified step, for sources, policy, ranks, statistics and observers. Valid until the next step.

    Attributes:
        graph: what was drafted; ``None`` where nothing was.
        rows: the graph unrolled, R rows.
        logits: float [B, R, V], the target's at every row.
        hidden: [B, R, D] in the target's dtype, the hidden states that a source declared, by their number (−1: the
            input of the output matrix); empty where none did.
        accepted: the path of rows that was accepted, P rows at most, and the bonus token.
        tail: int32 [B, C], the tokens before the root, nearest first, −1 where the text begins.
        tokens: int32 [B, P], the token emitted after each accepted row; 0 beyond ``accepted.num_accepted``.
        nodes: int32 [B, P], the graph node of each accepted row; −2 for none.
    """

    graph: TokenGraph | None
    rows: Rows
    logits: Tensor
    hidden: Mapping[int, Tensor]
    accepted: Acceptance
    tail: Tensor
    tokens: Tensor
    nodes: Tensor

    @classmethod
    def of(cls, step: Unverified, accepted: Acceptance, backend: str = "auto") -> Verified:
        """The record of a step, from its parts; accepted nodes and emitted tokens are looked up here, once."""
        tokens, nodes = accepted_path(accepted, step.rows, backend=backend)
        return cls(step.graph, step.rows, step.logits, step.hidden, accepted, step.tail, tokens, nodes)

    def last_rows(self) -> Tensor:
        """The last accepted row, whose pick is the next root: int64 [B]; 0 for a finished sequence."""
        return last_rows(self.accepted.accepted_rows, self.accepted.num_accepted)


def last_rows(accepted_rows: Tensor, num_accepted: Tensor) -> Tensor:
    """Of accepted rows int32 [B, P] and their number int32 [B], the last of each sequence: int64 [B]; 0 for none."""
    last = (num_accepted.long() - 1).clamp(min=0)[:, None]
    return accepted_rows.gather(1, last).clamp(min=0)[:, 0].long()


def lone_root(batch: int, device: torch.device) -> Rows:
    """The rows of plain decoding: the root of every sequence."""
    one, numbers = (batch, 1), partial(torch.full, dtype=torch.int32, device=device)
    return Rows(
        token_ids=numbers(one, 0),
        parent_rows=numbers(one, -1),
        depths=numbers(one, 0),
        ancestor_mask=numbers((*one, 1), 1),
        node_ids=numbers(one, 0),
        scores=numbers(one, 0, dtype=torch.float32),
        num_rows=numbers((batch,), 1),
    )
