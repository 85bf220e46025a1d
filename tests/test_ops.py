"""The reference ops of attention, verification and commit against plain statements of what they do."""

from __future__ import annotations

import math

import pytest
import torch
from graphs import drafted
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.graph import pack_bits, unpack_bits

torch.set_num_threads(1)

# dag_attention ------------------------------------------------------------------------------------------------------


def attention_case(
    seed: int,
    *,
    batch: int = 2,
    kv_heads: int = 2,
    groups: int = 1,
    rows: int = 9,
    nodes: int | None = None,
    prefix: int = 20,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Ragged prefixes with left padding, random masks with an empty row, NaN in every slot that nobody sees."""
    gen = torch.Generator().manual_seed(seed)
    nodes = rows if nodes is None else nodes
    capacity = prefix + nodes + 7
    kv_len = torch.randint(1, prefix + 1, (batch,), generator=gen, dtype=torch.int32)
    kv_len[0] = prefix
    kv_start = (torch.rand(batch, generator=gen) * kv_len).to(torch.int32)
    num_nodes = torch.randint(1, nodes + 1, (batch,), generator=gen, dtype=torch.int32)
    bits = torch.rand(batch, rows, nodes, generator=gen) < 0.4
    q = torch.randn(batch, kv_heads * groups, rows, head_dim, generator=gen)
    k = torch.randn(batch, kv_heads, capacity, head_dim, generator=gen)
    v = torch.randn(batch, kv_heads, capacity, value_dim or head_dim, generator=gen)
    case = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": v.to(dtype),
        "ancestor_mask": pack_bits(bits),
        "kv_len": kv_len,
        "kv_start": kv_start,
        "num_nodes": num_nodes,
        "row_depths": torch.randint(0, nodes, (batch, rows), generator=gen, dtype=torch.int32),
        "node_depths": torch.randint(0, nodes, (batch, nodes), generator=gen, dtype=torch.int32),
    }
    if batch > 1:  # a row that sees nothing: no prefix, no bit
        case["kv_start"][1] = case["kv_len"][1]
        bits[1, 0] = False
        case["ancestor_mask"] = pack_bits(bits)
    seen = dense_mask(case, None).any(1)
    case["k"][~seen[:, None].expand(-1, kv_heads, -1)] = math.nan
    case["v"][~seen[:, None].expand(-1, kv_heads, -1)] = math.nan
    return case


def dense_mask(case: dict[str, Tensor], window: int | None) -> Tensor:
    """bool [B, R, S], one position at a time."""
    batch, rows = case["ancestor_mask"].shape[:2]
    capacity = case["k"].shape[2]
    mask = torch.zeros(batch, rows, capacity, dtype=torch.bool)
    bits = unpack_bits(case["ancestor_mask"], case["ancestor_mask"].shape[2] * 32)
    for b in range(batch):
        start, length, nodes = (int(case[name][b]) for name in ("kv_start", "kv_len", "num_nodes"))
        for r in range(rows):
            here = length + int(case["row_depths"][b, r])
            for p in range(start, length):
                mask[b, r, p] = window is None or here - p < window
            for j in range(nodes):
                there = length + int(case["node_depths"][b, j])
                mask[b, r, length + j] = bool(bits[b, r, j]) and (window is None or here - there < window)
    return mask


def dense_attention(
    case: dict[str, Tensor], dtype: torch.dtype, *, window: int | None = None, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Plain softmax attention in ``dtype``: output [B, Hq, R, Dv] and log-sum-exp."""
    mask = dense_mask(case, window)[:, None]
    groups = case["q"].shape[1] // case["k"].shape[1]
    k, v = (case[x].nan_to_num(0.0).to(dtype).repeat_interleave(groups, 1) for x in "kv")
    scores = case["q"].to(dtype) @ k.mT * case["q"].shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)  # rows that see nothing
    return weights @ v, scores.logsumexp(-1)


def attend(case: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    return gsd.dag_attention(**case, **options, return_lse=True, backend="reference")


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 5}, {"softcap": 3.0}, {"sliding_window": 1, "softcap": 1.5}]
)
def test_attention_equals_dense_softmax(groups, options):
    for seed in range(6):
        shape = {"rows": (1, 9, 33)[seed % 3], "nodes": (1, 9, 70)[(seed + seed // 3) % 3], "kv_heads": 1 + seed % 2}
        case = attention_case(
            seed, groups=groups, prefix=(1, 20, 63)[seed // 2], **shape, value_dim=(None, 24)[seed % 2]
        )
        out, lse = attend(case, **options)
        exact, exact_lse = dense_attention(
            case, torch.float64, window=options.get("sliding_window"), softcap=options.get("softcap")
        )
        assert out.shape == exact.shape and out.dtype == torch.float64 and lse.dtype == torch.float32
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-6, atol=1e-6)
        empty = ~dense_mask(case, options.get("sliding_window")).any(-1)
        assert empty.any()
        for b, r in empty.nonzero().tolist():
            assert (out[b, :, r] == 0).all() and (lse[b, :, r] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_attention_error_is_at_most_twice_sdpas(dtype, groups):
    ours = sdpas = 0.0
    for seed in range(6):
        case = attention_case(seed, groups=groups, rows=33, prefix=111, head_dim=64, dtype=dtype)
        mask = dense_mask(case, None)
        exact, _ = dense_attention(case, torch.float64)
        seen = mask.any(-1)[:, None, :, None]
        k, v = (case[x].nan_to_num(0.0) for x in "kv")
        sdpa = torch.nn.functional.scaled_dot_product_attention(case["q"], k, v, mask[:, None], enable_gqa=True)
        out, _ = attend(case)
        assert out.dtype == dtype
        ours = max(ours, float((out - exact).abs().masked_fill(~seen, 0).max()))
        sdpas = max(sdpas, float((sdpa - exact).abs().masked_fill(~seen, 0).max()))
    assert 0 < ours <= 2 * sdpas, (ours, sdpas)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_independent_of_other_rows(dtype):
    """Other rows' queries, masks, positions, and every key and value that the row does not see, are replaced."""
    gen = torch.Generator().manual_seed(0)
    for seed in range(4):
        case = attention_case(seed, rows=17, groups=2, dtype=dtype)
        for name in "kv":
            case[name] = case[name].nan_to_num(0.0)
        out, lse = attend(case, sliding_window=9)
        mask = dense_mask(case, 9)
        for row in (0, 5, 16):
            other = {name: x.clone() for name, x in case.items()}
            others = torch.arange(17) != row
            other["q"][:, :, others] = torch.randn(other["q"][:, :, others].shape, generator=gen).to(dtype)
            random_mask = torch.randint(-(2**31), 2**31 - 1, other["ancestor_mask"].shape, generator=gen).int()
            other["ancestor_mask"] = torch.where(others[:, None], random_mask, other["ancestor_mask"])
            other["row_depths"][:, others] = 3
            unseen = ~mask[:, row][:, None].expand(-1, case["k"].shape[1], -1)
            for name in "kv":
                noise = 100 * torch.randn(other[name][unseen].shape, generator=gen)
                other[name][unseen] = noise.to(dtype)
            again, again_lse = attend(other, sliding_window=9)
            assert torch.equal(again[:, :, row], out[:, :, row]) and torch.equal(again_lse[:, :, row], lse[:, :, row])
            assert not torch.equal(again, out)


def test_attention_defaults_and_strides():
    """No optional argument, a transposed cache layout, an own scale."""
    case = attention_case(3, batch=1, groups=2)
    case["k"], case["v"] = case["k"].nan_to_num(0.0), case["v"].nan_to_num(0.0)
    plain = {name: case[name] for name in ("q", "k", "v", "ancestor_mask", "kv_len")}
    full = {**case, "kv_start": torch.zeros(1, dtype=torch.int32), "num_nodes": torch.tensor([9], dtype=torch.int32)}
    expected = dense_attention(full, torch.float64)[0]
    torch.testing.assert_close(gsd.dag_attention(**plain, backend="reference"), expected, rtol=0, atol=1e-12)
    strided = {**plain, "k": plain["k"].transpose(1, 2).contiguous().transpose(1, 2)}
    torch.testing.assert_close(gsd.dag_attention(**strided, backend="reference"), expected, rtol=0, atol=1e-12)
    doubled = gsd.dag_attention(**{**plain, "q": plain["q"] * 2}, scale=0.125, backend="reference")
    torch.testing.assert_close(doubled, expected, rtol=0, atol=1e-12)


# verify -------------------------------------------------------------------------------------------------------------


def rows_case(seed: int, max_rows: int = 24) -> tuple[gsd.Rows, gsd.GraphConfig, Tensor]:
    """Rows of a random graph, and picks that agree with a child of their row more often than not."""
    gen = torch.Generator().manual_seed(seed)
    config = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=max_rows, merge_context=seed % 4 - 1)
    graph = drafted(config, batch=4, vocab=6, seed=seed, style=("random", "repeat", "sparse")[seed % 3])
    rows = gsd.flatten(graph, config.max_rows, config.max_path, backend="reference")
    picked = torch.randint(0, 6, (4, max_rows), generator=gen, dtype=torch.int32)
    for b in range(4):
        for r in range(1, int(rows.num_rows[b])):
            if torch.rand((), generator=gen) < 0.6:
                picked[b, rows.parent_rows[b, r]] = rows.token_ids[b, r]
    return rows, config, picked


@pytest.mark.parametrize("seed", range(24))
def test_verify_equals_the_walk(seed):
    rows, config, picked = rows_case(seed)
    gen = torch.Generator().manual_seed(seed)
    eos = torch.tensor([[], [3], [2, 5]][seed % 3], dtype=torch.int32)
    remaining = torch.randint(1, 8, (4,), generator=gen, dtype=torch.int32)
    done = torch.tensor([False, False, False, True])
    got = gsd.verify(
        rows, picked, eos_ids=eos, remaining=remaining, done=done, max_path=config.max_path, backend="reference"
    )
    lengths = []
    for b in range(4):
        path = []
        if not done[b]:
            path = [0]
            while len(path) < remaining[b]:
                token = int(picked[b, path[-1]])
                children = [
                    r
                    for r in range(1, int(rows.num_rows[b]))
                    if rows.parent_rows[b, r] == path[-1] and rows.token_ids[b, r] == token
                ]
                if token in eos.tolist() or not children:
                    break
                path += children
            assert int(got.next_token[b]) == int(picked[b, path[-1]])
        assert got.accepted_rows[b].tolist() == path + [-1] * (config.max_path + 1 - len(path))
        assert int(got.num_accepted[b]) == len(path)
        lengths.append(len(path))
    assert got.accepted_rows.dtype == got.num_accepted.dtype == got.next_token.dtype == torch.int32
    assert lengths[3] == 0 and max(lengths) >= 1


def test_verify_cases_are_not_trivial():
    paths = []
    for seed in range(24):
        rows, config, picked = rows_case(seed)
        accepted = gsd.verify(
            rows,
            picked,
            eos_ids=torch.zeros(0, dtype=torch.int32),
            remaining=torch.full((4,), 99, dtype=torch.int32),
            done=torch.zeros(4, dtype=torch.bool),
            max_path=config.max_path,
            backend="reference",
        )
        paths += accepted.num_accepted.tolist()
    assert {1, 2, 3, 4} <= set(paths), set(paths)


# commit_kv ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("transposed", [False, True])
def test_commit_equals_reading_all_and_then_writing(seed, transposed):
    """Rows in any order, sources that are also destinations, finished sequences, several layers of several sizes."""
    gen = torch.Generator().manual_seed(seed)
    batch, rows, prefix, width = 4, 9, 11, 6
    capacity = prefix + rows + 2
    caches = []
    for heads, dim in ((1, 4), (2, 8), (3, 2)):
        shape = (batch, capacity, heads, dim) if transposed else (batch, heads, capacity, dim)
        cache = torch.randn(shape, generator=gen)
        cache[(cache.abs() < 0.01)] = math.nan
        caches.append(cache.transpose(1, 2) if transposed else cache)
    kv_len = torch.randint(0, prefix + 1, (batch,), generator=gen, dtype=torch.int32)
    accepted, count = torch.full((batch, width), -1, dtype=torch.int32), torch.zeros(batch, dtype=torch.int32)
    for b in range(batch - 1):  # the last sequence is finished
        n = int(torch.randint(1, width + 1, (), generator=gen))
        order = torch.randperm(rows, generator=gen)[:n]
        accepted[b, :n] = order.sort().values if b == 0 else order
        count[b] = n
    expected = [cache.clone() for cache in caches]
    for cache, before in zip(expected, caches, strict=True):
        for b in range(batch):
            for i in range(int(count[b])):
                cache[b, :, int(kv_len[b]) + i] = before[b, :, int(kv_len[b]) + int(accepted[b, i])]
    after = kv_len + count
    gsd.commit_kv(caches, [c.clone() for c in caches], accepted, count, kv_len.clone(), backend="reference")
    values = [torch.randn_like(c) for c in caches]
    kept = [v.clone() for v in values]
    for cache, wanted in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, wanted, rtol=0, atol=0, equal_nan=True)
    gsd.commit_kv([c.clone() for c in caches], values, accepted, count, kv_len, backend="reference")
    assert torch.equal(kv_len, after)
    assert all(not torch.equal(v, k) for v, k in zip(values, kept, strict=True)), "values move, too"


# write_kv -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_written_to_their_positions_and_made_finite(dtype):
    k_cache, v_cache = torch.ones(2, 3, 9, 4, dtype=dtype), torch.ones(2, 9, 3, 5, dtype=dtype).transpose(1, 2)
    k, v = torch.randn(2, 3, 2, 4).to(dtype), torch.randn(2, 3, 2, 5).to(dtype)
    k[0, 1, 1] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    positions = torch.tensor([[8, 2], [0, 5]])
    gsd.write_kv(k_cache, v_cache, k, v, positions)
    top = torch.finfo(dtype).max
    assert k_cache[0, 1, 2].tolist() == [0.0, top, -top, 0.0]
    for cache, rows in ((k_cache, k), (v_cache, v)):
        for b in range(2):
            assert torch.equal(cache[b][:, positions[b]], rows[b].nan_to_num())
        assert int((cache != 1).any(-1).any(1).sum()) == 4, "nothing else is written"


# Argument errors ----------------------------------------------------------------------------------------------------


def attention_arguments():
    return {name: x for name, x in attention_case(0).items()} | {"backend": "reference"}


def sampling_arguments():
    return {
        "logits": torch.randn(2, 3, 8),
        "positions": torch.zeros(2, 3, dtype=torch.int32),
        "seed": torch.tensor(0),
        "sequence_ids": torch.zeros(2, dtype=torch.int32),
        "backend": "reference",
    }


def verify_arguments():
    rows, config, picked = rows_case(0)
    return {
        "rows": rows,
        "sampled": picked,
        "eos_ids": torch.tensor([1], dtype=torch.int32),
        "remaining": torch.ones(4, dtype=torch.int32),
        "done": torch.zeros(4, dtype=torch.bool),
        "max_path": config.max_path,
        "backend": "reference",
    }


def commit_arguments():
    return {
        "k_caches": [torch.zeros(2, 1, 8, 4)],
        "v_caches": [torch.zeros(2, 1, 8, 4)],
        "accepted_rows": torch.zeros(2, 3, dtype=torch.int32),
        "num_accepted": torch.zeros(2, dtype=torch.int32),
        "kv_len": torch.zeros(2, dtype=torch.int32),
        "backend": "reference",
    }


def write_arguments():
    return {
        "k_cache": torch.zeros(2, 1, 8, 4),
        "v_cache": torch.zeros(2, 1, 8, 6),
        "k": torch.ones(2, 1, 3, 4),
        "v": torch.ones(2, 1, 3, 6),
        "positions": torch.arange(6).view(2, 3),
        "backend": "reference",
    }


def merge_arguments():
    config = gsd.GraphConfig(depth=2, width=2, branch=3, max_rows=8)
    graph = gsd.TokenGraph.empty(2, config, "cpu")
    graph.reset(torch.zeros(2, dtype=torch.int32), torch.full((2, 8), -1, dtype=torch.int32))
    return {
        "graph": graph,
        "frontier": graph.root_frontier(),
        "cand_tokens": torch.arange(3, dtype=torch.int32).expand(2, 1, 3).contiguous(),
        "cand_log_probs": torch.full((2, 1, 3), -1.0),
        "level": 0,
        "width": 2,
        "merge_context": 0,
        "backend": "reference",
    }


def flatten_arguments():
    config = gsd.GraphConfig(depth=2, width=2, branch=3, max_rows=8)
    return {"graph": drafted(config, vocab=6), "max_rows": 8, "max_path": 4, "backend": "reference"}


def int64(name):
    return lambda a: a[name].long()


BAD_ARGUMENTS = [
    (gsd.dag_attention, attention_arguments, "q", lambda a: a["q"][0], ValueError),
    (gsd.dag_attention, attention_arguments, "q", lambda a: a["q"].int(), TypeError),
    (gsd.dag_attention, attention_arguments, "q", lambda a: a["q"][:, :1].expand(-1, 3, -1, -1), ValueError),
    (gsd.dag_attention, attention_arguments, "k", lambda a: a["k"].float(), TypeError),
    (gsd.dag_attention, attention_arguments, "k", lambda a: a["k"][..., :8], ValueError),
    (gsd.dag_attention, attention_arguments, "v", lambda a: a["v"][:, :, :5], ValueError),
    (gsd.dag_attention, attention_arguments, "ancestor_mask", int64("ancestor_mask"), TypeError),
    (gsd.dag_attention, attention_arguments, "ancestor_mask", lambda a: a["ancestor_mask"][:, :3], ValueError),
    (gsd.dag_attention, attention_arguments, "kv_len", int64("kv_len"), TypeError),
    (gsd.dag_attention, attention_arguments, "kv_len", lambda a: 5, TypeError),
    (gsd.dag_attention, attention_arguments, "kv_start", lambda a: a["kv_start"][:1], ValueError),
    (gsd.dag_attention, attention_arguments, "num_nodes", int64("num_nodes"), TypeError),
    (gsd.dag_attention, attention_arguments, "sliding_window", lambda a: 0, ValueError),
    (gsd.dag_attention, attention_arguments, "backend", lambda a: "gpu", ValueError),
    (gsd.sample_rows, sampling_arguments, "logits", lambda a: a["logits"][0], ValueError),
    (gsd.sample_rows, sampling_arguments, "logits", lambda a: a["logits"].int(), TypeError),
    (gsd.sample_rows, sampling_arguments, "positions", int64("positions"), TypeError),
    (gsd.sample_rows, sampling_arguments, "positions", lambda a: a["positions"][:, :1], ValueError),
    (gsd.sample_rows, sampling_arguments, "seed", lambda a: 3, TypeError),
    (gsd.sample_rows, sampling_arguments, "sequence_ids", int64("sequence_ids"), TypeError),
    (gsd.sample_rows, sampling_arguments, "temperature", lambda a: -0.1, ValueError),
    (gsd.sample_rows, sampling_arguments, "temperature", lambda a: math.inf, ValueError),
    (gsd.sample_rows, sampling_arguments, "temperature", lambda a: "1", TypeError),
    (gsd.sample_rows, sampling_arguments, "top_k", lambda a: -1, ValueError),
    (gsd.sample_rows, sampling_arguments, "top_p", lambda a: 1.5, ValueError),
    (gsd.sample_rows, sampling_arguments, "min_p", lambda a: math.nan, ValueError),
    (gsd.verify, verify_arguments, "sampled", int64("sampled"), TypeError),
    (gsd.verify, verify_arguments, "sampled", lambda a: a["sampled"][:, :4], ValueError),
    (gsd.verify, verify_arguments, "eos_ids", lambda a: torch.tensor([1]), TypeError),
    (gsd.verify, verify_arguments, "remaining", lambda a: a["remaining"][:2], ValueError),
    (gsd.verify, verify_arguments, "done", lambda a: a["done"].int(), TypeError),
    (gsd.commit_kv, commit_arguments, "v_caches", lambda a: [], ValueError),
    (gsd.commit_kv, commit_arguments, "accepted_rows", int64("accepted_rows"), TypeError),
    (gsd.commit_kv, commit_arguments, "num_accepted", lambda a: a["num_accepted"][:1], ValueError),
    (gsd.commit_kv, commit_arguments, "kv_len", int64("kv_len"), TypeError),
    (gsd.write_kv, write_arguments, "k_cache", lambda a: a["k_cache"][0], ValueError),
    (gsd.write_kv, write_arguments, "k_cache", lambda a: a["k_cache"].int(), TypeError),
    (gsd.write_kv, write_arguments, "v_cache", lambda a: a["v_cache"][:, :, :5], ValueError),
    (gsd.write_kv, write_arguments, "v_cache", lambda a: a["v_cache"].half(), TypeError),
    (gsd.write_kv, write_arguments, "positions", lambda a: a["positions"].int(), TypeError),
    (gsd.write_kv, write_arguments, "positions", lambda a: a["positions"][:1], ValueError),
    (gsd.write_kv, write_arguments, "k", lambda a: a["k"].half(), TypeError),
    (gsd.write_kv, write_arguments, "k", lambda a: a["k"][..., :3], ValueError),
    (gsd.write_kv, write_arguments, "v", lambda a: a["v"][:, :, :2], ValueError),
    (gsd.write_kv, write_arguments, "backend", lambda a: "cuda", ValueError),
    (gsd.merge, merge_arguments, "frontier", int64("frontier"), TypeError),
    (gsd.merge, merge_arguments, "cand_tokens", lambda a: a["cand_tokens"][:, :, :2], ValueError),
    (gsd.merge, merge_arguments, "cand_log_probs", lambda a: a["cand_log_probs"].double(), TypeError),
    (gsd.merge, merge_arguments, "merge_context", lambda a: 9, ValueError),
    (gsd.merge, merge_arguments, "width", lambda a: 0, ValueError),
    (gsd.flatten, flatten_arguments, "max_rows", lambda a: 129, ValueError),
    (gsd.flatten, flatten_arguments, "max_path", lambda a: 8, ValueError),
]


@pytest.mark.parametrize(
    ("op", "arguments", "name", "bad", "error"), BAD_ARGUMENTS, ids=lambda x: getattr(x, "__name__", str(x))
)
def test_bad_arguments_are_named(op, arguments, name, bad, error):
    good = arguments()
    op(**arguments())
    with pytest.raises(error, match=name):
        op(**{**good, name: bad(good)})


def test_sample_rows_marks_nan():
    good = sampling_arguments()
    good["logits"][1, 2, 5] = math.nan
    for temperature in (0.0, 1.0):
        picked = gsd.sample_rows(**good, temperature=temperature)
        assert int(picked[1, 2]) == -1 and (picked.flatten()[:5] >= 0).all()
