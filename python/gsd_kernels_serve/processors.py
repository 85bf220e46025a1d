"""Logits processors of requests: OpenAI's penalties, and grammars by xgrammar."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from pydantic import Field, StrictBool, StrictStr
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from gsd_kernels_hf.extras import cure

from .checks import Object, Refused, one_line, one_of, reader
from .schemas import check_schema

CACHE_BYTES = 64 * 2**20
"""Bytes of grammars that are kept for requests to come."""

CACHED_COMPILERS = 4
"""Sets of end tokens that are remembered with their grammars; requests name them."""

_LETTER, _JSON_LETTER = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
"""Letters of a string with a length as xgrammar's rules have them, and without those that JSON escapes."""


class Penalties(LogitsProcessor):
    """OpenAI's penalties: logits fall with the number of times that the answer has a token, and that it has it at all.

    Args:
        prompt: number of tokens before the answer.
        frequency: times the count.
        presence: once.
    """

    def __init__(self, prompt: int, frequency: float, presence: float) -> None:
        self.prompt, self.frequency, self.presence = prompt, frequency, presence

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        answer = input_ids[:, self.prompt :].to(scores.device)
        counts = torch.zeros_like(scores).scatter_add_(1, answer, torch.ones_like(answer, dtype=scores.dtype))
        return scores - self.frequency * counts - self.presence * (counts > 0)


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

    def of(self, held: Mapping[str, Any] | bool | Marked, field: str, ends: list[int]) -> Any:
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

        read = xgrammar.TokenizerInfo.from_huggingface
        info = read(self.tokenizer, vocab_size=self.vocabulary, stop_token_ids=list(ends))
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
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return None if _plain_form(field, given)["type"] == "text" else {"type": "object"}
    if "json_schema" in given:
        field, form = f"{field}.json_schema", _schema_form(field, given)["json_schema"]
    else:
        form = _schema(field, given)
    check_schema(form["schema"], f"{field}.schema")
    return form["schema"]
