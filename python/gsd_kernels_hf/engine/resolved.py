"""The draft sources of one call: its options, resolved for its target once."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .. import validate
from ..model.facts import Facts
from ..sources import border
from ..sources.base import DraftSource, OwnSource, remembers
from ..sources.drafts import draft_source
from ..sources.grammar import Grammar
from ..sources.heads import DraftHeads, Heads
from ..sources.history import History
from ..sources.load import Drafter, loaded_drafter, loaded_heads, source_of
from .options import NAMES, Options

NO_HISTORY = (
    "reference_ids: the history reads them, and is not among the draft sources; name it in draft_sources, or pass a "
    "graph_config with history_depth above 0"
)


@dataclass(frozen=True, eq=False)
class Sources:
    """The draft sources of a call, made and checked once, and what they are made of.

    Attributes:
        options: as given.
        facts: of the target.
        drafter: loaded, where ``options`` name a place.
        heads: loaded likewise.
        every: all that a policy may use, in the order in which they are mixed.
    """

    options: Options
    facts: Facts
    drafter: Drafter | None
    heads: DraftHeads | None
    every: tuple[DraftSource, ...]

    @classmethod
    def of(cls, options: Options, target: PreTrainedModel | Facts) -> Sources:
        """Load a drafter and heads that were named by their places, once, and make the sources of ``target``.

        Raises:
            TypeError, ValueError: no drafter that can be served, a source that cannot draft for the target,
                ``reference_ids`` without a history that reads them.
        """
        facts, drafter, heads = Facts.of(target), options.drafter, options.draft_heads
        target = facts.model
        if isinstance(drafter, (str, os.PathLike)):
            drafter = loaded_drafter(drafter, target)
        if isinstance(heads, (str, os.PathLike)):
            heads = loaded_heads(heads, target)
        if isinstance(drafter, DraftHeads) and heads is not None:
            raise ValueError("drafter: these are heads, and draft_heads has others; give one of the two")
        sources = cls(options, facts, drafter, heads, tuple(_made(options, drafter, heads)))
        for source in sources.every:
            if isinstance(source, OwnSource):
                source.check(target)
            border.check_hidden_layers(source, target)
        for name, (source, draft) in sources._named_models.items():
            if not source.other_tokens:
                validate.check_pair(target, draft, name)
        return sources

    def used(self, *, automatic: bool, grammar: bool) -> list[DraftSource]:
        """The sources of the call's steps.

        Args:
            automatic: whether a policy chooses the shapes. A fixed shape without levels of its own has a history only
                where it was asked for.
            grammar: whether the call's grammar drafts as well.

        Raises:
            ValueError: ``reference_ids`` without a history that reads them.
        """
        options = self.options
        if automatic or options.draft_sources is not None or not options.drafts or options.graph_config.history_depth:
            sources = list(self.every)
        elif self.every and options.reference_ids is not None:
            raise ValueError(NO_HISTORY)
        else:
            sources = [source for source in self.every if not remembers(source)]
        return sources + [Grammar()] * grammar

    @cached_property
    def models(self) -> dict[str, PreTrainedModel]:
        """The models that sources forward, besides the target, by the name that an error calls them."""
        return {name: model for name, (_, model) in self._named_models.items()}

    @property
    def forwarded(self) -> list[nn.Module]:
        """The modules that sources run in a step, heads included, each once."""
        found = [self.heads, *(module for source in self.every for module in source.forwards)]
        return list({id(module): module for module in found if isinstance(module, nn.Module)}.values())

    @cached_property
    def _named_models(self) -> dict[str, tuple[DraftSource, PreTrainedModel]]:
        named = {}
        for source in self.every:
            models = models_of(source)
            name = "assistant_model" if source.name in NAMES else f"draft_sources: {source.name}"
            if border.is_own(source) and any(model is draft for model in models for draft in self.options.drafts[1:]):
                name = source.name.replace("model", "assistant_model", 1)
            for number, model in enumerate(models, 1):
                named[name if number == 1 else f"{name} {number}"] = source, model
        return named

    @cached_property
    def parts(self) -> list[Any]:
        """The objects whose identity tells sets of sources apart."""
        options = self.options
        own = [source for source in options.draft_sources or () if isinstance(source, DraftSource)]
        given = [*options.drafts, self.heads, self.drafter, *own]
        for between in options.translations:
            given += [] if between is None else [between.tokenizer, between.assistant_tokenizer]
        return [part for part in given if part is not None]

    def agreed(self) -> dict[str, object]:
        """The options that the ranks of a tensor-parallel model must have been given alike, by the option's name."""
        names = ("graph_config", "draft_sources", "reference_ids", "criterion", "backend")
        options = self.options
        read = tuple(None if between is None else between.shared.reads for between in options.translations)
        return {
            # The same names on every rank, however many drafts each was given.
            "assistant_model": tuple(d.forwards[0] if isinstance(d, DraftSource) else d for d in options.drafts)
            or (None,),
            **{name: getattr(options, name) for name in names},
            "draft_heads": self.heads,
            "drafter": self.drafter,
            "assistant_tokenizer": read if any(r is not None for r in read) else (),
        }


def _made(options: Options, drafter: Drafter | None, heads: DraftHeads | None) -> list[DraftSource]:
    """The sources by name, then those of one's own, then the history."""
    if not options.named:
        return []
    makers: dict[str, Callable[[], Sequence[DraftSource]]] = {
        "model": lambda: [
            draft_source(model, "model" if i == 1 else f"model {i}", between)
            for i, (model, between) in enumerate(zip(options.drafts, options.translations, strict=True), 1)
        ],
        "layer_skip": lambda: options.drafts,  # a source as it is given
        "drafter": lambda: [source_of(drafter)],
        "heads": lambda: [Heads(heads)],
    }
    sources = [source for name, make in makers.items() if name in options.named for source in make()]
    sources += [source for source in options.draft_sources or () if isinstance(source, DraftSource)]
    if "history" in options.named:
        sources.append(History())
    elif options.reference_ids is not None:
        raise ValueError(NO_HISTORY)
    return sources


def models_of(source: DraftSource) -> list[PreTrainedModel]:
    """Of what a source forwards, the language models of transformers; an encoder has no output matrix."""
    return [m for m in source.forwards if isinstance(m, PreTrainedModel) and m.get_output_embeddings() is not None]
