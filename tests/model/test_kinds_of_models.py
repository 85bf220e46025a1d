"""The contract of kinds of models: the text is transformers' own, and a seed's whatever is drafted. One is a row."""

from __future__ import annotations

import models
import pytest
import test_chunks
import test_positions
import test_sinks
import torch

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe

GRAPH = gsd.GraphConfig(depth=6, width=4, branch=3, max_rows=28, merge_context=1)
SEEDED = ("GptOssForCausalLM", "MiMoV2FlashForCausalLM", "Llama4ForCausalLM", "GPT2LMHeadModel")
ROWS = {
    **dict.fromkeys(test_sinks.CLASSES, test_sinks),
    "Llama4ForCausalLM": test_chunks,
    **dict.fromkeys(test_positions.CLASSES, test_positions),
}


def model_of(name: str):
    return test_chunks.llama4() if name == "Llama4ForCausalLM" else ROWS[name].model_of(name)


def right(place, model, batch: int) -> torch.Tensor:
    """Transformers' own text; where its eager attention makes NaN of padding in float64, of every sequence alone."""
    if place is not test_sinks:
        return model.generate(**place.prompts(batch), max_new_tokens=place.NEW, do_sample=False)
    texts = []
    for ids, mask in zip(*place.prompts(batch).values(), strict=True):
        alone = model.generate(ids[mask.bool()][None], max_new_tokens=place.NEW, do_sample=False)
        texts.append(torch.cat([ids, alone[0, -place.NEW :]]))
    return torch.stack(texts)


@pytest.mark.parametrize("name", ROWS)
def test_greedy_text_is_transformers(name):
    """For one prompt and three left-padded ones, with drafts that are right often and wrong often."""
    place, accepted, drafted = ROWS[name], 0, 0
    model = model_of(name)
    draft = {"assistant_model": models.noised(model, 0.01), "draft_sources": ("model", "history")}
    for batch, sources in ((1, draft), (3, draft), (3, {"draft_sources": ("history",)})):
        options = {**sources, "graph_config": GRAPH, "max_new_tokens": place.NEW, "do_sample": False}
        out = gsd.generate(model, **place.prompts(batch), **options, return_dict_in_generate=True)
        text = right(place, model, batch)
        assert torch.equal(out.sequences, text)
        assert out.stats.why_modules is not None and name in out.stats.why_modules
        accepted += out.stats.new_tokens - out.stats.sequence_steps
        drafted += out.stats.drafted_nodes
    assert drafted > accepted > 5, "nothing could have failed"
    if place is test_positions:  # the drafts reach beyond the table
        assert probe.examine(model).positions == place.END
    else:
        assert len(text[:, -place.NEW :].unique()) >= 15


@pytest.mark.parametrize("name", SEEDED)
def test_a_seed_gives_one_text_with_and_without_a_draft(name):
    place = ROWS[name]
    model, sampled = model_of(name), {"do_sample": True, "seed": 5, "temperature": 0.8}
    call = {**place.prompts(3), **sampled, "max_new_tokens": place.NEW}
    alone = gsd.generate(model, **call, draft_sources=("history",), graph_config="chain")
    options = {"assistant_model": models.noised(model, 0.02), "graph_config": GRAPH}
    drafted = gsd.generate(model, **call, **options, return_dict_in_generate=True)
    assert torch.equal(drafted.sequences, alone) and drafted.stats.tokens_per_step > 1


@pytest.mark.parametrize("name", ["GptOssForCausalLM", "Llama4ForCausalLM"])
def test_few_rows_in_float32(name):
    """Which the compiled attention computes, by positions rather than by a mask that is written out."""
    model = test_chunks.llama4(head_dim=16) if name.startswith("Llama4") else test_sinks.gpt_oss(head_dim=16)
    model, place = model.float(), ROWS[name]
    tokens = {"max_new_tokens": place.NEW, "do_sample": False}
    chain = gsd.GraphConfig.preset("chain", depth=3)
    out = gsd.generate(model, **place.prompts(3), assistant_model=model, graph_config=chain, **tokens)
    assert torch.equal(out, model.generate(**place.prompts(3), **tokens))
