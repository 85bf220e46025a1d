"""Ops of a step's ends: picks of rows, texts and counts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from ops.contracts.backends import Backend, assert_bit_equal, backends, cases
from ops.contracts.sampling import FLOATS, SAMPLING, WARPERS, check_sampling, problem, sampling_inputs
from ops.contracts.step import (
    COUNTS,
    WRITES,
    accepted,
    chained,
    check_chain,
    check_commit,
    check_feed,
    check_learning,
    check_path,
    check_start,
    check_write,
    copied,
    graph_of,
    int32,
    mixture,
    questions,
    state,
)

import gsd_kernels as gsd
from gsd_kernels.ops import step
from gsd_kernels.ops.learn import Asked, Mixture, learn_source
from gsd_kernels.ops.learn.api import MAX_LEVELS
from gsd_kernels.ops.sampling import warped_log_probs
from gsd_kernels.ops.sampling.reference import warp

# sample_rows and draft_candidates on every backend: the reference's tokens, NaN and ties.


of_sample_rows = pytest.mark.quick

EVERYWHERE = ("reference", "cpu", "interpreter", "triton", "cuda")
ON_A_GPU = list(itertools.product((1, 63, 1000, 128256), FLOATS))
SHAPES = {"cpu": [*itertools.product((1, 63, 111, 1000), FLOATS), (32003, torch.float32)], "cuda": ON_A_GPU}


@of_sample_rows
@pytest.mark.parametrize("name", SAMPLING)
@backends("cpu", "interpreter", "triton", "cuda")
def test_samples_equal_the_reference_except_ties(on, name):
    shape, options = SAMPLING[name]
    options = dict(options)
    made = {key: options.pop(key) for key in ("dtype", "spread") if key in options}
    flips = check_sampling(problem(shape, **made), on, **options)
    # On one machine the order of all scores is agreed on, but for a few in half precision.
    assert flips == 0 or "ties" in name or on.device == "cuda"


@of_sample_rows
@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@cases("shape", {name: [(f"{v}-{dtype}", (v, dtype)) for v, dtype in shapes] for name, shapes in SHAPES.items()})
def test_warpers_of_every_vocabulary(on, shape, warpers):
    vocab, dtype = shape
    seeds = [vocab] if on.device == "cuda" else range(1 if vocab > 2000 else 6)
    flips = sum(
        check_sampling(sampling_inputs(vocab, dtype, seed, (3.0, 0.5, 10.0)[seed % 3]), on, **warpers) for seed in seeds
    )
    assert flips == 0 or dtype != torch.float32 or on.device == "cuda", f"{flips} near ties: more than chance"


@of_sample_rows
@backends(*EVERYWHERE)
def test_a_row_with_nan_picks_nothing_and_minus_infinity_is_never_drawn(on):
    logits, positions, keys = sampling_inputs(5000, torch.float32, 0)
    logits[0, 1, 4500] = float("nan")
    logits[1, 2, 1:] = float("-inf")
    inputs = {**on.to(keys), "backend": on.name}
    for temperature, top_k in ((0.0, 0), (1.0, 0), (0.0, 5), (1.0, 5)):
        warpers = {"temperature": temperature, "top_k": top_k}
        picked = gsd.sample_rows(on.to(logits), on.to(positions), **inputs, **warpers).cpu()
        assert picked[0, 1] == -1 and picked[1, 2] == 0 and (picked[0, [0, 2, 3, 4]] >= 0).all()
        expected = gsd.sample_rows(logits, positions, **keys, **warpers, backend="reference")
        assert torch.equal(picked, expected)
        if top_k:
            continue
        tokens, log_probs = gsd.draft_candidates(on.to(logits), on.to(positions), branch=3, **inputs, **warpers)
        assert log_probs[0, 1].isnan().all()
        assert on.name != "triton" or (tokens[0, 1] == -1).all()
        assert log_probs[1, 2].tolist() == [0.0, float("-inf"), float("-inf")]


@of_sample_rows
@backends(*EVERYWHERE)
def test_ties_go_to_the_lowest_id_within_a_stretch_and_across(on):
    logits = torch.zeros(1, 1, 9000)
    logits[0, 0, [4601, 100, 4500, 103]] = 1.0
    keys = {"seed": torch.tensor(1), "sequence_ids": torch.zeros(1, dtype=torch.int32)}
    inputs = on.to((logits, torch.zeros(1, 1, dtype=torch.int32)))
    assert gsd.sample_rows(*inputs, **on.to(keys), backend=on.name).item() == 100
    if on.name == "reference":  # whose top-k leaves the order of ties open
        return
    tokens, _ = gsd.draft_candidates(*inputs, branch=5, **on.to(keys), backend=on.name)
    assert tokens.tolist() == [[[100, 103, 4500, 4601, 0]]]


@of_sample_rows
@backends(*EVERYWHERE)
def test_a_draw_does_not_depend_on_the_launch_shape(on):
    batch, rows, vocab = (2, 2, 1003) if on.interpreted else (4, 8, 32000)
    logits = torch.randn(batch, rows, vocab, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(batch * rows, dtype=torch.int32).view(batch, rows)
    keys = {"seed": on.to(torch.tensor(9)), "temperature": 1.0, "backend": on.name}
    ids = torch.arange(batch, dtype=torch.int32)
    together = gsd.sample_rows(*on.to((logits, positions)), sequence_ids=on.to(ids), **keys)
    for b, r in itertools.product(range(batch), range(rows)):
        one = on.to((logits[b : b + 1, r : r + 1].contiguous(), positions[b : b + 1, r : r + 1].contiguous()))
        assert gsd.sample_rows(*one, sequence_ids=on.to(ids[b : b + 1]), **keys).item() == together[b, r].item()


@of_sample_rows
@backends(*EVERYWHERE)
def test_a_row_without_a_distribution_is_not_drawn_from(on):
    """At a temperature above 0; the best of it is still the best."""
    logits, positions, keys = sampling_inputs(700, torch.float32, 0)
    logits[0, 1, 650] = float("inf")
    logits[1, 2] = float("-inf")
    inputs = (*on.to((logits, positions)),)
    for warpers in ({"temperature": 1.0}, {"temperature": torch.tensor([0.0, 0.7])}, {"temperature": 0.0}):
        picked = gsd.sample_rows(*inputs, **on.to({**keys, **warpers}), backend=on.name).cpu()
        temperature = torch.as_tensor(warpers["temperature"]).expand(2)
        assert picked[0, 1] == (-1 if temperature[0] > 0 else 650)
        assert picked[1, 2] == (-1 if temperature[1] > 0 else 0)
        assert (picked >= 0).sum() == 10 - int((temperature > 0).sum())


@of_sample_rows
@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@backends(*EVERYWHERE)
def test_candidates_without_noise_are_the_warped_distributions_best(on, warpers):
    logits, positions, keys = sampling_inputs(600, torch.float32, 1)
    given = on.to({**keys, **warpers})
    tokens, log_probs = gsd.draft_candidates(
        *on.to((logits, positions)), branch=4, noise=False, **given, backend=on.name
    )
    values = {name: warpers.get(name, off) for name, off in (("temperature", 0.0), ("top_k", 0), ("top_p", 1.0))}
    greedy = torch.as_tensor(values["temperature"]).view(-1, 1, 1) <= 0
    warped = torch.where(greedy, logits, warp(logits, *values.values(), warpers.get("min_p", 0.0)))
    expected, ids = warped.log_softmax(-1).topk(4)
    real = expected > float("-inf")
    assert torch.equal(tokens.cpu().long()[real], ids[real])
    torch.testing.assert_close(log_probs.cpu(), expected, atol=1e-5, rtol=1e-5)


def check_distribution(logits, on, **warpers):
    """Cut alike, and within 1e-5 of the reference; ties at a cut may be judged either way where rounding decides."""
    got = warped_log_probs(on.to(logits), **on.to(warpers), backend=on.name).cpu()
    expected = warped_log_probs(on.to_reference(logits), **on.to_reference(warpers), backend="reference").cpu()
    assert got.dtype == torch.float32 and got.shape == logits.shape
    real = expected > float("-inf")
    assert torch.equal(got > float("-inf"), real)
    torch.testing.assert_close(got[real], expected[real], atol=1e-5, rtol=1e-5)
    greedy = torch.as_tensor(warpers.get("temperature", 0.0)).view(-1, 1, 1) <= 0
    alone = {name: warpers.get(name, off) for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))}
    warped = torch.where(greedy, logits.float(), warp(logits.float(), warpers.get("temperature", 0.0), *alone.values()))
    torch.testing.assert_close(expected, warped.log_softmax(-1), atol=1e-6, rtol=3e-7)  # two roundings


@of_sample_rows
@pytest.mark.parametrize("name", SAMPLING)
@backends(*EVERYWHERE)
def test_the_distribution_after_the_warpers(on, name):
    shape, options = SAMPLING[name]
    if on.interpreted:
        shape = (*shape[:-1], min(shape[-1], 20_000))  # minutes otherwise
    options = {key: value for key, value in options.items() if key != "branch"}
    made = {key: options.pop(key) for key in ("dtype", "spread") if key in options}
    check_distribution(problem(shape, **made)[0], on, **options)


@of_sample_rows
@backends(*EVERYWHERE)
def test_a_row_without_a_distribution_has_no_log_probabilities(on):
    logits = torch.randn(2, 3, 5000, generator=torch.Generator().manual_seed(2))
    logits[0, 1, 4500] = float("nan")
    logits[1, 0, 4100] = float("inf")
    logits[1, 2] = float("-inf")
    for warpers in ({"temperature": 0.8}, {"temperature": 1.0, "top_k": 5, "min_p": 0.1}, {"temperature": 0.0}):
        got = warped_log_probs(on.to(logits), **warpers, backend=on.name).cpu()
        nothing = got.isnan().all(-1)
        assert nothing.tolist() == [[False, True, False], [True, False, True]]
        assert torch.allclose(got.exp().sum(-1)[~nothing], torch.ones(3), atol=1e-5)


@of_sample_rows
@backends("interpreter")
def test_tickets_are_put_back_for_the_next_launch(on, monkeypatch):
    from gsd_kernels.ops.sampling import triton

    kept = torch.zeros(10, dtype=torch.int32)
    monkeypatch.setattr(triton.Tickets, "of", lambda self, like, rows: kept[:rows])
    logits, positions, keys = sampling_inputs(4500, torch.float32, 3)
    expected = gsd.sample_rows(logits, positions, **keys, backend="reference")
    for _ in range(2):
        assert torch.equal(gsd.sample_rows(logits, positions, **keys, backend=on.name), expected)
        assert not kept.any()


# What lies between the larger ops of a step, commit_kv, write_kv and learn_source: bit for bit, and by hand.


of_step_ops = pytest.mark.quick

CHECKS = {f.__name__: f for f in (check_start, check_feed, check_chain, check_path, check_commit)}


@of_step_ops
@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
@backends("cpu", "cuda")
def test_equal_the_reference(on, check):
    for seed in range(12):
        check(seed, on)


@of_step_ops
@backends("reference", "cpu", "cuda")
def test_a_started_graph_is_the_root_and_its_text(on):
    graph = on.to(graph_of(0))
    tokens = torch.tensor([[0, 0, 5, 6, 7, 9], [1, 2, 3, 4, 9, 9], [8, 9, 9, 9, 9, 9]])
    text = on.to((tokens, int32(5, 4, 1), int32(2, 0, 0)))
    assert step.start_graph(graph, *text, backend=on.name).tolist() == [3, 4, 1]
    assert graph.token_ids[:, 0].tolist() == [7, 4, 8] and not graph.token_ids[:, 1:].any()
    assert graph.contexts[:, 0, :4].tolist() == [[6, 5, -1, -1], [3, 2, 1, -1], [-1] * 4]
    assert graph.num_nodes.tolist() == [1, 1, 1] and not graph.num_merges.any() and not graph.expanded.any()
    assert (graph.edge_targets == -1).all() and (graph.parents == -1).all() and not graph.ancestor_mask.any()


@of_step_ops
@backends("reference", "cpu", "cuda")
def test_fed_rows_by_hand(on):
    depths, node_depths = int32(3, 4)[None], torch.zeros(1, 5, dtype=torch.int32)
    rows = on.to((int32(10, 99)[None], depths, int32(20), int32(5)))
    node_depths = on.to(node_depths)
    got = step.feed_rows(*rows, vocab=50, first_slot=2, shift=1, node_depths=node_depths, backend=on.name)
    assert [t.tolist() for t in got] == [[[10, 0]], [[22, 23]], [[17, 18]], [[2, 3]], [[18, 19]]]
    assert node_depths.tolist() == [[0, 0, 2, 3, 0]]


@of_step_ops
@backends("reference", "cpu", "cuda")
def test_a_chain_is_right_aligned_and_sees_what_is_before(on):
    tokens, cached = on.to((torch.arange(10, 20)[None], int32(3)))
    got = step.feed_chain(tokens, on.to(int32(5)), cached, 4, backend=on.name)
    assert got.kv_len.tolist() == [3] and cached.tolist() == [5]
    assert got.token_ids.tolist() == [[0, 0, 13, 14]] and got.slots.tolist() == [[2, 3, 0, 1]]
    assert got.depths.tolist() == [[0, 0, 0, 1]] and got.node_depths.tolist() == [[0, 1, 2, 3]]
    assert got.ancestor_mask.flatten().tolist() == [0b100, 0b1000, 0b1, 0b11]


@of_step_ops
@backends("reference", "cpu", "cuda")
def test_texts_grow_end_and_are_counted(on):
    """The first ends with its room, the second with a token, the third was done."""
    tokens = on.to(torch.zeros(3, 8, dtype=torch.int64))
    of = on.to(
        {
            "out_len": int32(2, 3, 4),
            "remaining": int32(2, 9, 0),
            "done": torch.tensor([False, False, True]),
            "emitted": torch.full((3, 4), -1, dtype=torch.int32),
            "num_emitted": int32(0, 0, 0),
            "counts": torch.zeros(3, dtype=torch.int64),
        }
    )
    path = on.to(gsd.Acceptance(torch.zeros(3, 3, dtype=torch.int32), int32(2, 3, 0), int32(6, 7, 7)))
    new = on.to(torch.tensor([[5, 6, 0], [8, 9, 7], [0, 0, 0]], dtype=torch.int32))
    step.commit_text(new, path, eos_ids=on.to(int32(7)), tokens=tokens, **of, backend=on.name)
    assert tokens.tolist() == [[0, 0, 5, 6, 0, 0, 0, 0], [0, 0, 0, 8, 9, 7, 0, 0], [0] * 8]
    assert of["out_len"].tolist() == [4, 6, 4] and of["remaining"].tolist() == [0, 6, 0]
    assert of["done"].tolist() == [True, True, True] and of["num_emitted"].tolist() == [2, 3, 0]
    assert of["emitted"].tolist() == [[5, 6, 0, -1], [8, 9, 7, -1], [0, 0, 0, -1]]


@of_step_ops
def test_the_cases_say_something():
    merged = set()
    for seed in range(12):
        path, rows, graph = accepted(seed)
        after, now = state(seed), state(seed)
        tokens, nodes = step.accepted_path(path, rows, backend="reference")
        step.commit_text(tokens, path, eos_ids=int32(3), **after, nodes=nodes, graph=graph, backend="reference")
        merged.add(int(after["counts"][2] - now["counts"][2]))
        assert set(path.num_accepted.tolist()) > {0} and after["done"].tolist()[1]
    assert len(merged) > 1
    assert any((case["end"] - case["cached"] > case["width"]).any() for case in map(chained, range(12)))
    assert all((case["end"] == case["cached"]).any() for case in map(chained, range(12)))


KEPT = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FEW = [(torch.float32, 80), (torch.bfloat16, 64), (torch.float16, 256)]
HALF_AND_SINGLE = list(itertools.product(KEPT[:3], (64, 80, 256)))
ODD = list(itertools.product((torch.bfloat16, torch.float32, torch.float64), (1, 7, 63, 64, 128)))  # narrower loads
COMPILED = [*HALF_AND_SINGLE, *ODD]
COMMITS = {"reference": COMPILED, "cpu": COMPILED, "interpreter": FEW, "triton": HALF_AND_SINGLE, "cuda": COMPILED}


LAYOUTS = ("stacked", "separate", "positions first")


def caches_of(layout: str, dtype: torch.dtype, dim: int, slots: int, gen: torch.Generator) -> list[torch.Tensor]:
    """Three layers of four sequences, some numbers NaN: parts of one tensor, or of several sizes."""
    if layout == "stacked":
        stacked = torch.randn(3, 4, 2, slots, dim, generator=gen).to(dtype)
        return list(stacked.masked_fill_(stacked.abs() < 0.01, math.nan))
    caches = [torch.randn(4, heads, slots, size, generator=gen).to(dtype) for heads, size in ((1, dim), (2, 7), (3, 9))]
    caches[1][:, :, 12:] = math.nan
    return caches if layout == "separate" else [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]


@of_step_ops
@pytest.mark.parametrize("layout", LAYOUTS)
@cases("kind", {name: [(f"{t}-D{d}", (t, d)) for t, d in dict.fromkeys(kinds)] for name, kinds in COMMITS.items()})
def test_commit_equals_reading_all_and_then_writing(on, kind, layout):
    """Rows in any order, sources that are also destinations, finished sequences, several layers of several sizes."""
    gen = torch.Generator().manual_seed(3 * kind[1] + LAYOUTS.index(layout))
    batch, rows, prefix, width = 4, 60, 31, 6
    kv_len = torch.randint(0, prefix + 1, (batch,), generator=gen, dtype=torch.int32)
    count = torch.randint(1, width + 1, (batch,), generator=gen, dtype=torch.int32)
    count[3] = 0  # finished
    accepted = torch.rand(batch, rows, generator=gen).argsort(-1)[:, :width].int()
    accepted[0] = accepted[0].sort().values
    accepted[1] %= 7  # close to each other, some of them twice
    accepted = torch.where(torch.arange(width) < count[:, None], accepted, -1)
    others = (
        layout if on.name == "triton" else LAYOUTS[LAYOUTS.index(layout) - 1]
    )  # whose keys and values have one shape
    caches = [caches_of(of, *kind, prefix + rows + 2, gen) for of in (layout, others)]
    expected = [[cache.clone() for cache in part] for part in caches]
    for cache, before in zip(itertools.chain(*expected), itertools.chain(*caches), strict=True):
        for b in range(batch):
            for i in range(int(count[b])):
                cache[b, :, int(kv_len[b]) + i] = before[b, :, int(kv_len[b]) + int(accepted[b, i])]
    moved = [on_device(part, on) for part in caches]
    length = on.to(kv_len.clone())
    gsd.commit_kv(*moved, on.to(accepted), on.to(count), length, backend=on.name)
    assert_bit_equal(itertools.chain(*moved), itertools.chain(*expected))
    assert torch.equal(length.cpu(), kv_len + count)


def on_device(layers: list[torch.Tensor], on: Backend) -> list[torch.Tensor]:
    """Copies; layers of one tensor are layers of one tensor again."""
    whole = layers[0]._base
    if whole is not None and all(layer._base is whole for layer in layers):
        return list(on.to(copied(whole)))
    return [on.to(copied(layer)) for layer in layers]


@of_step_ops
@backends("cpu", "triton", "cuda")
def test_more_caches_than_one_launch_takes(on):
    cache = on.to(torch.randn(400, 1, 2, 20, 8))
    expected = cache.clone()
    expected[:, :, :, 6] = expected[:, :, :, 9]
    layers = list(cache)
    rows = on.to(torch.tensor([[0, 4]], dtype=torch.int32))
    kv_len = on.to(torch.tensor([5], dtype=torch.int32))
    gsd.commit_kv(layers[:200], layers[200:], rows, torch.full_like(kv_len, 2), kv_len, backend=on.name)
    assert torch.equal(cache, expected) and kv_len.item() == 7


WRITE_SHAPES = {
    f"{dtype}-D{dim}-{heads}-{rows}": (dtype, (dim, dim), heads, rows)
    for dtype, dim, heads, rows in itertools.product(KEPT[:3], (64, 128, 256), (1, 8), (1, 64))
}


@of_step_ops
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@backends("reference", "cpu", "interpreter", "triton")
def test_rows_are_written_to_their_positions_and_made_finite(on, dtype):
    k_cache = on.to(torch.ones(2, 3, 9, 4, dtype=dtype))
    v_cache = on.to(torch.ones(2, 9, 3, 5, dtype=dtype).transpose(1, 2))
    k, v = torch.randn(2, 3, 2, 4).to(dtype), torch.randn(2, 3, 2, 5).to(dtype)
    k[0, 1, 1] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    positions = torch.tensor([[8, 2], [0, 5]])
    gsd.write_kv(k_cache, v_cache, *on.to((k, v, positions)), backend=on.name)
    k_cache, v_cache = k_cache.cpu(), v_cache.cpu()
    top = torch.finfo(dtype).max
    assert k_cache[0, 1, 2].tolist() == [0.0, top, -top, 0.0]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for b in range(2):
            assert torch.equal(cache[b][:, positions[b]], rows[b].nan_to_num())
        assert int((cache != 1).any(-1).any(1).sum()) == 4, "nothing else is written"


@of_step_ops
@cases("case", {**{n: WRITES.items() for n in ("cpu", "interpreter")}, "triton": {**WRITES, **WRITE_SHAPES}.items()})
def test_written_rows_equal_the_reference_bit_for_bit(on, case):
    check_write(*case, on)


@of_step_ops
@backends("cpu")
def test_a_position_outside_is_refused(on):
    cache, rows = torch.zeros(2, 1, 20, 4), torch.ones(2, 1, 3, 4)
    with pytest.raises(RuntimeError, match="positions: 20 is outside"):
        gsd.write_kv(cache, cache.clone(), rows, rows, torch.tensor([[0, 19, 5], [1, 20, 3]]), backend=on.name)


@of_step_ops
@backends("cpu", "cuda")
def test_tables_equal_the_reference(on):
    learned = [check_learning(seed, on, batch=1 + seed % 4, branch=1 + seed % 5) for seed in range(8)]
    assert sum(learned) > 5


@of_step_ops
@backends("cpu", "cuda")
def test_more_levels_than_the_compiled_op_takes(on):
    assert check_learning(0, on, levels=MAX_LEVELS + 3)


@of_step_ops
@backends("reference", "cpu", "cuda")
def test_a_pick_that_both_had_is_shared_by_their_probabilities(on):
    start = torch.tensor([0.5])
    weights = on.to(Mixture(start, torch.tensor([4.0]), torch.tensor([8.0]), start.clone()))
    level = on.to(
        [
            torch.tensor([[3, 5]], dtype=torch.int32),
            torch.tensor([[[9, 8], [9, 8]]], dtype=torch.int32),
            torch.tensor([[[0.6, 0.2], [0.5, 0.1]]]).log(),
            None,
            torch.tensor([[[8, 9], [1, 2]]], dtype=torch.int32),
            torch.tensor([[[0.7, 0.2], [0.5, 0.1]]]).log(),
        ]
    )
    nodes, picked = on.to([torch.tensor([[3, 7, -2]], dtype=torch.int32), torch.tensor([[9, 9, 0]], dtype=torch.int32)])
    learn_source([Asked(*level)], nodes, picked, weights, 8.0, math.inf, backend=on.name)
    assert weights.counts.item() == 9.0 and weights.shares.item() == pytest.approx(4.0 + 0.6 / 0.8)
    assert weights.weights.item() == pytest.approx((4.0 + 0.75) / 9)


@of_step_ops
def test_no_level_is_refused():
    with pytest.raises(ValueError, match="asked: expected at least one level"):
        learn_source([], *questions(0)[1:], mixture(0), **COUNTS)
