"""Exactness with each kind of drafter and with all of them in one graph: shapes, padding, processors, seeds."""

from __future__ import annotations

import functools

import pytest
import torch
from models import noised, prompts, tiny
from sources.drafters import (
    dflash_config,
    eagle3_config,
    fit_dflash,
    fit_eagle3,
    fit_parallel,
    random_dflash,
    random_eagle3,
)

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, GraphConfig
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.sources.load import source_of

VOCAB = 41
LEVELS = {"depth": 3, "width": 3, "branch": 3, "max_rows": 24}
SHAPES = {
    "chain": GraphConfig.preset("chain", depth=4),
    "tree": GraphConfig(**LEVELS, merge_context=-1),
    "graph": GraphConfig(**LEVELS, merge_context=2, history_depth=2, history_width=4),
    "lattice": GraphConfig(**LEVELS | {"depth": 4, "max_rows": 32}, merge_context=0, history_depth=1, history_width=4),
    "auto": "auto",
}
PROCESSORS = (
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 6, "bad_words_ids": [[7]]},
)
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "seed": 5}
TEXT = {"max_new_tokens": 16, "eos_token_id": [2, 5], "pad_token_id": 0}
SOURCES = ("models", "heads", "eagle3", "p-eagle", "dflash", "every")


@functools.cache
def target_of():
    return tiny(num_hidden_layers=3, vocab_size=VOCAB)


@functools.cache
def sources_of(name: str) -> dict:
    """The options of a source, or of all in one graph."""
    target = target_of()
    if name == "models":
        drafts = [noised(target, 0.03, seed=1), noised(target, 0.06, seed=2)]
        return {"assistant_model": drafts, "draft_sources": ("model", "history")}
    if name == "heads":
        heads = DraftHeads.for_model(target, 3).requires_grad_(False)
        heads.weight.normal_(std=0.2, generator=torch.Generator().manual_seed(0))
        return {"draft_heads": heads, "draft_sources": ("heads", "history")}
    if name == "eagle3":
        return {"drafter": fit_eagle3(random_eagle3(eagle3_config(target)), target, steps=40)}
    if name == "p-eagle":
        module = random_eagle3(eagle3_config(target, mask_token_id=3), mask_shape=(96,))
        return {"drafter": fit_parallel(module, target, steps=40)}
    if name == "dflash":
        return {"drafter": fit_dflash(random_dflash(dflash_config(target)), target, steps=40)}
    drafters = tuple(source_of(sources_of(kind)["drafter"]) for kind in ("eagle3", "p-eagle", "dflash"))
    given = sources_of("models") | sources_of("heads")
    return given | {"draft_sources": ("model", "heads", *drafters, "history")}


@functools.cache
def expected(number: int, sampled: bool):
    """The target's own text: transformers' where it is greedy, ours without a draft of the same seed otherwise."""
    options = {**TEXT, **PROCESSORS[number], **prompts(3, 13, seed=number, vocab=VOCAB)}
    if sampled:
        return gsd.generate(target_of(), **options, **SAMPLED)
    return target_of().generate(**options, do_sample=False)


def cases():
    for name in SOURCES:
        for shape in SHAPES:
            fast = name == "every" and shape in ("graph", "lattice")
            yield pytest.param(name, shape, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize(("name", "shape"), cases())
def test_text_is_the_targets_own(name, shape):
    """A batch with padding, greedy and by seed; every combination with processors in turn."""
    accepted = rejected = 0
    for sampled in (False, True):
        number = (SOURCES.index(name) + list(SHAPES).index(shape) + sampled) % len(PROCESSORS)
        options = {**TEXT, **PROCESSORS[number], **prompts(3, 13, seed=number, vocab=VOCAB), **sources_of(name)}
        options |= SAMPLED if sampled else {"do_sample": False}
        out = gsd.generate(target_of(), **options, graph_config=SHAPES[shape], return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected(number, sampled)), (sampled, PROCESSORS[number])
        accepted += sum(out.stats.accepted[2:])
        rejected += out.stats.accepted[1]
    # what auto drafts is by measured times, which are the machine's
    assert shape == "auto" or (accepted > 0 and rejected > 0), "nothing could have failed"


@pytest.mark.parametrize("shape", ["graph", "lattice"])
def test_all_of_them_proposed(shape):
    """In one graph of all sources each has weights of its own, which it learned from what the target picked."""
    engines_of(target_of()).clear()
    options = {**TEXT, "eos_token_id": None, "do_sample": False, **prompts(2, 11, vocab=VOCAB), **sources_of("every")}
    gsd.generate(target_of(), **options, graph_config=SHAPES[shape])
    (engine,) = engines_of(target_of())
    learned = engine.statistics(sampled=False).weights
    assert {name: weights.learned()[0] > 0 for name, weights in learned.items() if name != "model"} == {
        name: True for name in ("model 2", "heads", "eagle3", "p-eagle", "dflash", "history")
    }
