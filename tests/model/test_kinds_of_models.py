"""The contract of kinds of models: the text is transformers' own, and a seed's whatever is drafted. One is a row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import models
import pytest
import test_attention as families
import torch

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe

GRAPH = gsd.GraphConfig(depth=6, width=4, branch=3, max_rows=28, merge_context=1)
SEEDED = ("GptOssForCausalLM", "MiMoV2FlashForCausalLM", "Llama4ForCausalLM", "GPT2LMHeadModel")


class Family(NamedTuple):
    prompts: Callable[..., dict[str, torch.Tensor]]
    new: int  # tokens
    model: Callable[[str], Any]


SINKS = Family(families.sinks_prompts, families.SINKS_NEW, families.model_of)
CHUNKS = Family(families.chunks_prompts, families.NEW, lambda name: families.llama4())
PLACED = Family(families.placed_prompts, families.PLACED_NEW, families.placed_model)
ROWS = {
    **dict.fromkeys(families.CLASSES, SINKS),
    "Llama4ForCausalLM": CHUNKS,
    **dict.fromkeys(families.PLACED_CLASSES, PLACED),
}


def right(place, model, batch: int) -> torch.Tensor:
    """Transformers' own text; where its eager attention makes NaN of padding in float64, of every sequence alone."""
    if place is not SINKS:
        return model.generate(**place.prompts(batch), max_new_tokens=place.new, do_sample=False)
    texts = []
    for ids, mask in zip(*place.prompts(batch).values(), strict=True):
        alone = model.generate(ids[mask.bool()][None], max_new_tokens=place.new, do_sample=False)
        texts.append(torch.cat([ids, alone[0, -place.new :]]))
    return torch.stack(texts)


@pytest.mark.parametrize("name", ROWS)
def test_greedy_text_is_transformers(name):
    """For one prompt and three left-padded ones, with drafts that are right often and wrong often."""
    place, accepted, drafted = ROWS[name], 0, 0
    model = ROWS[name].model(name)
    draft = {"assistant_model": models.noised(model, 0.01), "draft_sources": ("model", "history")}
    for batch, sources in ((1, draft), (3, draft), (3, {"draft_sources": ("history",)})):
        options = {**sources, "graph_config": GRAPH, "max_new_tokens": place.new, "do_sample": False}
        out = gsd.generate(model, **place.prompts(batch), **options, return_dict_in_generate=True)
        text = right(place, model, batch)
        assert torch.equal(out.sequences, text)
        assert out.stats.why_modules is not None and name in out.stats.why_modules
        accepted += out.stats.new_tokens - out.stats.sequence_steps
        drafted += out.stats.drafted_nodes
    assert drafted > accepted > 5, "nothing could have failed"
    if place is PLACED:  # the drafts reach beyond the table
        assert probe.examine(model).positions == families.END
    else:
        assert len(text[:, -place.new :].unique()) >= 15


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_gives_one_text_with_and_without_a_draft(name):
    place = ROWS[name]
    model, sampled = ROWS[name].model(name), {"do_sample": True, "seed": 5, "temperature": 0.8}
    call = {**place.prompts(3), **sampled, "max_new_tokens": place.new}
    alone = gsd.generate(model, **call, draft_sources=("history",), graph_config="chain")
    options = {"assistant_model": models.noised(model, 0.02), "graph_config": GRAPH}
    drafted = gsd.generate(model, **call, **options, return_dict_in_generate=True)
    assert torch.equal(drafted.sequences, alone) and drafted.stats.tokens_per_step > 1


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Llama4ForCausalLM"])
def test_few_rows_in_float32(name):
    """Which the compiled attention computes, by positions rather than by a mask that is written out."""
    model = families.llama4(head_dim=16) if name.startswith("Llama4") else families.gpt_oss(head_dim=16)
    model, place = model.float(), ROWS[name]
    tokens = {"max_new_tokens": place.new, "do_sample": False}
    chain = gsd.GraphConfig.preset("chain", depth=3)
    out = gsd.generate(model, **place.prompts(3), assistant_model=model, graph_config=chain, **tokens)
    assert torch.equal(out, model.generate(**place.prompts(3), **tokens))
