"""The automatic policy of a generation: shapes of steps, or rows of one shape; and what its pair has learned so far."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
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
"""What generations like one learned, in this process and others, and what has it written to disk."""


def automatic_policy(
    kept: MutableMapping[Any, Kept],
    models: Sequence[nn.Module],
    sources: Sequence[str],
    *,
    reuses: bool,
    about: str,
    chooses_rows: bool,
    backend: str,
    settings: Automatic,
    **text: Any,
) -> LearningPolicy:
    """The policy of one generation.

    Args:
        kept: what the caller keeps of this pair between generations; filled here.
        models: the target, and all that is forwarded beside it, a draft first.
        sources: names of the draft sources.
        reuses: whether one of them proposes without a forward.
        about: all else that acceptance depends on: how tokens are sampled, the criterion.
        chooses_rows: whether the host may choose how many rows a step has: then rows are chosen, not shapes, where the
            target is alone.
        backend: of the ops.
        settings: of the policies.
        **text: what :class:`~gsd_kernels_hf.policy.learning.LearningPolicy` is told of the text.
    """
    by_rows = chooses_rows and len(models) == 1
    ways = forwards(models, backend).values()
    key = (cache_dir(), backend, by_rows, settings, about, *sources, *ways, *map(placed, models))
    if key not in kept:
        pair = own_pair(models, backend)
        section = " ".join(["learned", str(by_rows), about, *sources, *map(fingerprint, models)])
        experience = Experience(pair.costs, ladder_of(models, reuses=reuses), by_rows=by_rows, settings=settings)
        pair.load(section, experience)

        def save() -> None:
            pair.sections[section] = copied(experience)  # for the next engine of the process
            write_later(pair.document, {COSTS: copied(pair.costs), section: pair.sections[section]}, section)

        kept.setdefault(key, (experience, save))
    experience, save = kept[key]
    return LearningPolicy(experience, backend=backend, save=save, **text)


def ladder_of(models: Sequence[nn.Module], *, reuses: bool = True) -> dict[str, GraphConfig]:
    """The shapes that automatic policies choose among, see :func:`ladder`."""
    return ladder(device_of(models[0]).type, with_model=len(models) > 1, reuses=reuses)


def own_pair(models: Sequence[nn.Module], backend: str) -> CostPair:
    """The pair, with costs of all shapes that automatic policies choose among."""
    return pair_of(models, backend, ladder_of(models))
