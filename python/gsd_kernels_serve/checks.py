"""Checks of a request's fields: functions of a field's name and its value, which refuse by name."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Check = Callable[[str, Any], None]

_PLAIN = {int, bool, type(None)}  # values that only their number is counted of


class Refused(ValueError):
    """A request that is not served, and the field that is why.

    Args:
        field: its name, with a place in it where that helps: ``messages[0].content``.
        reason: what was expected, what came, and the cure.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


@dataclass(frozen=True)
class Size:
    """How large a value of JSON may be.

    Attributes:
        characters: of all strings and names in it; ``None``: as many as a request has.
        values: in it, itself and those in lists and objects.
        depth: of lists and objects in each other.
    """

    characters: int | None = 1_000
    values: int = 100
    depth: int = 4

    def __str__(self) -> str:
        letters = "" if self.characters is None else f"{self.characters:,} characters, "
        return f"{letters}{self.values:,} values, {self.depth} deep"

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that is larger, whatever it is, or that holds what no answer could repeat; it is not shown.

        Raises:
            Refused: by how much; of half a character, or of an infinity.
        """
        characters, values = 0, 1
        waiting = [(value, 0)]
        while waiting:
            one, depth = waiting.pop()
            if isinstance(one, str):
                characters += len(one)
                _check_written(name, one)
            elif isinstance(one, (list, Mapping)):
                depth += 1
                values += len(one)
                if depth > self.depth:
                    raise Refused(name, f"is nested too deeply; at most {self}")
                if values > self.values:
                    raise Refused(name, f"holds too many values; at most {self}")
                if isinstance(one, Mapping):
                    names = "".join(one)
                    characters += len(names)
                    _check_written(name, names)
                    one = one.values()
                waiting += [(inner, depth) for inner in one if type(inner) not in _PLAIN]
            elif isinstance(one, float) and not math.isfinite(one):
                raise Refused(name, f"holds {one}, which is no number of JSON")
            if self.characters is not None and characters > self.characters:
                raise Refused(name, f"is too long; at most {self}")


def wrong(name: str, expected: str, value: Any) -> Refused:
    """The refusal of a value of another type or beyond a bound."""
    shown = repr(value)
    return Refused(name, f"expected {expected}, got {shown if len(shown) < 80 else shown[:76] + ' ...'}")


def _check_written(name: str, given: str) -> None:
    """Refuse a string that UTF-8 has not."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        odd = f"\\u{ord(given[error.start]):04x}"
        raise Refused(
            name, f"holds {odd} alone, half of a pair and no character; write both halves, or leave it out"
        ) from None


def anything(_: str, __: Any) -> None:
    """A field that is checked where it is used."""


def is_whole(value: Any) -> bool:
    """Return whether a value is an integer; JSON's true is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def flag(name: str, value: Any) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise wrong(name, "true or false", value)


def text(name: str, value: Any) -> None:
    """A string."""
    if not isinstance(value, str):
        raise wrong(name, "a string", value)


def whole(least: int, most: int | None = None) -> Check:
    """An integer between two bounds, which it may reach."""
    bounds = f"an integer from {least} to {most}" if most is not None else f"an integer of {least} or more"

    def check(name: str, value: Any) -> None:
        if not is_whole(value) or value < least or (most is not None and value > most):
            raise wrong(name, bounds, value)

    return check


def number(least: float, most: float | None = None, *, beyond: bool = False) -> Check:
    """A finite number between two bounds; ``beyond``: the lower one is out of bounds itself."""
    low = f"above {least:g}" if beyond else f"of {least:g} or more"
    bounds = f"a number {low}" if most is None else f"a number {low.removesuffix(' or more')} to {most:g}"

    def check(name: str, value: Any) -> None:
        good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        if not good or value < least or (beyond and value == least) or (most is not None and value > most):
            raise wrong(name, bounds, value)

    return check


def one_of(*known: Any) -> Check:
    """One of a few values."""

    def check(name: str, value: Any) -> None:
        if not any(same(value, one) for one in known):
            raise wrong(name, " or ".join(repr(one) for one in known), value)

    return check


def same(value: Any, other: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def mapping(**known: Check) -> Check:
    """An object with some of these fields, and no other."""

    def check(name: str, value: Any) -> None:
        for key, inner in entries(name, value, known).items():
            known[key](f"{name}.{key}", inner)

    return check


def entries(name: str, value: Any, known: Iterable[str], *needed: str) -> dict[str, Any]:
    """The fields of an object that are not null; ``needed`` must be there, unknown ones must be empty.

    Raises:
        Refused: no object, or with a field that is unknown.
    """
    if not isinstance(value, Mapping):
        raise wrong(name, "an object", value)
    for key in value:
        if key not in known and value[key] not in (None, [], {}):
            raise Refused(f"{name}.{key}", "unknown here; leave it out")
    for key in needed:
        if value.get(key) is None:
            raise Refused(f"{name}.{key}", "missing")
    return {key: inner for key, inner in value.items() if key in known and inner is not None}


def an_object(name: str, value: Any) -> None:
    """An object with any fields."""
    if not isinstance(value, Mapping):
        raise wrong(name, "an object", value)


def one_or_more(check: Check) -> Check:
    """A value, or a list of such."""

    def each(name: str, value: Any) -> None:
        for one in value if isinstance(value, list) else [value]:
            check(name, one)

    return each


def a_list(*known: str) -> Check:
    """A list of some of these strings."""

    def check(name: str, value: Any) -> None:
        if not isinstance(value, list) or not all(one in known for one in value):
            raise wrong(name, f"a list of {', '.join(map(repr, known))}", value)

    return check


def strings(most: int, length: int) -> Check:
    """A string or a list of up to ``most``, none of them empty or longer than ``length`` characters."""

    def check(name: str, value: Any) -> None:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or len(texts) > most or not all(isinstance(s, str) and s for s in texts):
            raise wrong(name, f"a string or a list of up to {most} strings, none empty", value)
        if long := [s for s in texts if len(s) > length]:
            raise Refused(name, f"{long[0][:20]!r} ... has {len(long[0])} characters, {length} at most")

    return check


def bias(name: str, value: Any) -> None:
    """An object from token ids, as strings, to numbers from -100 to 100."""
    between = number(-100, 100)
    an_object(name, value)
    for token, much in value.items():
        if not re.fullmatch(r"0|[1-9][0-9]*", token):
            raise wrong(name, "token ids as keys", token)
        between(f"{name}.{token}", much)
