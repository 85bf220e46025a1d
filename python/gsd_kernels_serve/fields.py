"""Every field that a client may name, and what becomes of it: the one table by which requests are checked.

`make docs` shows it, and tests walk it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from pydantic import StrictBool, StrictStr

from .checks import BIAS, STOPS, Check, Json, Refused, Size, number, one_of, one_or_more, optional, reader, whole

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES)
BOTH = (CHAT, COMPLETIONS)
TEMPLATED = (CHAT, RESPONSES)

HONOURED, REFUSED, HARMLESS = "honoured", "refused", "harmless"

SCALAR = Size()
TALK = Size(None, 200_000, 32)
WORDS = Size(None, 1, 0)
TOKENS = Size(None, 1_000_000, 2)
SCHEMAS = Size(200_000, 10_000, 32)
PAIRS = Size(200_000, 10_000, 2)
ARGUMENT = Size(20_000, 2_000, 4)
NOTES = Size(10_000, 17, 1)

MAX_TEXTS = 2_048
"""Texts of a request: its prompts, times ``n``."""


@dataclass(frozen=True)
class Field:
    """A field of some endpoints.

    Attributes:
        treatment: ``"honoured"``; ``"refused"``; or ``"harmless"``: any valid value leaves the answer as it is.
        name: of the field.
        endpoints: that know it.
        kind: of its value, where it is not refused; what is ``Any`` is checked where it is used.
        what: how it is honoured, why it is refused or why it is harmless, for people.
        own: whether it is no field of OpenAI's.
        most: its size, beside the size of the request.
        default: values with which a field that is refused asks for nothing. Null is one of every field.
    """

    treatment: str
    name: str
    endpoints: tuple[str, ...]
    kind: Any
    what: str
    own: bool = False
    most: Size = SCALAR
    default: tuple[Any, ...] = ()

    @cached_property
    def check(self) -> Check:
        """Refuse a value of another kind."""
        return reader(self.kind)


_honoured, _harmless = partial(Field, HONOURED), partial(Field, HARMLESS)


def _refused(name: str, endpoints: tuple[str, ...], what: str, *default: Any) -> Field:
    return Field(REFUSED, name, endpoints, Any, what, default=default)


_KEPT = "nothing is kept of a request, so there is nothing to come back to"
_LOGPROBS = "message.output_text.logprobs"
_NO_OTHER = "the model's text is all there is"
_BY_GRAMMAR = "by a grammar, which needs the package `xgrammar`"
_SAME = "the same text again, whatever else is served"
_WHO = "who asks is not looked at"
_NOT_SHORTENED = "no text is shortened"
_TOLD = "tokens of the answer; 1,024 without it"
_OWN = "of the model itself, before temperature, penalties, bias and grammar"
_seed = whole(-(2**63), 2**64 - 1)
_count = whole(0, 2**31 - 1)
_length = whole(1, 2**31 - 1)
_verbosity = one_of("low", "medium", "high")

FIELDS: tuple[Field, ...] = (
    # ---- what is asked
    _honoured("model", ENDPOINTS, StrictStr, "the one name that is served, or left out"),
    _honoured("messages", (CHAT,), Any, "text only, through the chat template", most=TALK),
    _honoured("prompt", (COMPLETIONS,), Any, "a string, token ids, or a list of either", most=TOKENS),
    _honoured(
        "input",
        (RESPONSES,),
        Any,
        "a string or a list of text messages, calls and their results",
        most=TALK,
    ),
    _honoured("instructions", (RESPONSES,), StrictStr, "the first system message", most=WORDS),
    _honoured("tools", TEMPLATED, Any, "functions, where the chat template reads tools", most=SCHEMAS),
    _honoured(
        "tool_choice",
        TEMPLATED,
        Any,
        f"`none`, `auto`; `required` or a named function {_BY_GRAMMAR}",
    ),
    _honoured(
        "chat_template_kwargs",
        TEMPLATED,
        dict,
        "variables that the chat template reads",
        own=True,
        most=SCHEMAS,
    ),
    _honoured(
        "reasoning_effort", (CHAT,), StrictStr, "handed to the chat template; refused where that does not read it"
    ),
    _honoured(
        "reasoning",
        (RESPONSES,),
        optional(effort=StrictStr, summary=Any),
        "`effort` is handed to the chat template; refused where that does not read `reasoning_effort`; no `summary`",
    ),
    # ---- which text it gets
    _honoured("temperature", ENDPOINTS, number(0, 2), "above 0 samples, 0 does not"),
    _honoured("top_p", ENDPOINTS, number(0, 1), "samples"),
    _honoured("top_k", ENDPOINTS, whole(-1), "samples; 0 and -1 are off", own=True),
    _honoured("min_p", ENDPOINTS, number(0, 1), "samples", own=True),
    _honoured("seed", BOTH, _seed, _SAME),
    _honoured("seed", (RESPONSES,), _seed, _SAME, own=True),
    _honoured("frequency_penalty", BOTH, number(-2, 2), "taken off a token's logit for each time the answer has it"),
    _honoured("presence_penalty", BOTH, number(-2, 2), "taken off the logit of every token that the answer has"),
    _honoured(
        "repetition_penalty",
        ENDPOINTS,
        number(0, beyond=True),
        "transformers': divides logits of tokens in prompt and answer",
        own=True,
    ),
    _honoured("logit_bias", BOTH, BIAS, "added to the logits of tokens", most=PAIRS),
    _honoured(
        "response_format",
        (CHAT,),
        Any,
        f"JSON {_BY_GRAMMAR}",
        most=SCHEMAS,
    ),
    _honoured(
        "text",
        (RESPONSES,),
        optional(format=Any, verbosity=_verbosity),
        f"`format`: JSON {_BY_GRAMMAR}; `verbosity` is not looked at",
        most=SCHEMAS,
    ),
    _honoured(
        "generation_config",
        ENDPOINTS,
        StrictStr,
        "a JSON string of other arguments of transformers' `generate`",
        own=True,
        most=ARGUMENT,
    ),
    # ---- where it ends
    _honoured("max_tokens", (CHAT,), _length, _TOLD),
    _honoured("max_tokens", (COMPLETIONS,), _count, f"{_TOLD}; 0 with `echo` alone"),
    _honoured("max_completion_tokens", (CHAT,), _length, _TOLD),
    _honoured("max_output_tokens", (RESPONSES,), _length, _TOLD),
    _honoured("stop", BOTH, STOPS, "up to 16 strings; the text ends with the one that was found"),
    # ---- how many, how fast
    _honoured("n", BOTH, whole(1, 128), "texts one after another, the i-th by `seed` + i"),
    _honoured("best_of", (COMPLETIONS,), whole(1, 128), "as many as `n`; others are refused"),
    _honoured(
        "prediction",
        (CHAT,),
        Any,
        "a text that the answer may repeat, which drafts: it changes the speed",
        most=TALK,
    ),
    # ---- what is told of it
    _honoured("stream", ENDPOINTS, StrictBool, "events"),
    _honoured(
        "stream_options",
        BOTH,
        optional(include_usage=StrictBool, include_obfuscation=one_of(False)),
        "`include_usage`: in an event of its own before the end, or nowhere; obfuscation is refused",
    ),
    _honoured("logprobs", (CHAT,), StrictBool, _OWN),
    _honoured("top_logprobs", (CHAT,), whole(0, 20), "with `logprobs`"),
    _honoured("logprobs", (COMPLETIONS,), whole(0, 20), _OWN),
    _honoured(
        "include", (RESPONSES,), list[one_of(_LOGPROBS)], f"`{_LOGPROBS}`: of the model itself; others are refused"
    ),
    _honoured("top_logprobs", (RESPONSES,), whole(0, 20), f'with `include: ["{_LOGPROBS}"]`'),
    _honoured(
        "echo", (COMPLETIONS,), StrictBool, "the prompt before its text, with its log-probabilities beside `logprobs`"
    ),
    _honoured("metadata", (RESPONSES,), dict, "in the response, as it came", most=NOTES),
    # ---- what asks for nothing here
    _harmless("user", ENDPOINTS, StrictStr, _WHO),
    _harmless("safety_identifier", TEMPLATED, StrictStr, _WHO),
    _harmless("prompt_cache_key", TEMPLATED, StrictStr, "there is one cache, which every request begins with"),
    _harmless("service_tier", TEMPLATED, one_of("auto", "default"), "there is one tier; others are refused"),
    _harmless("parallel_tool_calls", TEMPLATED, StrictBool, "how many calls a text has is the model's to choose"),
    _harmless("verbosity", (CHAT,), _verbosity, "the length is the model's to choose"),
    _harmless("max_tool_calls", (RESPONSES,), whole(1), "bounds built-in tools, of which there are none"),
    # ---- what is refused, but for the values that ask for nothing
    _refused("suffix", (COMPLETIONS,), "the text would have to know it", ""),
    _refused("store", TEMPLATED, _KEPT, False),
    _refused("metadata", (CHAT,), _KEPT, {}),
    _refused("previous_response_id", (RESPONSES,), _KEPT),
    _refused("conversation", (RESPONSES,), _KEPT),
    _refused("background", (RESPONSES,), _KEPT, False),
    _refused("background_options", (RESPONSES,), _KEPT, {}),
    _refused("prompt", (RESPONSES,), "no prompts are stored"),
    _refused("context_management", (RESPONSES,), _NOT_SHORTENED, []),
    _refused("truncation", (RESPONSES,), _NOT_SHORTENED, "disabled"),
    _refused("stream_options", (RESPONSES,), "no obfuscation", {}, {"include_obfuscation": False}),
    _refused("modalities", (CHAT,), _NO_OTHER, ["text"]),
    _refused("audio", (CHAT,), _NO_OTHER),
    _refused("image", (RESPONSES,), _NO_OTHER, {}),
    _refused("web_search_options", (CHAT,), "no search"),
    _refused("functions", (CHAT,), "`tools` took their place", []),
    _refused("function_call", (CHAT,), "`tool_choice` took its place", "none"),
    _refused("moderation", TEMPLATED, "nothing is judged"),
    _refused("access_programs", (RESPONSES,), "no programs", {}),
    _refused("prompt_cache_retention", TEMPLATED, "the cache lasts as long as the process", "in_memory"),
    _refused(
        "prompt_cache_options", TEMPLATED, "prompts are reused as far as they begin alike", {}, {"mode": "implicit"}
    ),
)

_ids = one_or_more(_count)

_ARGUMENTS: tuple[tuple[Any, str], ...] = (
    (_count, "max_length max_new_tokens min_length min_new_tokens top_k forced_bos_token_id bos_token_id pad_token_id"),
    (whole(0, 64), "encoder_no_repeat_ngram_size no_repeat_ngram_size"),
    (_ids, "eos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens"),
    (StrictBool, "do_sample remove_invalid_values renormalize_logits"),
    (number(0, 1), "epsilon_cutoff eta_cutoff min_p top_h top_p typical_p"),
    (number(0, beyond=True), "encoder_repetition_penalty repetition_penalty"),
    (number(0), "max_time temperature"),
    (one_or_more(_ids), "bad_words_ids"),
    (one_or_more(number(0)), "exponential_decay_length_penalty"),
    (_length, "prefill_chunk_size"),
    (STOPS, "stop_strings"),
    (dict, "watermarking_config"),
)
ARGUMENTS = {name: reader(kind) for kind, names in _ARGUMENTS for name in names.split()}
"""Arguments that ``generation_config`` may name, and bounds beside transformers' own and the field's size."""

NEEDED = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}


def rows(endpoint: str) -> dict[str, Field]:
    """The fields of an endpoint, by name."""
    return {field.name: field for field in FIELDS if endpoint in field.endpoints}


def check(endpoint: str, body: Json) -> Json:
    """The fields of a request that are to be honoured.

    Raises:
        Refused: a field is unknown, missing, refused, or holds what it may not.
    """
    kept: Json = {}
    known = rows(endpoint)
    for name, value in body.items():
        field = known.get(name)
        if field is None:
            others = [where for where in ENDPOINTS if name in rows(where)]
            name = name.encode(errors="backslashreplace").decode()  # which the answer repeats
            raise Refused(name, f"no field of {endpoint}" + (f", but of {' and '.join(others)}" if others else ""))
        if value is None or any(type(value) is type(harmless) and value == harmless for harmless in field.default):
            continue
        if field.treatment == REFUSED:
            instead = "".join(f", or say {value!r}" for value in field.default[-1:])
            raise Refused(name, f"not served: {field.what}; leave it out{instead}")
        field.most.check(name, value)
        field.check(name, value)
        if field.treatment == HONOURED:
            kept[name] = value
    if kept.get(NEEDED[endpoint]) is None:
        raise Refused(NEEDED[endpoint], "missing")
    return kept


def table() -> str:
    """The table as Markdown, an endpoint after another."""
    lines: list[str] = []
    for endpoint in ENDPOINTS:
        lines += [f"### {endpoint}", "", "| field | | | at most |", "|---|---|---|---|"]
        for name, field in sorted(rows(endpoint).items()):
            default = ", ".join(f"`{json.dumps(value)}`" for value in field.default)
            what = field.what + (f"; accepted: {default}" if default else "")
            mark = "\\*" if field.own else ""
            most = str(field.most) if field.treatment != REFUSED and field.most != SCALAR else ""
            lines.append(f"| `{name}`{mark} | {field.treatment} | {what} | {most} |")
        lines.append("")
    return "\n".join(lines)
