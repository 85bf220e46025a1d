"""Hybrid targets: layers with a recurrent state write transformers' own text, with any draft or none."""

from __future__ import annotations

import copy
import functools

import pytest
import tiny_configs
import torch
from hybrids import BY_DEPTH, FAMILIES, build, inputs_of
from models import prompts

import gsd_kernels as gsd
from gsd_kernels.ops.state_rows import BLOCK
from gsd_kernels_hf import validate
from gsd_kernels_hf.model import fused
from gsd_kernels_hf.model.facts import Facts
from gsd_kernels_hf.model.fused import block_of
from gsd_kernels_hf.model.recurrent import mixers
from gsd_kernels_hf.model.recurrent.tree import RowTree
from gsd_kernels_hf.model.runner import RowModel

pytestmark = pytest.mark.skipif(not mixers.READABLE, reason=f"states are read from transformers {mixers.FIRST} on")

NEW = 44
VOCABULARY = 640
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
target_of = functools.lru_cache(build)


@functools.lru_cache
def text_of(family: str, batch: int):
    return target_of(family).generate(**inputs_of(batch), **GREEDY)


def test_turns_go_on_from_the_state_where_the_text_ends():
    target = target_of("falcon-h1")
    first = inputs_of(1)["input_ids"]
    with gsd.patch(
        target, draft_sources=("history",), graph_config=gsd.GraphConfig(depth=0, history_depth=4)
    ) as handle:
        text = target.generate(first, max_new_tokens=45, do_sample=False)
        longer = torch.cat([text, torch.tensor([[7, 9, 11]])], 1)
        other = torch.cat([text[:, :25], torch.tensor([[7, 9, 11]])], 1)
        found = {
            name: target.generate(ids, max_new_tokens=20, do_sample=False)
            for name, ids in {"longer": longer, "same": text, "other": other}.items()
        }
        reused = [session.target.reused for session in handle.engines.idle.sessions]
    assert reused == [0], "the last prompt left the text in the middle"
    for name, ids in {"longer": longer, "same": text, "other": other}.items():
        assert torch.equal(found[name], target.generate(ids, max_new_tokens=20, do_sample=False)), name


def test_layers_that_forget_their_state_are_found_in_any_dtype():
    """In half precision the logits of a few tokens are as close as rounding."""
    for family in FAMILIES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            target = copy.deepcopy(target_of(family)).to(dtype)
            assert fused.reads_whole(Facts(target)) == (family == "jamba"), (family, dtype)
        assert (block_of(target_of(family), "auto") == 0) == (family in BY_DEPTH)


def test_prompts_are_read_whole_where_layers_forget_their_state():
    """Jamba's layers begin anew with every piece of a prompt, and so would the next turn's."""
    target, ids = target_of("jamba"), inputs_of(1)["input_ids"]
    text = text_of("jamba", 1)
    with gsd.patch(target, graph_config="plain"):
        found = target.generate(ids, **GREEDY, prefill_chunk_size=3)
        turn = target.generate(torch.cat([text, ids], 1), **GREEDY)
    assert torch.equal(found, text)
    assert torch.equal(turn, target.generate(torch.cat([text, ids], 1), **GREEDY))


@pytest.mark.parametrize("block", [0, 4])
@torch.no_grad()
def test_a_text_that_goes_on_is_not_read_again(block):
    target, ids, none = target_of("qwen3.5"), inputs_of(1)["input_ids"], torch.zeros(1, dtype=torch.int32)
    rows, whole = (RowModel(target, 64, none, "auto", block=block) for _ in range(2))
    rows.prefill(ids[:, :3], None, None)
    stored = torch.tensor([3], dtype=torch.int32)
    for place in range(3, ids.shape[1]):
        one = torch.zeros(1, 1, dtype=torch.int32)
        rows.rows(ids[:, place : place + 1], stored, 0, one[..., None] + 1, one, one, keep=1)
        rows.cache.commit(one, one[0] + 1, stored)
    rows.holds(ids, stored)
    rows.restart(torch.cat([ids, ids], 1))
    assert rows.reused == ids.shape[1]
    whole.prefill(ids, None, None)
    for found, read in zip(rows.cache.layers[:3], whole.cache.layers[:3], strict=True):
        assert torch.allclose(found.recurrent_states[0], read.recurrent_states[0], atol=1e-4)
        assert torch.allclose(found.conv_states[0][..., 1:], read.conv_states[0][..., 1:], atol=1e-4)
    rows.holds(ids, stored)
    rows.restart(ids[:, :-1])
    assert rows.reused == 0 and rows.cache.layers[0].recurrent_states[0] is None


WIDE = {"num_attention_heads": 8, "head_dim": 16}  # of which PyTorch's own attention is faster from three rows on


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "sizes"), [("qwen3.5", WIDE), ("bamba", {}), ("falcon-h1", {}), ("lfm2", {})])
@torch.no_grad()
def test_bits_of_a_row_are_its_own(family, sizes, dtype):
    """Alone or among others, wherever commits fall: of sizes that are no multiples of vectors, too."""
    target = tiny_configs.build(*FAMILIES[family], **sizes).to(dtype)
    ids = torch.randint(3, tiny_configs.VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))
    alone, generator = RowsOf(target, ids), torch.Generator().manual_seed(1)
    plain = [alone.step(place, [-1], []) for place in range(9, 32)]
    beside, place = RowsOf(target, ids), 9
    while place < 27:
        path, more_rows = torch.randint(1, 6, (2,), generator=generator).tolist()
        parents = list(range(-1, path - 1))
        parents += [int(torch.randint(0, path + j, (), generator=generator)) for j in range(11 * more_rows)]
        found = beside.step(place, parents, list(range(path))[: 1 + place % path])
        for j in range(path):
            assert torch.equal(found[0, j], plain[place - 9 + j][0, 0]), (place, j)
        place += 1 + place % path


@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("Qwen3_5ForCausalLM", range(1, 17)),
        ("Zamba2ForCausalLM", (11, 16)),
        ("LlamaForCausalLM", (1, 2, 3, 5, 8, 11, 16)),
    ],
)
def test_a_text_is_the_same_alone_and_in_batches_of_2_to_16(name, batches):
    """By window, and dense; 192 rows at most, more than other products than a step's are made for."""
    target = tiny_configs.build(name, 4, vocab_size=VOCABULARY)
    ids = prompts(16, 9, vocab=VOCABULARY)["input_ids"]  # as long as each other: no padding
    given: dict = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    alone = torch.cat([target.generate(ids[b : b + 1], **given) for b in range(16)])
    shape = gsd.GraphConfig(depth=3, width=3, branch=3, max_rows=12)
    for batch in batches:
        drafts = {"draft_sources": ("history",), "reference_ids": alone[:batch], "graph_config": shape}
        assert torch.equal(gsd.generate(target, ids[:batch], **given, **drafts), alone[:batch]), batch


class RowsOf:
    """A model behind 9 tokens of ``ids``, which takes rows step by step."""

    def __init__(self, model, ids):
        self.ids, self.stored = ids, torch.tensor([9], dtype=torch.int32)
        self.rows = RowModel(model, 256, torch.zeros(1, dtype=torch.int32), "auto", block=4)
        self.rows.prefill(ids[:, :9], None, None)

    def step(self, place, parents, accepted):
        """Logits of rows, the first of which are the text from ``place`` on; then commit ``accepted``, or the first."""
        sees, depths = torch.eye(len(parents), dtype=torch.bool), [0] * len(parents)
        for row, parent in enumerate(parents):
            if parent >= 0:
                sees[row] |= sees[parent]
                depths[row] = depths[parent] + 1
        tokens = self.ids.repeat(1, 3)[:, place : place + len(parents)]
        depths = torch.tensor([depths], dtype=torch.int32)
        mask = gsd.graph.pack_bits(sees)[None]
        out = self.rows.rows(tokens, self.stored, 0, mask, depths, depths, keep=len(parents))
        path = torch.tensor([accepted or [0]], dtype=torch.int32)
        self.rows.cache.commit(path, torch.tensor([path.shape[1]], dtype=torch.int32), self.stored)
        return out


def test_rows_that_are_not_what_the_model_computes_are_refused(monkeypatch):
    target = build("qwen3.5")
    right = RowTree.of
    monkeypatch.setattr(RowTree, "of", lambda *args, **options: wrong(right(*args, **options)))
    with pytest.raises(validate.Unsupported, match=r"Qwen3_5ForCausalLM.*linear_attn"):
        gsd.generate(target, inputs_of(1)["input_ids"], **GREEDY)


def wrong(tree: RowTree) -> RowTree:
    return RowTree((tree.parents - (tree.parents > 2).long()), tree.depths)


@torch.no_grad()
def test_memory_of_the_states_is_stated():
    target = target_of("qwen3.5")
    rows = RowModel(target, 32, torch.zeros(1, dtype=torch.int32), "auto")
    rows.prefill(inputs_of(1)["input_ids"], None, None)
    config = target.config
    heads = config.linear_num_value_heads
    state = heads * config.linear_key_head_dim * config.linear_value_head_dim * 4
    assert rows.nbytes > 3 * state
    windowed = RowModel(target, 32, torch.zeros(1, dtype=torch.int32), "auto", block=BLOCK)
    windowed.rows(*alone(5), keep=1)
    assert windowed.nbytes > 3 * (2 * state + 3 * BLOCK * config.linear_key_head_dim * 4)
    assert len(mixers.mixers_of(target)) == 3


def alone(token):
    """Arguments of a forward of one row."""
    zero = torch.zeros(1, 1, dtype=torch.int32)
    return zero + token, zero[0], 0, zero[..., None] + 1, zero, zero


def test_paths_longer_than_a_block_are_refused_by_name():
    shape = gsd.GraphConfig(depth=0, history_depth=40, max_rows=64, max_path=40)
    with pytest.raises(ValueError, match=r"graph_config: max_path=40.*Qwen3_5ForCausalLM.*max_path=32"):
        gsd.generate(target_of("qwen3.5"), inputs_of(1)["input_ids"], max_new_tokens=4, graph_config=shape)


def test_a_tree_of_rows():
    sees = torch.eye(6, dtype=torch.bool)
    for row, parent in ((1, 0), (2, 0), (3, 2), (4, 3)):
        sees[row] |= sees[parent]
    tree = RowTree.of(gsd.graph.pack_bits(sees)[None], 6)
    assert tree.parents.tolist() == [[-1, 0, 0, 2, 3, -1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 3, 0]]
    assert [row.tolist() for _, row, _ in tree.levels] == [[0, 5], [1, 2], [3], [4]]
