"""Names that a user misspelt: the error says which one is near."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar

_Class = TypeVar("_Class", bound=type)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``"; did you mean 'graph'?"`` where a known name is near, else ``""``; to be put before what is expected."""
    near = get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown(what: str, name: object, known: Iterable[str]) -> str:
    """An error's text: ``what`` has no ``name``, which one is near, and all that there are."""
    known = list(known)
    return f"{what} {name!r}{did_you_mean(name, known) or ';'} expected one of {', '.join(known)}"


def fields_named(what: str) -> Callable[[_Class], _Class]:
    """Class decorator of a dataclass: an unknown keyword is refused by name, with the nearest field.

    Args:
        what: the first words of the error.
    """

    def decorate(cls: _Class) -> _Class:
        init = cls.__init__  # type: ignore[misc]
        known = [field.name for field in fields(cls) if field.init and not field.name.startswith("_")]

        @functools.wraps(init)
        def checked(self: Any, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    raise TypeError(unknown(what, name, known))
            init(self, *args, **given)

        cls.__init__ = checked  # type: ignore[misc]
        return cls

    return decorate
