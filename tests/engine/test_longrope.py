"""``longrope``: prompts in pieces and turns of a chat on either side of the border between its factors, and across."""

from __future__ import annotations

import copy
import functools

import chats
import models
import pytest
import tiny_configs
import torch

import gsd_kernels as gsd
from gsd_kernels_hf import validate
from gsd_kernels_hf.validate.calls import check_inputs

VOCAB, ORIGINAL = 40, 24
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.3, 1.1, 1.7],
    "long_factor": [3.0, 9.0, 5.0, 20.0],
}


@functools.lru_cache
def pair():
    """A model of which other factors give other texts, and a draft."""
    sizes = {"vocab_size": VOCAB, "num_attention_heads": 4, "max_position_embeddings": 96}
    target = models.endless(**sizes, rope_parameters=ROPE)
    return target, models.noised(target, 0.02)


def prompt(length: int, batch: int = 1, *, seed: int = 3):
    return models.prompts(batch, length, seed=seed, vocab=VOCAB)


@pytest.mark.parametrize(("length", "chunk"), [(20, 8), (25, 8), (29, 5), (31, 24), (31, 100)])
def test_a_prompt_in_pieces(length, chunk):
    """transformers turns the pieces before the border by the short factors."""
    target, draft = pair()
    call = {**prompt(length), "max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": chunk}
    out = gsd.generate(target, **call, assistant_model=draft, graph_config="tree")
    assert torch.equal(out, target.generate(**call))


@pytest.mark.parametrize("batch", [1, 2])
def test_later_turns_of_a_chat(batch):
    """What is kept of a text serves the next one as far as both are on one side."""
    target, draft = pair()
    fresh, target = target, copy.deepcopy(target)
    reads, text, seen = chats.Reads(target), prompt(6, batch, seed=1)["input_ids"], []
    with chats.patched(target, assistant_model=draft, graph_config="tree"):
        for turn in range(6):
            want = chats.ask(fresh, text, tokens=4)
            reads.since()
            assert torch.equal(chats.ask(target, text, tokens=4), want), turn
            seen.append(reads.since() // batch)
            text = torch.cat([want, chats.words(batch, 2, seed=turn) % VOCAB], 1)
        assert seen[:3] == [5, 2, 2] and seen[-1] == 2
        short = prompt(8, batch, seed=9)["input_ids"]  # and back to the short side
        assert torch.equal(chats.ask(target, short), chats.ask(fresh, short))
        type(target).generate(target, text, max_new_tokens=3)  # which leaves the long factors on the module
        assert torch.equal(chats.ask(target, short), chats.ask(fresh, short))


def test_what_has_other_sides_is_refused_by_name():
    """PhiMoE scales by the side as well, and takes the short frequencies on both."""
    target = tiny_configs.build("PhimoeForCausalLM", 2)
    rope = {**ROPE, "short_mscale": 1.1, "long_mscale": 1.3, "original_max_position_embeddings": ORIGINAL}
    factors = {name: [1.5] * (target.model.rotary_emb.inv_freq.numel()) for name in ("short_factor", "long_factor")}
    config = copy.deepcopy(target.config)
    config.rope_parameters = {**rope, **factors}
    target = type(target)(config).eval()
    with pytest.raises(validate.Unsupported, match="longrope of which the sides differ in more than"):
        gsd.generate(target, **prompt(6), max_new_tokens=4)


def test_images_are_refused_by_name():
    class Inputs:
        unread = ("pixel_values",)

    with pytest.raises(validate.Unsupported, match=r"pixel_values: .*longrope"):
        check_inputs(pair()[0], Inputs(), torch.zeros(1))
