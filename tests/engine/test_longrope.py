"""``longrope``: the text is what transformers writes, on either side of the border between its factors and across."""

from __future__ import annotations

import copy
import functools

import chats
import models
import pytest
import tiny_configs
import torch
import transformers

import gsd_kernels as gsd
from gsd_kernels_hf import validate
from gsd_kernels_hf.validate.calls import check_inputs

VOCAB, ORIGINAL = 40, 24
FAMILIES = ("llama", "phi3")
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "original_max_position_embeddings": ORIGINAL,
    "short_factor": [1.0, 1.3, 1.1, 1.7],
    "long_factor": [3.0, 9.0, 5.0, 20.0],
}
LENGTHS = {"short": (6, 12), "ends at the border": (12, 12), "crosses": (14, 22), "from the border": (24, 12)}
LENGTHS |= {"behind the border": (25, 9), "long": (40, 9)}
WAYS = {
    "draft": lambda target: {"assistant_model": models.noised(target, 0.02), "graph_config": "tree"},
    "history": lambda target: {"draft_sources": ("history",), "graph_config": "tree"},
    "auto": lambda target: {"assistant_model": models.noised(target, 0.02), "graph_config": "auto"},
    "layer_skip": lambda target: {"assistant_model": gsd.LayerSkip(target, mlp=[1]), "graph_config": "tree"},
}


@functools.lru_cache
def target_of(family: str):
    """A model of which other factors give other texts."""
    if family == "llama":
        model = models.tiny(vocab_size=VOCAB, num_attention_heads=4, max_position_embeddings=96, rope_parameters=ROPE)
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        ids = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        config = transformers.Phi3Config(
            **sizes, **ids, num_key_value_heads=2, max_position_embeddings=96,
            original_max_position_embeddings=ORIGINAL, rope_parameters=ROPE,
        )  # fmt: skip
        torch.manual_seed(0)
        model = transformers.Phi3ForCausalLM(config).eval()
        models.add_noise((p for p in model.parameters() if p.dim() > 1), 0.2, 1)
        model = model.double()
    model.generation_config.eos_token_id = None
    return model


def prompt(length: int, batch: int = 1, *, seed: int = 3):
    return models.prompts(batch, length, seed=seed, vocab=VOCAB)


CASES = [(family, lengths, 3, "draft") for family in FAMILIES for lengths in LENGTHS]
CASES += [(FAMILIES[i % 2], "crosses", 3, way) for i, way in enumerate(WAYS) if way != "draft"]
CASES += [("llama", "crosses", 1, "draft")]


@pytest.mark.parametrize(
    ("length", "chunk", "family"),
    [(20, 8, "llama"), (25, 8, "phi3"), (29, 5, "llama"), (31, 8, "phi3"), (31, 24, "llama"), (31, 100, "phi3")],
)
def test_a_prompt_in_pieces(family, length, chunk):
    """transformers turns the pieces before the border by the short factors."""
    target = target_of(family)
    call = {**prompt(length), "max_new_tokens": 8, "do_sample": False, "prefill_chunk_size": chunk}
    want = target.generate(**call)
    assert torch.equal(gsd.generate(target, **call, **WAYS["draft"](target)), want)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_later_turns_of_a_chat(family, batch):
    """What is kept of a text serves the next one as far as both are on one side."""
    target = copy.deepcopy(target_of(family))
    fresh, reads = copy.deepcopy(target), chats.Reads(target)
    text, seen = prompt(6, batch, seed=1)["input_ids"], []
    with chats.patched(target, **WAYS["draft"](fresh)):
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
        check_inputs(target_of("phi3"), Inputs(), torch.zeros(1))
