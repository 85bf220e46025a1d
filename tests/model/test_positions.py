"""Models without rotary embedding: tokens are placed by position_ids, in tables that end somewhere."""

from __future__ import annotations

import functools

import models
import pytest
import tiny_configs
import torch
import transformers
from gates import refused
from packaging.version import Version
from transformers import PreTrainedModel

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe

END = 32  # positions of the table, behind prompts of 11 tokens
NEW = END - 11 + 1  # the last token of a text is not read
GRAPH = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=24, merge_context=1)
DECODER = {"is_decoder": True}  # of a class that is an encoder by default
CLASSES = {
    **{f"{name}LMHeadModel": {} for name in ("GPT2", "CTRL")},
    **{f"{name}ForCausalLM": {} for name in ("OPT", "GPTBigCode", "GPTJ", "CodeGen", "BioGpt")},
    "BertLMHeadModel": DECODER,
    "RobertaForCausalLM": DECODER,
}


@functools.lru_cache
def model_of(name: str) -> PreTrainedModel:
    fields = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), END)
    own = tiny_configs.shrunk(getattr(transformers, name).config_class, 2)
    model = tiny_configs.build(name, **CLASSES[name], **{field: END for field in fields if field in own})
    problem = probe.examine(model).problem
    if problem is not None and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"older transformers: {name} {problem}")
    return model


def prompts(batch: int, length: int = 11) -> dict[str, torch.Tensor]:
    return models.prompts(batch, length, seed=3, vocab=tiny_configs.VOCAB - 4)


def test_a_text_beyond_the_table_is_refused_where_it_gets_there():
    """Transformers raises an IndexError; a text that ends before by itself is served."""
    model, more = model_of("GPT2LMHeadModel"), {"do_sample": False, "max_new_tokens": NEW + 8}
    with pytest.raises(IndexError):
        model.generate(**prompts(1), **more)
    for options in ({"assistant_model": models.noised(model, 0.01), "graph_config": GRAPH}, {"graph_config": "plain"}):
        with pytest.raises(ValueError, match=f"max_new_tokens: GPT2LMHeadModel .* {END} positions"):
            gsd.generate(model, **prompts(1), **options, **more)
    text = model.generate(**prompts(1), max_new_tokens=NEW, do_sample=False)
    end = int(text[0, -1])
    expected = model.generate(**prompts(1), **more, eos_token_id=end)
    draft = {"assistant_model": models.noised(model, 0.01), "graph_config": GRAPH}
    assert torch.equal(gsd.generate(model, **prompts(1), **draft, **more, eos_token_id=end), expected)


def test_a_prompt_longer_than_the_table_is_refused():
    with pytest.raises(ValueError, match=f"input_ids: OPTForCausalLM .* {END} positions, and {END + 2} tokens"):
        gsd.generate(model_of("OPTForCausalLM"), **prompts(2, END + 3), draft_sources=("history",), max_new_tokens=2)


def test_padding_takes_no_positions():
    """A left-padded batch is wider than the table, its texts are not."""
    model, given = model_of("GPT2LMHeadModel"), prompts(2, END + 9)
    given["attention_mask"][:, : END - 2] = 0
    options = {"draft_sources": ("history",), "graph_config": "tree", "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**given, max_new_tokens=12, do_sample=False)
    assert torch.equal(gsd.generate(model, **given, **options), expected)


def test_a_draft_with_a_table_is_left_out_where_it_ends():
    draft = model_of("GPT2LMHeadModel")
    target = models.tiny(vocab_size=tiny_configs.VOCAB, eos_token_id=None)
    options = {"assistant_model": draft, "draft_sources": ("model",), "graph_config": GRAPH, "max_new_tokens": 40}
    out = gsd.generate(target, **prompts(2), **options, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, target.generate(**prompts(2), max_new_tokens=40, do_sample=False))
    assert out.stats.left_out == ["model"]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("BartForCausalLM", "(by place in the cache|attention interface)"),
        ("BloomForCausalLM", "attention interface"),
        ("BertLMHeadModel", "not causal"),
    ],
)
def test_what_cannot_be_proved_is_refused_by_name(name, why):
    refused(tiny_configs.build(name), why)


def test_positions_that_are_counted_from_the_first_row_are_refused():
    model = tiny_configs.build("GPT2LMHeadModel")
    table = model.transformer.wpe
    own = type(table).forward
    table.forward = lambda positions: own(table, torch.arange(positions.shape[1])[None])
    refused(model, "(by place in the cache|attention interface)")
