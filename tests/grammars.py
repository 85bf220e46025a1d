"""xgrammar and llguidance over the demo pair's tokens: one logits processor for several texts."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch
from transformers import LogitsProcessor

from gsd_kernels_cli import demo

TEXT = "def make("


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


def xgrammar(tokenizer, vocab, texts):
    """xgrammar's own processor, with a list of grammars."""
    xgr, contrib = pytest.importorskip("xgrammar"), importlib.import_module("xgrammar.contrib.hf")
    info = xgr.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab, stop_token_ids=[tokenizer.eos_token_id])
    compiler = xgr.GrammarCompiler(info, max_threads=1)
    return contrib.LogitsProcessor([compiler.compile_regex(text) for text in texts])


class LLGuidance(LogitsProcessor):
    """llguidance's matchers, as its documentation has them called."""

    def __init__(self, llguidance, tokenizer, vocab, texts):
        self.torch = importlib.import_module("llguidance.torch")
        known = importlib.import_module("llguidance.hf").from_tokenizer(tokenizer, n_vocab=vocab)
        self.matchers = [llguidance.LLMatcher(known, llguidance.LLMatcher.grammar_from_regex(text)) for text in texts]
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


def llguidance(tokenizer, vocab, texts):
    return LLGuidance(pytest.importorskip("llguidance"), tokenizer, vocab, texts)


GRAMMARS = {"xgrammar": xgrammar, "llguidance": llguidance}
