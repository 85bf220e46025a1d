"""Llama 4: attention in chunks, and queries that are scaled by their place; texts are transformers' own."""

from __future__ import annotations

import functools
import inspect

import models
import pytest
import tiny_configs
import torch
import transformers
from gates import refused
from transformers import PreTrainedModel

import gsd_kernels as gsd
from gsd_kernels_hf.model import probe
from gsd_kernels_hf.model.attention import AttentionKind
from gsd_kernels_hf.model.temperature import Temperature

ATTENTION = transformers.models.llama4.modeling_llama4.Llama4TextAttention
BY_LAYER = "get_seq_length" in inspect.getsource(ATTENTION)
pytestmark = pytest.mark.skipif(not BY_LAYER, reason="this transformers scales queries by cache_position")
CHUNK, FLOOR, SCALE = tiny_configs.WINDOW, 8, 1.5
NEW = 30  # behind prompts of 11 tokens: seven chunks, five steps of the factor
GRAPH = gsd.GraphConfig(depth=6, width=4, branch=3, max_rows=28, merge_context=1)  # rows lie in two or three chunks
FIELDS = {"no_rope_layers": [1, 1, 0], "num_hidden_layers": 3, "attn_temperature_tuning": True}
FIELDS |= {"floor_scale": FLOOR, "attn_scale": SCALE}


@functools.lru_cache
def llama4(**fields) -> PreTrainedModel:
    return tiny_configs.build("Llama4ForCausalLM", **{**FIELDS, **fields})


@pytest.mark.parametrize("no_rope_layers", [[0, 1, 1], [0, 0, 0]])
def test_the_first_layer_scales_as_well(no_rope_layers):
    model = tiny_configs.build("Llama4ForCausalLM", **{**FIELDS, "no_rope_layers": no_rope_layers})
    options = {"assistant_model": models.noised(model, 0.01), "graph_config": GRAPH}
    expected = model.generate(**prompts(3), max_new_tokens=NEW, do_sample=False)
    out = gsd.generate(model, **prompts(3), **options, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, expected)
    assert probe.examine(model).by_length == {layer for layer in range(3) if not no_rope_layers[layer]}


def prompts(batch: int) -> dict[str, torch.Tensor]:
    return models.prompts(batch, 11, seed=3, vocab=tiny_configs.VOCAB)


@functools.lru_cache
def plain(batch: int) -> torch.Tensor:
    return llama4().generate(**prompts(batch), max_new_tokens=NEW, do_sample=False)


def test_kinds_of_calls():
    chunked, scaled = AttentionKind(chunk=CHUNK), AttentionKind(temperature=Temperature(FLOOR, SCALE))
    assert probe.served(llama4()).kinds == (chunked, chunked, scaled)
    assert probe.examine(llama4()).by_length == {2}
    assert probe.served(llama4(attn_temperature_tuning=False)).kinds == (chunked, chunked, AttentionKind())


@pytest.mark.parametrize("pieces", [1, 4])
def test_prompts_in_pieces_and_prefixes_that_are_read_once(pieces):
    model = llama4()
    options = {"graph_config": GRAPH, "max_new_tokens": NEW, "do_sample": False, "prefill_chunk_size": pieces}
    given = {"input_ids": plain(1)[:, :21]}
    expected = model.generate(**given, max_new_tokens=NEW, do_sample=False)
    with gsd.patch(model, draft_sources=("history",)) as handle:
        model.generate(**prompts(1), **{**options, "max_new_tokens": 3})
        assert torch.equal(model.generate(**given, **options), expected)
        assert handle.stats.why is None and handle.stats.tokens_per_step > 1


@pytest.mark.parametrize("change", [{"attention_chunk_size": 1000}, {"attn_temperature_tuning": False}])
def test_chunks_and_the_factor_matter(change):
    model = tiny_configs.build("Llama4ForCausalLM", **{**FIELDS, **change})
    model.load_state_dict(llama4().state_dict())
    assert not torch.equal(model.generate(**prompts(1), max_new_tokens=NEW, do_sample=False), plain(1))


class Squared(ATTENTION):
    """Scales as Llama 4 does, and then once more."""

    def forward(self, hidden_states, *args, **options):
        cache = options["cache"]
        begin = cache.get_seq_length(self.layer_idx)
        places = torch.arange(hidden_states.shape[1]) + begin
        factor = 1 + torch.floor((places + 1.0) / self.floor_scale)
        return super().forward(hidden_states * factor[None, :, None].to(hidden_states), *args, **options)


def test_what_else_goes_by_the_caches_length_is_refused():
    model = tiny_configs.build("Llama4ForCausalLM", **FIELDS)
    model.model.layers[2].self_attn.__class__ = Squared
    refused(model, "cache's length")
    model.model.layers[2].self_attn.__class__ = ATTENTION
    assert probe.examine(model).problem is None
    model.model.layers[2].self_attn.attn_scale = str(SCALE)
    assert probe.examine(model).problem is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_is_rounded_as_transformers_rounds_it(dtype):
    """At every place of two sequences, bit for bit."""
    query = torch.randn(2, 4, 50, 8).to(dtype)
    places = torch.stack([torch.arange(50), 30 + torch.arange(50)])
    scales = torch.log1p(torch.floor((places.float() + 1.0) / FLOOR)) * SCALE + 1.0
    expected = (query.transpose(1, 2) * scales[:, :, None, None]).to(dtype).transpose(1, 2)
    assert torch.equal(Temperature(FLOOR, SCALE).applied(query, places), expected)
