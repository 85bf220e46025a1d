"""Copies and pickles of a patched model are of the model, not of the patch."""

from __future__ import annotations

import copy
import io

import models
import pytest
import torch
import transformers
from validate.calls import VOCAB, prompt

import gsd_kernels as gsd


def fresh(**config):
    model = models.endless(**{"vocab_size": VOCAB, **config})
    return model


def pickled(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickled}


@pytest.fixture
def patched():
    target = fresh()
    draft = models.noised(target, 0.01)
    with gsd.patch(target, assistant_model=draft, graph_config="tree") as handle:
        yield target, draft, handle


@pytest.fixture(scope="module")
def plain():
    return fresh().generate(**prompt())


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_is_not_patched_and_can_be(way, patched, plain):
    target, draft, handle = patched
    clone = WAYS[way](target)
    assert vars(clone).keys() == vars(fresh()).keys()
    assert clone.generate.__func__ is transformers.GenerationMixin.generate and clone.generate.__self__ is clone
    assert torch.equal(clone.generate(**prompt()), plain)
    assert handle.stats is None
    with pytest.raises(ValueError, match="model: not patched, as a copy of a patched model is not"):
        gsd.unpatch(clone)
    own = gsd.patch(clone, assistant_model=draft, graph_config="tree")
    assert torch.equal(clone.generate(**prompt()), plain)
    assert own.stats.steps > 0 and handle.stats is None
    gsd.unpatch(clone)
    assert clone.config._attn_implementation == "sdpa" and handle.patched
    assert torch.equal(target.generate(**prompt()), plain) and handle.stats.steps > 0
