"""JSON schemas that xgrammar holds a text to, whole: what it would drop without a word is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .checks import Check, Refused, number, whole, wrong

_SAID = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly")
_SAID += ("$comment", "$schema", "$id", "$defs", "definitions")
"""Keywords that every valid text meets."""

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_OF_TYPE = {
    "multipleOf": ("integer",),
    **dict.fromkeys(_BOUNDS, ("integer", "number")),
    **dict.fromkeys(("minLength", "maxLength", "pattern", "format"), ("string",)),
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems"), ("array",)),
    **dict.fromkeys(("properties", "required", "additionalProperties", "patternProperties"), ("object",)),
    **dict.fromkeys(("propertyNames", "minProperties", "maxProperties"), ("object",)),
}
"""Keywords that are read beside these types alone."""

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

_NAMED = ("properties", "patternProperties", "$defs", "definitions")
_LISTED = ("anyOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "propertyNames")
"""Keywords that hold schemas."""

_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_FORMATS += ("uri-reference", "uri-template", "json-pointer", "relative-json-pointer")

_KINDS: dict[str, Any] = {"string": str, "number": (int, float), "integer": int, "object": Mapping, "array": list}
_KINDS |= {"boolean": bool, "null": type(None)}


_COUNTED = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_SIZES: dict[str, Check] = {
    **dict.fromkeys(_COUNTED, whole(0, 10_000)),
    **dict.fromkeys(_BOUNDS, number(-(2**63), 2**63)),
    "multipleOf": whole(1, 1_000),
}
"""Bounds of numbers in a schema, whose grammar grows with them."""

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
        _check(schema, field)
    except RecursionError:
        raise Refused(field, "is nested too deeply") from None


def _check(schema: Any, at: str) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise wrong(at, "a JSON schema", schema)
    for keyword in schema:
        if keyword not in _SAID and keyword not in _OF_TYPE and keyword not in (*_ALONE, "type"):
            cure = "; say anyOf" if keyword == "oneOf" else ""
            raise Refused(f"{at}.{keyword}", f"xgrammar does not hold a text to it; leave it out{cure}")
    _check_alone(schema, at)
    _check_bounds(schema, at)
    _check_sizes(schema, at)
    for place, inner in _within(schema, at):
        _check(inner, place)


def _check_alone(schema: Mapping[str, Any], at: str) -> None:
    first = next((keyword for keyword in _ALONE if keyword in schema), None)
    if first is None:
        return
    read = {first, *_SAID}
    if first in ("enum", "const"):  # whose values show whether they have the type beside them
        values = schema[first] if first == "enum" and isinstance(schema[first], list) else [schema[first]]
        read |= {"type"} if all(_has_type(value, schema.get("type")) for value in values) else set()
    if unread := [keyword for keyword in schema if keyword not in read]:
        raise Refused(f"{at}.{unread[0]}", f"xgrammar does not read it beside {first}; leave it out")
    if first == "allOf" and (not isinstance(schema[first], list) or len(schema[first]) != 1):
        raise Refused(f"{at}.allOf", "xgrammar holds a text to a single one; merge them")


def _check_bounds(schema: Mapping[str, Any], at: str) -> None:
    told = [kind for kind, keywords in _TOLD_BY.items() if any(name in schema for name in keywords)]
    kinds = schema.get("type", told[:1])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if "type" in schema and not kinds:
        raise wrong(f"{at}.type", "a type", kinds)
    for keyword in schema:
        wanted = _OF_TYPE.get(keyword, ())
        if wanted and not any(kind in wanted for kind in kinds):
            raise Refused(f"{at}.{keyword}", f"xgrammar reads it beside type {' or '.join(wanted)}; name it")
    if "multipleOf" in schema and "number" in kinds:
        raise Refused(f"{at}.multipleOf", "xgrammar holds integers to it, and no others; leave it out")
    for groups in _APART:
        found = [[name for name in group if name in schema] for group in groups]
        if len(found := [names[0] for names in found if names]) > 1:
            raise Refused(f"{at}.{found[1]}", f"xgrammar does not read it beside {found[0]}; leave one of them out")
    if "format" in schema and schema["format"] not in _FORMATS:
        raise Refused(f"{at}.format", f"expected one of {', '.join(_FORMATS)}, got {schema['format']!r}")
    properties = schema.get("properties", {})
    needed = schema.get("required", [])
    if not isinstance(needed, list) or not all(isinstance(name, str) for name in needed):
        raise wrong(f"{at}.required", "a list of names", needed)
    if isinstance(properties, Mapping) and (missing := [name for name in needed if name not in properties]):
        raise Refused(f"{at}.required", f"properties has no {missing[0]!r}, which xgrammar needs there")


def _check_sizes(schema: Mapping[str, Any], at: str) -> None:
    for keyword, check in _SIZES.items():
        if keyword in schema:
            check(f"{at}.{keyword}", schema[keyword])
    values = schema.get("enum", [])
    if isinstance(values, list) and len(values) > MAX_ENUM_VALUES:
        raise Refused(f"{at}.enum", f"has {len(values)} values; {MAX_ENUM_VALUES} at most")
    named = list(schema.get("patternProperties", ()))
    if len(named) > 1:
        raise Refused(f"{at}.patternProperties", "xgrammar holds a name to one of several patterns; write one")
    patterns = {f"{at}.pattern": schema.get("pattern"), f"{at}.patternProperties": named[0] if named else None}
    for place, pattern in patterns.items():
        if isinstance(pattern, str):
            parts = _PARTS.findall(pattern)
            states = max(_states(parts), len(parts) - MAX_PARTS)
            if states > MAX_LETTERS:
                reason = f"a pattern for texts of {states} letters; {MAX_LETTERS} at most: repeat less, or use *"
                raise Refused(place, reason)
            if (part := _dropped(parts)) is not None:
                raise Refused(place, f"xgrammar does not hold a text to {part!r} in {pattern!r}; write it otherwise")


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
    if "$ref" in copy:
        copy["$ref"] = place + copy["$ref"][1:]
    for keyword, inner in schema.items():
        if keyword in _NAMED:
            copy[keyword] = {name: moved(one, place) for name, one in inner.items()}
        elif keyword in _LISTED:
            copy[keyword] = [moved(one, place) for one in inner]
        elif keyword in _SINGLE:
            copy[keyword] = moved(inner, place)
    return copy


def _within(schema: Mapping[str, Any], at: str) -> Iterator[tuple[str, Any]]:
    """The schemas within one, and their places."""
    for keyword in _NAMED:
        inner = schema.get(keyword, {})
        if not isinstance(inner, Mapping):
            raise wrong(f"{at}.{keyword}", "an object of JSON schemas", inner)
        yield from ((f"{at}.{keyword}.{name}", one) for name, one in inner.items())
    for keyword in _LISTED:
        inner = schema.get(keyword, [])
        if not isinstance(inner, list):
            raise wrong(f"{at}.{keyword}", "a list of JSON schemas", inner)
        yield from ((f"{at}.{keyword}[{i}]", one) for i, one in enumerate(inner))
    yield from ((f"{at}.{keyword}", schema[keyword]) for keyword in _SINGLE if keyword in schema)
    reference = schema.get("$ref", "#")
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise wrong(f"{at}.$ref", "a place in this schema, as #/$defs/name", reference)


def _has_type(value: Any, kinds: Any) -> bool:
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        wanted = _KINDS.get(kind, ()) if isinstance(kind, str) else ()
        if isinstance(value, wanted) and (not isinstance(value, bool) or kind == "boolean"):
            return True
    return False
