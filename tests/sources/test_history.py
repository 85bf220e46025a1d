"""The history source: right contexts, exact output, no draft needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.records import DecodeState, Sampler
from gsd_kernels_hf.sources.history import History


@pytest.mark.parametrize("sampled", [False, True])
def test_a_reference_that_the_output_repeats_makes_it_faster(sampled):
    target = tiny()
    inputs = prompts(2, 12, seed=3)
    options = {"do_sample": sampled, "max_new_tokens": 40, "eos_token_id": None, "return_dict_in_generate": True}
    options |= {"seed": 1, "draft_sources": ("history",), "graph_config": GraphConfig(history_depth=4)}
    alone = gsd.generate(target, **inputs, **options)
    told = gsd.generate(target, **inputs, **options, reference_ids=alone.sequences)
    assert torch.equal(told.sequences, alone.sequences)
    assert told.stats.tokens_per_step > 1.5 * alone.stats.tokens_per_step
    one_for_all = gsd.generate(target, **inputs, **options, reference_ids=alone.sequences[0])
    assert torch.equal(one_for_all.sequences, alone.sequences)
    assert one_for_all.stats.tokens_per_step > alone.stats.tokens_per_step


def test_what_is_likely_is_remembered_and_no_noise():
    """Sampled, with cuts: the target's own distribution after a row, not what it drew there."""
    warpers = {"temperature": 0.7, "top_k": 5, "top_p": 0.95, "min_p": 0.0}
    state = DecodeState.empty(1, 20, 4, torch.device("cpu"))
    sampler = Sampler(torch.tensor(3), torch.zeros(1, dtype=torch.int32), warpers)
    history = History()
    history.start(SimpleNamespace(state=state, sampler=sampler, branch=3, continues=False, reference_ids=None))
    config = GraphConfig(depth=1, width=1, branch=3, max_rows=4)
    graph = gsd.TokenGraph.empty(1, config, "cpu")
    graph.reset(torch.tensor([7], dtype=torch.int32), torch.tensor([[4, 5, -1, -1, -1, -1, -1, -1]], dtype=torch.int32))
    rows = gsd.flatten(graph, 4, 2)
    logits = torch.randn(1, 4, 30, generator=torch.Generator().manual_seed(0))
    history.observe(SimpleNamespace(graph=graph, rows=rows, tail=graph.contexts[:, 0], logits=logits))
    tokens, log_probs, matched = gsd.ngram_lookup(history.table, torch.tensor([[[7, 4, 5, -1]]], dtype=torch.int32))
    expected = sampler.log_probs(logits[:, :1]).topk(3)
    assert matched.item() == 3 and torch.equal(tokens, expected.indices.int())
    torch.testing.assert_close(log_probs, expected.values)
