"""Drafts by a call's grammar: fewer steps, the same texts; the processors' own state is not touched."""

from __future__ import annotations

import importlib

import pytest
import torch
from grammars import GRAMMARS, TEXT, Rows, pair
from transformers import LogitsProcessor, LogitsProcessorList

import gsd_kernels as gsd
from gsd_kernels_hf.model.vocabulary import Vocabulary
from gsd_kernels_hf.sources.grammar import holds_grammar, walks_of

SHAPE = gsd.GraphConfig(depth=0, history_depth=8, history_width=3, width=3, branch=3, max_rows=16)
FORCED = r'\{"first_name": "Ada", "kind": "(class|def)", "on": (true|false)\}'
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 1.5, "seed": 7}


@pytest.fixture(autouse=True)
def uncompiled():
    """Their masking kernels are written for torch.compile, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def processors(kind):
    target, _, tokenizer = pair()
    return LogitsProcessorList([GRAMMARS[kind](tokenizer, target.config.vocab_size, [FORCED])])


def written(kind, **options):
    """A text that is held to the grammar, and its statistics."""
    target, _, tokenizer = pair()
    options = {"max_new_tokens": 48, "graph_config": SHAPE, "tokenizer": tokenizer, **options}
    options |= {"logits_processor": processors(kind), "return_dict_in_generate": True}
    return gsd.generate(target, **tokenizer(TEXT, return_tensors="pt"), **options)


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_the_same_in_fewer_steps(kind, how):
    """End-of-text tokens that the grammar forces are drafted too: the last step brings several tokens."""
    plain = written(kind, graph_config="plain", **how)
    history = written(kind, draft_sources=("history",), **how)
    drafted = written(kind, **how)
    assert torch.equal(drafted.sequences, plain.sequences) and torch.equal(history.sequences, plain.sequences)
    assert drafted.sequences[0, -1] == pair()[2].eos_token_id
    assert drafted.stats.steps <= 0.6 * history.stats.steps
    assert list(drafted.stats.sources) == ["history", "grammar"]


def test_a_compiled_grammar_says_its_tokens_itself():
    drafted = written("xgrammar", tokenizer=None, **GREEDY)
    assert torch.equal(drafted.sequences, written("xgrammar", graph_config="plain", **GREEDY).sequences)
    assert drafted.stats.sources["grammar"].accepted > 0


def test_none_are_found_without_a_library(monkeypatch):
    monkeypatch.setitem(walks_of.__globals__, "_kinds", lambda *_: ())
    own = LogitsProcessor()
    own.parts = own  # has no end
    assert not holds_grammar([own])


HELD = {  # how a processor holds a grammar
    "matchers": lambda lib, one: vars(one).get("matchers") or [lib.GrammarMatcher(one.compiled_grammars[0])],
    "processors of a row each": lambda lib, one: [one],
}


@pytest.mark.parametrize("how", HELD)
@pytest.mark.parametrize("kind", GRAMMARS)
def test_grammars_are_found_however_a_processor_holds_them(kind, how):
    target, _, tokenizer = pair()
    vocabulary = Vocabulary.of(tokenizer, "tokenizer")
    library = importlib.import_module(kind)
    held = Rows(HELD[how](library, processors(kind)[0]))
    (walk,) = walks_of([held], 1, vocabulary, target.config.vocab_size)
    assert walk.forced().startswith(b'{"first_name"') and not walk.text(b"x")


@pytest.mark.parametrize("kind", GRAMMARS)
def test_a_walk_leaves_the_processor_alone(kind):
    """Walks are of their own, and come back by as many steps as they took."""
    target, _, tokenizer = pair()
    (processor,) = processors(kind)
    scores = torch.zeros(1, target.config.vocab_size)
    first = processor(torch.zeros(1, 1, dtype=torch.int64), scores.clone())
    vocabulary = Vocabulary.of(tokenizer, "tokenizer")
    (walk,) = walks_of(processors(kind), 1, vocabulary, target.config.vocab_size)
    assert torch.equal(first[0] == 0, torch.from_numpy(walk.allowed().copy())[: scores.shape[1]])
    begun = walk.allowed().tolist()
    took = walk.text(b'{"first')
    assert took and walk.forced().startswith(b"_name") and not walk.text(b"x") and not walk.token(0)
    walk.back(took)
    assert walk.allowed().tolist() == begun
    (beside,) = walks_of([processor], 1, vocabulary, target.config.vocab_size)
    assert beside.text(b'{"first')
    brace = torch.tensor([[0, vocabulary.ids[b"{"]]])
    assert (processor(brace, scores.clone()) == 0).any(), "the walk moved the processor"
