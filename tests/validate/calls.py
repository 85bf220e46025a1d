"""One call to every way into the decoder, and what a refusal must leave as it was."""

from __future__ import annotations

import contextlib
import copy
import functools

import models
import pytest
import torch

import gsd_kernels as gsd

VOCAB = 32
LENGTH, NEW = 9, 16


@functools.lru_cache
def pair():
    target = models.endless(vocab_size=VOCAB)
    return target, models.noised(target, 0.01)


def prompt(batch: int = 2, **more) -> dict:
    return {**models.prompts(batch, LENGTH, seed=3, vocab=VOCAB), "max_new_tokens": NEW, "do_sample": False, **more}


@contextlib.contextmanager
def refused(model, error: type[Exception], match: str, **exact):
    """The block's call is refused; the model is bit-equal and as patched as before, and its next call exact."""
    weights, variables = copy.deepcopy(model.state_dict()), dict(vars(model))
    attention = model.config._attn_implementation
    with pytest.raises(error, match=match):
        yield
    assert dict(vars(model)) == variables and model.config._attn_implementation == attention
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    call = {**prompt(), **exact}
    assert torch.equal(gsd.generate(model, graph_config="tree", **call), type(model).generate(model, **call))


def ways(model, draft, **call):
    """The three ways to the decoder."""
    yield lambda: gsd.generate(model, assistant_model=draft, graph_config="tree", **call)
    yield lambda: model.generate(custom_generate=gsd.GraphDecoder(draft, "tree"), **call)

    def patched():
        with gsd.patch(model, assistant_model=draft, graph_config="tree"):
            return model.generate(**call)

    yield patched
