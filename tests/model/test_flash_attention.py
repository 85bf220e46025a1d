"""Prompts through ``flash_attention_2``, graph rows through ``dag_attention``: with a stand-in for flash-attn.

transformers' own integration runs; only the package that needs a GPU is replaced, by the same functions in PyTorch.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

import pytest
import torch
import transformers
from models import noised, prompts, tiny
from transformers import modeling_flash_attention_utils as flash_utils

import gsd_kernels as gsd
from gsd_kernels import GraphConfig

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
