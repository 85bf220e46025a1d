"""JSON schemas that xgrammar holds a text to, whole: what it would drop without a word is refused by name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from .checks import Check, Refused, number, one_of, reader, text, whole, wrong

_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_FORMATS += ("uri-reference", "uri-template", "json-pointer", "relative-json-pointer")

_TYPES = {str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), dict: ("object",)}
_TYPES |= {list: ("array",), type(None): ("null",)}
"""Types that a value of JSON has."""

_list, _object = reader(list), reader(dict)

_parser: Any = getattr(re, "_parser", None) or importlib.import_module("sre_parse")
"""Python's own reader of regular expressions, which has another name before 3.11."""

MAX_ENUM_VALUES, MAX_LETTERS = 1_000, 300
"""Values of one enum; letters of the longest text of a pattern without stars."""


def check_schema(schema: Any, field: str) -> None:
    """Check a schema and those within it.

    Args:
        schema: an object, or a truth value.
        field: its name in the request.

    Raises:
        Refused: a keyword that would not hold, by its place.
    """
    try:
        _check(field, schema)
    except RecursionError:
        raise Refused(field, "is nested too deeply") from None


def _each(at: str, inner: Any) -> None:
    """A list of schemas."""
    for i, one in enumerate(_list(at, inner)):
        _check(f"{at}[{i}]", one)


def _single(at: str, inner: Any) -> None:
    """A list of one schema."""
    if len(_list(at, inner)) != 1:
        raise Refused(at, "xgrammar holds a text to a single one; merge them")
    _each(at, inner)


def _named(at: str, inner: Any) -> None:
    """Schemas by name."""
    for name, one in _object(at, inner).items():
        _check(f"{at}.{name}", one)


def _by_pattern(at: str, inner: Any) -> None:
    """A schema by the pattern of its names."""
    _named(at, inner)
    if len(inner) > 1:
        raise Refused(at, "xgrammar holds a name to one of several patterns; write one")
    for pattern in inner:
        _pattern(at, pattern)


def _pattern(at: str, pattern: Any) -> None:
    """A regular expression."""
    text(at, pattern)
    try:
        if r"\U" in pattern:  # a letter to Python alone
            raise re.error(r"\U")
        letters = _letters(_parser.parse(pattern), True, True)
    except (re.error, ValueError, OverflowError) as error:
        raise Refused(at, f"xgrammar does not hold a text to {pattern!r}: {error}; write it otherwise") from error
    if letters > MAX_LETTERS:
        raise Refused(at, f"a pattern for texts of {letters} letters; {MAX_LETTERS} at most: repeat less, or use *")


def _types(at: str, types: Any) -> None:
    if types == []:
        raise wrong(at, "a type", types)


def _reference(at: str, place: Any) -> None:
    if not isinstance(place, str) or not (place == "#" or place.startswith("#/")):
        raise wrong(at, "a place in this schema, as #/$defs/name", place)


def _check(at: str, schema: Any) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise wrong(at, "a JSON schema", schema)
    told = [kind for kind, keywords in _TOLD_BY.items() if any(name in schema for name in keywords)]
    kinds = schema.get("type", told[:1])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    for keyword in schema:
        if keyword not in _KEYWORDS:
            cure = "; say anyOf" if keyword == "oneOf" else ""
            raise Refused(f"{at}.{keyword}", f"xgrammar does not hold a text to it; leave it out{cure}")
    _check_alone(at, schema, kinds)
    for keyword, value in schema.items():
        wanted, check = _KEYWORDS[keyword]
        if wanted and not any(kind in wanted for kind in kinds):
            raise Refused(f"{at}.{keyword}", f"xgrammar reads it beside type {' or '.join(wanted)}; name it")
        check(f"{at}.{keyword}", value)
    _check_together(at, schema, kinds)


def _check_alone(at: str, schema: Mapping[str, Any], kinds: list[Any]) -> None:
    """Refuse the neighbours of a keyword that xgrammar reads alone."""
    first = next((keyword for keyword in _ALONE if keyword in schema), None)
    if first is None:
        return
    read = {first, *_SAID}
    if first in ("enum", "const"):  # whose values show whether they have the type beside them
        values = schema[first] if first == "enum" and isinstance(schema[first], list) else [schema[first]]
        read |= {"type"} if all(any(kind in _TYPES[type(value)] for kind in kinds) for value in values) else set()
    if unread := [keyword for keyword in schema if keyword not in read]:
        raise Refused(f"{at}.{unread[0]}", f"xgrammar does not read it beside {first}; leave it out")


def _check_together(at: str, schema: Mapping[str, Any], kinds: list[Any]) -> None:
    """Refuse a keyword that xgrammar does not read beside another."""
    for groups in _APART:
        found = [[name for name in group if name in schema] for group in groups]
        if len(found := [names[0] for names in found if names]) > 1:
            raise Refused(f"{at}.{found[1]}", f"xgrammar does not read it beside {found[0]}; leave one of them out")
    if "multipleOf" in schema and "number" in kinds:
        raise Refused(f"{at}.multipleOf", "xgrammar holds integers to it, and no others; leave it out")
    properties = schema.get("properties", {})
    needed = schema.get("required", [])
    if isinstance(properties, Mapping) and (missing := [name for name in needed if name not in properties]):
        raise Refused(f"{at}.required", f"properties has no {missing[0]!r}, which xgrammar needs there")


_SAID = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
_SAID += ("$id", "$defs", "definitions")
"""Keywords that every valid text meets."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_anything, _count = reader(Any), reader(whole(0, 10_000))

_KEYWORDS: dict[str, tuple[tuple[str, ...], Check]] = {
    **dict.fromkeys(_SAID, ((), _anything)),
    **dict.fromkeys(("$defs", "definitions"), ((), _named)),
    "type": ((), _types),
    "enum": ((), reader(Annotated[list, Field(max_length=MAX_ENUM_VALUES)])),
    "const": ((), _anything),
    "$ref": ((), _reference),
    "anyOf": ((), _each),
    "allOf": ((), _single),
    "multipleOf": (("integer",), reader(whole(1, 1_000))),
    **dict.fromkeys(_BOUNDS, (("integer", "number"), reader(number(-(2**63), 2**63)))),
    **dict.fromkeys(("minLength", "maxLength"), (("string",), _count)),
    "pattern": (("string",), _pattern),
    "format": (("string",), reader(one_of(*_FORMATS))),
    **dict.fromkeys(("minItems", "maxItems"), (("array",), _count)),
    "items": (("array",), _check),
    "prefixItems": (("array",), _each),
    **dict.fromkeys(("minProperties", "maxProperties"), (("object",), _count)),
    **dict.fromkeys(("additionalProperties", "propertyNames"), (("object",), _check)),
    "properties": (("object",), _named),
    "patternProperties": (("object",), _by_pattern),
    "required": (("object",), reader(list[str])),
}
"""Keywords that are served: the types beside which alone xgrammar reads them, if not any, and the check of their value.

Numbers have bounds, since a grammar grows with them.
"""

_TOLD_BY = {"object": ("properties", "additionalProperties"), "array": ("items", "prefixItems")}
"""Keywords by which xgrammar tells the type of a schema that names none."""

_ALONE = ("$ref", "anyOf", "allOf", "enum", "const")
"""Keywords whose neighbours xgrammar does not read."""

_APART = (
    (("format",), ("pattern",), ("minLength", "maxLength")),
    (("properties",), ("patternProperties",), ("propertyNames",)),
    (_BOUNDS, ("multipleOf",)),
)
"""Groups of keywords of which xgrammar reads those of one alone."""


_LETTERS = (_parser.LITERAL, _parser.IN)


def _letters(parts: Any, begins: bool, ends: bool) -> int:
    """How many letters a regular expression tells one by one: those of groups times their repetitions.

    Args:
        parts: of Python's reader.
        begins, ends: whether nothing that has to match is before them, or behind.

    Raises:
        re.error: a part that xgrammar leaves out, or takes for letters that JSON escapes.
    """
    count = 0
    for place, (kind, value) in enumerate(parts):
        first, last = begins and place == 0, ends and place == len(parts) - 1
        if (first and value is _parser.AT_BEGINNING) or (last and value is _parser.AT_END):
            continue
        if kind is _parser.BRANCH:
            count += sum(_letters(one, first, last) for one in value[1])
        elif kind is _parser.SUBPATTERN and not any(value[1:3]):  # without flags of its own
            count += max(_letters(value[3], first, last), 1)
        elif kind in (_parser.MAX_REPEAT, _parser.MIN_REPEAT):
            least, most, inner = value
            count += max(least if most is _parser.MAXREPEAT else most, 1) * _letters(inner, False, False)
        elif kind in (_parser.ANY, _parser.NOT_LITERAL) or (kind in _LETTERS and not _escaped(value)):
            count += 1
        else:
            raise re.error(f"{kind} {value}".lower())
    return count


def _escaped(value: Any) -> bool:
    """Return whether JSON escapes a letter, or one that a class names."""
    if isinstance(value, int):
        return value < ord(" ") or chr(value) in '"\\'
    return value[0][0] is not _parser.NEGATE and any(
        kind in (_parser.LITERAL, _parser.RANGE) and any(map(_escaped, one if isinstance(one, tuple) else (one,)))
        for kind, one in value
    )


def moved(schema: Any, place: str) -> Any:
    """A schema that has been checked, for another place than the root: ``#/$defs/0``."""
    if isinstance(schema, bool):
        return schema
    copy = dict(schema)
    for keyword, inner in schema.items():
        check = _KEYWORDS[keyword][1]
        if check is _reference:
            copy[keyword] = place + inner[1:]
        elif check in (_named, _by_pattern):
            copy[keyword] = {name: moved(one, place) for name, one in inner.items()}
        elif check in (_each, _single):
            copy[keyword] = [moved(one, place) for one in inner]
        elif check is _check:
            copy[keyword] = moved(inner, place)
    return copy
