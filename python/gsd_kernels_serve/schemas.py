"""JSON schemas that xgrammar holds a text to, whole: what it would drop without a word is refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .checks import Check, Refused, anything, number, one_of, whole, wrong

_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_FORMATS += ("uri-reference", "uri-template", "json-pointer", "relative-json-pointer")

_KINDS: dict[str, Any] = {"string": str, "number": (int, float), "integer": int, "object": Mapping, "array": list}
_KINDS |= {"boolean": bool, "null": type(None)}

_PARTS = re.compile(
    r"\\(?:x[\da-fA-F]{2}|u[\da-fA-F]{4}|.)|\[(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}|\((?:\?[:=!])?|.", re.DOTALL
)
"""Of a regular expression: an escape, a class, a count, the beginning of a group, or a letter."""

_UNHELD = re.compile(r"^\(\?[=!]|[\0-\x1f\"]|\\(?![dDwWsSpPkxu1-9])[\w\"\\]|\\(?:x|u00)(?:[01]|22|5[cC])")
"""In a part: a look ahead, and letters that JSON escapes; escapes that xgrammar takes for letters."""

MAX_ENUM_VALUES, MAX_LETTERS, MAX_PARTS = 1_000, 300, 3_000
"""Values of one enum; letters of the longest text of a pattern without stars; its letters, anchors and counts."""


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
    if not isinstance(inner, list):
        raise wrong(at, "a list of JSON schemas", inner)
    for i, one in enumerate(inner):
        _check(f"{at}[{i}]", one)


def _single(at: str, inner: Any) -> None:
    """A list of one schema."""
    if not isinstance(inner, list) or len(inner) != 1:
        raise Refused(at, "xgrammar holds a text to a single one; merge them")
    _each(at, inner)


def _named(at: str, inner: Any) -> None:
    """Schemas by name."""
    if not isinstance(inner, Mapping):
        raise wrong(at, "an object of JSON schemas", inner)
    for name, one in inner.items():
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
    parts = _PARTS.findall(pattern) if isinstance(pattern, str) else []
    states = max(_states(parts), len(parts) - MAX_PARTS)
    if states > MAX_LETTERS:
        raise Refused(at, f"a pattern for texts of {states} letters; {MAX_LETTERS} at most: repeat less, or use *")
    if (part := _dropped(parts)) is not None:
        raise Refused(at, f"xgrammar does not hold a text to {part!r} in {pattern!r}; write it otherwise")


def _values(at: str, values: Any) -> None:
    """A list of values, not too many."""
    if isinstance(values, list) and len(values) > MAX_ENUM_VALUES:
        raise Refused(at, f"has {len(values)} values; {MAX_ENUM_VALUES} at most")


def _names(at: str, names: Any) -> None:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise wrong(at, "a list of names", names)


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
    _check_alone(at, schema)
    for keyword, value in schema.items():
        wanted, check = _KEYWORDS[keyword]
        if wanted and not any(kind in wanted for kind in kinds):
            raise Refused(f"{at}.{keyword}", f"xgrammar reads it beside type {' or '.join(wanted)}; name it")
        check(f"{at}.{keyword}", value)
    _check_together(at, schema, kinds)


def _check_alone(at: str, schema: Mapping[str, Any]) -> None:
    """Refuse the neighbours of a keyword that xgrammar reads alone."""
    first = next((keyword for keyword in _ALONE if keyword in schema), None)
    if first is None:
        return
    read = {first, *_SAID}
    if first in ("enum", "const"):  # whose values show whether they have the type beside them
        values = schema[first] if first == "enum" and isinstance(schema[first], list) else [schema[first]]
        read |= {"type"} if all(_has_type(value, schema.get("type")) for value in values) else set()
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
_count = whole(0, 10_000)

_KEYWORDS: dict[str, tuple[tuple[str, ...], Check]] = {
    **dict.fromkeys(_SAID, ((), anything)),
    **dict.fromkeys(("$defs", "definitions"), ((), _named)),
    "type": ((), _types),
    "enum": ((), _values),
    "const": ((), anything),
    "$ref": ((), _reference),
    "anyOf": ((), _each),
    "allOf": ((), _single),
    "multipleOf": (("integer",), whole(1, 1_000)),
    **dict.fromkeys(_BOUNDS, (("integer", "number"), number(-(2**63), 2**63))),
    **dict.fromkeys(("minLength", "maxLength"), (("string",), _count)),
    "pattern": (("string",), _pattern),
    "format": (("string",), one_of(*_FORMATS)),
    **dict.fromkeys(("minItems", "maxItems"), (("array",), _count)),
    "items": (("array",), _check),
    "prefixItems": (("array",), _each),
    **dict.fromkeys(("minProperties", "maxProperties"), (("object",), _count)),
    **dict.fromkeys(("additionalProperties", "propertyNames"), (("object",), _check)),
    "properties": (("object",), _named),
    "patternProperties": (("object",), _by_pattern),
    "required": (("object",), _names),
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


def _dropped(parts: list[str]) -> str | None:
    """The first part of a regular expression that xgrammar leaves out, or takes for letters that JSON escapes."""
    for i, part in enumerate(parts):
        within = part == "^" and not _at_edge(parts[:i][::-1], ")", "(", "^")
        within |= part == "$" and not _at_edge(parts[i + 1 :], "(", ")", "$")
        if within or (not part.startswith("[^") and _UNHELD.search(part)):
            return part
    return None


def _at_edge(rest: list[str], enters: str, leaves: str, anchor: str) -> bool:
    """Return whether nothing that has to match is between an anchor and the end of the expression: ``rest``."""
    depth, others = 0, False  # groups within other alternatives than the anchor's
    for part in rest:
        if part[0] == leaves:
            others &= depth > 0
            depth = max(depth - 1, 0)
        elif part == "|" and not depth:
            others = True
        elif others:
            depth += part[0] == enters
        elif part != anchor:
            return False
    return True


def _states(parts: list[str]) -> int:
    """How many letters a regular expression tells one by one: those of groups times their repetitions."""
    groups, last = [0], 0
    for part in parts:
        if part.startswith("("):
            groups.append(0)
            continue
        if part == ")" and len(groups) > 1:
            last = groups.pop()
        elif len(part) > 2 and part[0] == "{":
            times = max(int(number[-9:]) + 10**9 * (len(number) > 9) for number in re.findall(r"\d+", part))
            groups[-1] += last * max(times - 1, 0)
            last *= max(times, 1)
            continue
        elif part in "*+?|^$":
            continue
        else:
            last = 1
        groups[-1] += last
    return sum(groups)


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


def _has_type(value: Any, kinds: Any) -> bool:
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        wanted = _KINDS.get(kind, ()) if isinstance(kind, str) else ()
        if isinstance(value, wanted) and (not isinstance(value, bool) or kind == "boolean"):
            return True
    return False
