"""A real chat model that a library quantised: read packed, with the text of the dense weights, whatever drafts."""

from __future__ import annotations

import copy

import pytest
import torch
from quantised import SCHEMES, dense_of

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_cli.demo import smollm2

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(
        unavailable_reason("cpu", torch.device("cpu")) is not None, reason="packed weights are for the operator"
    ),
]
TREE = GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=3)


@pytest.mark.parametrize("name", ["torchao int8", "bitsandbytes nf4"])
def test_its_text_is_that_of_the_dense_weights_with_any_draft(half, name):
    scheme = SCHEMES[name]
    model, inputs = scheme(copy.deepcopy(half.model)), half.chats("Count from one to ten in words.", "Name a colour.")
    call = {**inputs, "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    plain = gsd.generate(model, **call, graph_config="plain")
    assert plain.stats.why_modules is None and plain.stats.tokens_per_step == 1
    ways = {
        "history": {"draft_sources": ("history",), "graph_config": TREE},
        "the model as it was": {"assistant_model": half.model, "graph_config": TREE},
        "auto": {},
    }
    for way, options in ways.items():
        out = gsd.generate(model, **call, **options)
        assert torch.equal(out.sequences, plain.sequences), way
        assert out.stats.why_modules is None and (way == "auto" or out.stats.tokens_per_step > 1), way
    dense = dense_of(model, scheme, copy.deepcopy(half.model))
    assert torch.equal(gsd.generate(dense, **call, graph_config="plain").sequences, plain.sequences)
    assert len(set(plain.sequences[:, inputs["input_ids"].shape[1] :].flatten().tolist())) > 15


def test_the_published_file_has_the_text_of_its_dense_weights_with_any_draft(half):
    """``half`` is the file's model as transformers dequantises it, in bfloat16."""
    packed, inputs = gsd.from_gguf(smollm2.gguf_path()), half.chats("Count from one to ten in words.", "Name a colour.")
    call = {**inputs, "max_new_tokens": 20, "do_sample": False, "return_dict_in_generate": True}
    plain = gsd.generate(half.model, **call, graph_config="plain")
    assert len(set(plain.sequences[:, inputs["input_ids"].shape[1] :].flatten().tolist())) > 15
    ways = {
        "plain": {"graph_config": "plain"},
        "history": {"draft_sources": ("history",), "graph_config": TREE},
        "the dense model": {"assistant_model": half.model, "graph_config": TREE},
    }
    for way, options in ways.items():
        out = gsd.generate(packed, **call, **options)
        assert out.stats.why_modules is None and torch.equal(out.sequences, plain.sequences), way
