"""State that outlives a call: sessions with caches and captured steps, and statistics of a target and its sources."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from gsd_kernels.ops.learn import Mixture

from ..locks import forkable_lock
from ..model import replay
from ..model.facts import Facts
from ..model.runner import CachedText
from ..packed.modules import forget_copies
from ..policy.learning import Policy
from ..sources.base import DraftSource
from ..sources.memory import HistoryMemory
from ..sources.mixer import Retention
from .resolved import Request, SessionKey, Sources
from .session import Session, rooms, rounded

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

    weights: dict[str, Mixture] = field(default_factory=dict)
    experience: dict[Any, Any] = field(default_factory=dict)
    retention: Retention = field(default_factory=Retention)


HOLDERS = (CachedText, DraftSource)
"""What in a session refers to a model, and is the session's alone."""


class Parked:
    """A session that waits, and goes with the first of the objects that it was made for.

    While it waits, these are held weakly wherever the session refers to them: whoever calls next holds them. A source
    of one's own that keeps a model deeper inside keeps it alive until the session goes.

    Args:
        engine: whose it is.
        session: whose text has ended.
        objects: the models, and what its sources are made of.
    """

    def __init__(self, engine: Engine, session: Session, objects: Iterable[Any]) -> None:
        me = weakref.ref(self)  # no cycle: caches go with the session, at once

        def end(_: weakref.ReferenceType[Any]) -> None:
            parked = me()
            if parked is not None:
                parked.session = None
                parked._places.clear()  # these hold the caches as well

        refs = {id(one): weakref.ref(one, end) for one in objects}
        self.engine, self.refs = engine, list(refs.values())
        self.session: Session | None = session
        self._places: list[tuple[dict[str, Any], str]] = []

        for variables in _variables(session):
            for name, value in list(variables.items()):
                waiting = _exchanged(value, refs)
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
            variables[name] = _exchanged(variables[name], alive)
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


def _exchanged(value: Any, others: Mapping[int, Any]) -> Any:
    """A value, or what a list, tuple or dictionary holds, exchanged by its id; the same object where nothing is."""
    if type(value) not in (list, tuple, dict):
        return others.get(id(value), value)
    inside = list(value.values() if type(value) is dict else value)
    if not any(id(one) in others for one in inside):
        return value
    inside = [others.get(id(one), one) for one in inside]
    return dict(zip(value, inside, strict=True)) if type(value) is dict else type(value)(inside)


class Engine:
    """Statistics of one target with one set of sources and one criterion.

    Args:
        parts: the objects that the sources are made of, held weakly: an engine ends with them.
        criterion: which drafted tokens are accepted.
    """

    def __init__(self, parts: Sequence[Any], criterion: object) -> None:
        self.parts, self.criterion = [weakref.ref(part) for part in parts], criterion
        self.statistics = Statistics(), Statistics()  # of greedy and of sampled texts; here, so that calls share them


class Engines:
    """The engines of one target, by sources and criterion, at most :data:`MOST_ENGINES`, and sessions that wait.

    Of these there are :data:`MOST_SESSIONS`; without a ``memory`` one an engine, which keeps no model alive.

    Calls that overlap in time have a session each. They begin with what was learned by the last call that ended. Where
    a model was changed in place since a session's text was begun, no key or value of it is used, nor of any other model
    unless it was a draft model; where its tensors, modules, settings or hooks are others, or those of what else sources
    forward, the session is not.

    Args:
        memory: what histories leave from call to call; ``None``: nothing.

    Attributes:
        keeps_sessions: whether, as with a memory, caches, with all that a text left there, and drafts are kept for
            later calls; else captured steps alone, with the storage that they write, as long as the models live.
        learner: what learns from the calls, if anything does, see :mod:`gsd_kernels_train.online`.
    """

    def __init__(self, memory: HistoryMemory | None = None) -> None:
        self.memory, self.keeps_sessions = memory, memory is not None
        self.learner: Any = None
        self._engines: list[Engine] = []
        self._waiting: list[Parked] = []  # the most recently used last
        self._lock = forkable_lock()

    def of(self, sources: Sources) -> Engine:
        """The engine of a call's sources and criterion; made at the first call."""
        parts, criterion = sources.parts, sources.options.criterion
        with self._lock:
            engine: Engine | None = None
            others = []
            for one in self._engines:
                own = [part() for part in one.parts]
                if one.criterion == criterion and [*map(id, own)] == [*map(id, parts)]:
                    engine = one
                elif all(part is not None for part in own):
                    others.append(one)
            engine = engine or Engine(parts, criterion)
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

    def session(
        self, engine: Engine, request: Request, policy: Policy, sources: Sequence[DraftSource], *, alone: bool
    ) -> tuple[Session, bool]:
        """A session for a call, and whether keys and values in its caches may be used.

        Args:
            engine: of the call.
            request: the call.
            policy: what chooses the shapes of its steps.
            sources: of the call, for a new session.
            alone: whether no other rank must do the same at the same time.

        Returns:
            Of the engine's idle sessions of this key, whose models have the structure that they had, the one that holds
            most of the prompt, or a new one. Idle ones of another structure go.
        """
        key = SessionKey(request, policy, sources, alone=alone)
        (capacity, most), idle, current = rooms(request, key.slots), None, False
        structure: list[Any] = []
        contents: list[Any] = []
        if self.keeps_sessions or replay.is_gpu(request.device):
            capacity, given = rounded(capacity), request.sources
            # As they are now: what is changed while a text is written is a change to the next call.
            models = [module for module in (*request.models.values(), given.drafter) if module is not None]
            beside = (given.heads, *(module for source in given.every for module in source.forwards))
            known = [Facts.of(module) for module in models]
            built = [Facts.of(module) for module in beside if isinstance(module, nn.Module)]
            structure = [facts.structure for facts in (*known, *built)]
            contents = [facts.content for facts in known]
            with self._lock:
                # No name outlives this that holds one which goes: a new one's caches are made behind it.
                found = ((parked, parked.session) for parked in self._waiting)
                waiting = [(p, s) for p, s in found if s and (p.engine is not engine or s.structure == structure)]
                fitting = [(p, s) for p, s in waiting if p.engine is engine and s.key == key]
                prompt = request.input_ids, request.kv_start
                best = max(fitting, key=lambda entry: entry[1].target.common(*prompt), default=(None,))[0]
                self._waiting = [parked for parked, _ in waiting if parked is not best]
                idle = None if best is None else best.resume()
        session = idle or Session(key, request.facts, capacity, [copy.copy(source) for source in sources])
        if idle is not None:
            session.reserve(capacity, rounded(most))
            changed = [m for m, now, before in zip(models, contents, session.contents, strict=True) if now != before]
            # A draft model's cache is all that depends on it: of one that learns, nothing else is read anew.
            drafts = request.options.drafts
            current = self.keeps_sessions and all(any(module is draft for draft in drafts) for module in changed)
            moved = [rows.changed() for rows in session.row_models if any(rows.model is module for module in changed)]
            if any(moved):
                session.recapture()
        session.most, session.structure, session.contents = most, structure, contents
        return session, current

    def release(self, engine: Engine, session: Session, statistics: Statistics, *, steps: int, automatic: bool) -> None:
        """End a call that succeeded: keep what it learned and, where sessions are kept, the session.

        Args:
            engine: of the call.
            session: of the call.
            statistics: that it began with.
            steps: that it took.
            automatic: whether a policy chose them, which may leave sources out of the next call.
        """
        statistics.weights = {**statistics.weights, **copy.deepcopy(session.mixer.weights)}
        if automatic:
            statistics.retention.observe(session.mixer.every, statistics.weights, steps)
        if engine not in self:  # any more: another thread may forget it
            session.memory = None  # what was forgotten meanwhile stays so
        request = session.request
        held = (*request.models.values(), request.sources.drafter, *(part() for part in engine.parts))
        session.end()
        if not self.keeps_sessions and session.captured is None:
            return  # there is nothing in it that a new one would not have
        with self._lock:
            if engine in self:
                others = [parked for parked in self._waiting if self.keeps_sessions or parked.engine is not engine]
                objects = () if self.keeps_sessions else [one for one in held if one is not None]
                self._waiting = [*others, Parked(engine, session, objects)][-MOST_SESSIONS:]

    def _keep(self, engines: list[Engine]) -> None:
        self._engines = engines
        self._waiting = [parked for parked in self._waiting if parked.engine in engines]

    def let_go(self) -> None:
        """Let go of the sessions that wait."""
        with self._lock:
            self._waiting = []

    def __iter__(self) -> Iterator[Engine]:
        return iter(self._engines)

    @property
    def sessions(self) -> list[Session]:
        """The sessions that wait, the most recently used last."""
        return [session for parked in self._waiting if (session := parked.session) is not None]

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
