"""What outlives a call: statistics of a target and its sources, which later calls begin with."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from gsd_kernels.config import MAX_BRANCH

from ..policy.acceptance import AcceptanceModel
from ..policy.tuning import FAMILIES
from ..sources.base import DraftSource
from ..sources.weights import SourceWeights
from .options import Options
from .request import Request

MOST_ENGINES = 8  # of a target; the least recently used one goes


@dataclass
class Learned:
    """What earlier calls learned: how often candidates were accepted, and the sources' weights by name."""

    acceptance: AcceptanceModel = field(default_factory=lambda: AcceptanceModel(max(branch for _, branch in FAMILIES)))
    weights: dict[str, SourceWeights] = field(default_factory=dict)

    def copy(self) -> Learned:
        """The same in storage of its own."""
        return Learned(copy.deepcopy(self.acceptance), {name: found.copy() for name, found in self.weights.items()})

    def add(self, sources: Sequence[DraftSource], device: torch.device) -> None:
        """Begin with a source's starting values where nothing is known of it."""
        for source in sources:
            if source.name not in self.weights:
                self.weights[source.name] = SourceWeights(source.shares, source.worth, MAX_BRANCH, device)


class Engine:
    """What is known of one target with one set of sources and one criterion.

    Calls take a copy and hand it back when they end, so calls that overlap in time do not touch each other's tables;
    the last one to end is remembered. Drafts are held weakly: an engine ends with them.
    """

    def __init__(self, parts: Sequence[Any], criterion: object, device: torch.device) -> None:
        self.parts = [weakref.ref(part) for part in parts]
        self.criterion, self.device = criterion, device
        self._learned: dict[bool, Learned] = {}  # by whether tokens are sampled

    def serves(self, parts: Sequence[Any], criterion: object, device: torch.device) -> bool:
        """Whether these are the engine's own."""
        mine = [part() for part in self.parts]
        same = len(mine) == len(parts) and all(a is b for a, b in zip(mine, parts, strict=True))
        return same and self.criterion == criterion and self.device == device

    @property
    def ended(self) -> bool:
        """Whether a draft is gone."""
        return any(part() is None for part in self.parts)

    def learned(self, *, sampled: bool) -> Learned:
        """A copy of what is known."""
        return self._learned.get(sampled, Learned()).copy()

    def keep(self, learned: Learned, *, sampled: bool) -> None:
        """Remember what a call ended with."""
        self._learned[sampled] = learned


_engines: weakref.WeakKeyDictionary[PreTrainedModel, list[Engine]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def engine_of(request: Request) -> Engine:
    """The engine of a call's target, sources and criterion; made at the first call."""
    parts, criterion = parts_of(request.options), request.options.criterion
    with _lock:
        engines = [engine for engine in _engines.get(request.model, []) if not engine.ended]
        found = next((e for e in engines if e.serves(parts, criterion, request.device)), None)
        if found is None:
            found = Engine(parts, criterion, request.device)
        _engines[request.model] = [*(e for e in engines if e is not found), found][-MOST_ENGINES:]
        return found


def clear(model: PreTrainedModel) -> None:
    """Forget all engines of a target."""
    with _lock:
        _engines.pop(model, None)


def parts_of(options: Options) -> list[Any]:
    """The objects that tell sources apart."""
    own = [source for source in options.draft_sources or () if isinstance(source, DraftSource)]
    return [part for part in (options.assistant_model, options.draft_heads, *own) if part is not None]
