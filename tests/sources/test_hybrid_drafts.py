"""Drafts with recurrent layers: their rows at any level are the model's own, and the text is the target's."""

from __future__ import annotations

import copy
import functools

import pytest
import tiny_configs
import torch
from hybrids import TREE, build, inputs_of
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny, tokenizer

import gsd_kernels as gsd
from gsd_kernels.graph import pack_bits
from gsd_kernels_hf import validate
from gsd_kernels_hf.model.runner import RowModel

FAMILIES = ("qwen3.5", "lfm2", "bamba", "falcon-h1", "kimi", "zaya")
GREEDY = {"max_new_tokens": 44, "do_sample": False, "eos_token_id": None}
model_of = functools.lru_cache(build)


def generate(target, draft, batch: int = 3, **options):
    options = {"draft_sources": ("model",), "graph_config": TREE, **GREEDY, **options}
    return gsd.generate(target, **inputs_of(batch), assistant_model=draft, return_dict_in_generate=True, **options)


@pytest.mark.parametrize(
    ("family", "backend", "new"),
    [
        *((family, "auto", 20) for family in FAMILIES if family != "bamba"),
        ("qwen3.5", "auto", 90),
        ("qwen3.5", "reference", 20),
    ],
)
def test_a_draft_that_is_the_target_is_always_right(family, backend, new):
    """Behind padding, behind tokens that were drafted and taken, where states move; by window and by depth."""
    target, shape = model_of(family), gsd.GraphConfig.preset("chain", depth=7)
    out = generate(target, copy.deepcopy(target), graph_config=shape, backend=backend, max_new_tokens=new)
    assert sum(out.stats.accepted[:-1]) <= 3, "more than the ends of three texts"
    assert out.stats.accepted[-1] >= 3 * (new // 8)


@pytest.mark.parametrize(("family", "block"), [("qwen3.5", 4), ("qwen3.5", 0), ("bamba", 4), ("zaya", 0)])
@settings(max_examples=3, deadline=None)
@given(st.lists(st.lists(st.integers(-1, 11), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 5))
@torch.no_grad()
def test_rows_of_a_level_follow_those_of_earlier_ones(family, block, levels, count):
    """Levels of three rows, each behind any earlier one or the text, which grew by a chain of ``count`` tokens."""
    model, ids = model_of(family), inputs_of(1)["input_ids"]
    rows = RowModel(model, 64, torch.zeros(1, dtype=torch.int32), "auto", block=block)
    width, read = 5, ids.shape[1] - count
    rows.prefill(ids[:, :read], None, None)
    stored = torch.tensor([read], dtype=torch.int32)
    # Right-aligned behind padding, which has the slots above.
    place = torch.arange(width) - (width - count)
    slots = torch.where(place >= 0, place, count + torch.arange(width))[None]
    sees = (place[:, None] >= torch.arange(width)) | (torch.arange(width) == slots.T)
    chain = torch.where(place >= 0, ids[0, (read + place).clamp(min=0)], 0)[None]
    depths, none = place.clamp(min=0)[None].to(torch.int32), torch.arange(width, dtype=torch.int32)[None]
    found = rows.rows(chain, stored, slots, pack_bits(sees)[None], depths, none, keep=1)
    assert close(found[0, -1], model(ids).logits[0, -1])
    accepted = torch.arange(width - count, width, dtype=torch.int32)[None]
    rows.cache.commit_states(accepted, torch.tensor([count], dtype=torch.int32))
    stored += count
    total = 3 * len(levels)
    sees, paths, node_depths = torch.zeros(total, total, dtype=torch.bool), [], torch.zeros(1, total, dtype=torch.int32)
    for number, parents in enumerate(levels):
        first = 3 * number
        for row, parent in enumerate(parents, first):
            parent = min(parent, first - 1)
            if parent >= 0 and len(paths[parent]) > 4:  # deeper than a block is never accepted
                parent = -1
            sees[row] = torch.nn.functional.one_hot(torch.tensor(row), total).bool()
            if parent >= 0:
                sees[row] |= sees[parent]
            paths.append([*(paths[parent] if parent >= 0 else ()), 5 + 7 * row % 50])
        tokens = torch.tensor([[path[-1] for path in paths[first:]]])
        depths = torch.tensor([[len(path) - 1 for path in paths[first:]]], dtype=torch.int32)
        mask = pack_bits(sees[first : first + 3])[None]
        found = rows.rows(tokens, stored, first, mask, depths, node_depths, keep=3)
        for logits, path in zip(found[0], paths[first:], strict=True):
            right = model(torch.cat([ids, torch.tensor([path])], 1)).logits[0, -1]
            assert close(logits, right), (number, path)


def close(found: torch.Tensor, right: torch.Tensor) -> bool:
    return float((found - right).norm()) < 1e-4 * float((right - right.mean()).norm())


def test_what_a_hybrid_draft_cannot_do_is_refused_by_name():
    target, draft = tiny(vocab_size=tiny_configs.VOCAB), model_of("qwen3.5")
    shape = gsd.GraphConfig.preset("chain", depth=40)
    with pytest.raises(validate.Unsupported, match=r"graph_config: max_path=40.*Qwen3_5ForCausalLM.*max_path=32"):
        generate(target, draft, graph_config=shape)
    other = tokenizer(tiny_configs.VOCAB)
    few = tokenizer(20)
    with pytest.raises(validate.Unsupported, match="assistant_model: Qwen3_5ForCausalLM keeps a recurrent state"):
        generate(target, draft, tokenizer=other, assistant_tokenizer=few)
