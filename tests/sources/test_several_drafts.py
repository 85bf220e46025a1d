"""Several draft models, alone and mixed with other sources: the same text, a learned weight each."""

from __future__ import annotations

import functools

import pytest
import torch
from models import noised, prompts, tiny
from sources.drafters import eagle3_config, fit_eagle3, random_eagle3
from sources.mtp_checkpoints import fit, saved
from sources.mtp_checkpoints import target_of as own_target

import gsd_kernels as gsd
from gsd_kernels import GraphConfig, LayerSkip, Mtp
from gsd_kernels_hf.sources.load import source_of

VOCAB = 41
GRAPH = GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=0, history_depth=2, history_width=4)


@functools.cache
def target_of():
    return tiny(num_hidden_layers=3, vocab_size=VOCAB)


@functools.cache
def drafts():
    return noised(target_of(), 0.03, seed=1), noised(target_of(), 0.06, seed=2)


def generate(ids, **options):
    options = {"max_new_tokens": 20, "eos_token_id": [2, 5], "pad_token_id": 0, "assistant_model": drafts(), **options}
    return gsd.generate(target_of(), ids, return_dict_in_generate=True, **options)


def test_a_second_drafter_is_refused_as_an_option_and_drafts_as_a_source(tmp_path):
    """The target's own head and an EAGLE-3: both read the target's states, and each has a cache of its own."""
    saved("glm", tmp_path)
    target = own_target("glm")
    head = fit(Mtp.from_pretrained(tmp_path, target), target, steps=20)
    other = fit_eagle3(random_eagle3(eagle3_config(target)), target, steps=30)
    options = {**prompts(2, 9, vocab=60), "max_new_tokens": 24, "eos_token_id": None, "return_dict_in_generate": True}
    for given in ([head, other], (head, other)):
        with pytest.raises(TypeError, match=f"drafter: expected .*, got {type(given).__name__}; of drafters one is"):
            gsd.generate(target, **options, drafter=given)
    sources = {"drafter": head, "draft_sources": ("drafter", source_of(other), "history"), "graph_config": GRAPH}
    for sampling in ({"do_sample": False}, {"do_sample": True, "temperature": 0.8, "seed": 3}):
        plain = gsd.generate(target, **options, **sampling).sequences
        both = gsd.generate(target, **options, **sampling, **sources)
        assert torch.equal(both.sequences, plain)
        assert all(both.stats.sources[name].proposed > 0 for name in ("mtp", "eagle3"))
        assert sum(both.stats.sources[name].accepted for name in ("mtp", "eagle3")) > 0


def test_what_is_no_list_of_models_is_refused_by_name():
    ids = prompts(1, 9, vocab=VOCAB)["input_ids"]
    for given, error, why in (
        ([], ValueError, "expected draft models, got an empty list"),
        ([drafts()[0], drafts()[0]], ValueError, "the same draft model twice"),
        ([drafts()[0], "draft"], TypeError, "expected a model, got the path 'draft'; load it"),
        (
            [drafts()[0], LayerSkip(target_of(), attention=[1])],
            TypeError,
            "expected a list of models; a LayerSkip is given alone",
        ),
        ([drafts()[0], tiny(vocab_size=5000)], ValueError, "vocabulary sizes 41"),
    ):
        with pytest.raises(error, match=f"assistant_model( 2)?: {why}"):
            generate(ids, assistant_model=given)


def test_speculative_sampling_drafts_from_one_model():
    ids = prompts(1, 9, vocab=VOCAB)["input_ids"]
    with pytest.raises(ValueError, match=r"assistant_model: criterion=.speculative. drafts from one model alone"):
        generate(ids, do_sample=True, criterion="speculative", graph_config="chain")
