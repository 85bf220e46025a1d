"""Grammars of texts by xgrammar: of JSON by a schema, which holds whole.

What xgrammar would drop of a schema without a word is refused by name.
"""

from __future__ import annotations

import importlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, Field, StrictBool, StrictStr
from transformers import PreTrainedTokenizerBase

from gsd_kernels_hf.extras import cure

from .checks import Check, Json, Object, Refused, number, one_line, one_of, reader, whole, wrong

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


def moved(schema: Any, place: str) -> Any:
    """A schema that has been checked, for another place than the root: ``#/$defs/0``."""
    if isinstance(schema, bool):
        return schema
    copy = {name: _within(name, value, lambda _, one: moved(one, place)) for name, value in schema.items()}
    return {**copy, "$ref": place + schema["$ref"][1:]} if "$ref" in schema else copy


def _within(keyword: str, value: Any, do: Callable[[str, Any], Any]) -> Any:
    """A keyword's value with what ``do`` makes of the schemas in it, each with its place there."""
    holds = _KEYWORDS[keyword].holds
    if holds is list:
        return [do(f"[{i}]", one) for i, one in enumerate(value)]
    if holds is dict:
        return {name: do(f".{name}", one) for name, one in value.items()}
    return value if holds is None else do("", value)


def _check(at: str, schema: Any) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise wrong(at, "a JSON schema", schema)
    told = [kind for kind, keywords in _TOLD_BY.items() if any(name in schema for name in keywords)]
    kinds = schema.get("type", told[:1])
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if not kinds and "type" in schema:
        raise wrong(f"{at}.type", "a type", kinds)
    for keyword in schema:
        if keyword not in _KEYWORDS:
            cure = "; say anyOf" if keyword == "oneOf" else ""
            raise Refused(f"{at}.{keyword}", f"xgrammar does not hold a text to it; leave it out{cure}")
    first = next((keyword for keyword in _ALONE if keyword in schema), None)
    # Beside enum or const, a type that all their values have.
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("enum", schema.get("const"))]
    shown = first in ("enum", "const") and all(any(kind in _TYPES[type(one)] for kind in kinds) for one in values)
    read: dict[str, str] = {}  # by type: the keyword whose kind is read
    for keyword, value in schema.items():
        place, row = f"{at}.{keyword}", _KEYWORDS[keyword]
        if first not in (None, keyword) and keyword not in _SAID and not (keyword == "type" and shown):
            raise Refused(place, f"xgrammar does not read it beside {first}; leave it out")
        if row.types and not any(kind in row.types for kind in kinds):
            raise Refused(place, f"xgrammar reads it beside type {' or '.join(row.types)}; name it")
        other = read.setdefault(row.types[0], keyword) if row.kind else keyword
        if _KEYWORDS[other].kind != row.kind:
            raise Refused(place, f"xgrammar does not read it beside {other}; leave one of them out")
        row.check(place, value)
        _within(keyword, value, lambda inner, one, place=place: _check(place + inner, one))
    if "multipleOf" in schema and "number" in kinds:
        raise Refused(f"{at}.multipleOf", "xgrammar holds integers to it, and no others; leave it out")
    known = schema.get("properties", {})
    if missing := [name for name in schema.get("required", []) if name not in known]:
        raise Refused(f"{at}.required", f"properties has no {missing[0]!r}, which xgrammar needs there")


def _pattern(pattern: str) -> str:
    """Read a regular expression."""
    try:
        if r"\U" in pattern:  # a letter to Python alone
            raise re.error(r"\U")
        letters = _letters(_parser.parse(pattern), True, True)
    except (re.error, ValueError, OverflowError) as error:
        raise Refused("", f"xgrammar does not hold a text to {pattern!r}: {error}; write it otherwise") from error
    if letters > MAX_LETTERS:
        raise Refused("", f"a pattern for texts of {letters} letters; {MAX_LETTERS} at most: repeat less, or use *")
    return pattern


def _met(holds: Callable[[Any], bool], expected: str) -> AfterValidator:
    """A condition of what is read, and what is expected where it is not met."""

    def check(value: Any) -> Any:
        if not holds(value):
            raise wrong("", expected, value)
        return value

    return AfterValidator(check)


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


class Keyword(NamedTuple):
    """A keyword that is served.

    Attributes:
        check: of its value; numbers have bounds, since a grammar grows with them.
        types: beside which alone xgrammar reads it, if not any.
        kind: of those that have one beside a type, xgrammar reads one kind.
        holds: the schemas in its value: a list or a dict of them; ``bool``: it is one; ``None``: none.
    """

    check: Check
    types: tuple[str, ...] = ()
    kind: str = ""
    holds: type | None = None


_TYPES = {str: ("string",), bool: ("boolean",), int: ("integer", "number"), float: ("number",), dict: ("object",)}
_TYPES |= {list: ("array",), type(None): ("null",)}
"""Types that a value of JSON has."""

_SAID = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
_SAID += ("$id", "$defs", "definitions")
"""Keywords that every valid text meets."""

_FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
_FORMATS += ("uri-reference", "uri-template", "json-pointer", "relative-json-pointer")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
_Pattern = Annotated[StrictStr, AfterValidator(_pattern)]
_ByPattern = Annotated[dict[_Pattern, Any], _met(lambda named: len(named) < 2, "one pattern, for all names")]
_Single = Annotated[list, _met(lambda schemas: len(schemas) == 1, "one schema, in which all are merged")]
_Place = Annotated[
    StrictStr, _met(lambda place: f"{place}/".startswith("#/"), "a place in this schema, as #/$defs/name")
]
_anything, _list, _object, _count = map(reader, (Any, list, dict, whole(0, 10_000)))

_KEYWORDS: dict[str, Keyword] = {
    **dict.fromkeys(_SAID, Keyword(_anything)),
    **dict.fromkeys(("$defs", "definitions"), Keyword(_object, holds=dict)),
    "type": Keyword(_anything),
    "enum": Keyword(reader(Annotated[list, Field(max_length=MAX_ENUM_VALUES)])),
    "const": Keyword(_anything),
    "$ref": Keyword(reader(_Place)),
    "anyOf": Keyword(_list, holds=list),
    "allOf": Keyword(reader(_Single), holds=list),
    "multipleOf": Keyword(reader(whole(1, 1_000)), ("integer",), "multiple"),
    **dict.fromkeys(_BOUNDS, Keyword(reader(number(-(2**63), 2**63)), ("integer", "number"), "bound")),
    **dict.fromkeys(("minLength", "maxLength"), Keyword(_count, ("string",), "length")),
    "pattern": Keyword(reader(_Pattern), ("string",), "pattern"),
    "format": Keyword(reader(one_of(*_FORMATS)), ("string",), "format"),
    **dict.fromkeys(("minItems", "maxItems"), Keyword(_count, ("array",))),
    "items": Keyword(_anything, ("array",), holds=bool),
    "prefixItems": Keyword(_list, ("array",), holds=list),
    **dict.fromkeys(("minProperties", "maxProperties"), Keyword(_count, ("object",))),
    "additionalProperties": Keyword(_anything, ("object",), holds=bool),
    "propertyNames": Keyword(_anything, ("object",), "names", holds=bool),
    "properties": Keyword(_object, ("object",), "properties", holds=dict),
    "patternProperties": Keyword(reader(_ByPattern), ("object",), "patterns", holds=dict),
    "required": Keyword(reader(list[str]), ("object",)),
}

_TOLD_BY = {"object": ("properties", "additionalProperties"), "array": ("items", "prefixItems")}
"""Keywords by which xgrammar tells the type of a schema that names none."""

_ALONE = ("$ref", "anyOf", "allOf", "enum", "const")
"""Keywords whose neighbours xgrammar does not read."""


# ---- grammars


CACHE_BYTES = 64 * 2**20
"""Bytes of grammars that are kept for requests to come."""

CACHED_COMPILERS = 4
"""Sets of end tokens that are remembered with their grammars; requests name them."""

_LETTER, _JSON_LETTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
"""Letters of a string with a length as xgrammar's rules have them, and without those that JSON escapes."""


@dataclass(frozen=True)
class Marked:
    """A text with parts between marks that are held to schemas: xgrammar's structural tag."""

    tag: dict[str, Any]


class Grammars:
    """Compiled grammars of one tokenizer; xgrammar keeps those that it has seen.

    Args:
        tokenizer: the model's.
        vocabulary: columns of its logits.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self.compiler = lru_cache(CACHED_COMPILERS)(self._compiler)
        self.making = threading.Lock()

    def of(self, held: Json | bool | Marked, field: str, ends: list[int]) -> Any:
        """The grammar of JSON by a schema, or of a text with such parts, which ends with one of ``ends``.

        Raises:
            Refused: xgrammar is missing, or cannot serve the schema; named ``field``.
        """
        if not ends:
            raise Refused(field, "this model has no end-of-text token, which would end the JSON")
        try:
            import xgrammar
        except ImportError:
            raise Refused(field, f"needs xgrammar, which is missing: {cure('grammar')}") from None
        with self.making:
            compiler = self.compiler(tuple(ends))
        try:
            if isinstance(held, Marked):
                rules = xgrammar.Grammar.from_structural_tag(held.tag)
            else:  # strict_mode would close every object that does not say whether it is open: {} alone
                rules = xgrammar.Grammar.from_json_schema(json.dumps(held), max_whitespace_cnt=2, strict_mode=False)
            return compiler.compile_grammar(str(rules).replace(_LETTER, _JSON_LETTER))
        except Exception as error:  # xgrammar's own, of several kinds, behind its time and place
            raise Refused(field, re.sub(r"^\[[\d:]+\] \S+: ", "", one_line(error))) from error

    def _compiler(self, ends: tuple[int, ...]) -> Any:
        import xgrammar

        info = xgrammar.TokenizerInfo.from_huggingface(
            self.tokenizer, vocab_size=self.vocabulary, stop_token_ids=list(ends)
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)


class Schema(Object):
    """A schema with its name."""

    held: Any = Field(alias="schema")
    type: Any = None
    name: StrictStr = ""
    description: StrictStr = ""
    strict: StrictBool = True


class PlainForm(Object):
    """Any text, or any object."""

    type: one_of("text", "json_object", "json_schema")


class SchemaForm(PlainForm):
    """A form whose schema is not beside its type."""

    json_schema: Schema


_schema, _plain_form, _schema_form = reader(Schema), reader(PlainForm), reader(SchemaForm)


def schema_of(given: Any, field: str) -> Any:
    """The JSON schema that ``response_format`` or ``text.format`` asks for; ``None`` for plain text.

    Raises:
        Refused: another format, or one without a schema.
    """
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        return None if _plain_form(field, given)["type"] == "text" else {"type": "object"}
    if "json_schema" in given:
        field, form = f"{field}.json_schema", _schema_form(field, given)["json_schema"]
    else:
        form = _schema(field, given)
    check_schema(form["schema"], f"{field}.schema")
    return form["schema"]
