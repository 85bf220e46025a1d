"""xgrammar, outlines and llguidance over the demo pair's tokens: one logits processor for several texts."""

from __future__ import annotations

import functools
import importlib
import json

import pytest
import torch
from transformers import LogitsProcessor

from gsd_kernels_cli import demo

TEXTS = ("def make(", "import json\nx = ", "# a kind of thing\n")
OBJECTS = [
    {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"kind": {"enum": ["class", "def"]}}, "required": ["kind"]},
]
SCHEMAS = [json.dumps({**schema, "additionalProperties": False}) for schema in OBJECTS]
REGEXES = (r"\[1, [0-9]{2}\]", r"(True|False) and None", r"class [A-Z][a-z]{3,5}:")


@functools.lru_cache
def pair():
    """The demo pair; its tokenizer is byte-level BPE of 2,048 tokens."""
    target, draft, tokenizer = demo.load(torch.float32)
    return target, draft, tokenizer


class Rows(LogitsProcessor):
    """One processor a row, for packages that have one grammar a processor."""

    def __init__(self, processors):
        self.processors = processors

    def __call__(self, input_ids, scores):
        each = enumerate(self.processors)
        return torch.cat([one(input_ids[row : row + 1], scores[row : row + 1]) for row, one in each])


def xgrammar(tokenizer, vocab, texts, *, regex=False):
    """xgrammar's own processor, with a list of grammars."""
    xgr, contrib = pytest.importorskip("xgrammar"), importlib.import_module("xgrammar.contrib.hf")
    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=[tokenizer.eos_token_id])
    compiler = xgr.GrammarCompiler(info, max_threads=1)
    compiled = compiler.compile_regex if regex else compiler.compile_json_schema
    return contrib.LogitsProcessor([compiled(text) for text in texts])


def outlines(tokenizer, vocab, texts, *, regex=False):
    """outlines' own processors, over outlines_core's indices."""
    core = pytest.importorskip("outlines_core")
    backend = pytest.importorskip("outlines.backends.outlines_core")
    known, to_text = tokenizer.get_vocab(), lambda token: tokenizer.convert_tokens_to_string([token])
    words = backend.OutlinesCoreBackend.create_outlines_core_vocabulary(
        known, tokenizer.eos_token_id, tokenizer.eos_token, to_text
    )
    patterns = texts if regex else [core.json_schema.build_regex_from_schema(text) for text in texts]
    return Rows([backend.OutlinesCoreLogitsProcessor(core.Index(text, words), "torch") for text in patterns])


class LLGuidance(LogitsProcessor):
    """llguidance's matchers, as its documentation has them called."""

    def __init__(self, llguidance, tokenizer, vocab, texts, regex):
        self.torch = importlib.import_module("llguidance.torch")
        known = importlib.import_module("llguidance.hf").from_tokenizer(tokenizer, n_vocab=vocab)
        grammar = llguidance.LLMatcher.grammar_from_regex if regex else llguidance.LLMatcher.grammar_from_json_schema
        self.matchers = [llguidance.LLMatcher(known, grammar(text)) for text in texts]
        self.mask = self.torch.allocate_token_bitmask(len(texts), vocab)
        self.begun = False

    def __call__(self, input_ids, scores):
        for row, matcher in enumerate(self.matchers):
            if self.begun and not matcher.is_stopped():
                assert matcher.consume_token(int(input_ids[row, -1])), matcher.get_error()
            self.torch.fill_next_token_bitmask(matcher, self.mask, row)
        self.begun = True
        self.torch.apply_token_bitmask_inplace(scores, self.mask)
        return scores


def llguidance(tokenizer, vocab, texts, *, regex=False):
    return LLGuidance(pytest.importorskip("llguidance"), tokenizer, vocab, texts, regex)


GRAMMARS = {"xgrammar": xgrammar, "outlines": outlines, "llguidance": llguidance}
