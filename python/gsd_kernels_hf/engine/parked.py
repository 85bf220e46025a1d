"""A session that waits for a call outside a patch and keeps no model of it alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..model.runner import CachedText
from ..sources.base import DraftSource
from .session import Session

HOLDERS = (CachedText, DraftSource)
"""What in a session refers to a model, and is the session's alone."""


@dataclass(frozen=True)
class Held:
    """A reference to a model, in its place while the session waits."""

    to: weakref.ReferenceType[Any]


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

        def weakly(value: Any) -> Any:
            return Held(refs[id(value)]) if id(value) in refs else value

        for variables in _variables(session):
            for name, value in list(variables.items()):
                waiting = _exchanged(value, weakly)
                if waiting is not value:
                    variables[name] = waiting
                    self._places.append((variables, name))

    def resume(self) -> Session | None:
        """The session, as it was; ``None`` where one of its objects is gone. Once."""
        alive = [ref() for ref in self.refs]  # held until it is back in its places
        session, self.session = self.session, None
        if session is None or any(one is None for one in alive):
            return None
        for variables, name in self._places:
            variables[name] = _exchanged(variables[name], lambda value: value.to() if type(value) is Held else value)
        return session


def _variables(session: Session) -> Iterator[dict[str, Any]]:
    """Attributes of everything in a session that may refer to a model."""
    waiting: list[Any] = [*session.row_models, *(() if session.mixer is None else session.mixer.every)]
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
