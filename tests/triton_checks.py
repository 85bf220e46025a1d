"""What a Triton op owes its reference, for any device: the interpreter's tests and the GPU's call the same checks.

Those of dag_attention take the backend, because the CUDA kernel owes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from graphs import candidates, drafted, tails
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.dag_attention.reference import visibility
from gsd_kernels.ops.sampling.philox import gumbel_noise
from gsd_kernels.ops.sampling.reference import warp

NAN = float("nan")


def assert_same(got: Any, expected: Any) -> None:
    """Equal dataclasses of tensors: dtype, shape and every bit."""
    for f in fields(expected):
        a, b = getattr(got, f.name), getattr(expected, f.name)
        assert a.dtype == b.dtype and a.shape == b.shape, f.name
        bits = torch.int32 if a.dtype == torch.float32 else a.dtype
        assert torch.equal(a.view(bits), b.view(bits)), f"{f.name}: {a} instead of {b}"


# ---------------------------------------------------------------- dag_attention


@dataclass(frozen=True)
class Attention:
    """One attention problem; ragged in every length, NaN wherever nothing may be read."""

    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    value_dim: int | None = None
    group: int = 1
    kv_heads: int = 2
    rows: int = 9
    nodes: int = 40
    capacity: int = 311
    prefixes: tuple[int, ...] = (130, 233)
    paddings: tuple[int, ...] = (3, 70)
    softcap: float | None = None
    window: int | None = None
    positions_first: bool = False  # caches stored [B, S, H, D]
    density: float = 0.4
    seed: int = 0

    def build(self, device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        gen = torch.Generator().manual_seed(self.seed)
        batch, value_dim = len(self.prefixes), self.value_dim or self.head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen).to(self.dtype)

        def cache(dim: int) -> Tensor:
            if self.positions_first:
                return normal(batch, self.capacity, self.kv_heads, dim).transpose(1, 2)
            return normal(batch, self.kv_heads, self.capacity, dim)

        tensors = {
            "q": normal(batch, self.kv_heads * self.group, self.rows, self.head_dim),
            "k": cache(self.head_dim),
            "v": cache(value_dim),
            "kv_len": torch.tensor(self.prefixes, dtype=torch.int32),
            "kv_start": torch.tensor(self.paddings, dtype=torch.int32),
            "num_nodes": torch.tensor([max(0, self.nodes - 7 * b) for b in range(batch)], dtype=torch.int32),
            "ancestor_mask": pack_bits(torch.rand(batch, self.rows, self.nodes, generator=gen) < self.density),
        }
        options: dict[str, Any] = {"softcap": self.softcap}
        if self.window is not None:
            depths = torch.randint(0, 12, (2, batch, max(self.rows, self.nodes)), generator=gen, dtype=torch.int32)
            tensors["row_depths"] = depths[0, :, : self.rows].contiguous()
            tensors["node_depths"] = depths[1, :, : self.nodes].contiguous()
            options["sliding_window"] = self.window
        for b in range(batch):  # positions that no row sees
            unseen = ~self.visible(tensors, self.capacity)[b].any(0)
            tensors["k"][b, :, unseen] = NAN
            tensors["v"][b, :, unseen] = NAN
        return {name: t.to(device) for name, t in tensors.items()}, options

    def visible(self, tensors: dict[str, Tensor], capacity: int) -> Tensor:
        return visibility(
            tensors["ancestor_mask"],
            tensors["kv_len"],
            tensors["kv_start"],
            tensors["num_nodes"],
            tensors.get("row_depths"),
            tensors.get("node_depths"),
            self.window,
            capacity,
        )


def check_attention(case: Attention, device: str, backend: str = "triton") -> None:
    """Error against float64 at most twice that of plain PyTorch in the same dtype; the log-sum-exp; empty rows."""
    tensors, options = case.build(device)
    out, lse = gsd.dag_attention(**tensors, **options, return_lse=True, backend=backend)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    exact, exact_lse = gsd.dag_attention(**wide, **options, return_lse=True, backend="reference")
    plain = [_plain_attention(case, tensors, torch.matmul)]
    if device == "cpu" and case.dtype == torch.float32:
        # The interpreter multiplies with numpy, which sums 256 products in one chain: twice the error of torch's CPU
        # product, in plain PyTorch's formula just as in the kernel.
        plain.append(_plain_attention(case, tensors, lambda a, b: torch.from_numpy(np.matmul(a.numpy(), b.numpy()))))
    empty = exact_lse == float("-inf")
    assert out.dtype == case.dtype and torch.equal(lse == float("-inf"), empty)
    assert not empty.any() or out[empty].abs().max() == 0
    error = (out.double() - exact)[~empty].norm()  # one wrong element would stand out: the norms are about 1e-5
    allowed = max((p.double() - exact)[~empty].norm() for p in plain)
    assert error <= 2 * allowed, f"error {error:.2e}, plain PyTorch {allowed:.2e}"
    assert (lse.double() - exact_lse)[~empty].abs().max() < (1e-5 if case.dtype == torch.float32 else 1e-2)


def _plain_attention(case: Attention, tensors: dict[str, Tensor], product: Callable[..., Tensor]) -> Tensor:
    """scaled_dot_product_attention, or its formula where that cannot be had, in the case's own dtype."""
    k, v = (torch.nan_to_num(tensors[n]).repeat_interleave(case.group, 1) for n in "kv")
    mask = case.visible(tensors, case.capacity)[:, None]
    if case.softcap is None and product is torch.matmul:
        return torch.nn.functional.scaled_dot_product_attention(tensors["q"], k, v, attn_mask=mask)
    scores = product(tensors["q"], k.mT.contiguous()) * case.head_dim**-0.5
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    return product(scores.masked_fill(~mask, float("-inf")).softmax(-1), v)


def check_row_invariance(case: Attention, device: str, backend: str = "triton") -> None:
    """Row 1 keeps every bit when all other rows' queries, masks and own cache slots change, even to NaN."""
    tensors, options = case.build(device)
    row = 1
    before = gsd.dag_attention(**tensors, **options, backend=backend)[:, :, row]
    seen = case.visible(tensors, case.capacity)[:, row]  # [B, S]
    changed = {n: t.clone() for n, t in tensors.items()}
    others = torch.arange(case.rows) != row
    changed["q"][:, :, others] = NAN
    changed["ancestor_mask"][:, others] = -1
    for b, prefix in enumerate(case.prefixes):
        slots = ~seen[b]
        slots[:prefix] = False
        changed["k"][b, :, slots] = NAN
        changed["v"][b, :, slots] = NAN
    after = gsd.dag_attention(**changed, **options, backend=backend)[:, :, row]
    assert before.isfinite().all() and torch.equal(before, after)


# ---------------------------------------------------------------- merge and flatten


def check_graph(config: gsd.GraphConfig, style: str, vocab: int, seed: int, device: str, batch: int = 2) -> int:
    """Every level's graph and frontier, then the rows, bit for bit. Returns the merge edges drawn."""
    levels: dict[str, list[tuple[gsd.TokenGraph, gsd.Frontier]]] = {"reference": [], "triton": []}
    for backend, seen in levels.items():
        graph = drafted(
            config,
            batch=batch,
            vocab=vocab,
            style=style,
            seed=seed,
            backend=backend,
            device=device,
            on_level=lambda g, _level, _f, _t, _lp, nxt, seen=seen: seen.append((g.clone(), nxt)),
        )
    for (graph_a, next_a), (graph_b, next_b) in zip(levels["triton"], levels["reference"], strict=True):
        assert_same(graph_a, graph_b)
        assert_same(next_a, next_b)
    check_flatten(graph, config.max_rows, config.max_path)
    return int(graph.num_merges.sum())


def check_merge_into_arbitrary_graph(seed: int, merge_context: int, device: str) -> None:
    """Many nodes of one token whose contexts agree to all lengths, tied scores: what drafting reaches rarely."""
    gen = torch.Generator().manual_seed(seed)
    config = gsd.GraphConfig(depth=4, width=6, branch=4)
    graph = gsd.TokenGraph.empty(2, config, "cpu")
    batch = graph.token_ids.shape[0]
    graph.reset(torch.tensor([1, 0], dtype=torch.int32), tails(batch, 2, gen))
    count = 45

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, (batch, *shape), generator=gen, dtype=torch.int32)

    graph.token_ids[:, :count] = integers(2, count)
    lengths = integers(12, count, 1)
    contexts = torch.where(torch.arange(MAX_CONTEXT) < lengths, integers(2, count, MAX_CONTEXT), -1)
    graph.contexts[:, :count] = contexts.int()
    graph.scores[:, :count] = -(integers(6, count) / 2)
    graph.parents[:, 1:count] = torch.minimum(integers(count, count - 1), torch.arange(count - 1)).int()
    graph.depths[:, :count] = integers(5, count)
    graph.expanded[:, :count] = integers(2, count).bool()
    graph.num_nodes[:] = torch.tensor([count, count // 2])
    graph = gsd.TokenGraph(*(t.to(device) for t in graph.tensors()))
    frontier = torch.stack([torch.randperm(count // 2, generator=gen)[:6] for _ in range(batch)]).int()
    frontier[:, 4] = -1
    tokens, log_probs = candidates("ties", 4, (batch, 6, config.branch), gen)
    level = (frontier.to(device), tokens.to(device), log_probs.to(device))
    rules = {"level": 2, "width": 6, "merge_context": merge_context, "log_min_prob": -3.0}
    expected = graph.clone()
    expected_next = gsd.merge(expected, *level, **rules, backend="reference")
    got_next = gsd.merge(graph, *level, **rules, backend="triton")
    assert_same(graph, expected)
    assert_same(got_next, expected_next)


def check_flatten(graph: gsd.TokenGraph, max_rows: int, max_path: int) -> None:
    expected = gsd.flatten(graph, max_rows, max_path, backend="reference")
    assert_same(gsd.flatten(graph, max_rows, max_path, backend="triton"), expected)


# ---------------------------------------------------------------- sampling


def check_sampling(
    shape: tuple[int, int, int],
    device: str,
    dtype: torch.dtype = torch.float32,
    spread: float = 3.0,
    branch: int = 4,
    seed: int = 0,
    **warpers: Any,
) -> int:
    """Tokens equal except where scores tie within 1e-4; log-probabilities within 1e-5. Returns the tied differences."""
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(shape, generator=gen) * spread).to(dtype).to(device)
    positions = torch.randint(0, 5000, shape[:2], generator=gen, dtype=torch.int32).to(device)
    warpers = {n: w.to(device) if isinstance(w, Tensor) else w for n, w in warpers.items()}
    keys = {
        "seed": torch.tensor(-0x123456789ABCDEF, device=device),  # both words of the key in use
        "sequence_ids": torch.arange(shape[0], dtype=torch.int32, device=device) + 3,
    }
    scores = _scores(logits, positions, **keys, **warpers)
    expected = gsd.sample_rows(logits, positions, **keys, **warpers, backend="reference")
    got = gsd.sample_rows(logits, positions, **keys, **warpers, backend="triton")
    assert got.dtype == torch.int32
    flips = _check_ties(got[..., None], expected[..., None], scores)
    expected, expected_lp = gsd.draft_candidates(
        logits, positions, branch=branch, **keys, **warpers, backend="reference"
    )
    got, got_lp = gsd.draft_candidates(logits, positions, branch=branch, **keys, **warpers, backend="triton")
    real = expected_lp > float("-inf")
    assert torch.equal(got_lp > float("-inf"), real)
    assert (got_lp - expected_lp)[real].abs().max() < 1e-5 and (got_lp <= 0).all()
    return flips + _check_ties(got.masked_fill(~real, 0), expected.masked_fill(~real, 0), scores)


def _scores(logits: Tensor, positions: Tensor, seed: Tensor, sequence_ids: Tensor, **warpers: Any) -> Tensor:
    temperature = torch.as_tensor(warpers.get("temperature", 0.0), device=logits.device).view(-1, 1, 1)
    cuts = [warpers.get(n, off) for n, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))]
    warped = warp(logits.float(), warpers.get("temperature", 0.0), *cuts)
    noise = gumbel_noise(seed, positions, sequence_ids[:, None], logits.shape[-1])
    return torch.where(temperature > 0, warped + noise, logits.float())


def _check_ties(got: Tensor, expected: Tensor, scores: Tensor) -> int:
    a, b = (scores.gather(-1, t.clamp(min=0).long()) for t in (got, expected))
    assert torch.where(got == expected, 0.0, (a - b).abs()).max() <= 1e-4
    return int((got != expected).sum())


# ---------------------------------------------------------------- verify, commit_kv and write_kv


def check_verify(config: gsd.GraphConfig, style: str, seed: int, device: str) -> Tensor:
    """Samples that follow the rows most of the time; with and without EOS, budgets and finished sequences."""
    gen = torch.Generator().manual_seed(seed)
    graph = drafted(config, vocab=5, style=style, seed=seed, batch=4)
    rows = gsd.flatten(graph, config.max_rows, config.max_path, backend="reference")
    batch, count = rows.token_ids.shape
    sampled = torch.randint(0, 5, (batch, count), generator=gen, dtype=torch.int32)
    follow = torch.rand(batch, count, generator=gen) < 0.8
    for b in range(batch):
        for i in range(count - 1, 0, -1):
            if rows.parent_rows[b, i] >= 0 and follow[b, i]:
                sampled[b, rows.parent_rows[b, i]] = rows.token_ids[b, i]
    options = {
        "eos_ids": torch.tensor([[], [1], [4, 2]][seed % 3], dtype=torch.int32),
        "remaining": torch.tensor([50, 1, 3, 50], dtype=torch.int32),
        "done": torch.tensor([False, False, False, seed % 2 == 0]),
    }
    rows = type(rows)(*(t.to(device) for t in rows.tensors()))
    options = {n: t.to(device) for n, t in options.items()}
    expected = gsd.verify(rows, sampled.to(device), **options, max_path=config.max_path, backend="reference")
    got = gsd.verify(rows, sampled.to(device), **options, max_path=config.max_path, backend="triton")
    assert_same(got, expected)
    return got.num_accepted


def check_commit(layout: str, dtype: torch.dtype, dim: int, device: str) -> None:
    """Any order of rows, finished sequences, stacked and separate layers; the whole cache compared, NaN included."""
    gen = torch.Generator().manual_seed(dim)
    layers, batch, heads, capacity = 3, 3, 2, 61

    def caches() -> list[Tensor]:
        if layout == "stacked":
            return list(torch.randn(layers, batch, heads, capacity, dim, generator=gen).to(dtype).to(device))
        each = [torch.randn(batch, capacity, heads, dim, generator=gen).to(dtype).to(device) for _ in range(layers)]
        return [x.transpose(1, 2) for x in each]

    k, v = caches(), caches()
    k[1][:, :, 40:] = NAN
    rows = torch.tensor([[0, 9, 2, 17, 4, -1], [3, -1, -1, -1, -1, -1], [-1] * 6], dtype=torch.int32, device=device)
    accepted = torch.tensor([5, 1, 0], dtype=torch.int32, device=device)
    kv_len = torch.tensor([11, 30, 43], dtype=torch.int32, device=device)
    expected_k, expected_v, expected_len = [x.clone() for x in k], [x.clone() for x in v], kv_len.clone()
    gsd.commit_kv(expected_k, expected_v, rows, accepted, expected_len, backend="reference")
    gsd.commit_kv(k, v, rows, accepted, kv_len, backend="triton")
    for got, expected in zip(k + v, expected_k + expected_v, strict=True):
        assert torch.equal(got.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(kv_len, expected_len)


def check_write(dtype: torch.dtype, dims: tuple[int, int], heads: int, rows: int, device: str) -> None:
    """Every bit of the caches, whatever they held; values that are not finite, the smallest and both zeros."""
    gen = torch.Generator().manual_seed(rows)
    batch, capacity = 3, rows + 5
    info = torch.finfo(dtype)
    rare = torch.tensor([NAN, -NAN, math.inf, -math.inf, info.max, info.min, info.smallest_normal, 0.0, -0.0])
    rare = torch.cat([rare.to(dtype), torch.tensor([info.tiny / 2, -info.tiny / 2], dtype=dtype)])

    def rows_of(dim: int, spare: int) -> Tensor:
        values = torch.randn(batch, rows, heads, dim + spare, generator=gen).to(dtype)
        picked = torch.randint(0, 2 * len(rare), values.shape, generator=gen)
        return torch.where(picked < len(rare), rare[picked % len(rare)], values).to(device)

    k, v = rows_of(dims[0], 3)[..., 3:].transpose(1, 2), rows_of(dims[1], 0).transpose(1, 2)
    v = v.mT.contiguous().mT if rows % 2 else v  # dimensions need not be next to each other
    order = torch.stack([torch.randperm(capacity, generator=gen)[:rows] for _ in range(batch)])
    positions = order.T.contiguous().T.to(device)
    caches = {
        "k_cache": torch.full((batch, heads, capacity, dims[0]), NAN, dtype=dtype, device=device),
        "v_cache": torch.full((batch, capacity, heads, dims[1] + 2), 7.0, dtype=dtype, device=device).transpose(1, 2),
    }
    expected = {n: c.clone() for n, c in caches.items()}
    gsd.write_kv(
        *(c[..., :d] for c, d in zip(expected.values(), dims, strict=True)), k, v, positions, backend="reference"
    )
    gsd.write_kv(*(c[..., :d] for c, d in zip(caches.values(), dims, strict=True)), k, v, positions, backend="triton")
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for name, cache in caches.items():
        assert torch.equal(cache.view(bits), expected[name].view(bits)), name


# ---------------------------------------------------------------- the case lists

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16)
ATTENTION = {
    **{
        f"{str(t).removeprefix('torch.')}-D{d}": Attention(dtype=t, head_dim=d, group=g, seed=d)
        for t in FLOAT_TYPES
        for d, g in ((64, 4), (80, 1), (96, 8), (128, 4), (256, 1))
    },
    "one-row": Attention(rows=1, nodes=1, density=1.0),
    "odd-63": Attention(rows=5, nodes=63, group=4, dtype=torch.float16, kv_heads=1),
    "odd-111-rows": Attention(rows=111, nodes=111, group=1, kv_heads=1, prefixes=(64,), paddings=(0,)),
    "1000-nodes": Attention(rows=3, nodes=1000, kv_heads=1, capacity=1100, prefixes=(97,), paddings=(1,), group=8),
    "no-nodes-seen": Attention(density=0.0),
    "empty-prefix": Attention(prefixes=(0, 70), paddings=(0, 70), density=0.1, rows=13),
    "values-narrower": Attention(head_dim=96, value_dim=64),
    "positions-first": Attention(positions_first=True, group=4),
    "window": Attention(window=31, group=4),
    "window-shorter-than-depths": Attention(window=5, rows=16),
    "softcap": Attention(softcap=20.0, group=4),
    "softcap-small-scores": Attention(softcap=500.0),
    "window-softcap-bf16": Attention(window=50, softcap=5.0, dtype=torch.bfloat16, group=8, rows=5),
    "splits": Attention(capacity=3000, prefixes=(2900,), paddings=(0,), kv_heads=1, rows=3, head_dim=80),
}
INVARIANCE = {
    "float32": Attention(rows=20, nodes=40),
    "bfloat16": Attention(rows=20, nodes=40, dtype=torch.bfloat16, group=4),
    "window": Attention(rows=20, nodes=40, window=20),
}
GRAPHS = {
    "graph": (gsd.GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=1), 6),
    "context-0": (gsd.GraphConfig(depth=4, width=5, branch=3, max_rows=33, merge_context=0), 6),
    "context-3": (gsd.GraphConfig(depth=5, width=3, branch=2, max_rows=17, merge_context=3), 2),
    "tree": (gsd.GraphConfig(depth=3, width=7, branch=5, max_rows=63, merge_context=-1), 9),
    "chain": (gsd.GraphConfig.preset("chain", depth=7), 3),
    "pruned": (gsd.GraphConfig(depth=4, width=6, branch=4, max_rows=40, sibling_ratio=0.3, min_prob=0.02), 12),
    "one-level": (gsd.GraphConfig(depth=1, width=1, branch=1, max_rows=2), 3),
    "rows-left-over": (gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=100), 4),
    "shallow-path": (gsd.GraphConfig(depth=5, width=4, branch=2, max_rows=30, max_path=3), 4),
}
EACH = {
    "temperature": torch.tensor([0.0, 0.5, 1.0]),
    "top_k": torch.tensor([3, 0, 7]),
    "top_p": torch.tensor([0.9, 0.5, 1.0]),
    "min_p": torch.tensor([0.0, 0.05, 0.01]),
}
SAMPLING: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "greedy": ((2, 3, 1000), {}),
    "greedy-bf16-ties": ((2, 2, 4099), {"dtype": torch.bfloat16, "spread": 1.0}),
    "temperature": ((2, 3, 1003), {"temperature": 0.8}),
    "top-k": ((2, 3, 1003), {"temperature": 0.8, "top_k": 17}),
    "top-k-1": ((2, 3, 63), {"temperature": 2.0, "top_k": 1}),
    "top-p": ((2, 2, 5003), {"temperature": 0.8, "top_p": 0.7}),
    "top-p-0": ((2, 2, 111), {"temperature": 0.8, "top_p": 0.0}),
    "min-p": ((2, 2, 5003), {"temperature": 1.2, "min_p": 0.05}),
    "all": ((2, 2, 9001), {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02, "dtype": torch.float16}),
    "each": ((3, 2, 4500), EACH),
    "flat-nucleus-streams": ((1, 2, 9001), {"temperature": 1.5, "top_p": 0.95, "spread": 0.5}),
    "top-k-streams": ((1, 1, 9001), {"temperature": 1.0, "top_k": 5000, "top_p": 0.9}),
    "fewer-tokens-than-branch": ((1, 2, 3), {"temperature": 1.0, "branch": 5}),
    "branch-32": ((1, 2, 5000), {"temperature": 1.0, "branch": 32}),
    "vocabulary-256k": ((1, 1, 262144), {"temperature": 1.0, "top_k": 40}),
}
WRITES = {
    "float32-D80": (torch.float32, (80, 80), 2, 9),
    "float16-one-row": (torch.float16, (64, 64), 8, 1),
    "bfloat16-D128": (torch.bfloat16, (128, 128), 4, 33),
    "float64-odd": (torch.float64, (7, 1), 3, 5),
    "values-narrower": (torch.bfloat16, (96, 24), 5, 6),
    "values-wider": (torch.float16, (17, 200), 1, 10),
    "one-head-per-program": (torch.float32, (1500, 3), 2, 2),
}
