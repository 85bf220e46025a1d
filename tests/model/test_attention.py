"""Kinds of attention (windows, chunks, sinks, tables of positions, flash): texts are transformers' own, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import models
import pytest
import tiny_configs
import torch
import transformers
from models import noised, prompts, tiny
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama4.modeling_llama4 import Llama4TextAttention

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.model import probe
from gsd_kernels_hf.model.probe import FAR, AttentionKind, Unserved, limits_of

CHUNK, FLOOR, SCALE, TABLE = tiny_configs.WINDOW, 8, 1.5, 32
LLAMA4 = {"no_rope_layers": [1, 1, 0], "num_hidden_layers": 3, "attn_temperature_tuning": True}
LLAMA4 |= {"floor_scale": FLOOR, "attn_scale": SCALE}
DECODER = {"is_decoder": True}  # of a class that is an encoder by default
GRAPH = GraphConfig(depth=6, width=4, branch=3, max_rows=28, merge_context=1)
HISTORY: dict[str, Any] = {"draft_sources": ("history",), "graph_config": "tree", "do_sample": False}


class Family(NamedTuple):
    """Behind prompts of 11 tokens: new ones, and what is built."""

    new: int
    fields: dict[str, Any]


def ends_early(name: str) -> dict[str, int]:
    """A table of positions that ends somewhere."""
    own = tiny_configs.shrunk(getattr(transformers, name).config_class, 2)
    return {n: TABLE for n in ("max_position_embeddings", "n_positions", "n_ctx") if n in own}


SINKS = {  # each with full layers and such with windows
    "GptOssForCausalLM": {},
    "MiMoV2FlashForCausalLM": {"head_dim": 24},  # values are narrower than keys
    "GraniteSWAForCausalLM": {},
    "GraniteMoeSWAForCausalLM": {},
    "FlintForCausalLM": {"layer_types": ["sliding_attention", "full_attention"]},
}
PLACED = {
    **{f"{name}LMHeadModel": {} for name in ("GPT2", "CTRL")},
    **{f"{name}ForCausalLM": {} for name in ("OPT", "GPTBigCode", "GPTJ", "CodeGen", "BioGpt")},
    "BertLMHeadModel": DECODER,
    "RobertaForCausalLM": DECODER,
}
ROWS = {
    **{name: Family(24, fields) for name, fields in SINKS.items()},
    "Llama4ForCausalLM": Family(30, LLAMA4),  # seven chunks, five steps of the factor
    **{name: Family(TABLE - 10, fields | ends_early(name)) for name, fields in PLACED.items()},  # its last is not read
}


@functools.lru_cache
def model_of(name: str) -> PreTrainedModel:
    try:
        model = tiny_configs.build(name, **ROWS[name].fields)
    except tiny_configs.Unbuildable as error:
        pytest.skip(f"this transformers cannot build it: {error}")
    generator = torch.Generator().manual_seed(2)
    for path, sinks in model.named_parameters():
        if path.endswith("sinks"):
            sinks.data.copy_(2 + 2 * torch.randn(sinks.shape, generator=generator, dtype=torch.float64))
    return model


def asked(batch: int, length: int = 11) -> dict[str, torch.Tensor]:
    return models.prompts(batch, length, seed=5, vocab=tiny_configs.VOCAB - 4)


def own_text(name: str, model: Any, batch: int) -> torch.Tensor:
    """Transformers' own; with sinks of every sequence alone, as its eager attention makes NaN of padding in float64."""
    tokens, given = {"max_new_tokens": ROWS[name].new, "do_sample": False}, asked(batch)
    if name not in SINKS:
        return model.generate(**given, **tokens)
    alone = [model.generate(ids[mask.bool()][None], **tokens)[0] for ids, mask in zip(*given.values(), strict=True)]
    return torch.stack(
        [torch.cat([ids, t[-ROWS[name].new :]]) for ids, t in zip(given["input_ids"], alone, strict=True)]
    )


@pytest.mark.parametrize("name", ROWS)
def test_text_is_transformers_and_a_seeds(name):
    """For one prompt and three left-padded ones, with drafts that are right often and wrong often."""
    model, new, accepted, drafted = model_of(name), ROWS[name].new, 0, 0
    draft = {"assistant_model": noised(model, 0.01), "draft_sources": ("model", "history")}
    for batch, sources in ((1, draft), (3, draft), (3, {"draft_sources": ("history",)})):
        options = {**asked(batch), **sources, "graph_config": GRAPH, "max_new_tokens": new}
        out = gsd.generate(model, **options, do_sample=False, return_dict_in_generate=True)
        text = own_text(name, model, batch)
        assert torch.equal(out.sequences, text)
        assert name in out.stats.why_modules
        accepted += out.stats.new_tokens - out.stats.sequence_steps
        drafted += out.stats.drafted_nodes
    assert drafted > accepted > 5, "nothing could have failed"
    if name in PLACED:  # the drafts reach beyond the table
        assert probe.examine(model).positions == TABLE
    else:
        assert len(text[:, -new:].unique()) >= 15
    sampled = {**asked(3), "do_sample": True, "seed": 5, "temperature": 0.8, "max_new_tokens": new}
    alone = gsd.generate(model, **sampled, draft_sources=("history",), graph_config="chain")
    assert torch.equal(gsd.generate(model, **sampled, **draft, graph_config=GRAPH), alone)


class Squared(Llama4TextAttention):
    """Scales as Llama 4 does, and then once more."""

    def forward(self, hidden_states, *args, **options):
        begin = options["cache"].get_seq_length(self.layer_idx)
        factor = 1 + torch.floor((torch.arange(hidden_states.shape[1]) + begin + 1.0) / self.floor_scale)
        return super().forward(hidden_states * factor[None, :, None].to(hidden_states), *args, **options)


scaled = Llama4TextAttention.forward


def counted(self, *args, cache, **options):
    """Scales by places that the model counts, as in transformers 5.0."""
    told = SimpleNamespace(update=cache.update, get_seq_length=lambda _: cache.layers[0].get_seq_length())
    return scaled(self, *args, cache=told, **options)


def exchanged(module, query, key, value, mask, scaling=None, dropout=0.0, s_aux=None, **options):
    """Takes one head's sink for another's."""
    scores = query @ key.repeat_interleave(2, 1).mT * scaling + mask
    columns = s_aux.roll(1).to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2).contiguous(), None


def implemented(name: str) -> Callable[[Any, pytest.MonkeyPatch], None]:
    """SDPA takes s_aux and drops it; transformers keeps models with sinks from it, a config that was set does not."""

    def change(model: Any, patch: pytest.MonkeyPatch) -> None:
        if name == "exchanged":
            patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, exchanged)
            eager = ALL_MASK_ATTENTION_FUNCTIONS["eager"]
            patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, name, eager)
        model.config._attn_implementation = name

    return change


def fewer_sinks(model: Any, _: pytest.MonkeyPatch) -> None:
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(1, dtype=torch.float64))


REFUSED: dict[str, tuple[str, Callable[[Any, pytest.MonkeyPatch], Any], str]] = {
    "sinks left out": ("GptOssForCausalLM", implemented("sdpa"), "differ.*leave sinks out; .*'eager'"),
    "sinks exchanged": ("GptOssForCausalLM", implemented("exchanged"), "differ.*exchanged; .*'sdpa'"),
    "one sink of four": ("GptOssForCausalLM", fewer_sinks, r"s_aux.*4 heads"),
    "a factor twice": (
        "Llama4ForCausalLM",
        lambda model, _: setattr(model.model.layers[2].self_attn, "__class__", Squared),
        "cache's length",
    ),
    "a factor of the model's": (
        "Llama4ForCausalLM",
        lambda _, patch: patch.setattr(Llama4TextAttention, "forward", counted),
        "cache's length",
    ),
    "not causal": ("BertLMHeadModel", lambda model, _: None, "not causal"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_another_function_is_refused_by_name(what, monkeypatch):
    name, change, says = REFUSED[what]
    model = tiny_configs.build(name, **({} if name.startswith("Bert") else ROWS[name].fields))
    change(model, monkeypatch)
    with pytest.raises(ValueError, match=rf"^model: {name}.*{says}"):
        gsd.generate(model, models.prompts(1, 8, vocab=48)["input_ids"], draft_sources=("history",), max_new_tokens=2)


# Where a table of positions ends.


def test_a_text_beyond_the_table_is_refused_where_it_gets_there():
    """Transformers raises an IndexError; a text that ends before by itself is served."""
    model, more = model_of("GPT2LMHeadModel"), {"do_sample": False, "max_new_tokens": TABLE}
    drafted = {"assistant_model": noised(model, 0.01), "graph_config": GRAPH}
    for options in (drafted, {"graph_config": "plain"}):
        with pytest.raises(ValueError, match=f"max_new_tokens: GPT2LMHeadModel .* {TABLE} positions"):
            gsd.generate(model, **asked(1), **options, **more)
    end = int(own_text("GPT2LMHeadModel", model, 1)[0, -1])
    expected = model.generate(**asked(1), **more, eos_token_id=end)
    assert torch.equal(gsd.generate(model, **asked(1), **drafted, **more, eos_token_id=end), expected)
    with pytest.raises(ValueError, match=f"input_ids: OPTForCausalLM .* {TABLE} positions, and {TABLE + 2} tokens"):
        gsd.generate(model_of("OPTForCausalLM"), **asked(2, TABLE + 3), **HISTORY, max_new_tokens=2)


# Prompts through ``flash_attention_2``, graph rows through ``dag_attention``; PyTorch stands in for what needs a GPU.

FLASH = "flash_attention_2"
SHAPE = GraphConfig(depth=3, width=3, branch=3, max_rows=20, history_depth=2, history_width=3)
GREEDY = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}


class Flash:
    """transformers' function of that name, and how often it was called with how many query rows."""

    __module__ = "transformers.integrations.flash_attention"

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, module, query, key, value, mask, scaling=None, sliding_window=None, **_):
        assert module.config._attn_implementation == FLASH, "which is asked for there"
        queries, keys, groups = query.shape[2], key.shape[2], query.shape[1] // key.shape[1]
        self.rows.append(queries)
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)  # [Q, K]; distance to the key
        seen = ((back >= 0) & (back < (sliding_window or keys)))[None, None]
        seen = seen if mask is None else seen & mask[:, None, None, -keys:].bool()
        weights = (query @ key.mT * scaling).masked_fill(~seen, -1e30).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize(("family", "batch"), [("llama-gqa", 3), ("mistral-window", 1)])
def test_prompts_flash_and_graph_rows_do_not(family, batch, monkeypatch):
    """Between calls the model's own choice is followed, and a forward of the patched model is what it was."""
    flash, target, inputs = Flash(), tiny(family), prompts(batch, 17)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, FLASH, flash)
    expected = target.generate(**inputs, **GREEDY)
    target.config._attn_implementation = FLASH
    assert torch.equal(target.generate(**inputs, **GREEDY), expected), "the stand-in is no attention"
    assert 1 in flash.rows
    with torch.no_grad():
        before = target(**inputs).logits
    with gsd.patch(target, assistant_model=noised(tiny(family), 0.03), graph_config=SHAPE) as handle:
        with torch.no_grad():
            assert torch.equal(target(**inputs).logits, before)
        for options, longest in (({}, [16, 16]), ({"prefill_chunk_size": 5}, [5, 5, 5, 5, 5, 5, 1, 1])):
            flash.rows.clear()
            handle.clear()
            assert torch.equal(target.generate(**inputs, **GREEDY, **options), expected)
            assert flash.rows == longest and handle.stats.tokens_per_step > 1, "the prompt alone, and all of it"
            assert target.config._attn_implementation == FLASH, "switched for a forward at a time"
        for own in ("sdpa", FLASH):
            target.config._attn_implementation = own
            flash.rows.clear()
            assert torch.equal(target.generate(**inputs, **GREEDY), expected)
            assert bool(flash.rows) == (own != "sdpa") and target.config._attn_implementation == own


@pytest.mark.parametrize("most", [1, 2, 700, FAR])
def test_a_masks_limits_are_found_and_another_mask_is_refused(most):
    assert limits_of(lambda b, h, q, k: (k <= q) & (q - k < most)) == AttentionKind(None if most == FAR else most)
    for sees in (lambda b, h, q, k: k < 0, lambda b, h, q, k: (k <= q + 1) & (q - k < most)):
        with pytest.raises(Unserved, match="neither causal nor causal within"):
            limits_of(sees)
