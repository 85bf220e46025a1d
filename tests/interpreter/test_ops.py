"""Every Triton op against its reference, in triton's interpreter on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
import triton_checks as checks
from graphs import STYLES
from ngrams import MEMORIES, check_memory, check_mix, check_perturbed

import gsd_kernels as gsd


@pytest.mark.parametrize("case", checks.ATTENTION.values(), ids=checks.ATTENTION.keys())
def test_attention_error_is_at_most_twice_plain_pytorch(case):
    checks.check_attention(case, "cpu")


@pytest.mark.parametrize("case", checks.INVARIANCE.values(), ids=checks.INVARIANCE.keys())
def test_an_attention_row_ignores_the_other_rows_bit_for_bit(case):
    checks.check_row_invariance(case, "cpu")


def test_attention_spoils_only_the_rows_that_see_nan():
    tensors, options = checks.Attention(rows=6, nodes=6).build("cpu")
    tensors["ancestor_mask"][:] = torch.tensor([1, 3, 5, 9, 17, 33], dtype=torch.int32)[:, None]
    tensors["num_nodes"][:] = 6
    for b, prefix in enumerate(checks.Attention().prefixes):
        tensors["k"][b, :, prefix : prefix + 6] = 0.5
        tensors["v"][b, :, prefix : prefix + 6] = 0.5
        tensors["v"][b, :, prefix + 2] = float("nan")
    out = gsd.dag_attention(**tensors, **options, backend="triton")
    assert out[:, :, 2].isnan().all() and out[:, :, [0, 1, 3, 4, 5]].isfinite().all()


def test_attention_output_needs_no_copy_before_the_projection():
    tensors, options = checks.Attention().build("cpu")
    assert gsd.dag_attention(**tensors, **options, backend="triton").transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", checks.GRAPHS)
def test_merge_and_flatten_equal_the_reference_bit_for_bit(name):
    config, vocab = checks.GRAPHS[name]
    styles = STYLES if name == "graph" else STYLES[len(name) % 3 :: 3]
    merges = sum(checks.check_graph(config, style, vocab, seed, "cpu") for seed, style in enumerate(styles))
    assert merges > 0 or name not in ("graph", "context-0", "context-3")
    assert merges == 0 or name not in ("tree", "chain")


@pytest.mark.parametrize("merge_context", [-1, 0, 1, 3])
def test_merge_into_arbitrary_graphs(merge_context):
    for seed in range(3):
        checks.check_merge_into_arbitrary_graph(seed, merge_context, "cpu")


def test_merge_of_many_candidates():
    """Several row blocks and column blocks: 130 candidates, 300 nodes."""
    config = gsd.GraphConfig(depth=4, width=26, branch=5, max_rows=128, merge_context=1)
    assert checks.check_graph(config, "random", 6, 0, "cpu", batch=1) > 50


@pytest.mark.parametrize("name", checks.SAMPLING)
def test_samples_equal_the_reference_except_ties(name):
    shape, options = checks.SAMPLING[name]
    flips = checks.check_sampling(shape, "cpu", **options)
    assert flips == 0 or "ties" in name  # elsewhere numpy and torch agree on the order of all scores


def test_ties_go_to_the_lowest_id_within_a_stretch_and_across():
    logits = torch.zeros(1, 1, 9000)
    logits[0, 0, [4601, 100, 4500, 103]] = 1.0
    keys = {"seed": torch.tensor(1), "sequence_ids": torch.zeros(1, dtype=torch.int32), "backend": "triton"}
    positions = torch.zeros(1, 1, dtype=torch.int32)
    assert gsd.sample_rows(logits, positions, **keys).item() == 100
    assert gsd.draft_candidates(logits, positions, branch=5, **keys)[0].tolist() == [[[100, 103, 4500, 4601, 0]]]


def test_a_row_with_nan_gives_minus_one():
    logits = torch.randn(1, 3, 5000)
    logits[0, 1, 4500] = float("nan")
    keys = {"seed": torch.tensor(1), "sequence_ids": torch.zeros(1, dtype=torch.int32)}
    positions = torch.zeros(1, 3, dtype=torch.int32)
    for temperature in (0.0, 1.0):
        tokens = gsd.sample_rows(logits, positions, **keys, temperature=temperature, top_k=5, backend="triton")
        assert tokens[0, 1] == -1 and (tokens[0, [0, 2]] >= 0).all()
        ids, log_probs = gsd.draft_candidates(
            logits, positions, branch=2, **keys, temperature=temperature, backend="triton"
        )
        assert (ids[0, 1] == -1).all() and log_probs[0, 1].isnan().all()


@pytest.mark.parametrize("max_rows", [2, 7, 31, 32, 33, 100])
def test_verify_equals_the_reference(max_rows):
    config = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=max_rows)
    accepted = torch.cat([checks.check_verify(config, style, seed, "cpu") for seed, style in enumerate(STYLES)])
    assert accepted.max() > min(2, max_rows - 1) and accepted.min() == 0


@pytest.mark.parametrize("layout", ["stacked", "separate"])
@pytest.mark.parametrize("dtype,dim", [(torch.float32, 80), (torch.bfloat16, 64), (torch.float16, 256)], ids=str)
def test_commit_equals_the_reference(layout, dtype, dim):
    checks.check_commit(layout, dtype, dim, "cpu")


@pytest.mark.parametrize("case", checks.WRITES.values(), ids=checks.WRITES.keys())
def test_written_rows_equal_the_reference_bit_for_bit(case):
    checks.check_write(*case, "cpu")


@pytest.mark.parametrize("name", MEMORIES)
def test_the_ngram_table_equals_the_reference_bit_for_bit(name):
    check_memory(MEMORIES[name], "triton", "cpu")


@pytest.mark.parametrize("branch", [1, 4, 5, 32])
def test_perturbed_candidates_equal_the_reference(branch):
    for seed in range(3):
        check_perturbed(seed, branch, "triton", "cpu")


@pytest.mark.parametrize(("branch", "others"), [(4, 4), (1, 1), (3, 7), (32, 32)])
def test_mixed_candidates_equal_the_reference(branch, others):
    assert sum(check_mix(seed, branch, others, "triton", "cpu") for seed in range(3)) <= 3


def test_nan_candidates_come_first_and_ties_keep_their_order():
    tokens = torch.tensor([[[5, 6, 7]]], dtype=torch.int32)
    log_probs = torch.tensor([[[-1.0, math.nan, -1.0]]])
    others = torch.tensor([[[8]]], dtype=torch.int32), torch.tensor([[[-1.0]]])
    mixed, _ = gsd.mix_candidates(tokens, log_probs, *others, torch.tensor([[0.5]]), backend="triton")
    assert mixed.tolist() == [[[6, 5, 7]]]
