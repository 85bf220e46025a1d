"""The file of ``gsd_kernels.learn``: how a model's own answers go on, and the weights of the history's mixture."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from gsd_kernels import NgramTable
from gsd_kernels.ops.history import WEIGHTS
from gsd_kernels.ops.history.records import LEARNED_ORDERS, REMEMBERED
from gsd_kernels.ops.ngram.reference import sets_of

from ..files import path_of
from ..store import damaged, read_saved, write_saved

FORMAT = "gsd_kernels learned"
VERSION = 1
MOST_CONTEXTS = 1 << 20
WAYS = 8


class Known(NamedTuple):
    """The learned part of a model, as the history takes it."""

    table: NgramTable  # of one sequence
    weights: Tensor  # float64, of the mixture


@dataclass(frozen=True)
class Learned:
    """The learned part of a model, as its file has it.

    Attributes:
        keys: int64 [N], of contexts of 1 … 3 tokens, each once.
        counts: uint8 [N], continuations of each, 1 … 8.
        tokens: int32 [M], the continuations one context after the other, best first.
        log_probs: float16 [M].
        weights: float64 of the mixture.
        vocab_size: of the model.
        fingerprint: of the model.
        seen: tokens of answers that it was learned from.
    """

    keys: Tensor
    counts: Tensor
    tokens: Tensor
    log_probs: Tensor
    weights: Tensor
    vocab_size: int
    fingerprint: str
    seen: int

    def __repr__(self) -> str:
        return f"<Learned: {len(self.keys):,} contexts of {self.seen:,} tokens, model {self.fingerprint}>"

    def table(self, device: torch.device | str = "cpu") -> NgramTable:
        """The contexts as a table of one sequence; of a set that is full the last contexts are left out."""
        capacity = 1 << max(6, (2 * len(self.keys) - 1).bit_length())
        made = NgramTable.empty(1, REMEMBERED, "cpu", capacity=capacity, max_context=LEARNED_ORDERS, ways=WAYS)
        home = sets_of(self.keys, capacity // WAYS)
        by_set, order = home.sort(stable=True)
        way = torch.arange(len(order), device="cpu") - torch.searchsorted(by_set, by_set)  # place in its set
        kept = way < WAYS
        at, order = (by_set * WAYS + way)[kept], order[kept]
        ends = self.counts.long().cumsum(0)
        rank = torch.arange(REMEMBERED, device="cpu")
        inside = rank < self.counts[order].long()[:, None]  # [N, K]
        place = ((ends - self.counts)[order, None] + rank).clamp(max=max(0, len(self.tokens) - 1))
        made.keys[0, at] = self.keys[order]
        made.tokens[0, at] = torch.where(inside, self.tokens[place], -1)
        made.log_probs[0, at] = torch.where(inside, self.log_probs[place].float(), 0.0)
        return NgramTable(*(t.to(device) for t in (made.keys, made.tokens, made.log_probs)), LEARNED_ORDERS, WAYS)

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write a safetensors file, as a whole or not at all."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        write_saved(path_of(file), FORMAT, VERSION, tensors, **{n: parts[n] for n in parts.keys() - tensors.keys()})


def read_learned(file: str | os.PathLike[str], *, fingerprint: str, vocab_size: int) -> Learned:
    """Read what :meth:`Learned.save` wrote for this model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another model, damaged, of a newer version, or something else.
    """
    place, foreign = path_of(file), "was not written by gsd-kernels learn"
    tensors, about = read_saved(place, "learned", FORMAT, VERSION, foreign=foreign)
    if about["fingerprint"] != fingerprint:
        raise ValueError(f"learned: {place} is of another model; run gsd-kernels learn for this one")
    if about["vocab_size"] != str(vocab_size):
        raise damaged("learned", place, f"a vocabulary of {about['vocab_size']} tokens, not {vocab_size}")
    if len(tensors["weights"]) != WEIGHTS:
        raise damaged("learned", place, f"{len(tensors['weights'])} weights, not {WEIGHTS}")
    return Learned(**tensors, vocab_size=vocab_size, fingerprint=fingerprint, seen=int(about["seen"]))
