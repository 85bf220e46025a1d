"""The contract of sources beside their texts (tests/texts): drafts depend on the text alone, whatever the target is."""

from __future__ import annotations

import contextlib
import copy
import functools
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
import tiny_configs
import torch
import transformers
from models import prompts, tiny
from sources import drafters
from sources.drafters import generate, noting
from sources.rows import ROWS, hybrid, llama, random_assistant
from texts.covering import SHAPES
from tiny_configs import build_hybrid, hybrid_inputs

import gsd_kernels as gsd
from gsd_kernels import DraftHeads, Gemma4Assistant
from gsd_kernels.graph import pack_bits
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.model.hidden import LAST
from gsd_kernels_hf.model.recurrent import mixers
from gsd_kernels_hf.model.runner import RowModel
from gsd_kernels_hf.sources.mixer import learned
from gsd_kernels_train.drafters import block_to_train, new_head

READERS = ("eagle3 norms", "p-eagle norms", "dflash window", "mtp deepseek", "assistant")
"""Sources that read the target's states, one of each kind."""


def test_all_of_them_proposed(tmp_path):
    """In one graph of all sources each has weights of its own, which it learned from what the target picked."""
    target, given = llama(), ROWS["every"].options(tmp_path)
    given["draft_sources"] += ("history",)
    for shape in (SHAPES["graph"], SHAPES["lattice"]):
        engines_of(target).clear()
        generate(target, **ROWS["every"].inputs(0), **given, do_sample=False, graph_config=shape)
        (engine,) = engines_of(target)
        of = engine.statistics[False].weights
        assert {name: learned(weights)[0] > 0 for name, weights in of.items() if name != "model"} == {
            name: True for name in ("model 2", "heads", "eagle3", "p-eagle", "dflash", "history")
        }


@pytest.mark.parametrize("name", [*READERS, "history"])
def test_drafts_do_not_depend_on_padding_or_pieces(name, tmp_path):
    """The same prompt alone, behind padding, beside another one and read in pieces: the same drafts, to rounding."""
    row = ROWS[name]
    ids, other = row.inputs(0)["input_ids"][:1], row.inputs(3)["input_ids"][:1]
    ids[:, -2:] = 1  # as the padding, behind which another token stands
    alone, both = [], []  # behind a few, and behind more than there is room for after the text
    for pads in (5, 90):
        padded = torch.nn.functional.pad(ids, (pads, 0), value=1)
        mask = (torch.arange(padded.shape[1]) >= pads).long()[None]
        alone.append({"input_ids": padded, "attention_mask": mask})
        longer = torch.cat([padded, other.repeat(1, 20)[:, : padded.shape[1]]])
        both.append({"input_ids": longer, "attention_mask": torch.cat([mask, torch.ones_like(mask)])})
    seen = []
    options = {"do_sample": False, "graph_config": SHAPES["tree"], **row.options(tmp_path)}
    for changed in ({"input_ids": ids}, *alone, *both, {"input_ids": ids, "prefill_chunk_size": 3}):
        seen.append([])
        generate(row.target(), **options, **changed, observer=noting(seen[-1]))
    count = seen[0][0][0].shape[1]
    for found in seen[1:]:
        assert torch.equal(found[0][0][:1, :count], seen[0][0][0])
        torch.testing.assert_close(found[0][1][:1, :count], seen[0][0][1])


@pytest.mark.parametrize("name", READERS)
def test_a_chats_next_turn_drafts_as_a_new_call_does(name, tmp_path):
    """What was reused of the prompt has its entries and states; plain steps in between are made up for."""
    row, drafts = ROWS[name], []
    target, first, more = row.target(), row.inputs(0)["input_ids"][:1], row.inputs(8)["input_ids"][:1, -6:]
    options = {"max_new_tokens": 24, "eos_token_id": None, "pad_token_id": 0, "do_sample": False}
    with gsd.patch(target, **row.options(tmp_path), graph_config=SHAPES["tree"], observer=noting(drafts)) as handle:
        first = target.generate(first, attention_mask=torch.ones_like(first), **options)
        turn, found = torch.cat([first, more], 1), []
        for reuse in (True, False):
            drafts.clear()
            text = target.generate(turn, attention_mask=torch.ones_like(turn), reuse_prefix=reuse, **options)
            (session,) = handle.engines.sessions
            assert (session.target.reused > 0) == reuse
            found.append((text, list(drafts)))
    assert torch.equal(found[0][0], found[1][0])
    for reused, anew in zip(found[0][1], found[1][1], strict=True):
        assert torch.equal(reused[0], anew[0])
        torch.testing.assert_close(reused[1], anew[1])


@pytest.mark.parametrize("option", ["draft_heads", "drafter"])
def test_files_that_go_bad_leave_what_was_loaded(tmp_path, caplog, option):
    """A draft never decides whether there is a text."""
    target, inputs = tiny(num_hidden_layers=2), {**prompts(1, 9), "max_new_tokens": 6, "do_sample": False}
    want, place = target.generate(**inputs), tmp_path / "heads"
    DraftHeads.for_model(target, 2).save_pretrained(place)
    with gsd.patch(target, **{option: place}) as handle:

        def now() -> DraftHeads:
            (*_, engine) = handle.engines
            return engine.parts[0]()

        assert torch.equal(target.generate(**inputs), want)
        first = now()
        for bad in (partial((place / "draft_heads.safetensors").write_bytes, b"half"), partial(shutil.rmtree, place)):
            bad()
            for _ in range(2):
                assert torch.equal(target.generate(**inputs), want) and now() is first
        said = [record.getMessage() for record in caplog.records if "goes on drafting" in record.getMessage()]
        assert len(said) == 2 and all(message.startswith(f"{option}: what was loaded") for message in said)
        DraftHeads.for_model(target, 3).save_pretrained(place)
        assert torch.equal(target.generate(**inputs), want) and now().num_heads == 3


# Unusual targets: the target's own text, or a refusal by name before a token is written.


of_transformers = pytest.mark.skipif(not mixers.READABLE, reason=f"the classes are of transformers {mixers.FIRST}")

SHAPE = gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=12, merge_context=-1)
PROMPTS = ((1, 1), (1, 7), (2, 6))  # sequences, tokens
CALL = {"max_new_tokens": 6, "do_sample": False}
OWN_HEADS = {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
TARGETS = {
    "llama4": ("Llama4ForCausalLM", {"no_rope_layers": [1, 1, 1, 0]}),
    "gpt-oss": ("GptOssForCausalLM", {}),
    "gemma4": ("Gemma4ForCausalLM", OWN_HEADS | {"global_head_dim": 8}),
    "gemma4 shared": ("Gemma4ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "gemma3n": ("Gemma3nForCausalLM", {}),
    "lfm2": ("Lfm2ForCausalLM", {}),
    "zaya": ("ZayaForCausalLM", {}),
    "diffllama": ("DiffLlamaForCausalLM", {}),
    "olmo": ("OlmoForCausalLM", {}),
}


@functools.cache
def target_of(name: str):
    transformers.logging.set_verbosity_error()
    kind, more = TARGETS[name]
    return tiny_configs.build(kind, 4, **more)


@functools.cache
def texts_of(name: str):
    """Prompts, and transformers' own texts of them."""
    found = []
    for batch, length in PROMPTS:
        ids = torch.randint(3, tiny_configs.VOCAB - 4, (batch, length), generator=torch.Generator().manual_seed(length))
        found.append((ids, target_of(name).generate(ids, **CALL)))
    return found


def assistant(**changes):
    return {"drafter": Gemma4Assistant(random_assistant(**changes))}


ONE_TYPE = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "num_kv_shared_layers": 1}
DRAFTS = {
    "history": lambda target: {"draft_sources": ("history",)},
    "skips attention": lambda target: {"assistant_model": gsd.LayerSkip(target, attention=[1])},
    "skips an mlp": lambda target: {"assistant_model": gsd.LayerSkip(target, mlp=[1])},
    "eagle3": lambda target: {
        "drafter": drafters.random_eagle3(
            drafters.eagle3_config(SimpleNamespace(config=target.config.get_text_config(decoder=True)))
        )
    },
    "mtp": lambda target: {"drafter": new_head(block_to_train(target)).requires_grad_(False).eval().double()},
    "assistant": lambda target: assistant(),
    "assistant of one type": lambda target: assistant(**ONE_TYPE),
    "assistant of other heads": lambda target: assistant(num_key_value_heads=1),
}
ENDED = {  # calls, each of which ended in another error once: how they are refused now; None: served
    ("llama4", "history"): None,
    ("llama4", "eagle3"): "hidden states of Llama4ForCausalLM cannot be read",
    ("gpt-oss", "skips an mlp"): None,
    ("zaya", "skips an mlp"): "attention, mlp: without these blocks ZayaForCausalLM cannot be forwarded",
    ("zaya", "skips attention"): None,
    ("lfm2", "skips an mlp"): "model: the blocks of Lfm2ForCausalLM are not self_attn and mlp",
    ("gpt-oss", "skips attention"): None,
    ("gemma4 shared", "skips attention"): "attention, mlp: without these blocks Gemma4ForCausalLM cannot be forwarded",
    ("gemma4 shared", "eagle3"): None,
    ("gemma4 shared", "mtp"): r"a Gemma4TextDecoderLayer cannot be forwarded as a multi-token-prediction head",
    ("gemma4", "assistant"): None,
    ("gemma4", "assistant of one type"): None,
    ("gemma4", "assistant of other heads"): "reads 1 heads of 8 of sliding_attention layers, and .* store 2 of 8",
    ("gemma3n", "eagle3"): "eagle3 reads hidden states, and hidden state 0 of Gemma3nForCausalLM is .4, 1, 1, 32.",
    ("diffllama", "mtp"): "a DiffLlamaDecoderLayer cannot be forwarded .* attends 2 times",
    ("olmo", "mtp"): "drafter: the norm of OlmoForCausalLM cannot be made by itself",
}


def decode(target: str, options: dict) -> None:
    """Texts with a draft, which options of a call name, are the target's own.

    Raises:
        ValueError: it is refused, for the first of them.
    """
    for number, (ids, text) in enumerate(texts_of(target)):
        try:
            out = gsd.generate(target_of(target), ids, **CALL, **options, graph_config=SHAPE)
        except ValueError as error:
            assert number == 0, f"served, and then not: {error}"
            raise
        assert torch.equal(out, text), (target, options, ids.shape)


@of_transformers
@pytest.mark.parametrize("pair", ENDED, ids=" with ".join)
def test_a_draft_ends_no_call(pair):
    target, draft = pair
    with contextlib.nullcontext() if ENDED[pair] is None else pytest.raises(ValueError, match=ENDED[pair]):
        decode(target, DRAFTS[draft](target_of(target)))


@of_transformers
@pytest.mark.parametrize("target", ["gemma4 shared", "gemma3n", "gpt-oss", "zaya"])
def test_a_search_of_layers_to_skip_leaves_those_that_others_read(target):
    skip = gsd.LayerSkip.search(target_of(target), texts_of(target)[1][0], seconds=None)
    decode(target, {"assistant_model": skip})


# Hybrids.

GREEDY = {"max_new_tokens": 44, "do_sample": False, "eos_token_id": None}


def with_draft(target, draft, **options):
    options = {"graph_config": tiny_configs.TREE, **GREEDY, **options}
    return gsd.generate(target, **hybrid_inputs(3), assistant_model=draft, return_dict_in_generate=True, **options)


FULL = gsd.GraphConfig(depth=3, width=9, branch=3, max_rows=40, merge_context=-1)


@pytest.mark.parametrize(
    ("family", "backend", "new", "shape"),
    [
        ("kimi", "auto", 20, FULL),
        ("zaya", "auto", 20, FULL),
        ("qwen3.5", "auto", 90, tiny_configs.CHAIN),
        ("qwen3.5", "auto", 20, FULL),
    ],
)
def test_a_draft_that_is_the_target_is_always_right(family, backend, new, shape):
    """Behind padding, behind tokens that were drafted and taken, where states move; by window and by depth.

    In a full tree rows of a level follow all rows of the one before, each by its own state.
    """
    target, options = hybrid(family), {"draft_sources": ("model",), "backend": backend, "max_new_tokens": new}
    out = with_draft(target, copy.deepcopy(target), graph_config=shape, **options)
    assert sum(out.stats.accepted[:-1]) <= 3, "more than the ends of three texts"
    assert out.stats.accepted[-1] >= 3 * (new // (shape.depth + 1) - 1)


@pytest.mark.parametrize(
    ("family", "outputs"),
    [
        ("qwen3.5", "out_proj"),
        ("kimi", "o_proj"),
    ],
)
def test_skipped_blocks_that_do_nothing_are_not_missed(family, outputs):
    """Rows of the levels follow the root and each other in the target's states, which stay as they were."""
    target = build_hybrid(family)
    layer = target.model.layers[0]
    mixer = layer.linear_attn if family == "qwen3.5" else layer.self_attn
    with torch.no_grad():
        getattr(mixer, outputs).weight.zero_()
    skip = gsd.LayerSkip(target, attention=[0])
    assert 0 < skip.cost < 1
    out = with_draft(target, skip, graph_config=tiny_configs.CHAIN)
    assert torch.equal(out.sequences, type(target).generate(target, **hybrid_inputs(3), **GREEDY))
    assert sum(out.stats.accepted[: tiny_configs.CHAIN.depth]) == 0, out.stats.accepted


@pytest.mark.parametrize(("family", "block"), [("qwen3.5", 0), ("lfm2", 4), ("nemotron-h", 4)])
@torch.no_grad()
def test_hidden_states_of_rows_are_the_models_own(family, block):
    """Of a prompt in pieces and of two paths of rows, between any two layers."""
    target, ids = hybrid(family), hybrid_inputs(3)["input_ids"][:1]
    layers = (0, 1, 2, target.config.num_hidden_layers, LAST)
    rows = RowModel(target, 32, torch.zeros(1, dtype=torch.int32), "auto", hidden_layers=layers, block=block)
    read: dict[int, list[torch.Tensor]] = {}
    rows.restart(ids[:, :5])
    rows.read(ids[:, :5], None, 2, lambda hidden, _: [read.setdefault(i, []).append(h) for i, h in hidden.items()])
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    depths = torch.tensor([[0, 1, 1, 2]], dtype=torch.int32)
    tokens = torch.tensor([[ids[0, 5], ids[0, 6], 9, ids[0, 7]]])
    rows.rows(tokens, torch.tensor([5], dtype=torch.int32), 0, pack_bits(sees)[None], depths, depths, keep=4)
    for path, places in (([0, 1, 3], ids[:, 5:8]), ([0, 2], tokens[:, [0, 2]])):
        right = target(torch.cat([ids[:, :5], places], 1), output_hidden_states=True).hidden_states
        for layer in layers[:-1]:
            assert torch.allclose(torch.cat(read[layer], 1), right[layer][:, :5], atol=2e-3), layer
            assert torch.allclose(rows.hidden[layer][:, path], right[layer][:, 5:], atol=2e-3), layer
        assert torch.allclose(rows.hidden[LAST][:, path], right[-1][:, 5:], atol=2e-3)
