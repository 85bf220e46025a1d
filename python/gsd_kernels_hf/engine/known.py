"""The file that ``gsd_kernels.learn`` left of a model in the cache folder: found by its fingerprint, read once."""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ..costs.pair import fingerprint
from ..model.facts import Facts
from ..sources.learned import Known, read_learned
from ..store import cache_dir

logger = logging.getLogger("gsd_kernels")


class _Read(NamedTuple):
    """A file as it was when it was read, for which device, and what it holds; ``None`` where that cannot be used."""

    file: Path
    written: tuple[Any, ...]
    known: Known | None


_read: weakref.WeakKeyDictionary[Any, _Read] = weakref.WeakKeyDictionary()


def learned_file(model: nn.Module) -> Path:
    """Where what is learned of a model lies, whether it is there or not."""
    return cache_dir() / f"learned-{fingerprint(model)}.safetensors"


def learned_of(facts: Facts) -> Known | None:
    """Read what was learned of a model; ``None`` where nothing was, or its file cannot be used, which is said once."""
    model, file = facts.model, learned_file(facts.model)
    try:
        written = file.stat()
    except OSError:
        _read.pop(model, None)
        return None
    seen, before = (written.st_mtime_ns, written.st_size, facts.device), _read.get(model)
    if before is None or before[:2] != (file, seen):
        before = _read[model] = _Read(file, seen, _known(file, facts))
    return before.known


def _known(file: Path, facts: Facts) -> Known | None:
    try:
        learned = read_learned(file, fingerprint=fingerprint(facts.model), vocab_size=facts.vocabulary)
    except (OSError, ValueError) as error:
        logger.warning("ignoring %s, which cannot be used: %s", file, error)
        return None
    logger.info("drafting with what was learned of the model: %s (%s contexts)", file, f"{len(learned.keys):,}")
    return Known(learned.table(facts.device), learned.weights)
