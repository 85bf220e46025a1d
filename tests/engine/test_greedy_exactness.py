"""Text after merge edges is transformers' own."""

from __future__ import annotations

import pytest
import torch
from models import endless, noised, prompts

import gsd_kernels as gsd

pytestmark = pytest.mark.quick
VOCAB = 32  # small, so that sequences recur and merge edges are accepted


@pytest.mark.parametrize("context", [0, 1, 2, 3])
def test_merge_edges_are_accepted_with_every_context(context):
    target = endless("qwen3", vocab_size=VOCAB)
    shape = gsd.GraphConfig(depth=8, width=12, branch=3, max_rows=128, merge_context=context)
    call = {**prompts(4, 20, seed=3, vocab=VOCAB), "max_new_tokens": 32, "do_sample": False}
    drafts = {"assistant_model": noised(target, 0.01), "graph_config": shape, "return_dict_in_generate": True}
    out = gsd.generate(target, **call, **drafts)
    assert torch.equal(out.sequences, target.generate(**call))
    assert out.stats.merges > out.stats.accepted_merges > 0
