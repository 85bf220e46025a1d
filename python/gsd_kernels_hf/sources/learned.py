"""The file of ``gsd_kernels.learn``: how a model's own answers go on, and the weights of the history's mixture.

Some files come with this package, each for one published model in all its forms.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

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


# Files that come with this package. A model is told by all its weights of one dimension, which are its norms' and
# biases. No format quantises these: rounded to bfloat16 they are the same numbers in a checkpoint of any dtype and in a
# GGUF file of any number of bits. Further training changes them. Adapters that are merged into matrices do not, and
# then the file may guess worse; the text is the model's own in any case.

FOLDER = Path(__file__).resolve().parents[1] / "shipped"

SHIPPED = {"smollm2-135m-instruct": "824cf4dfddc66fb5"}
"""The :func:`print_of_vectors` of a model, which its file has too, by the file's name."""


def shipped_file(model: PreTrainedModel) -> tuple[Path, str] | None:
    """The file that was learned of a model and comes with this package, and the fingerprint in it; else ``None``."""
    own = print_of_vectors(model)
    return next(((FOLDER / f"{name}.safetensors", own) for name, print_ in SHIPPED.items() if print_ == own), None)


def print_of_vectors(model: nn.Module) -> str | None:
    """64 bits of a model's weights of one dimension as hexadecimal digits.

    ``None`` where one is not a plain tensor of floats: sharded, quantised, not loaded.
    """
    content = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() != 1:
            continue
        plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor and not parameter.is_meta
        if not plain or not parameter.is_floating_point():
            return None
        rounded = parameter.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        content.update(name.encode() + rounded.view(torch.int16).numpy().tobytes())
    return content.hexdigest()[:16]


# The weights with which the history's mixture begins, in the order of gsd_kernels.ops.history.records. Fitted as
# gsd_kernels.learn fits its own, from zero: to 7,888 nodes that SmolLM2 accepted in its greedy answers to 72 prompts,
# of which the benchmarks report none (of a recipe in commit a2049d6), with a table of the other half's answers and
# without.

PRIOR = (
    1.305, 0.171, 0.347, -1.46, 1.81, 0.209, 0.668, 0.221,  # text, contexts of 1
    0.677, 0.133, 0.074, 0.09, 2.37, 0.33, 0.541, 0.361,  # text, contexts of 2
    0.813, 0.163, -0.435, -0.687, 2.364, 0.365, 1.087, 0.606,  # text, contexts of 3
    1.001, 0.139, 0.489, 0.156, 1.001, 0.139, 0.489, 0.156,  # text, contexts of 4
    0.57, 0.221, -0.016, 0.762, 1.099, 0.13, 0.216, -0.039,  # learned, contexts of 1
    1.368, 0.52, -0.02, 0.498, 0.681, -0.004, 0.422, 0.009,  # learned, contexts of 2
    0.659, -0.121, 0.45, -0.185, 0.659, -0.121, 0.45, -0.185,  # learned, contexts of 3
    0.432, 0.026, 0.892, 0.0, 0.0, 0.0, 0.0, 0.0,  # runners-up
    0.58, 1.667, 1.68, 1.811, 3.492, 2.857, 4.317,  # the longest match, by length
    -0.315, -1.801, -0.716, 0.164, 0.628, -0.008, 0.0,  # the next one
    0.135, 0.236, -0.083, -0.208,  # pace: of the match, of the longest context
    2.193,  # none: 1
    0.959, 1.051, 0.817, -0.474, -0.16,  # by longest context
    0.49, 0.571, 0.483, 0.648,  # by longest learned
    0.407, 0.539, 0.062, 0.524, 0.445, 0.279, 0.24, -0.305,  # by match
    0.09, 0.224, 0.331, 0.407, 0.252, 0.89,  # by depth
    -0.217, -0.391,  # by pace
    0.149, 0.251, 0.045, 0.318, 0.419, -0.308,  # by what is left
    -0.006,  # by the first runner-up
)  # fmt: skip


def prior() -> Tensor:
    """The weights in the form that the op takes, float64."""
    return torch.tensor(PRIOR, dtype=torch.float64, device="cpu")
