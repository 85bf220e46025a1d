"""The compiled CPU ops: equal to the reference, valid custom ops, clear errors."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from graphs import STYLES, drafted, tails
from hypothesis import given, settings
from hypothesis import strategies as st
from ngrams import Memory, remembered, two_sources
from test_graph import configs

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.compiled import SCHEMAS
from gsd_kernels.ops.dag_attention import visibility
from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights, decoder_rows
from gsd_kernels.ops.sampling.reference import warp

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MISSING = unavailable_reason("cpu", CPU)

pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"compiled CPU ops: {MISSING}")

EQUAL_SCORE = 1e-4  # scores this close may be picked either way: logarithms differ in the last bits


def assert_bit_equal(got, expected):
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def frontier_tensors(f):
    return f.node_ids, f.token_ids, f.depths, f.ancestor_mask


@settings(max_examples=100, deadline=None)
@given(configs(), st.sampled_from(STYLES), st.integers(2, 12), st.integers(0, 10**6))
def test_merge_flatten_verify_are_bit_equal(config, style, vocab, seed):
    frontiers: dict[str, list] = {"reference": [], "cpu": []}
    graphs = {
        backend: drafted(
            config,
            vocab=vocab,
            style=style,
            seed=seed,
            backend=backend,
            on_level=lambda _g, _l, _f, _t, _lp, nxt, seen=seen: seen.append(nxt),
        )
        for backend, seen in frontiers.items()
    }
    assert_bit_equal(graphs["cpu"].tensors(), graphs["reference"].tensors())
    for ours, theirs in zip(frontiers["cpu"], frontiers["reference"], strict=True):
        assert_bit_equal(frontier_tensors(ours), frontier_tensors(theirs))

    graph = graphs["reference"]
    rows = gsd.flatten(graph, config.max_rows, config.max_path, backend="reference")
    ours = gsd.flatten(graph, config.max_rows, config.max_path, backend="cpu")
    assert_bit_equal(ours.tensors(), rows.tensors())

    sampled, arguments = agreeing_target(rows, vocab, seed)
    for done in (torch.tensor([False, False]), torch.tensor([True, False])):
        expected, got = (
            gsd.verify(rows, sampled, **arguments, done=done, max_path=config.max_path, backend=backend)
            for backend in ("reference", "cpu")
        )
        assert_bit_equal(got.tensors(), expected.tensors())


def agreeing_target(rows, vocab, seed):
    """Target picks that often equal the drafted tokens, and verify's other arguments."""
    gen = torch.Generator().manual_seed(seed)
    batch, num_rows = rows.token_ids.shape
    sampled = torch.randint(0, vocab, (batch, num_rows), generator=gen, dtype=torch.int32)
    for b in range(batch):
        for row in range(1, int(rows.num_rows[b])):
            if torch.rand((), generator=gen) < 0.7:
                sampled[b, rows.parent_rows[b, row]] = rows.token_ids[b, row]
    return sampled, {
        "eos_ids": torch.arange(seed % 3, dtype=torch.int32),
        "remaining": torch.randint(1, 9, (batch,), generator=gen, dtype=torch.int32),
    }


def test_large_batches_run_on_several_threads():
    config = gsd.GraphConfig(depth=5, width=8, branch=4, max_rows=64)
    graphs = [drafted(config, batch=67, vocab=9, style="ties", backend=backend) for backend in ("reference", "cpu")]
    assert_bit_equal(graphs[1].tensors(), graphs[0].tensors())
    rows = [gsd.flatten(graphs[0], 64, 10, backend=backend) for backend in ("reference", "cpu")]
    assert_bit_equal(rows[1].tensors(), rows[0].tensors())


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_candidate_joins_the_best_node_and_at_ties_the_oldest(backend):
    """Hand-drawn: three nodes hold the candidate's token after the same context; two of them share the best score."""
    config = gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=8, merge_context=1)
    graph = gsd.TokenGraph.empty(1, config, "cpu")
    graph.reset(torch.tensor([9], dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
    graph.token_ids[0, 1:4] = 5
    graph.contexts[0, 1:4, 0] = 9
    graph.scores[0, 1:4] = torch.tensor([-2.0, -1.0, -1.0])
    graph.parents[0, 1:4] = 0
    graph.num_nodes[0] = 4
    candidates = torch.tensor([[[5, 6]]], dtype=torch.int32), torch.tensor([[[-0.5, -0.7]]])
    step = {"level": 0, "width": 2, "merge_context": 1, "backend": backend}
    nxt = gsd.merge(graph, graph.root_frontier(), *candidates, **step)
    assert graph.edge_targets[0, 0].tolist() == [2, 4] and graph.num_merges.item() == 1
    assert nxt.node_ids[0].tolist() == [4, 2]


def test_the_largest_graph():
    config = gsd.GraphConfig(depth=2, width=30, branch=32, max_rows=128, merge_context=0)
    graphs = [drafted(config, vocab=64, style="ties", backend=backend) for backend in ("reference", "cpu")]
    assert_bit_equal(graphs[1].tensors(), graphs[0].tensors())
    rows = [gsd.flatten(graphs[0], 128, 127, backend=backend) for backend in ("reference", "cpu")]
    assert_bit_equal(rows[1].tensors(), rows[0].tensors())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("seed", range(4))
def test_commit_kv_is_bit_equal(dtype, seed):
    gen = torch.Generator().manual_seed(seed)
    layers, batch, heads, slots, width = 3, 5, 2, 97, 6
    # Odd sizes, and layers stored slot-first: [B, S, Hkv, D] seen as [B, Hkv, S, D].
    k = [torch.randn(batch, heads, slots, 7, generator=gen).to(dtype) for _ in range(layers)]
    v = [torch.randn(batch, slots, heads, 9, generator=gen).to(dtype).transpose(1, 2) for _ in range(layers)]
    kv_len = torch.randint(0, 30, (batch,), generator=gen, dtype=torch.int32)
    num_accepted = torch.randint(0, width + 1, (batch,), generator=gen, dtype=torch.int32)
    rows = torch.rand(batch, 60, generator=gen).argsort(-1)[:, :width].int()  # any order, not only ascending
    rows[0] = torch.arange(width)
    rows = torch.where(torch.arange(width) < num_accepted[:, None], rows, -1).int()

    results = []
    for backend in ("reference", "cpu"):
        ours = [x.clone() for x in k], [x.clone() for x in v], kv_len.clone()
        gsd.commit_kv(ours[0], ours[1], rows, num_accepted, ours[2], backend=backend)
        results.append([*ours[0], *ours[1], ours[2]])
    assert_bit_equal(results[1], results[0])


WARPERS = [
    {},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.0},
    {
        "temperature": torch.tensor([0.0, 1.0]),
        "top_k": torch.tensor([3, 0]),
        "top_p": torch.tensor([1.0, 0.7]),
        "min_p": torch.tensor([0.0, 0.05]),
    },
]


def sampling_inputs(vocab, dtype, seed, spread=3.0):
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(2, 5, vocab, generator=gen) * spread).to(dtype)
    positions = torch.randint(0, 10**6, (2, 5), generator=gen, dtype=torch.int32)
    noise = {
        "seed": torch.randint(-(2**62), 2**62, (), generator=gen),
        "sequence_ids": torch.tensor([3, 11], dtype=torch.int32),
    }
    return logits, positions, noise


def final_scores(logits, positions, noise, warpers):
    """What the picks maximise, from the reference: warped logits + g, or the logits."""
    from gsd_kernels.ops.sampling.philox import gumbel_noise

    temperature = torch.as_tensor(warpers.get("temperature", 0.0)).expand(2)[:, None, None]
    g = gumbel_noise(noise["seed"], positions, noise["sequence_ids"][:, None], logits.shape[-1])
    parameters = [warpers.get(n, d) for n, d in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
    return torch.where(temperature > 0, warp(logits.float(), *parameters) + g, logits.float())


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [
        *((vocab, dtype) for vocab in (1, 63, 111, 1000) for dtype in FLOATS),
        (32003, torch.float32),
    ],
)
def test_sampled_and_drafted_tokens_are_equal(warpers, vocab, dtype):
    ties = 0
    for seed in range(1 if vocab > 2000 else 6):
        logits, positions, noise = sampling_inputs(vocab, dtype, seed, spread=(3.0, 0.5, 10.0)[seed % 3])
        scores = final_scores(logits, positions, noise, warpers)
        expected, got = (
            gsd.sample_rows(logits, positions, **noise, **warpers, backend=b).long() for b in ("reference", "cpu")
        )
        assert got.dtype == expected.dtype
        gap = (scores.gather(-1, expected[..., None]) - scores.gather(-1, got[..., None])).squeeze(-1)
        assert (gap[got != expected].abs() <= EQUAL_SCORE).all(), (gap, seed)
        ties += int((got != expected).sum())

        branch = 4
        (tokens, log_probs), (our_tokens, our_log_probs) = (
            gsd.draft_candidates(logits, positions, branch=branch, **noise, **warpers, backend=b)
            for b in ("reference", "cpu")
        )
        assert our_tokens.dtype == torch.int32 and our_log_probs.dtype == torch.float32
        finite = log_probs.isfinite()
        assert torch.equal(our_log_probs.isfinite(), finite)
        torch.testing.assert_close(our_log_probs[finite], log_probs[finite], atol=1e-5, rtol=1e-5)
        assert (our_log_probs[~finite] == float("-inf")).all()
        if vocab < branch:
            assert (our_tokens[..., vocab:] == -1).all()
        pairs = [scores.gather(-1, t.long().clamp(min=0)) for t in (tokens, our_tokens)]
        other = (tokens != our_tokens) & finite
        assert ((pairs[0] - pairs[1])[other].abs() <= EQUAL_SCORE).all()
        ids = our_tokens[0, 0][our_tokens[0, 0] >= 0].tolist()
        assert len(ids) == len(set(ids)), "a candidate twice"
    if dtype == torch.float32:
        assert ties == 0, f"{ties} picks differ at near-ties: more than chance"


def test_nan_rows_pick_nothing_and_minus_infinity_is_never_drawn():
    logits, positions, noise = sampling_inputs(1000, torch.float32, 0)
    logits[0, 1, 999] = float("nan")
    logits[1, 2, 1:] = float("-inf")
    for temperature in (0.0, 1.0):
        picked = gsd.sample_rows(logits, positions, **noise, temperature=temperature, backend="cpu")
        assert picked[0, 1] == -1 and picked[1, 2] == 0
        assert torch.equal(
            picked, gsd.sample_rows(logits, positions, **noise, temperature=temperature, backend="reference")
        )
    _, log_probs = gsd.draft_candidates(logits, positions, branch=3, **noise, temperature=1.0, backend="cpu")
    assert log_probs[0, 1].isnan().all()
    assert log_probs[1, 2].tolist() == [0.0, float("-inf"), float("-inf")]


def test_ties_go_to_the_lowest_id():
    logits = torch.zeros(1, 1, 300)
    logits[0, 0, [7, 64, 200]] = 5.0
    noise = {"seed": torch.tensor(0), "sequence_ids": torch.zeros(1, dtype=torch.int32)}
    positions = torch.zeros(1, 1, dtype=torch.int32)
    assert gsd.sample_rows(logits, positions, **noise, backend="cpu").item() == 7
    tokens, _ = gsd.draft_candidates(logits, positions, branch=4, **noise, backend="cpu")
    assert tokens.flatten().tolist() == [7, 64, 200, 0]


# Attention, cache writes and a small decoder.


@st.composite
def attentions(draw):
    """Arguments of dag_attention in float32, unseen positions NaN, and a dtype to round q, k and v to."""
    gen = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    dim, value_dim, rows = draw(st.sampled_from((16, 48, 64))), draw(st.sampled_from((16, 80))), draw(st.integers(1, 9))
    words = draw(st.integers(1, 2))
    prefix = draw(st.sampled_from((0, 1, 7, 300, 511, 513, 1100)))
    kv_len = torch.tensor([prefix, max(0, prefix - 3)], dtype=torch.int32)[:batch]
    capacity = prefix + 32 * words + 5
    mask = torch.randint(-(2**31), 2**31, (batch, rows, words), generator=gen).int()
    mask[:, 0] = 0  # a row that sees the prefix only, or nothing
    node_depths = torch.randint(0, 6, (batch, 32 * words), generator=gen).int()
    args = {
        "kv_len": kv_len,
        "kv_start": (kv_len // 3).int() if draw(st.booleans()) else None,
        "num_nodes": torch.randint(0, 32 * words, (batch,), generator=gen).int() if draw(st.booleans()) else None,
        "row_depths": torch.randint(0, 6, (batch, rows), generator=gen).int(),
        "node_depths": node_depths,
        "sliding_window": draw(st.sampled_from((None, None, 2, 5, 400))),
    }
    visible = visibility(mask, **args, capacity=capacity)
    q = torch.randn(batch, rows, kv_heads * group, dim, generator=gen).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, capacity, d, generator=gen) for d in (dim, value_dim))
    unseen = ~visible.any(1)[:, None, :, None]
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    k, v = (torch.where(unseen, float("nan"), x).to(dtype) for x in (k, v))
    return {
        "q": q.to(dtype),
        "k": k,
        "v": v,
        "ancestor_mask": mask,
        **args,
        "softcap": draw(st.sampled_from((None, 5.0))),
    }


@settings(max_examples=80, deadline=None)
@given(attentions())
def test_attention_equals_the_reference(case):
    exact = {name: x.double() if name in "qkv" else x for name, x in case.items()}
    expected, expected_lse = gsd.dag_attention(**exact, return_lse=True, backend="reference")
    order = "q k v ancestor_mask kv_len kv_start num_nodes row_depths node_depths".split()
    got, lse = torch.ops.gsd_kernels.dag_attention(
        *(case[name] for name in order), case["q"].shape[3] ** -0.5, case["softcap"], case["sliding_window"]
    )
    empty = expected_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty) and (got[empty] == 0).all()
    torch.testing.assert_close(lse[~empty], expected_lse[~empty], atol=1e-4, rtol=1e-4)
    unit = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=unit, rtol=unit)
    by_name = gsd.dag_attention(**case, backend="cpu")
    torch.testing.assert_close(by_name.double(), expected, atol=4 * unit, rtol=4 * unit)


def test_an_attention_row_is_bitwise_independent_of_the_others():
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 7, 64, generator=gen)
    k, v = torch.randn(2, 1, 2, 1300, 64, generator=gen)
    mask = torch.randint(0, 2**7, (1, 7, 1), generator=gen).int()
    kv_len = torch.tensor([1200], dtype=torch.int32)

    def attend(q, mask):
        rest = (None, None, None, None, 0.125, None, None)
        return torch.ops.gsd_kernels.dag_attention(q, k, v, mask, kv_len, *rest)[0]

    together = attend(q, mask)
    for row in range(7):
        assert torch.equal(attend(q[:, :, row : row + 1], mask[:, row : row + 1])[:, :, 0], together[:, :, row])


def test_nan_reaches_exactly_the_rows_that_see_it():
    q, (k, v) = torch.randn(1, 2, 3, 16), torch.randn(2, 1, 2, 40, 16)
    v[0, 0, 31] = float("nan")  # node 1, for head 0
    mask = torch.tensor([[[1], [2], [3]]], dtype=torch.int32)
    rest = (None, None, None, None, 0.25, None, None)
    out, _ = torch.ops.gsd_kernels.dag_attention(q, k, v, mask, torch.tensor([30], dtype=torch.int32), *rest)
    assert out.isnan().all(-1).tolist() == [[[False, True, True], [False, False, False]]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_write_kv_is_bit_equal(dtype):
    gen = torch.Generator().manual_seed(0)
    k, v = (torch.randn(2, 5, 3, d, generator=gen).to(dtype).transpose(1, 2) for d in (16, 8))
    k[0, 0, 0, :4] = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0], dtype=dtype)
    positions = torch.stack([torch.randperm(20, generator=gen)[:5] for _ in range(2)])
    caches = [[torch.zeros(2, 3, 20, 16, dtype=dtype), torch.zeros(2, 3, 20, 8, dtype=dtype)] for _ in range(2)]
    for (k_cache, v_cache), backend in zip(caches, ("cpu", "reference"), strict=True):
        gsd.write_kv(k_cache, v_cache, k, v, positions, backend=backend)
    assert_bit_equal(*caches)
    assert caches[0][0].isfinite().all()
    with pytest.raises(RuntimeError, match="positions: 20 is outside"):
        gsd.write_kv(*caches[0], k, v, positions + (20 - positions.max()), backend="cpu")


def decoder_case(dtype=torch.float32, batch=2, rows=5):
    """A random decoder with caches of 40 positions, 20 and 17 of them filled, and rows that form a small tree."""
    gen = torch.Generator().manual_seed(0)
    vocab, hidden, inner, heads, kv_heads, dim = 50, 32, 48, 4, 2, 16

    def matrix(*shape):
        return (torch.randn(shape, generator=gen) * shape[-1] ** -0.5).to(dtype)

    def layer():
        norms = [(1 + 0.1 * torch.randn(hidden, generator=gen)).to(dtype) for _ in range(2)]
        attention = [matrix(n * dim, hidden) for n in (heads, kv_heads, kv_heads)] + [matrix(hidden, heads * dim)]
        return LayerWeights(
            norms[0], *attention, norms[1], matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)
        )

    weights = DecoderWeights(
        embedding=matrix(vocab, hidden),
        layers=[layer(), layer()],
        final_norm=torch.ones(hidden, dtype=dtype),
        head=matrix(vocab + 3, hidden),
        inv_freq=10000.0 ** -(torch.arange(dim // 2) / (dim // 2)),
        rope_scale=1.0,
        heads=heads,
        eps=1e-5,
    )
    k_caches, v_caches = ([matrix(batch, kv_heads, 40, dim) for _ in range(2)] for _ in range(2))
    kv_len = torch.tensor([20, 17], dtype=torch.int32)[:batch]
    depths = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)[:rows].expand(batch, -1)
    mask = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101], dtype=torch.int32)[:rows].expand(batch, -1)[..., None]
    return weights, {
        "token_ids": torch.randint(0, vocab, (batch, rows), generator=gen).int(),
        "positions": kv_len[:, None] + depths,
        "slots": kv_len[:, None] + torch.arange(rows, dtype=torch.int32),
        "ancestor_mask": mask.contiguous(),
        "node_depths": depths.contiguous(),
        "kv_len": kv_len,
        "kv_start": torch.tensor([0, 3], dtype=torch.int32)[:batch],
        "k_caches": k_caches,
        "v_caches": v_caches,
    }


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_decoder_rows_equal_the_reference(dtype, atol, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for backend in ("cpu", "reference"):
            weights, case = decoder_case(dtype)
            results.append(
                (decoder_rows(weights, **case, keep=3, backend=backend)[0], case["k_caches"] + case["v_caches"])
            )
    finally:
        torch.set_num_threads(before)
    (logits, caches), (expected, expected_caches) = results
    assert logits.shape == (2, 3, 53) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=atol, rtol=atol)
    for cache, other in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache, other, atol=atol, rtol=atol)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("token_ids", 50, "token_ids: 50 is outside the vocabulary of 50"),
        ("slots", 40, "slots: 40 is outside the cache's 40"),
        ("kv_len", 41, "kv_len: the prefix"),
    ],
)
def test_decoder_rows_outside_a_tensor_are_refused(name, value, match):
    weights, case = decoder_case()
    case[name] = case[name].clone()
    case[name][-1] = value
    with pytest.raises(RuntimeError, match=match):
        decoder_rows(weights, **case, keep=1, backend="cpu")


# Valid custom ops.


def op_inputs():
    config = gsd.GraphConfig(depth=2, width=3, branch=2, max_rows=8, merge_context=0)
    graph = drafted(config, vocab=4)
    rows = gsd.flatten(graph, 8, 4, backend="reference")
    fresh = gsd.TokenGraph.empty(2, config, "cpu")
    fresh.reset(torch.tensor([1, 2], dtype=torch.int32), tails(2, 4, torch.Generator().manual_seed(0)))
    candidates = torch.tensor([[[0, 3]], [[1, 2]]], dtype=torch.int32), torch.full((2, 1, 2), -0.7)
    logits, positions, noise = sampling_inputs(50, torch.float32, 0)
    stream = (noise["seed"], noise["sequence_ids"])
    cache = [torch.randn(2, 1, 16, 4) for _ in range(4)]
    accepted = torch.tensor([[0, 2, 5], [0, -1, -1]], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    return {
        "merge": (*fresh.tensors(), fresh.root_frontier(), *candidates, 0, 3, 0, -1.0, float("-inf")),
        "flatten": (graph.token_ids, graph.edge_targets, graph.edge_log_probs, 8, 4),
        "verify": (
            *(rows.token_ids, rows.parent_rows, rows.depths, rows.ancestor_mask, rows.num_rows),
            torch.zeros(2, 8, dtype=torch.int32),
            torch.tensor([1], dtype=torch.int32),
            torch.tensor([4, 4], dtype=torch.int32),
            torch.tensor([False, True]),
            4,
        ),
        "commit_kv": (cache[:2], cache[2:], *accepted, torch.tensor([2, 3], dtype=torch.int32)),
        "sample_rows": (logits, positions, *stream, 1.0, 0, 0.9, 0.0, None, torch.tensor([3.0, 0.0]), None, None),
        "draft_candidates": (logits, positions, 3, *stream, 0.0, 0, 1.0, 0.0),
        "dag_attention": attention_inputs(),
        "write_kv": (*cache[:2], *torch.randn(2, 2, 1, 3, 4), torch.tensor([[0, 5, 2], [1, 2, 3]])),
        "decoder_rows": decoder_inputs(),
        "row_linear": (torch.randn(3, 32), torch.randn(5, 32)),
        "ngram_insert": (*ngram_tensors(), *Memory().calls()[0], 3, 4),
        "ngram_lookup": (*ngram_tensors(), Memory().queries(), 3, 4),
        "perturb_candidates": (*remembered(0, 4), *stream),
        "mix_candidates": two_sources(0, 4, 3),
    }


def attention_inputs():
    q, (k, v) = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 2, 40, 16)
    lengths = (torch.tensor([20, 7], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32))
    mask = torch.tensor([[[1], [3], [5]]], dtype=torch.int32).expand(2, -1, -1).contiguous()
    return q, k, v, mask, *lengths, None, None, None, 0.25, None, None


def decoder_inputs():
    w, case = decoder_case()
    *rows, k_caches, v_caches = case.values()
    rest = (w.windows, w.heads, w.eps, w.rope_scale, 3)
    return *rows, w.embedding, w.flat_layers, w.final_norm, w.head, w.inv_freq, k_caches, v_caches, *rest


def ngram_tensors():
    table = Memory().empty()
    return table.keys, table.tokens, table.log_probs


def test_every_schema_has_inputs_below():
    assert sorted(op_inputs()) == sorted(schema.partition("(")[0] for schema in SCHEMAS)


@pytest.mark.parametrize("name", sorted(op_inputs()))
def test_opcheck(name):
    op = getattr(torch.ops.gsd_kernels, name).default
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gsd_kernels::{name}", "CPU")
    results = torch.library.opcheck(op, op_inputs()[name])
    assert set(results.values()) == {"SUCCESS"}, results


def test_a_step_compiles_to_one_graph():
    config = gsd.GraphConfig(depth=1, width=3, branch=2, max_rows=4)

    def step(tokens, log_probs):
        graph = gsd.TokenGraph.empty(1, config, "cpu")
        graph.reset(torch.ones(1, dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
        gsd.merge(graph, graph.root_frontier(), tokens, log_probs, level=0, width=3, merge_context=1, backend="cpu")
        return gsd.flatten(graph, 4, 2, backend="cpu").token_ids

    inputs = torch.tensor([[[5, 6]]], dtype=torch.int32), torch.tensor([[[-0.1, -2.0]]])
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), step(*inputs))
    assert step(*inputs).tolist() == [[1, 5, 6, 0]]


# Errors: nothing is read or written outside a tensor.


def test_a_graph_too_small_for_the_level_is_refused():
    config = gsd.GraphConfig(depth=1, width=2, branch=2, max_rows=4)
    graph = gsd.TokenGraph.empty(1, config, "cpu")
    graph.reset(torch.ones(1, dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
    level = {"width": 2, "merge_context": -1, "backend": "cpu"}
    candidates = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[-0.1, -0.2]]])
    frontier = gsd.merge(graph, graph.root_frontier(), *candidates, level=0, **level).node_ids
    more = (c.expand(1, 2, 2).contiguous() for c in candidates)
    with pytest.raises(RuntimeError, match="needs 7 nodes, the graph holds 3"):
        gsd.merge(graph, frontier, *more, level=1, **level)


def test_commit_outside_the_cache_is_refused():
    cache = [torch.zeros(1, 1, 8, 4)]
    rows, count = torch.tensor([[0, 6]], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)
    with pytest.raises(RuntimeError, match="position 9 is outside"):
        gsd.commit_kv(cache, cache, rows, count, torch.tensor([3], dtype=torch.int32), backend="cpu")


@pytest.mark.parametrize(
    ("name", "at", "value", "match"),
    [
        ("merge", 3, torch.zeros(2, 5, dtype=torch.float64), "scores: wrong dtype"),
        ("merge", 12, torch.zeros(2, 2, 2, dtype=torch.int32), "frontier: expected size"),
        ("merge", 16, 9, "merge_context"),
        ("flatten", 3, 129, "max_rows"),
        ("flatten", 4, 8, "max_path"),
        ("verify", 5, torch.zeros(2, 8, dtype=torch.int64), "sampled: wrong dtype"),
        ("verify", 7, torch.zeros(3, dtype=torch.int32), "remaining: expected size"),
        ("commit_kv", 3, torch.tensor([4, 1], dtype=torch.int32), "num_accepted: 4 of 3"),
        ("sample_rows", 2, torch.zeros((), dtype=torch.int32), "seed: wrong dtype"),
        ("sample_rows", 0, torch.zeros(2, 5, 50, dtype=torch.int32), "logits: expected float"),
        ("draft_candidates", 2, 0, "branch"),
        ("ngram_insert", 8, 3, "ways: expected a power of two"),
        ("ngram_insert", 6, torch.ones(2, 3, dtype=torch.bool), "valid: expected size"),
        ("perturb_candidates", 2, torch.zeros(2, 4, dtype=torch.int32), "positions: expected size"),
        ("ngram_lookup", 4, 9, "contexts: expected at least 9"),
        ("ngram_lookup", 0, torch.zeros(2, 31, dtype=torch.int64), "keys: expected a power of two"),
    ],
)
def test_wrong_arguments_of_the_plain_ops_raise(name, at, value, match):
    arguments = list(op_inputs()[name])
    arguments[at] = value
    with pytest.raises(RuntimeError, match=match):
        getattr(torch.ops.gsd_kernels, name)(*arguments)


def test_auto_is_the_compiled_op_and_names_never_fall_back():
    from gsd_kernels.backends import resolve
    from gsd_kernels.ops.merge.api import IMPLEMENTATIONS

    assert resolve("auto", CPU, IMPLEMENTATIONS) is IMPLEMENTATIONS["cpu"]
    with pytest.raises(gsd.BackendUnavailableError, match="cuda tensors"):
        resolve("cuda", CPU, IMPLEMENTATIONS)


def test_without_the_library_the_reference_runs_and_the_reason_names_the_cure(tmp_path):
    """A pure-Python install: the package without its shared objects."""
    import shutil
    from pathlib import Path

    package = Path(gsd.__file__).parent
    shutil.copytree(package, tmp_path / "gsd_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = (
        "import torch, gsd_kernels as gsd\n"
        "from gsd_kernels.backends import resolve, unavailable_reason\n"
        "from gsd_kernels.ops.verify.api import IMPLEMENTATIONS\n"
        f"assert gsd.__file__.startswith({str(tmp_path)!r}), gsd.__file__\n"
        "print(unavailable_reason('cpu', torch.device('cpu')))\n"
        "print(resolve('auto', torch.device('cpu'), IMPLEMENTATIONS).__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    reason, module = done.stdout.strip().splitlines()
    assert "not built" in reason and "pip install --no-build-isolation" in reason
    assert module == "gsd_kernels.ops.verify.reference"
