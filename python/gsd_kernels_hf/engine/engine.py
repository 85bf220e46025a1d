"""State that outlives a call: sessions with caches and captured steps, and statistics of a target and its sources."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..model.identity import ModelState
from ..policy.base import Policy
from ..sources.base import DraftSource
from ..sources.weights import SourceWeights
from .options import Options
from .request import Request
from .session import Kind, Session

MOST_ENGINES = 8  # of a target; the least recently used one goes
MOST_SESSIONS = 4  # that an engine keeps for later calls; the least recently used one goes
GRAIN = 256  # cache positions by which kept sessions are sized


@dataclass
class Learned:
    """Statistics of earlier calls.

    Attributes:
        weights: of sources, by name.
        experience: of automatic policies, see :func:`~gsd_kernels_hf.policy.pairs.automatic_policy`.
    """

    weights: dict[str, SourceWeights] = field(default_factory=dict)
    experience: dict[Any, Any] = field(default_factory=dict)


class Engine:
    """Sessions and statistics of one target with one set of sources and one criterion.

    Calls that overlap in time have a session each. They begin with what was learned by the last call that ended. Where
    a model was changed in place since, no key or value of before is used; where its tensors, modules or hooks are
    others, nothing is.

    Args:
        parts: the objects that the sources are made of, held weakly: an engine ends with them.
        criterion: which drafted tokens are accepted.
        keeps_sessions: whether caches, captured steps and drafts are kept for later calls: the memory of up to
            :data:`MOST_SESSIONS` sessions.
    """

    def __init__(self, parts: Sequence[Any], criterion: object, *, keeps_sessions: bool) -> None:
        self.parts = [weakref.ref(part) for part in parts]
        self.criterion, self.keeps_sessions = criterion, keeps_sessions
        self._learned: dict[bool, Learned] = {}  # by whether tokens are sampled
        self._idle: list[tuple[Session, dict[str, ModelState]]] = []  # the most recently used last
        self._lock = threading.Lock()

    def serves(self, parts: Sequence[Any], criterion: object) -> bool:
        """Whether the engine was made for these sources' objects and this criterion."""
        mine = [part() for part in self.parts]
        same = len(mine) == len(parts) and all(a is b for a, b in zip(mine, parts, strict=True))
        return same and self.criterion == criterion

    @property
    def ended(self) -> bool:
        """Whether an object that a source is made of was deleted."""
        return any(part() is None for part in self.parts)

    def learned(self, *, sampled: bool) -> Learned:
        """Statistics of greedy or of sampled texts, to begin a call with."""
        return self._learned.setdefault(sampled, Learned())

    def session(
        self, request: Request, policy: Policy, sources: Sequence[DraftSource], *, alone: bool
    ) -> tuple[Session, bool]:
        """A session for a call, and whether keys and values in its caches may be used.

        Args:
            request: the call.
            policy: what chooses the shapes of its steps.
            sources: of the call, for a new session.
            alone: whether no other rank must do the same at the same time.

        Returns:
            An idle session of this kind, the one that holds most of the prompt, or a new one.
        """
        kind = Kind.of(request, policy, sources, alone=alone)
        found = self._take(kind, request) if self.keeps_sessions else None
        if found is not None:
            return found
        capacity = request.prompt_length + request.room + kind.slots
        if self.keeps_sessions:
            capacity = -(-capacity // GRAIN) * GRAIN
        return Session(kind, request.model, request.device, capacity, [copy.copy(s) for s in sources]), False

    def _take(self, kind: Kind, request: Request) -> tuple[Session, bool] | None:
        """Take an idle session of this kind, the one that holds most of the prompt; ``None`` if there is none."""
        with self._lock:
            states = {name: ModelState.of(model) for name, model in request.models.items()}
            same = {name: state.structure for name, state in states.items()}
            self._idle = [
                entry for entry in self._idle if {name: state.structure for name, state in entry[1].items()} == same
            ]
            fitting = [entry for entry in self._idle if entry[0].kind == kind]
            if not fitting:
                return None
            best = max(fitting, key=lambda entry: entry[0].holds(request))
            self._idle.remove(best)
            return best[0], best[1] == states

    def release(self, session: Session, learned: Learned, request: Request) -> None:
        """End a call that succeeded: keep what it learned and, where sessions are kept, the session."""
        if session.drafter is not None:
            learned.weights = {name: found.clone() for name, found in session.drafter.weights.items()}
        session.end()
        if self.keeps_sessions:
            states = {name: ModelState.of(model) for name, model in request.models.items()}
            with self._lock:
                self._idle = [*self._idle, (session, states)][-MOST_SESSIONS:]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of idle sessions."""
        return sum(session.cache_bytes for session, _ in self._idle)


class Engines:
    """The engines of one target, by sources and criterion; at most :data:`MOST_ENGINES`.

    Args:
        keeps_sessions: see :class:`Engine`.
    """

    def __init__(self, *, keeps_sessions: bool = False) -> None:
        self.keeps_sessions = keeps_sessions
        self._engines: list[Engine] = []
        self._lock = threading.Lock()

    def of(self, options: Options) -> Engine:
        """The engine of a call's sources and criterion; made at the first call."""
        parts, criterion = parts_of(options), options.criterion
        with self._lock:
            engines = [engine for engine in self._engines if not engine.ended]
            found = next((e for e in engines if e.serves(parts, criterion)), None)
            if found is None:
                found = Engine(parts, criterion, keeps_sessions=self.keeps_sessions)
            self._engines = [*(e for e in engines if e is not found), found][-MOST_ENGINES:]
            return found

    def clear(self) -> None:
        """Forget everything and return the memory."""
        with self._lock:
            self._engines.clear()

    def __iter__(self) -> Any:
        return iter(self._engines)

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of idle sessions."""
        return sum(engine.cache_bytes for engine in self._engines)

    def __reduce__(self) -> tuple[Any, ...]:
        return Engines, ()  # a copied or pickled model starts anew


_unpatched: weakref.WeakKeyDictionary[Any, Engines] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


def engines_of(model: Any) -> Engines:
    """The engines of calls outside a patch: they keep statistics and no sessions, which would keep drafts alive."""
    with _lock:
        return _unpatched.setdefault(model, Engines())


def parts_of(options: Options) -> list[Any]:
    """The objects whose identity tells sets of sources apart."""
    own = [source for source in options.draft_sources or () if isinstance(source, DraftSource)]
    return [part for part in (options.assistant_model, options.draft_heads, *own) if part is not None]
