"""Drafts by a call's grammar: fewer steps, the same texts; the processors' own state is not touched."""

from __future__ import annotations

import pytest
import torch
from grammars import GRAMMARS, TEXTS, pair
from transformers import LogitsProcessorList

import gsd_kernels as gsd
from gsd_kernels_hf.model.vocabulary import Vocabulary
from gsd_kernels_hf.sources.matchers import LLGuidanceWalk, XGrammarWalk, walks_of

SHAPE = gsd.GraphConfig(depth=0, history_depth=8, history_width=3, width=3, branch=3, max_rows=16)
FORCED = r'\{"first_name": "Ada", "kind": "(class|def)", "on": (true|false)\}'
WALKS = {"xgrammar": XGrammarWalk, "llguidance": LLGuidanceWalk}
LIBRARIES = tuple(WALKS)
ARRAYS = [{"type": "array", "items": of} for of in ({"type": "boolean"}, {"enum": ["ab", "ba"]}, {"enum": [1, 2, 3]})]
PIECES = ["ab", "ba", "0", "1", "[a-c]", "left"]
GREEDY, SAMPLED = {"do_sample": False}, {"do_sample": True, "temperature": 1.5, "seed": 7}


@pytest.fixture(autouse=True)
def uncompiled():
    """Their masking kernels are written for torch.compile, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


def processors(kind, texts, *, regex=False):
    target, _, tokenizer = pair()
    return LogitsProcessorList([GRAMMARS[kind](tokenizer, target.config.vocab_size, texts, regex=regex)])


def written(texts, kind="xgrammar", *, prompts=TEXTS[:1], regex=False, **options):
    """Sequences and statistics of a batch, each held to its grammar."""
    target, _, tokenizer = pair()
    prompt = tokenizer(list(prompts), return_tensors="pt", padding=True)
    options = {"max_new_tokens": 48, "graph_config": SHAPE, "tokenizer": tokenizer, **GREEDY, **options}
    options |= {"logits_processor": processors(kind, texts, regex=regex), "return_dict_in_generate": True}
    return gsd.generate(target, **prompt, **options)


@pytest.mark.parametrize("kind", LIBRARIES)
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_texts_are_the_same_in_fewer_steps(kind, how):
    """End-of-text tokens that the grammar forces are drafted too: the last step brings several tokens."""
    plain = written([FORCED], kind, regex=True, graph_config="plain", **how)
    history = written([FORCED], kind, regex=True, draft_sources=("history",), **how)
    drafted = written([FORCED], kind, regex=True, **how)
    assert torch.equal(drafted.sequences, plain.sequences) and torch.equal(history.sequences, plain.sequences)
    assert drafted.sequences[0, -1] == pair()[2].eos_token_id
    assert drafted.stats.steps <= 0.6 * history.stats.steps
    assert list(drafted.stats.sources) == ["history", "grammar"]
    assert drafted.stats.sources["grammar"].accepted > 0
    assert "grammar" not in history.stats.sources


def test_a_grammar_that_is_named_and_not_there():
    target, _, tokenizer = pair()
    inputs = tokenizer(TEXTS[0], return_tensors="pt")
    call = {"max_new_tokens": 8, **GREEDY}
    expected = gsd.generate(target, **inputs, graph_config="plain", **call)
    assert torch.equal(gsd.generate(target, **inputs, draft_sources=("grammar",), **call), expected)


@pytest.mark.parametrize("kind", LIBRARIES)
def test_a_walk_leaves_the_processor_alone(kind):
    """Walks are of their own, and come back by as many steps as they took."""
    target, _, tokenizer = pair()
    (processor,) = processors(kind, [FORCED], regex=True)
    scores = torch.zeros(1, target.config.vocab_size)
    first = processor(torch.zeros(1, 1, dtype=torch.int64), scores.clone())
    vocabulary = Vocabulary.of(tokenizer, "tokenizer")
    (walk,) = walks_of(processors(kind, [FORCED], regex=True), 1, vocabulary, target.config.vocab_size)
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
