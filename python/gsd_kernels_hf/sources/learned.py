"""The file of ``gsd_kernels.learn``: how a model's own answers go on, and the weights of the history's mixture."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from gsd_kernels import NgramTable
from gsd_kernels.ops.history import WEIGHTS
from gsd_kernels.ops.history.records import LEARNED_ORDERS, REMEMBERED
from gsd_kernels.ops.ngram.reference import sets_of

from ..files import damaged, number_in, open_saved, path_of, write_file

FORMAT = "gsd_kernels learned"
VERSION = 1
MOST_CONTEXTS = 1 << 20
MOST_WEIGHT = 100.0  # of a mixture, in magnitude; beyond it a file is damaged
MOST_BYTES = 1 << 26
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
        names = ("keys", "counts", "tokens", "log_probs", "weights")
        tensors = {name: getattr(self, name).contiguous() for name in names}
        about = {"format": FORMAT, "version": str(VERSION), "fingerprint": self.fingerprint}
        about |= {name: str(getattr(self, name)) for name in ("vocab_size", "seen")}
        write_file(path_of(file), lambda partial: save_file(tensors, partial, metadata=about))


def read_learned(file: str | os.PathLike[str], *, fingerprint: str, vocab_size: int) -> Learned:
    """Read what :meth:`Learned.save` wrote for this model.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is of another model, damaged, of a newer version, or something else.
    """
    place = path_of(file)
    if place.is_file() and place.stat().st_size > MOST_BYTES:
        raise damaged("learned", place, f"{place.stat().st_size} bytes")
    with open_saved(place, "learned", FORMAT, VERSION, foreign="was not written by gsd-kernels learn") as opened:
        reader, about = opened
        if about["fingerprint"] != fingerprint:
            raise ValueError(f"learned: {place} is of another model; run gsd-kernels learn for this one")
        sizes = number_in(about, "vocab_size"), number_in(about, "seen")
        tensors = [reader.get_tensor(name).clone() for name in ("keys", "counts", "tokens", "log_probs", "weights")]
    learned = Learned(*tensors, *sizes[:1], fingerprint, sizes[1])
    wrong = _fault(learned, vocab_size)
    if wrong is not None:
        raise damaged("learned", place, wrong)
    return learned


def _fault(learned: Learned, vocab_size: int) -> str | None:
    """Name what of a file is not as :meth:`Learned.save` leaves it; ``None`` where all is."""
    contexts, continuations = learned.keys.numel(), learned.tokens.numel()
    expected = {
        "keys": (torch.int64, (contexts,)),
        "counts": (torch.uint8, (contexts,)),
        "tokens": (torch.int32, (continuations,)),
        "log_probs": (torch.float16, (continuations,)),
        "weights": (torch.float64, (WEIGHTS,)),
    }
    for name, (dtype, shape) in expected.items():
        tensor = getattr(learned, name)
        if tensor.dtype is not dtype or tensor.shape != shape:
            return f"{name}: {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
    if learned.vocab_size != vocab_size:
        return f"a vocabulary of {learned.vocab_size} tokens, not {vocab_size}"
    if contexts > MOST_CONTEXTS:
        return f"{contexts} contexts"
    counts = learned.counts.long()
    if not ((counts >= 1) & (counts <= REMEMBERED)).all() or int(counts.sum()) != continuations:
        return "counts that do not add up"
    if (learned.keys == 0).any() or len(learned.keys.unique()) < contexts:
        return "a context twice"
    if not ((learned.tokens >= 0) & (learned.tokens < vocab_size)).all():
        return "tokens outside the vocabulary"
    # Comparisons with NaN are false.
    if not ((learned.log_probs <= 0) & (learned.log_probs > -torch.inf)).all():
        return "probabilities that none has"
    if not (learned.weights.abs() <= MOST_WEIGHT).all():
        return "weights that none has"
    return None
