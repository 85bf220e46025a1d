"""Checks of a request's fields: types of pydantic's, whose errors become refusals by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    StrictStr,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

Json = dict[str, Any]
"""An object of JSON."""

Check = Callable[[str, Any], Any]
"""(name of a field, value) → the value as it is read."""

_PLAIN = {int, float, bool, str, type(None)}  # values that only their number is counted of
_SAID = {"missing": "missing", "extra_forbidden": "unknown here; leave it out"}
"""What is said of a kind of error of pydantic's, where its own words say less."""


class Refused(ValueError):
    """A request that is not served, and the field that is why.

    Args:
        field: its name, with a place in it where that helps: ``messages[0].content``.
        reason: what was expected, what came, and the cure.
    """

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@dataclass(frozen=True)
class Size:
    """How large a value of JSON may be.

    Attributes:
        characters: of its JSON; ``None``: as many as a request has.
        values: in it, itself and those in lists and objects.
        depth: of lists and objects in each other.
    """

    characters: int | None = 2_000
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
        try:
            written = json.dumps(value, ensure_ascii=False, allow_nan=False)
            written.encode()
        except RecursionError:
            raise Refused(name, f"is nested too deeply; at most {self}") from None
        except ValueError as error:
            raise Refused(name, f"cannot be written as JSON: {error}; write it otherwise, or leave it out") from None
        if self.characters is not None and len(written) > self.characters:
            raise Refused(name, f"is too long; at most {self}")
        values, within = 1, [(value, 1)]
        while within:
            one, depth = within.pop()
            if isinstance(one, (list, dict)):
                if depth > self.depth:
                    raise Refused(name, f"is nested too deeply; at most {self}")
                values += len(one)
                if values > self.values:
                    raise Refused(name, f"holds too many values; at most {self}")
                inner = one.values() if isinstance(one, dict) else one
                within += [(other, depth + 1) for other in inner if type(other) not in _PLAIN]


def wrong(name: str, expected: str, value: Any) -> Refused:
    """The refusal of a value of another type or beyond a bound."""
    return Refused(name, f"expected {expected}, got {shown(value)}")


def shown(value: Any) -> str:
    """The value as an error shows it, cut where it is long."""
    text = repr(value)
    return text if len(text) < 80 else text[:76] + " ..."


def one_line(error: BaseException) -> str:
    """The message of an error on one line; its kind where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


class Object(BaseModel):
    """An object with the fields of a subclass, read as a dict in the order of the request.

    Null is as good as left out. Unknown fields are refused, but for those that hold nothing.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="wrap")
    @classmethod
    def _as_given(cls, given: Any, read: ModelWrapValidatorHandler[Any]) -> Any:
        if not isinstance(given, dict):
            raise Refused("", f"expected an object, got {shown(given)}")
        known = {field.alias or name: name for name, field in cls.model_fields.items()}
        named = {k: value for k, value in given.items() if value is not None and (k in known or value not in ([], {}))}
        found = read(named)
        return {name: getattr(found, known[name]) for name in named}


def reader(kind: Any) -> Check:
    """A function that reads values of a kind: a type of Python's or pydantic's."""
    adapter = TypeAdapter(kind)

    def read(name: str, value: Any) -> Any:
        try:
            return adapter.validate_python(value)
        except ValidationError as errors:
            error = errors.errors(include_url=False)[0]
        places = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"] if part != "[key]")
        place, inner = name + "".join(places), error.get("ctx", {}).get("error")
        if isinstance(inner, Refused):
            raise Refused(place + inner.field, inner.reason)
        expected = f"{error['msg'].replace('Input should be', 'expected')}, got {shown(error['input'])}"
        raise Refused(place, _SAID.get(error["type"], expected))

    return read


text = reader(StrictStr)


def whole(least: int, most: int | None = None) -> Any:
    """An integer between two bounds, which it may reach."""
    return Annotated[int, Field(strict=True, ge=least, le=most)]


def number(least: float, most: float | None = None, *, beyond: bool = False) -> Any:
    """A finite number between two bounds; ``beyond``: the lower one is out of bounds itself."""
    low = {"gt": least} if beyond else {"ge": least}
    return Annotated[float, Field(strict=True, le=most, allow_inf_nan=False, **low)]


def one_of(*known: Any) -> Any:
    """One of a few values."""
    return Literal[known]


def one_or_more(kind: Any, most: int | None = None) -> Any:
    """A value, or a list of up to so many."""
    one, several = reader(kind), reader(Annotated[list[kind], Field(max_length=most)])
    return Annotated[Any, PlainValidator(lambda given: (several if isinstance(given, list) else one)("", given))]


def optional(**kinds: Any) -> Any:
    """An object with some of these fields, and no other."""
    return create_model("Fields", __base__=Object, **{name: (kind, None) for name, kind in kinds.items()})


BIAS = dict[Annotated[str, Field(pattern="^(0|[1-9][0-9]*)$")], number(-100, 100)]
"""From token ids, as strings, to numbers."""

STOPS = one_or_more(Annotated[StrictStr, Field(min_length=1, max_length=64)], 16)
"""A string or a list of up to 16, none of them empty or longer than 64 characters."""
