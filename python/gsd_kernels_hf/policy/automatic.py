"""The automatic policy of a generation: shapes of steps, or rows of one shape; and what its pair has learned so far."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from gsd_kernels import GraphConfig

from ..costs.pair import COSTS, CostPair, copied, fingerprint, forwards, pair_of, placed
from ..model.properties import device_of
from ..store import cache_dir, write_later
from .learning import Experience, LearningPolicy
from .settings import Automatic
from .shapes import ladder

Kept = tuple[Experience, Callable[[], None]]
"""What generations like one learned, and what has it written to disk."""


@dataclass(frozen=True)
class Situation:
    """The facts of a generation that its policy depends on.

    Attributes:
        models: the target, and all that is forwarded beside it, a draft first.
        sources: names of the draft sources.
        reuses: whether one of them proposes without a forward.
        about: all else that acceptance depends on: how tokens are sampled, the criterion.
        batch, prefix: sequences, and tokens of the prompt.
        reads_prompt: whether a source reads all of the prompt before it proposes.
        chooses_rows: whether the host may choose how many rows a step has.
        backend: of the ops.
        settings: of the policies.
    """

    models: Sequence[nn.Module]
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
    def by_rows(self) -> bool:
        """Return whether rows are chosen, not shapes."""
        return self.chooses_rows and len(self.models) == 1


def automatic_policy(
    kept: MutableMapping[Any, tuple[Experience, Callable[[], None]]], situation: Situation
) -> LearningPolicy:
    """The policy of one generation.

    Args:
        kept: what the caller keeps of this pair between generations; filled here.
        situation: of the generation.
    """
    ways = forwards(situation.models, situation.backend).values()
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
    pair = own_pair(situation.models, situation.backend)
    prints = map(fingerprint, situation.models)
    about = " ".join([str(situation.by_rows), situation.about, *situation.sources, *prints])
    section = f"learned {about}"
    shapes = ladder_of(situation.models, reuses=situation.reuses)
    experience = Experience(pair.costs, shapes, by_rows=situation.by_rows, settings=situation.settings)
    pair.load(section, experience)

    def save() -> None:
        pair.sections[section] = copied(experience)  # for the next engine of the process
        write_later(pair.document, {COSTS: copied(pair.costs), section: pair.sections[section]}, section)

    return experience, save


def ladder_of(models: Sequence[nn.Module], *, reuses: bool = True) -> dict[str, GraphConfig]:
    """The shapes that automatic policies choose among, see :func:`ladder`."""
    return ladder(device_of(models[0]).type, with_model=len(models) > 1, reuses=reuses)


def own_pair(models: Sequence[nn.Module], backend: str) -> CostPair:
    """The pair, with costs of all shapes that automatic policies choose among."""
    return pair_of(models, backend, ladder_of(models))
