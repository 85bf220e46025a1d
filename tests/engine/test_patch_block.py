"""``with patch(model):``, and what a handle says of itself."""

from __future__ import annotations

import models
import pytest
import torch

import gsd_kernels as gsd

TOKENS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture
def target():
    model = models.tiny()
    yield model
    if "generate" in vars(model):
        gsd.unpatch(model)


def test_the_block_patches_and_its_end_unpatches(target):
    prompt = models.prompts(1, 9)
    expected = target.generate(**prompt, **TOKENS)
    with gsd.patch(target) as handle:
        assert torch.equal(target.generate(**prompt, **TOKENS), expected)
        assert handle.stats.new_tokens == 12 and handle.patched
        assert len(handle.engines.idle.sessions) == 1
    assert "generate" not in vars(target) and not handle.patched
    assert not handle.engines.idle.sessions and not len(handle.history), "what it kept is returned"
    assert handle.stats.new_tokens == 12, "the counts of its last call can be read behind it"


def test_an_exception_unpatches_and_gets_out(target):
    with pytest.raises(KeyError, match="mine"), gsd.patch(target):
        raise KeyError("mine")
    assert "generate" not in vars(target)


def test_a_handle_serves_before_its_block_and_unpatching_inside_is_fine(target):
    handle = gsd.patch(target)
    target.generate(**models.prompts(1, 9), **TOKENS)
    assert handle.stats.steps
    with handle as same:
        assert same is handle
        gsd.unpatch(target)
    with gsd.patch(target):
        gsd.unpatch(target)
        other = gsd.patch(target)  # of somebody else: the block's end leaves it alone
    assert other.patched and "generate" in vars(target)


def test_nested_and_late_blocks_are_refused_by_name(target):
    with gsd.patch(target) as handle:
        with pytest.raises(ValueError, match=r"model: already patched, this LlamaForCausalLM; .*unpatch\(model\)"):
            gsd.patch(target)
        with pytest.raises(ValueError, match="patch: this handle's with block is entered already"), handle:
            pass
        assert handle.patched, "the refused block ended nothing"
    with pytest.raises(ValueError, match="patch: this handle's model was unpatched; patch it anew"), handle:
        pass


def test_what_a_handle_keeps_is_said_in_a_line(target):
    with gsd.patch(target) as handle:
        assert repr(handle) == "<Patch of LlamaForCausalLM: 0 texts kept in 0.0 MiB of caches, history of 0 contexts>"
        target.generate(**models.prompts(1, 9), **TOKENS)
        assert repr(handle).startswith("<Patch of LlamaForCausalLM: 1 text kept in 0.")
        assert f"history of {len(handle.history)} contexts" in repr(handle) and len(handle.history)
    assert repr(handle) == "<Patch of LlamaForCausalLM: unpatched>"
