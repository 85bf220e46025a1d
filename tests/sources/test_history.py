"""The history source: right contexts, exact output, no draft needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from models import noised, prompts, tiny
from ops.contracts.backends import assert_bit_equal
from rotated import rotated

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels.ops.ngram.reference import row_contexts
from gsd_kernels_hf.records import DecodeState, Sampler
from gsd_kernels_hf.sources import mixer
from gsd_kernels_hf.sources.history import History


def test_row_contexts_follow_the_path_and_run_on_into_the_text():
    rows = gsd.Rows(
        token_ids=torch.tensor([[10, 11, 12, 13]], dtype=torch.int32),
        parent_rows=torch.tensor([[-1, 0, 0, 2]], dtype=torch.int32),
        depths=torch.tensor([[0, 1, 1, 2]], dtype=torch.int32),
        ancestor_mask=torch.zeros(1, 4, 1, dtype=torch.int32),
        node_ids=torch.arange(4, dtype=torch.int32)[None],
        scores=torch.zeros(1, 4),
        num_rows=torch.tensor([4], dtype=torch.int32),
    )
    tail = torch.tensor([[9, 8, 7, -1, -1, -1, -1, -1]], dtype=torch.int32)
    assert row_contexts(rows, tail, 4).tolist() == [
        [[10, 9, 8, 7], [11, 10, 9, 8], [12, 10, 9, 8], [13, 12, 10, 9]],
    ]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("with_draft", [False, True])
def test_levels_without_a_node_to_expand_are_left_out(monkeypatch, batch, with_draft):
    """The graph is the one that all levels grow: the same rows are accepted in the same steps."""
    options = {"assistant_model": noised(tiny(), 0.04), "draft_sources": ("model", "history")} if with_draft else {}
    shape = GraphConfig(depth=3 if with_draft else 0, width=3, branch=3, max_rows=24, history_depth=4, min_prob=0.2)
    levels = []
    merge = mixer.merge

    def counted(*args, **kwargs):
        levels.append(kwargs["level"])
        return merge(*args, **kwargs)

    monkeypatch.setattr(mixer, "merge", counted)
    monkeypatch.setattr(History, "propose_rest", lambda *_: None)  # level by level

    def run():
        levels.clear()
        out = gsd.generate(
            tiny(),  # a new one, to which no earlier call taught anything
            **prompts(batch, 24, seed=batch),
            **{"draft_sources": ("history",)} | options,
            max_new_tokens=40,
            eos_token_id=None,
            graph_config=shape,
            return_dict_in_generate=True,
        )
        stats = out.stats
        return out.sequences.tolist(), stats.steps, stats.target_rows, stats.drafted_nodes, stats.accepted, len(levels)

    *trimmed, few = run()
    draft = mixer.Mixer.draft
    monkeypatch.setattr(mixer.Mixer, "draft", lambda self, config, *, trims: draft(self, config))
    *whole, all_levels = run()
    assert trimmed == whole
    assert all_levels == (shape.depth + shape.history_depth) * whole[1]
    assert few < all_levels


@pytest.mark.parametrize(("depth", "batch", "sampled"), rotated((0, 1, 3), (1, 3), (False, True)))
def test_all_levels_at_once_are_the_levels_one_by_one(monkeypatch, depth, batch, sampled):
    """Graphs and what was learned are the same; a step takes fewer merges."""
    options = {"assistant_model": noised(tiny(), 0.04), "draft_sources": ("model", "history")} if depth else {}
    if sampled:
        options |= {"do_sample": True, "seed": 5, "temperature": 0.5, "top_k": 20}
    shape = GraphConfig(depth=depth, width=2, branch=3, max_rows=24, history_depth=5, history_width=4, min_prob=1e-3)
    draft, observe, merge, seen = mixer.Mixer.draft, mixer.Mixer.observe, mixer.merge, []

    def drafted(self, config, *, trims):
        graph = draft(self, config, trims=trims)
        seen.extend(t.clone() for t in graph.tensors())
        return graph

    def observed(self, verified):
        observe(self, verified)
        for weights in self.weights.values():
            seen.extend(t.clone() for t in (*weights.mixture, *(weights.reliability or ())) if t is not None)

    merges = []
    monkeypatch.setattr(mixer.Mixer, "draft", drafted)
    monkeypatch.setattr(mixer.Mixer, "observe", observed)
    monkeypatch.setattr(mixer, "merge", lambda *args, **kwargs: merges.append(1) or merge(*args, **kwargs))

    def run():
        seen.clear(), merges.clear()
        out = gsd.generate(
            tiny(),
            **prompts(batch, 24, seed=batch),
            **{"draft_sources": ("history",)} | options,
            max_new_tokens=40,
            eos_token_id=None,
            graph_config=shape,
            return_dict_in_generate=True,
        )
        return [out.sequences, torch.tensor(out.stats.accepted), *seen], len(merges) / out.stats.steps

    at_once, few = run()
    monkeypatch.setattr(History, "propose_rest", lambda *_: None)
    one_by_one, many = run()
    assert_bit_equal(at_once, one_by_one)
    assert len(at_once) > 100 and few == depth < many


@pytest.mark.parametrize(
    ("sources", "draft", "match"),
    [(("wisdom",), False, "draft_sources"), (("model",), False, "assistant_model"), ((), True, "draft_sources")],
)
def test_sources_that_make_no_sense_are_refused(sources, draft, match):
    target = tiny()
    with pytest.raises(ValueError, match=match):
        gsd.generate(
            target,
            **prompts(1, 5),
            assistant_model=noised(target) if draft else None,
            draft_sources=sources,
            max_new_tokens=4,
        )


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


@pytest.mark.parametrize(
    ("reference", "sources", "error", "match"),
    [
        ("text", ("history",), TypeError, "reference_ids: expected a tensor"),
        (torch.zeros(4), ("history",), TypeError, "reference_ids: expected a tensor of int64"),
        (torch.zeros(3, 4, dtype=torch.int64), ("history",), ValueError, r"reference_ids: expected \[length\]"),
        (torch.tensor([5000]), ("history",), ValueError, "reference_ids: expected ids 0"),
    ],
)
def test_a_reference_that_makes_no_sense_is_refused(reference, sources, error, match):
    with pytest.raises(error, match=match):
        gsd.generate(
            tiny(), **prompts(1, 5), draft_sources=sources, reference_ids=reference, max_new_tokens=4, do_sample=False
        )


@pytest.mark.parametrize("reference", [torch.zeros(0, dtype=torch.int64), torch.zeros(2, 0).int(), torch.tensor([])])
@pytest.mark.parametrize("drafting", ["history", "draft"])
def test_an_empty_reference_is_none(reference, drafting):
    target, inputs = tiny(), prompts(2, 12, seed=3)
    options = {"graph_config": GraphConfig(depth=2, history_depth=0 if drafting == "draft" else 4)}
    options |= {"assistant_model": noised(target)} if drafting == "draft" else {"draft_sources": ("history",)}
    greedy = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    out = gsd.generate(target, **inputs, **greedy, **options, reference_ids=reference)
    assert torch.equal(out, target.generate(**inputs, **greedy))


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
