"""xgrammar, outlines and llguidance, a schema a row: what they hold is native code, which nothing can copy."""

from __future__ import annotations

import json

import pytest
import torch
from grammars import GRAMMARS, REGEXES, SCHEMAS, TEXTS, pair
from transformers import LogitsProcessorList

import gsd_kernels as gsd

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def uncompiled():
    """Their masking kernels are written for torch.compile, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


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
    with gsd.patch(target, assistant_model=draft, graph_config=gsd.GraphConfig(history_depth=4)) as handle:
        assert torch.equal(target.generate(**call, logits_processor=processors()), expected)
        assert torch.equal(target.generate(**sampled, logits_processor=processors()), plain)
        assert torch.equal(target.generate(**alone, logits_processor=processors(grammars[1:2])), first)
        known = {"reference_ids": expected.clone()}
        assert torch.equal(target.generate(**call, **known, logits_processor=processors()), expected)
        assert handle.stats.steps < expected.shape[1] - length
