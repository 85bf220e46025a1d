"""Rotary embeddings with two sets of frequencies, as ``longrope`` has: one for short texts, one for long ones.

transformers takes one set for a whole forward, by the largest position in it. Its batches grow by one token a step, so
the place of a token alone says by which it was turned: from the border on by the long factors. Rows of a graph lie on
both sides of the border, and sequences of a batch grow by different numbers of tokens, so here every row is turned by
the side of its place.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from .facts import Facts, fact
from .modes import Unserved
from .properties import seen, text_config

LONGROPE = "longrope"
ORIGINAL = "original_max_position_embeddings"


def rope_types(config: PretrainedConfig) -> set[str]:
    """The kinds of rotary embedding in a text model's config."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, Mapping)] or [parameters]
    return {str(p.get("rope_type", p.get("type", "default"))) for p in nested}


@fact
def longropes_of(facts: Facts) -> list[Any]:
    """The rotary embeddings of a model that have two sides."""
    return [module for _, module in facts.modules if is_longrope(module)]


def is_longrope(module: nn.Module) -> bool:
    """Return whether a module is a rotary embedding with two sides."""
    return getattr(module, "rope_type", None) == LONGROPE


def original_of(module: Any) -> int:
    """Tokens of the longest text that is turned by the short factors."""
    return int(module.config.rope_parameters[ORIGINAL])


def rereads(model: PreTrainedModel) -> bool:
    """Return whether transformers reads a text anew once it crosses the border, as Phi 3's classes ask for."""
    prepare = inspect.unwrap(type(model).prepare_inputs_for_generation)
    return ORIGINAL in prepare.__code__.co_names and hasattr(model.config, ORIGINAL)


def apart(module: Any) -> Any:
    """The rotary embedding with an ``inv_freq`` of its own, which a forward writes."""
    view = copy.copy(module)
    view.__dict__["_buffers"] = {**module._buffers, "inv_freq": module.inv_freq.clone()}
    return view


def frozen(module: Any, *, long: bool) -> Any:
    """The rotary embedding on one side for all positions."""
    view, at = apart(module), original_of(module) if long else 0
    place = torch.full((1, 1), at, dtype=torch.int64, device=module.inv_freq.device)
    view.forward(place, place)  # which takes the frequencies of its side
    view.__dict__["rope_type"] = "default"
    return view


class TwoSided(nn.Module):
    """A rotary embedding that turns every row by the side of its place.

    Args:
        module: the model's own.
        border: int64 [B, 1], first position of each sequence on the long side; changed in place.
    """

    def __init__(self, module: nn.Module, border: Tensor) -> None:
        super().__init__()
        self.short, self.long = frozen(module, long=False), frozen(module, long=True)
        self.__dict__.update(own=module, border=border)
        self.train(module.training)

    def refresh(self) -> None:
        """Follow the model's own, whose numbers may have changed in place."""
        for side, long in ((self.short, False), (self.long, True)):
            side.inv_freq.copy_(frozen(self.own, long=long).inv_freq)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        """Cosines and sines [B, n, D] at ``position_ids``, int64 [B, n]."""
        beyond = (position_ids >= self.border.to(position_ids.device))[..., None]
        both = zip(self.long(x, position_ids), self.short(x, position_ids), strict=True)
        return tuple(torch.where(beyond, long, short) for long, short in both)


class Sides:
    """On which side of the border the positions of a batch of texts are.

    Args:
        facts: of a model with ``longrope``.
        batch: B, sequences.

    Attributes:
        columns: int64 [B] on the CPU, the first place of the batch's on the long side, padding included.
        border: int64 [B, 1], the same as positions of the sequences; changed in place.
        pending: whether the text is read anew where it crosses the border.
    """

    def __init__(self, facts: Facts, batch: int) -> None:
        self.original, self.rereads = original_of(longropes_of(facts)[0]), rereads(facts.model)
        self.columns, self.pending = torch.zeros(batch, dtype=torch.int64, device="cpu"), False
        self.border = torch.zeros(batch, 1, dtype=torch.int64, device=facts.device)
        self.made: list[TwoSided] = []

    def view(self, model: PreTrainedModel) -> PreTrainedModel:
        """``model`` seen with rotary embeddings of which each row has its side."""

        def instead(module: Any) -> Any:
            if not is_longrope(module):
                return module
            self.made.append(TwoSided(module, self.border))
            return self.made[-1]

        view: PreTrainedModel = seen(model, instead)
        return view

    def begin(self, length: int, padding: Tensor, chunk: int | None) -> bool:
        """Begin a text with a prompt of ``length`` tokens behind ``padding`` [B], read in pieces of ``chunk``.

        Returns:
            Whether its tokens are turned as those of the text before.
        """
        for rotary in self.made:
            rotary.refresh()
        before, least = self.columns, int(padding.min())
        column = last = self.original + least  # places on the short side, where no forward reaches beyond
        if length > last:  # the piece that reaches beyond is turned by the long factors from its beginning on
            column = last // chunk * chunk if chunk and chunk < length else 0
        self.pending = self.rereads and length <= last and not least
        self._place(torch.full_like(before, column), padding)
        return torch.equal(before, self.columns)

    def cross(self, crossed: Sequence[bool], padding: Tensor) -> None:
        """From here on turn all places of the sequences that crossed the border by the long factors."""
        self._place(self.columns.masked_fill(torch.tensor(crossed, device="cpu"), 0), padding)

    def _place(self, columns: Tensor, padding: Tensor) -> None:
        self.columns = columns
        self.border.copy_((columns - padding.cpu())[:, None])


def check_sides(facts: Facts) -> None:
    """Raise where ``longrope`` is asked for and what the model makes of it is not what the view here does.

    Raises:
        Unserved: the sides differ in more than their frequencies, or there is no module known to have them.
    """
    model, rotaries = facts.model, longropes_of(facts)
    if not rotaries and LONGROPE in rope_types(text_config(model)):
        raise Unserved("has longrope in modules of a form that is not known, or for some types of layers alone")
    for name, module in facts.modules if rotaries else ():
        if "forward" in vars(module) and any(map(is_longrope, module.modules())):
            raise Unserved(
                f"has longrope inside {name or 'the model'}, whose forward was replaced, as accelerate does where "
                "layers lie on several devices"
            )
    for module in rotaries:
        own, last = apart(module), original_of(module)
        x = torch.zeros(1, 1, dtype=model.dtype, device=module.inv_freq.device)
        places = torch.tensor([[0, 1, last - 1, last]], dtype=torch.int64, device=x.device)
        for long in (False, True):  # of texts that end on the other side, as the model's are on this one
            ours, theirs = frozen(module, long=long)(x, places[:, : 4 - long]), own(x, places[:, : 3 + long])
            if not all(torch.equal(mine[:, :3], its[:, :3]) for mine, its in zip(ours, theirs, strict=True)):
                raise Unserved("has longrope of which the sides differ in more than their frequencies")
