"""Windows, chunks, sinks, positions, flash attention: texts are transformers' own, and what cannot be is refused."""

from __future__ import annotations

import functools
import importlib.machinery
import inspect
import sys
import types

import models
import pytest
import tiny_configs
import torch
import transformers
from gates import refused, unchanged, unpadded
from models import noised, prompts, tiny
from packaging.version import Version
from torch import nn
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.model import probe
from gsd_kernels_hf.model.attention import AttentionKind
from gsd_kernels_hf.model.temperature import Temperature

# Prompts through ``flash_attention_2``, graph rows through ``dag_attention``: with a stand-in for flash-attn.
# transformers' own integration runs; only the package that needs a GPU is replaced, by the same functions in PyTorch.


SHAPE = GraphConfig(depth=3, width=3, branch=3, max_rows=20, history_depth=2, history_width=3)
GREEDY = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}


class StandIn:
    """``flash_attn``'s functions, and how often they were called with how many query rows."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def attend(self, q, k, v, scale, causal, window):
        """One sequence, [S, H, D]; the causal mask ends at the last key."""
        queries, keys = q.shape[0], k.shape[0]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
        back = torch.arange(queries)[:, None] + keys - queries - torch.arange(keys)  # [Q, K]; distance to the key
        seen = torch.ones(queries, keys, dtype=torch.bool)
        if causal:
            seen &= back >= 0
        if window[0] >= 0:
            seen &= back <= window[0]
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)

    def flash_attn_func(
        self, q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
        deterministic=False,
    ):  # fmt: skip
        self.rows.append(q.shape[1])
        return torch.stack([self.attend(*x, softmax_scale, causal, window_size) for x in zip(q, k, v, strict=True)])

    def flash_attn_varlen_func(
        self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None,
        causal=False, window_size=(-1, -1), softcap=0.0, deterministic=False,
    ):  # fmt: skip
        self.rows.append(int(max_seqlen_q))
        queries, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
        parts = zip(queries[:-1], queries[1:], keys[:-1], keys[1:], strict=True)
        out = [self.attend(q[a:b], k[c:d], v[c:d], softmax_scale, causal, window_size) for a, b, c, d in parts]
        return torch.cat(out)


@pytest.fixture
def stand_in(monkeypatch):
    if not hasattr(transformers.PreTrainedModel, "_flash_attn_can_dispatch"):
        pytest.skip("this transformers loads flash attention in another way than the stand-in takes")
    flash = StandIn()
    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    package.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    package.flash_attn_func, package.flash_attn_varlen_func = flash.flash_attn_func, flash.flash_attn_varlen_func
    package.flash_attn_with_kvcache = flash.flash_attn_varlen_func
    padding.pad_input, padding.unpad_input = flash_utils._pad_input, flash_utils._unpad_input
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(flash_utils, "is_flash_attn_2_available", lambda *a, **k: True)
    # It would ask for a GPU.
    monkeypatch.setattr(transformers.PreTrainedModel, "_flash_attn_can_dispatch", lambda *a, **k: True)
    available = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    monkeypatch.setitem(available, "general_availability_check", lambda *a, **k: True)
    monkeypatch.setattr(flash_utils, "_loaded_implementation", None)
    return flash


def flashing(family: str = "llama-gqa", **config):
    model = tiny(family, **config)
    model.set_attn_implementation("flash_attention_2")
    assert model.config._attn_implementation == "flash_attention_2"
    return model


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-window"])
@pytest.mark.parametrize("batch", [1, 3])
def test_prompts_flash_and_graph_rows_do_not(stand_in, family, batch):
    reference, inputs = tiny(family).generate(**prompts(batch, 17), **GREEDY), prompts(batch, 17)
    target = flashing(family)
    expected = target.generate(**inputs, **GREEDY)
    assert torch.equal(expected, reference), "the stand-in is no attention"
    assert 1 in stand_in.rows
    stand_in.rows.clear()
    for sources in ({"assistant_model": noised(target, 0.03)}, {"draft_sources": ("history",)}):
        for chunk in (None, 5):
            out = gsd.generate(
                target,
                **inputs,
                **GREEDY,
                **sources,
                graph_config=SHAPE,
                prefill_chunk_size=chunk,
                return_dict_in_generate=True,
            )
            assert torch.equal(out.sequences, expected)
            assert sum(out.stats.accepted[2:]) > 0
            longest = 16 if chunk is None else chunk
            assert stand_in.rows and max(stand_in.rows) == longest, "the prompt went elsewhere"
            assert len(stand_in.rows) <= 2 * 2 * -(-16 // longest), "graph rows went there too"
            stand_in.rows.clear()
        assert target.config._attn_implementation == "flash_attention_2"


def test_patch_and_unpatch(stand_in):
    inputs = prompts(2, 17)
    expected = tiny().generate(**inputs, **GREEDY)
    target, draft = flashing(), noised(tiny(), 0.03)  # the draft keeps sdpa
    with torch.no_grad():
        before = target(**inputs).logits
    handle = gsd.patch(target, assistant_model=draft, graph_config=SHAPE)
    assert target.config._attn_implementation == "flash_attention_2", "switched for a forward at a time"
    stand_in.rows.clear()
    with torch.no_grad():
        assert torch.equal(target(**inputs).logits, before), "a forward of the patched model is what it was"
    assert stand_in.rows == [17, 17]
    stand_in.rows.clear()
    assert torch.equal(target.generate(**inputs, **GREEDY), expected) and handle.stats.tokens_per_step > 1
    assert stand_in.rows == [16, 16]
    gsd.unpatch(target)
    assert target.config._attn_implementation == "flash_attention_2" and draft.config._attn_implementation == "sdpa"
    assert torch.equal(target.generate(**inputs, **GREEDY), expected) and 1 in stand_in.rows


def test_switching_to_flash_attention_and_from_it(stand_in):
    """Between calls the model's own choice is followed."""
    target, inputs = tiny(), prompts(2, 17)
    expected = target.generate(**inputs, **GREEDY)
    for own in ("flash_attention_2", "sdpa", "flash_attention_2"):
        target.set_attn_implementation(own)
        stand_in.rows.clear()
        out = gsd.generate(target, **inputs, **GREEDY, assistant_model=noised(tiny(), 0.03), graph_config=SHAPE)
        assert torch.equal(out, expected) and bool(stand_in.rows) == (own != "sdpa")
        assert target.config._attn_implementation == own


# Llama 4: attention in chunks, and queries that are scaled by their place; texts are transformers' own.


ATTENTION = transformers.models.llama4.modeling_llama4.Llama4TextAttention
BY_LAYER = "get_seq_length" in inspect.getsource(ATTENTION)
of_chunks = pytest.mark.skipif(not BY_LAYER, reason="this transformers scales queries by cache_position")
CHUNK, FLOOR, SCALE = tiny_configs.WINDOW, 8, 1.5
NEW = 30  # behind prompts of 11 tokens: seven chunks, five steps of the factor
GRAPH = gsd.GraphConfig(depth=6, width=4, branch=3, max_rows=28, merge_context=1)  # rows lie in two or three chunks
FIELDS = {"no_rope_layers": [1, 1, 0], "num_hidden_layers": 3, "attn_temperature_tuning": True}
FIELDS |= {"floor_scale": FLOOR, "attn_scale": SCALE}


@functools.lru_cache
def llama4(**fields) -> PreTrainedModel:
    return tiny_configs.build("Llama4ForCausalLM", **{**FIELDS, **fields})


@of_chunks
@pytest.mark.parametrize("no_rope_layers", [[0, 1, 1], [0, 0, 0]])
def test_the_first_layer_scales_as_well(no_rope_layers):
    model = tiny_configs.build("Llama4ForCausalLM", **{**FIELDS, "no_rope_layers": no_rope_layers})
    options = {"assistant_model": models.noised(model, 0.01), "graph_config": GRAPH}
    expected = model.generate(**chunks_prompts(3), max_new_tokens=NEW, do_sample=False)
    out = gsd.generate(model, **chunks_prompts(3), **options, max_new_tokens=NEW, do_sample=False)
    assert torch.equal(out, expected)
    assert probe.examine(model).by_length == {layer for layer in range(3) if not no_rope_layers[layer]}


def chunks_prompts(batch: int) -> dict[str, torch.Tensor]:
    return models.prompts(batch, 11, seed=3, vocab=tiny_configs.VOCAB)


@functools.lru_cache
def plain(batch: int) -> torch.Tensor:
    return llama4().generate(**chunks_prompts(batch), max_new_tokens=NEW, do_sample=False)


@of_chunks
def test_kinds_of_calls():
    chunked, scaled = AttentionKind(chunk=CHUNK), AttentionKind(temperature=Temperature(FLOOR, SCALE))
    assert probe.served(llama4()).kinds == (chunked, chunked, scaled)
    assert probe.examine(llama4()).by_length == {2}
    assert probe.served(llama4(attn_temperature_tuning=False)).kinds == (chunked, chunked, AttentionKind())


@of_chunks
@pytest.mark.parametrize("pieces", [1, 4])
def test_prompts_in_pieces_and_prefixes_that_are_read_once(pieces):
    model = llama4()
    options = {"graph_config": GRAPH, "max_new_tokens": NEW, "do_sample": False, "prefill_chunk_size": pieces}
    given = {"input_ids": plain(1)[:, :21]}
    expected = model.generate(**given, max_new_tokens=NEW, do_sample=False)
    with gsd.patch(model, draft_sources=("history",)) as handle:
        model.generate(**chunks_prompts(1), **{**options, "max_new_tokens": 3})
        assert torch.equal(model.generate(**given, **options), expected)
        assert handle.stats.why is None and handle.stats.tokens_per_step > 1


@of_chunks
@pytest.mark.parametrize("change", [{"attention_chunk_size": 1000}, {"attn_temperature_tuning": False}])
def test_chunks_and_the_factor_matter(change):
    model = tiny_configs.build("Llama4ForCausalLM", **{**FIELDS, **change})
    model.load_state_dict(llama4().state_dict())
    assert not torch.equal(model.generate(**chunks_prompts(1), max_new_tokens=NEW, do_sample=False), plain(1))


class Squared(ATTENTION):
    """Scales as Llama 4 does, and then once more."""

    def forward(self, hidden_states, *args, **options):
        cache = options["cache"]
        begin = cache.get_seq_length(self.layer_idx)
        places = torch.arange(hidden_states.shape[1]) + begin
        factor = 1 + torch.floor((places + 1.0) / self.floor_scale)
        return super().forward(hidden_states * factor[None, :, None].to(hidden_states), *args, **options)


@of_chunks
def test_what_else_goes_by_the_caches_length_is_refused():
    model = tiny_configs.build("Llama4ForCausalLM", **FIELDS)
    model.model.layers[2].self_attn.__class__ = Squared
    refused(model, "cache's length")
    model.model.layers[2].self_attn.__class__ = ATTENTION
    assert probe.examine(model).problem is None
    model.model.layers[2].self_attn.attn_scale = str(SCALE)
    assert probe.examine(model).problem is not None


@of_chunks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_is_rounded_as_transformers_rounds_it(dtype):
    """At every place of two sequences, bit for bit."""
    query = torch.randn(2, 4, 50, 8).to(dtype)
    places = torch.stack([torch.arange(50), 30 + torch.arange(50)])
    scales = torch.log1p(torch.floor((places.float() + 1.0) / FLOOR)) * SCALE + 1.0
    expected = (query.transpose(1, 2) * scales[:, :, None, None]).to(dtype).transpose(1, 2)
    assert torch.equal(Temperature(FLOOR, SCALE).applied(query, places), expected)


# Models with attention sinks: texts are transformers' own, and what ignores the sinks is refused.


SINKS_NEW = 24  # behind prompts of 11 tokens, windows of 5
CLASSES = {  # each with full layers and such with windows
    "GptOssForCausalLM": {},
    "MiMoV2FlashForCausalLM": {"head_dim": 24},  # values are narrower than keys
    "GraniteSWAForCausalLM": {},
    "GraniteMoeSWAForCausalLM": {},
    "FlintForCausalLM": {"layer_types": ["sliding_attention", "full_attention"]},
}


@functools.lru_cache
def model_of(name: str) -> PreTrainedModel:
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    try:
        model = tiny_configs.build(name, **CLASSES[name])
    except tiny_configs.Unbuildable as error:
        pytest.skip(f"this transformers cannot build it: {error}")
    generator = torch.Generator().manual_seed(2)
    for sinks in sinks_of(model):
        sinks.data.copy_(2 + 2 * torch.randn(sinks.shape, generator=generator, dtype=torch.float64))
    return model


def sinks_of(model: PreTrainedModel) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if name.endswith("sinks")]


def sinks_prompts(batch: int) -> dict[str, torch.Tensor]:
    return models.prompts(batch, 11, seed=3, vocab=tiny_configs.VOCAB)


@functools.lru_cache
def sinks_plain(name: str, batch: int) -> torch.Tensor:
    """Transformers' own text. Its eager attention makes NaN of padding in float64, so every sequence is alone."""
    model, given = model_of(name), sinks_prompts(batch)
    texts = []
    for ids, mask in zip(given["input_ids"], given["attention_mask"].bool(), strict=True):
        alone = model.generate(ids[mask][None], max_new_tokens=SINKS_NEW, do_sample=False)
        texts.append(torch.cat([ids, alone[0, -SINKS_NEW:]]))
    return torch.stack(texts)


@pytest.mark.parametrize("name", CLASSES)
def test_sinks_matter_and_are_of_the_layers_that_have_them(name):
    model = model_of(name)
    kinds = probe.served(model).kinds
    with_sinks = [hasattr(layer.self_attn, "sinks") and layer.self_attn.sinks is not None for layer in layers_of(model)]
    assert [kind.sinks is not None for kind in kinds] == with_sinks
    assert any(with_sinks) and tiny_configs.WINDOW in [kind.window for kind in kinds]
    before = [sinks.detach().clone() for sinks in sinks_of(model)]
    try:
        for sinks in sinks_of(model):
            sinks.data.fill_(-1e9)
        text = model.generate(sinks_prompts(1)["input_ids"], max_new_tokens=SINKS_NEW, do_sample=False)
    finally:
        for sinks, value in zip(sinks_of(model), before, strict=True):
            sinks.data.copy_(value)
    assert not torch.equal(text, sinks_plain(name, 1))


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return model.model.layers


def gpt_oss(**fields) -> PreTrainedModel:
    model = tiny_configs.build("GptOssForCausalLM", **fields)
    for sinks in sinks_of(model):
        sinks.data.copy_(torch.tensor([2.0, 0.0, -1.0, 4.0]))
    return model


def exchanged(module, query, key, value, mask, scaling=None, dropout=0.0, s_aux=None, **options):
    """Takes one head's sink for another's."""
    scores = query @ key.repeat_interleave(2, 1).mT * scaling + mask
    columns = s_aux.roll(1).to(scores)[:, None, None].expand(*scores.shape[:-1], 1)
    weights = torch.cat([scores, columns], -1).softmax(-1)[..., :-1]
    return (weights @ value.repeat_interleave(2, 1)).transpose(1, 2).contiguous(), None


@pytest.mark.parametrize(
    ("own", "says"), [("sdpa", "leave sinks out; .*'eager'"), ("exchanged", "exchanged; .*'sdpa'")]
)
def test_an_attention_that_does_otherwise_with_sinks_is_refused(own, says, monkeypatch):
    """SDPA takes s_aux and drops it; transformers keeps models with sinks from it, a config that was set does not."""
    model = gpt_oss()
    assert gsd.generate(model, unpadded(), draft_sources=("history",), max_new_tokens=2).shape[1] > 2
    for functions, like in ((ALL_ATTENTION_FUNCTIONS, exchanged), (ALL_MASK_ATTENTION_FUNCTIONS, None)):
        if own == "exchanged":
            monkeypatch.setitem(functions._global_mapping, own, like or functions["eager"])
    model.config._attn_implementation = own
    with unchanged(model), pytest.raises(ValueError, match=rf"^model: GptOssForCausalLM.*differ.*{says}"):
        gsd.generate(model, unpadded(), draft_sources=("history",), max_new_tokens=2)


def test_sinks_of_another_size_are_refused():
    model = gpt_oss()
    model.model.layers[1].self_attn.sinks = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"GptOssForCausalLM.*s_aux.*4 heads"):
        gsd.generate(model, unpadded(), draft_sources=("history",), max_new_tokens=2)


def test_half_precision_sinks_take_part_in_their_dtype():
    model = gpt_oss().to(torch.bfloat16)
    assert set(probe.served(model).kinds) == {
        AttentionKind(window, sinks=torch.bfloat16) for window in (tiny_configs.WINDOW, None)
    }
    options = {"draft_sources": ("history",), "graph_config": "tree", "max_new_tokens": 12, "do_sample": False}
    assert gsd.generate(model, unpadded(), **options).shape == (1, unpadded().shape[1] + 12)


# Models without rotary embedding: tokens are placed by position_ids, in tables that end somewhere.


END = 32  # positions of the table, behind prompts of 11 tokens
PLACED_NEW = END - 11 + 1  # the last token of a text is not read
PLACED = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=24, merge_context=1)
DECODER = {"is_decoder": True}  # of a class that is an encoder by default
PLACED_CLASSES = {
    **{f"{name}LMHeadModel": {} for name in ("GPT2", "CTRL")},
    **{f"{name}ForCausalLM": {} for name in ("OPT", "GPTBigCode", "GPTJ", "CodeGen", "BioGpt")},
    "BertLMHeadModel": DECODER,
    "RobertaForCausalLM": DECODER,
}


@functools.lru_cache
def placed_model(name: str) -> PreTrainedModel:
    fields = dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), END)
    own = tiny_configs.shrunk(getattr(transformers, name).config_class, 2)
    model = tiny_configs.build(name, **PLACED_CLASSES[name], **{field: END for field in fields if field in own})
    problem = probe.examine(model).problem
    if problem is not None and Version(transformers.__version__) < Version("5.24"):
        pytest.skip(f"older transformers: {name} {problem}")
    return model


def placed_prompts(batch: int, length: int = 11) -> dict[str, torch.Tensor]:
    return models.prompts(batch, length, seed=3, vocab=tiny_configs.VOCAB - 4)


def test_a_text_beyond_the_table_is_refused_where_it_gets_there():
    """Transformers raises an IndexError; a text that ends before by itself is served."""
    model, more = placed_model("GPT2LMHeadModel"), {"do_sample": False, "max_new_tokens": PLACED_NEW + 8}
    with pytest.raises(IndexError):
        model.generate(**placed_prompts(1), **more)
    for options in (
        {"assistant_model": models.noised(model, 0.01), "graph_config": PLACED},
        {"graph_config": "plain"},
    ):
        with pytest.raises(ValueError, match=f"max_new_tokens: GPT2LMHeadModel .* {END} positions"):
            gsd.generate(model, **placed_prompts(1), **options, **more)
    text = model.generate(**placed_prompts(1), max_new_tokens=PLACED_NEW, do_sample=False)
    end = int(text[0, -1])
    expected = model.generate(**placed_prompts(1), **more, eos_token_id=end)
    draft = {"assistant_model": models.noised(model, 0.01), "graph_config": PLACED}
    assert torch.equal(gsd.generate(model, **placed_prompts(1), **draft, **more, eos_token_id=end), expected)


def test_a_prompt_longer_than_the_table_is_refused():
    with pytest.raises(ValueError, match=f"input_ids: OPTForCausalLM .* {END} positions, and {END + 2} tokens"):
        gsd.generate(
            placed_model("OPTForCausalLM"),
            **placed_prompts(2, END + 3),
            draft_sources=("history",),
            max_new_tokens=2,
        )


def test_padding_takes_no_positions():
    """A left-padded batch is wider than the table, its texts are not."""
    model, given = placed_model("GPT2LMHeadModel"), placed_prompts(2, END + 9)
    given["attention_mask"][:, : END - 2] = 0
    options = {"draft_sources": ("history",), "graph_config": "tree", "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**given, max_new_tokens=12, do_sample=False)
    assert torch.equal(gsd.generate(model, **given, **options), expected)


def test_a_draft_with_a_table_is_left_out_where_it_ends():
    draft = placed_model("GPT2LMHeadModel")
    target = models.tiny(vocab_size=tiny_configs.VOCAB, eos_token_id=None)
    options = {
        "assistant_model": draft,
        "draft_sources": ("model",),
        "graph_config": PLACED,
        "max_new_tokens": 40,
    }
    out = gsd.generate(target, **placed_prompts(2), **options, do_sample=False, return_dict_in_generate=True)
    assert torch.equal(out.sequences, target.generate(**placed_prompts(2), max_new_tokens=40, do_sample=False))
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
