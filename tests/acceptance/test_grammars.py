"""xgrammar, outlines and llguidance, a schema a row: what they hold is native code, which nothing can copy."""

from __future__ import annotations

import functools
import importlib
import json

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import gsd_kernels as gsd
from gsd_kernels_cli import demo

TEXTS = ("def make(", "import json\nx = ", "# a kind of thing\n")
SCHEMAS = [
    {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "object", "properties": {"kind": {"enum": ["class", "def"]}}, "required": ["kind"]},
]
SCHEMAS = [json.dumps({**schema, "additionalProperties": False}) for schema in SCHEMAS]
REGEXES = (r"\[1, [0-9]{2}\]", r"(True|False) and None", r"class [A-Z][a-z]{3,5}:")


@functools.lru_cache
def pair():
    """The demo pair; its tokenizer is byte-level BPE of 2,048 tokens."""
    target, draft, tokenizer = demo.load(torch.float32)
    return target, draft, tokenizer


@pytest.fixture(autouse=True)
def uncompiled():
    """Their masking kernels are written for torch.compile, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


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


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("regex", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["schema", "regex"])
def test_a_grammar_a_row(kind, regex):
    """Patched and not: the same text; drafted and not: the same sample; and it gains where a draft knows the text."""
    target, draft, tokenizer = pair()
    vocab, grammars = target.config.vocab_size, REGEXES if regex else SCHEMAS

    def processors(texts=grammars):
        return LogitsProcessorList([GRAMMARS[kind](tokenizer, vocab, texts, regex=regex)])

    prompt = tokenizer(list(TEXTS), return_tensors="pt", padding=True)
    length = prompt["input_ids"].shape[1]
    call = {**prompt, "max_new_tokens": 24, "do_sample": False}
    assert (prompt["attention_mask"] == 0).any(), "no left padding"
    expected = target.generate(**call, logits_processor=processors())
    said = tokenizer.batch_decode(expected[:, length:], skip_special_tokens=True)
    assert len(set((expected == 0).sum(1).tolist())) > 1, "all end at once"
    if not regex:
        assert [type(json.loads(text)) for text in said] == [dict, list, dict]
    alone = {**call, "input_ids": prompt["input_ids"][1:2], "attention_mask": prompt["attention_mask"][1:2]}
    sampled = {**call, "do_sample": True, "temperature": 2.0, "seed": 7}
    plain = gsd.generate(target, **sampled, logits_processor=processors())
    first = target.generate(**alone, logits_processor=processors(grammars[1:2]))
    handle = gsd.patch(target, assistant_model=draft, graph_config=gsd.GraphConfig(history_depth=4))
    try:
        assert torch.equal(target.generate(**call, logits_processor=processors()), expected)
        assert torch.equal(target.generate(**sampled, logits_processor=processors()), plain)
        assert torch.equal(target.generate(**alone, logits_processor=processors(grammars[1:2])), first)
        known = {"reference_ids": expected.clone()}
        assert torch.equal(target.generate(**call, **known, logits_processor=processors()), expected)
        assert handle.stats.steps < expected.shape[1] - length
    finally:
        gsd.unpatch(target)
