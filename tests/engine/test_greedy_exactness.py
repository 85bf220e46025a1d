"""Text after merge edges is transformers' own."""

from __future__ import annotations

import models
import pytest
from engine.greedy import VOCAB, draft_of, target_of

import gsd_kernels as gsd

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("context", [0, 1, 2, 3])
def test_merge_edges_are_accepted_with_every_context(context):
    """Wide graphs over a batch: text after a merge edge is right, too."""
    target = target_of("qwen3")
    config = gsd.GraphConfig(depth=8, width=12, branch=3, max_rows=128, merge_context=context)
    prompt = models.prompts(4, 20, seed=3, vocab=VOCAB)
    expected = target.generate(**prompt, max_new_tokens=32, do_sample=False)
    actual = gsd.generate(
        target,
        **prompt,
        assistant_model=draft_of("qwen3", 0.01),
        graph_config=config,
        max_new_tokens=32,
        do_sample=False,
        return_dict_in_generate=True,
    )
    assert actual.sequences.tolist() == expected.tolist()
    assert actual.stats.accepted_merges > 0 and actual.stats.merges > actual.stats.accepted_merges
