"""The automatic policy of a generation: shapes of steps, or rows of one shape; and what its pair has learned so far."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..costs.pair import COSTS, CostPair, Draft, fingerprint, forwards, pair_of, placed
from ..model.properties import device_of
from ..store import cache_dir, write_later
from .learning import Experience, LearningPolicy
from .settings import Automatic
from .shapes import ladder, row_shape, shape_name

Kept = tuple[Experience, Callable[[], None]]
"""What generations like one learned, and what has it written to disk."""


@dataclass(frozen=True)
class Situation:
    """The facts of a generation that its policy depends on.

    Attributes:
        model, draft: target and draft.
        others: models and drafters that are forwarded beside ``draft``.
        sources: names of the draft sources.
        reuses: whether one of them proposes without a forward.
        about: all else that acceptance depends on: how tokens are sampled, the criterion.
        batch, prefix: sequences, and tokens of the prompt.
        reads_prompt: whether a source reads all of the prompt before it proposes.
        chooses_rows: whether the host may choose how many rows a step has.
        backend: of the ops.
        settings: of the policies.
    """

    model: PreTrainedModel
    draft: Draft
    others: Sequence[nn.Module]
    sources: Sequence[str]
    reuses: bool
    about: str
    batch: int
    prefix: int
    reads_prompt: bool
    chooses_rows: bool
    backend: str
    settings: Automatic

    @property
    def models(self) -> list[nn.Module]:
        """Target, draft and others."""
        return [self.model, *([] if self.draft is None else [self.draft]), *self.others]

    @property
    def by_rows(self) -> bool:
        """Return whether rows are chosen, not shapes."""
        return self.chooses_rows and self.draft is None


def automatic_policy(
    kept: MutableMapping[Any, tuple[Experience, Callable[[], None]]], situation: Situation
) -> LearningPolicy:
    """The policy of one generation.

    Args:
        kept: what the caller keeps of this pair between generations; filled here.
        situation: of the generation.
    """
    ways = forwards(situation.model, situation.draft, situation.backend).values()
    kind = situation.backend, situation.by_rows, situation.settings, situation.about, *situation.sources
    key = (cache_dir(), *kind, *ways, *map(placed, situation.models))
    if key not in kept:
        kept.setdefault(key, learned(situation))
    experience, save = kept[key]
    return LearningPolicy(
        experience,
        batch=situation.batch,
        prefix=situation.prefix,
        reads_prompt=situation.reads_prompt,
        backend=situation.backend,
        save=save,
    )


def learned(situation: Situation) -> Kept:
    """The experience of earlier generations like this one, in this process and others; and what keeps it on disk."""
    pair = own_pair(situation.model, situation.draft, situation.backend, situation.others)
    prints = map(fingerprint, situation.models)
    about = " ".join([str(situation.by_rows), situation.about, *situation.sources, *prints])
    section = f"learned {hashlib.sha256(about.encode()).hexdigest()[:16]}"
    if situation.by_rows:
        shapes = {shape_name(row_shape()): row_shape()}
    else:
        shapes = ladder(pair.device.type, with_model=situation.draft is not None, reuses=situation.reuses)
    experience = Experience(pair.costs, shapes, by_rows=situation.by_rows, settings=situation.settings)
    pair.load(section, experience)

    def save() -> None:
        pair.sections[section] = experience.as_dict()  # for the next engine of the process
        write_later(pair.document, {COSTS: pair.costs.as_dict(), section: pair.sections[section]}, section)

    return experience, save


def own_pair(model: PreTrainedModel, draft: Draft, backend: str, others: Sequence[nn.Module] = ()) -> CostPair:
    """The pair, with costs of all shapes that automatic policies choose among."""
    return pair_of(model, draft, backend, ladder(device_of(model).type, with_model=draft is not None), others)
