"""The n-gram table and the history source: right continuations, no collisions, exact output, no draft needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import noised, prompts, tiny

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_hf.history import row_contexts


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(2, 5))
def test_lookup_returns_the_newest_entry_of_the_longest_known_context(seed, entries, vocab):
    gen = torch.Generator().manual_seed(seed)
    table = gsd.NgramTable.empty(2, 2, "cpu", capacity=1 << 14)
    memory: list[dict[tuple[int, ...], list[int]]] = [{}, {}]
    for _ in range(2):
        contexts = torch.randint(-1, vocab, (2, entries, 8), generator=gen, dtype=torch.int32)
        tokens = torch.randint(0, 1000, (2, entries, 2), generator=gen, dtype=torch.int32)
        log_probs = -torch.rand(2, entries, 2, generator=gen)
        valid = torch.rand(2, entries, generator=gen) < 0.8
        gsd.ngram_insert(table, contexts, tokens, log_probs, valid)
        for b in range(2):
            for m in range(entries):
                for length in range(1, 5):
                    context = tuple(contexts[b, m, :length].tolist())
                    if valid[b, m] and min(context) >= 0:
                        memory[b][context] = tokens[b, m].tolist()
    queries = torch.randint(-1, vocab, (2, 30, 8), generator=gen, dtype=torch.int32)
    found, log_probs, matched = gsd.ngram_lookup(table, queries)
    wrong = 0
    for b in range(2):
        for w in range(30):
            known = [n for n in range(1, 5) if tuple(queries[b, w, :n].tolist()) in memory[b]]
            expected = memory[b][tuple(queries[b, w, : known[-1]].tolist())] if known else [-1, -1]
            # Direct-mapped: an entry may have been overwritten by another context of the same slot, never mixed up.
            wrong += int(matched[b, w]) != (known[-1] if known else 0)
            if int(matched[b, w]) == (known[-1] if known else 0):
                assert found[b, w].tolist() == expected
            if not known:
                assert matched[b, w] == 0 and (log_probs[b, w] == float("-inf")).all()
    assert wrong <= 6


def test_a_free_table_knows_nothing_and_capacity_is_checked():
    table = gsd.NgramTable.empty(1, 3, "cpu", capacity=16)
    tokens, log_probs, matched = gsd.ngram_lookup(table, torch.zeros(1, 4, 8, dtype=torch.int32))
    assert (tokens == -1).all() and (log_probs == float("-inf")).all() and (matched == 0).all()
    with pytest.raises(ValueError, match="capacity"):
        gsd.NgramTable.empty(1, 3, "cpu", capacity=100)


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
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("with_draft", [False, True])
def test_history_changes_the_speed_and_never_the_text(batch, sampled, with_draft):
    target = tiny()
    draft = noised(target, 0.04) if with_draft else None
    inputs = prompts(batch, 24, seed=batch)
    options = {"do_sample": sampled, "max_new_tokens": 60, "eos_token_id": None}
    if sampled:
        options |= {"seed": 5, "temperature": 0.5, "top_k": 20}
    plain = gsd.generate(target, **inputs, **options)
    out = gsd.generate(
        target,
        **inputs,
        **options,
        assistant_model=draft,
        draft_sources=("model", "history") if with_draft else ("history",),
        graph_config=GraphConfig(depth=3, width=3, branch=3, max_rows=24, reuse_depth=3),
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, plain)
    assert out.stats.tokens_per_step > 1.0
    assert out.stats.draft_rows == 0 or with_draft


def test_without_a_draft_repetitive_text_takes_fewer_steps():
    target = tiny()
    period = torch.randint(3, 97, (1, 12), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": period.repeat(1, 5)}
    options = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": None, "repetition_penalty": 1.0}
    out = gsd.generate(
        target,
        **inputs,
        **options,
        draft_sources=("history",),
        graph_config=GraphConfig(),
        return_dict_in_generate=True,
    )
    assert torch.equal(out.sequences, target.generate(**inputs, **options))
    assert out.stats.steps < 64 and out.stats.accepted[1] < out.stats.sequence_steps


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
    options |= {"seed": 1, "draft_sources": ("history",), "graph_config": GraphConfig(reuse_depth=4)}
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
        (torch.tensor([5]), None, ValueError, "reference_ids: the history reads them"),
    ],
)
def test_a_reference_that_makes_no_sense_is_refused(reference, sources, error, match):
    with pytest.raises(error, match=match):
        gsd.generate(
            tiny(), **prompts(1, 5), draft_sources=sources, reference_ids=reference, max_new_tokens=4, do_sample=False
        )
