"""Finding what ``gsd_kernels.learn`` left of a model in the cache folder, or what comes with this package of it."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

from torch import nn

from ..costs.pair import fingerprint
from ..model.facts import Facts
from ..sources.history import mixes_on
from ..sources.memory import Known, read_learned, shipped_file
from ..store import cache_dir

logger = logging.getLogger("gsd_kernels")


_found: weakref.WeakKeyDictionary[Any, tuple[Any, Known | None]] = weakref.WeakKeyDictionary()
"""By model: the user's file as it was when it was looked for, and for which device; what drafts, ``None``: nothing."""


def learned_file(model: nn.Module) -> Path:
    """Where what is learned of a model lies, whether it is there or not."""
    return cache_dir() / f"learned-{fingerprint(model)}.safetensors"


def learned_of(facts: Facts) -> Known | None:
    """Read what was learned of a model: the user's file, else this package's; ``None`` where nothing was.

    A file that cannot be used is as none, which is said once. No file is looked for where the history reads none.
    """
    if not mixes_on(facts.device):
        return None
    model, file = facts.model, learned_file(facts.model)
    try:
        stat = file.stat()
        written = (stat.st_mtime_ns, stat.st_size)
    except OSError:
        written = None
    key = file, written, facts.device
    before, known = _found.get(model, (None, None))
    if before != key:
        known = None if written is None else _known(facts, file, fingerprint(model))
        if known is None and (shipped := shipped_file(model)) is not None:
            known = _known(facts, *shipped, ", which comes with this package")
        _found[model] = key, known
    return known


def _known(facts: Facts, file: Path, print_: str, whose: str = "") -> Known | None:
    try:
        learned = read_learned(file, fingerprint=print_, vocab_size=facts.vocabulary)
    except (OSError, ValueError) as error:
        logger.warning("ignoring %s, which cannot be used: %s", file, error)
        return None
    logger.info(
        "drafting with what was learned of the model: %s (%s contexts)%s", file, f"{len(learned.keys):,}", whose
    )
    return Known(learned.table(facts.device), learned.weights)
