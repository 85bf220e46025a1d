"""The automatic policy of a generation: shapes of steps, or rows of one shape; and what its pair has learned so far."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..costs.pair import fingerprint, forwards, own_costs, placed
from ..model.properties import device_of
from ..store import Document, Learned, cache_dir, shared, write_later
from .learning import Experience, LearningPolicy
from .shapes import ladder

Kept = tuple[Experience, dict[Document, Learned]]
"""What generations like one learned, in this process and others, and all of it by where it is kept."""


def automatic_policy(
    kept: MutableMapping[Any, Kept],
    models: Sequence[nn.Module],
    sources: Sequence[str],
    *,
    reuses: bool,
    about: str,
    chooses_rows: bool,
    backend: str,
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
        **text: what :class:`~gsd_kernels_hf.policy.learning.LearningPolicy` is told of the text, and its settings.
    """
    by_rows = chooses_rows and len(models) == 1
    ways = forwards(models, backend).values()
    key = (cache_dir(), backend, by_rows, about, *sources, *ways, *map(placed, models))
    if key not in kept:
        shapes = ladder(device_of(models[0]).type, with_model=len(models) > 1, reuses=reuses)
        document, costs = own_costs(models, backend, shapes)
        known = [by_rows, about, sources, *map(fingerprint, models)]
        learned = Document("pair", {"costs": document.told, "learned": known})
        experience = shared(learned, lambda: Experience(costs, by_rows=by_rows))
        kept.setdefault(key, (experience, {document: experience.costs, learned: experience}))
    experience, parts = kept[key]
    return LearningPolicy(experience, backend=backend, save=partial(write_later, parts), **text)
