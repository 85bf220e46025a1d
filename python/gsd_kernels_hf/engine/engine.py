"""State that outlives a call: sessions with caches and captured steps, and statistics of a target and its sources."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..locks import forkable_lock
from ..model import replay
from ..model.facts import ModelState
from ..model.runner import CachedText
from ..packed.modules import forget_copies
from ..policy.learning import Policy
from ..sources.base import DraftSource
from ..sources.memory import HistoryMemory
from ..sources.mixer import Retention, SourceWeights
from .resolved import Request, SessionKey, Sources
from .session import Session, larger, room_to_begin, rounded

MOST_ENGINES = 8  # of a target; the least recently used one goes
MOST_SESSIONS = 4  # that wait for later calls, of all engines of a target; the least recently used one goes


@dataclass
class Statistics:
    """Statistics of earlier calls.

    Attributes:
        weights: of sources, by name.
        experience: of automatic policies, see :func:`~gsd_kernels_hf.policy.automatic.automatic_policy`.
        retention: which sources automatic calls go without.
    """

    weights: dict[str, SourceWeights] = field(default_factory=dict)
    experience: dict[Any, Any] = field(default_factory=dict)
    retention: Retention = field(default_factory=Retention)


HOLDERS = (CachedText, DraftSource)
"""What in a session refers to a model, and is the session's alone."""


class Parked:
    """A session that waits, and goes with the first of the objects that it was made for.

    While it waits, these are held weakly wherever the session refers to them: whoever calls next holds them. A source
    of one's own that keeps a model deeper inside keeps it alive until the session goes.

    Args:
        session: whose text has ended.
        objects: the models, and what its sources are made of.
    """

    def __init__(self, session: Session, objects: Iterable[Any]) -> None:
        me = weakref.ref(self)  # no cycle: caches go with the session, at once

        def end(_: weakref.ReferenceType[Any]) -> None:
            parked = me()
            if parked is not None:
                parked.session = None
                parked._places.clear()  # these hold the caches as well

        refs = {id(one): weakref.ref(one, end) for one in objects}
        self.refs = list(refs.values())
        self.session: Session | None = session
        self._places: list[tuple[dict[str, Any], str]] = []

        for variables in _variables(session):
            for name, value in list(variables.items()):
                waiting = _exchanged(value, lambda one: refs.get(id(one), one))
                if waiting is not value:
                    variables[name] = waiting
                    self._places.append((variables, name))

    def resume(self) -> Session | None:
        """The session, as it was; ``None`` where one of its objects is gone. Once."""
        alive = {id(ref): ref() for ref in self.refs}  # held until it is back in its places
        session, self.session = self.session, None
        if session is None or any(one is None for one in alive.values()):
            return None
        for variables, name in self._places:
            variables[name] = _exchanged(variables[name], lambda value: alive.get(id(value), value))
        return session


def _variables(session: Session) -> Iterator[dict[str, Any]]:
    """Attributes of everything in a session that may refer to a model."""
    waiting: list[Any] = [*session.row_models, *session.mixer.every]
    seen: set[int] = set()
    while waiting:
        holder = waiting.pop()
        if id(holder) in seen or not hasattr(holder, "__dict__"):
            continue
        seen.add(id(holder))
        yield vars(holder)
        waiting += [value for value in vars(holder).values() if issubclass(type(value), HOLDERS)]


def _exchanged(value: Any, exchange: Callable[[Any], Any]) -> Any:
    """A value, or what a list, tuple or dictionary holds, exchanged; the same object where nothing is."""
    if type(value) not in (list, tuple, dict):
        return exchange(value)
    inside = list(value.values()) if type(value) is dict else list(value)
    others = [exchange(one) for one in inside]
    if all(one is other for one, other in zip(inside, others, strict=True)):
        return value
    return dict(zip(value, others, strict=True)) if type(value) is dict else type(value)(others)


class Engine:
    """Sessions and statistics of one target with one set of sources and one criterion.

    Calls that overlap in time have a session each. They begin with what was learned by the last call that ended. Where
    a model was changed in place since a session's text was begun, no key or value of it is used, nor of any other model
    unless it was a draft model; where its tensors, modules, settings or hooks are others, or those of what else sources
    forward, the session is not.

    Args:
        parts: the objects that the sources are made of, held weakly: an engine ends with them.
        criterion: which drafted tokens are accepted.
        engines: of the target, where sessions wait for later calls.
    """

    def __init__(self, parts: Sequence[Any], criterion: object, engines: Engines) -> None:
        self.parts = [weakref.ref(part) for part in parts]
        self.criterion, self.engines = criterion, engines
        self.statistics = Statistics(), Statistics()  # of greedy and of sampled texts; here, so that calls share them

    def serves(self, parts: Sequence[Any], criterion: object) -> bool:
        """Return whether the engine was made for these sources' objects and this criterion."""
        same = len(self.parts) == len(parts) and all(a() is b for a, b in zip(self.parts, parts, strict=True))
        return same and self.criterion == criterion

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
            An idle session of this key, the one that holds most of the prompt, or a new one.
        """
        key = SessionKey.of(request, policy, sources, alone=alone)
        prompt, most = request.prompt_length, request.prompt_length + request.room + key.slots
        capacity = room_to_begin(prompt, key.slots, request.room, request.device)
        own = [copy.copy(source) for source in sources]
        keeps_sessions = self.engines.keeps_sessions
        if not keeps_sessions and not replay.is_gpu(request.device):
            return Session(key, request.facts, capacity, own), False
        capacity = rounded(capacity)
        # As they are now: what is changed while a text is written is a change to the next call.
        modules = {**request.models, "drafter": request.sources.drafter}
        states = {name: ModelState.of(module) for name, module in modules.items() if module is not None}
        others = [m for m in request.sources.forwarded if not any(m is module for module in modules.values())]
        states |= {f"forwarded {number}": ModelState.built(module) for number, module in enumerate(others)}
        session, current = self.engines.take(self, key, request, states), False
        if session is None:
            session = Session(key, request.facts, capacity, own)
        else:
            if capacity > session.capacity:
                session.grow(larger(session.capacity, capacity, rounded(most)))
            changed = [modules[name] for name, state in states.items() if session.models[name] != state]
            # A draft model's cache is all that depends on it: of one that learns, nothing else is read anew.
            drafts = request.options.drafts
            current = keeps_sessions and all(any(module is draft for draft in drafts) for module in changed)
            session.forget(changed)
        session.models = states
        return session, current

    def release(self, session: Session, statistics: Statistics, *, steps: int, automatic: bool) -> None:
        """End a call that succeeded: keep what it learned and, where sessions are kept, the session.

        Args:
            session: of the call.
            statistics: that it began with.
            steps: that it took.
            automatic: whether a policy chose them, which may leave sources out of the next call.
        """
        statistics.weights = {**statistics.weights, **copy.deepcopy(session.mixer.weights)}
        if automatic:
            statistics.retention.observe(session.mixer.every, statistics.weights, steps)
        if self not in self.engines:  # any more: another thread may forget it
            session.memory = None  # what was forgotten meanwhile stays so
        request = session.request
        held = (*request.models.values(), request.sources.drafter, *(part() for part in self.parts))
        session.end()
        self.engines.add(self, session, [one for one in held if one is not None])


class Engines:
    """The engines of one target, by sources and criterion, at most :data:`MOST_ENGINES`, and sessions that wait.

    Of these there are :data:`MOST_SESSIONS`; without ``keeps_sessions`` one an engine, which keeps no model alive.

    Args:
        keeps_sessions: whether caches, with all that a text left there, and drafts are kept for later calls; else
            captured steps alone, with the storage that they write, as long as the models live.
        memory: what histories leave from call to call; ``None``: nothing.

    Attributes:
        learner: what learns from the calls, if anything does, see :mod:`gsd_kernels_train.online`.
    """

    def __init__(self, *, keeps_sessions: bool = False, memory: HistoryMemory | None = None) -> None:
        self.keeps_sessions, self.memory = keeps_sessions, memory
        self.learner: Any = None
        self._engines: list[Engine] = []
        self._waiting: list[tuple[Engine, Parked]] = []  # the most recently used last
        self._lock = forkable_lock()

    def of(self, sources: Sources) -> Engine:
        """The engine of a call's sources and criterion; made at the first call."""
        parts, criterion = sources.parts, sources.options.criterion
        with self._lock:
            engine = next((e for e in self._engines if e.serves(parts, criterion)), None)
            if engine is None:
                engine = Engine(parts, criterion, self)
            living = [e for e in self._engines if all(part() is not None for part in e.parts)]
            others = [e for e in living if e is not engine]
            self._keep([*others, engine][-MOST_ENGINES:])
            return engine

    def clear(self) -> None:
        """Forget everything and return the memory, of calls that are running when they end."""
        for part in (part() for engine in self._engines for part in engine.parts):
            if isinstance(part, nn.Module):
                forget_copies(part)
        with self._lock:
            self._keep([])
        if self.memory is not None:
            self.memory.clear()

    def take(
        self, engine: Engine, key: SessionKey, request: Request, states: Mapping[str, ModelState]
    ) -> Session | None:
        """Take a session of this engine and key whose models have the structure they had; of several that which holds
        most of the prompt. The engine's sessions of another structure go."""
        structure = {name: state.structure for name, state in states.items()}

        def fits(session: Session) -> bool:
            return {name: state.structure for name, state in session.models.items()} == structure

        with self._lock:
            waiting = [(owner, parked, parked.session) for owner, parked in self._waiting]
            here = [entry for entry in waiting if entry[2] is not None and (entry[0] is not engine or fits(entry[2]))]
            fitting = [(p, s) for owner, p, s in here if owner is engine and s is not None and s.key == key]
            best = max(fitting, key=lambda entry: entry[1].holds(request))[0] if fitting else None
            self._waiting = [(owner, parked) for owner, parked, _ in here if parked is not best]
            return None if best is None else best.resume()

    def add(self, engine: Engine, session: Session, objects: Sequence[Any]) -> None:
        """Keep a session, unless its engine was forgotten meanwhile; ``objects``: what it was made for."""
        if not self.keeps_sessions and session.captured is None:
            return  # there is nothing in it that a new one would not have
        with self._lock:
            if engine in self:
                others = [entry for entry in self._waiting if self.keeps_sessions or entry[0] is not engine]
                parked = Parked(session, () if self.keeps_sessions else objects)
                self._waiting = [*others, (engine, parked)][-MOST_SESSIONS:]

    def _keep(self, engines: list[Engine]) -> None:
        self._engines = engines
        self._waiting = [entry for entry in self._waiting if entry[0] in engines]

    def let_go(self) -> None:
        """Let go of the sessions that wait."""
        with self._lock:
            self._waiting = []

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    @property
    def sessions(self) -> list[Session]:
        """The sessions that wait, the most recently used last."""
        return [session for session in (parked.session for _, parked in self._waiting) if session is not None]

    @property
    def cache_bytes(self) -> int:
        """Bytes of the caches of sessions that wait for a call."""
        return sum(session.cache_bytes for session in self.sessions)

    def __reduce__(self) -> tuple[Any, ...]:
        return Engines, ()  # a copied or pickled model starts anew


_unpatched: weakref.WeakKeyDictionary[Any, Engines] = weakref.WeakKeyDictionary()
_lock = forkable_lock()


def engines_of(model: Any) -> Engines:
    """The engines of calls outside a patch: they keep statistics, and captured steps on a GPU."""
    with _lock:
        return _unpatched.setdefault(model, Engines())
