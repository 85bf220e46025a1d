"""The Triton ops on a GPU beyond their contracts: CUDA graphs, and compute time against the bytes moved.

Run with ``python -m pytest -m gpu tests/backends/test_triton_on_gpu.py -s``; the last test prints the table of times.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from graphs import candidates, drafted, tails
from ops.contracts.attention import Attention
from ops.contracts.ngram import Memory, remembered, two_sources

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason

DEVICE = "cuda"
REASON = "no CUDA GPU" if not torch.cuda.is_available() else unavailable_reason("triton", torch.device(DEVICE))
pytestmark = [
    pytest.mark.quick,
    pytest.mark.gpu,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET is set"),
]


def test_one_captured_graph_serves_every_length():
    """Capture a step's ops once; replay with other lengths, tokens and graphs, and compare with fresh calls."""
    config = gsd.GraphConfig(depth=2, width=4, branch=3, max_rows=16)
    case = Attention(rows=16, nodes=16, group=4, dtype=torch.float16)
    tensors, _ = case.build(DEVICE)
    tensors = {n: t.nan_to_num(0.5) if t.is_floating_point() else t for n, t in tensors.items()}
    gen = torch.Generator().manual_seed(0)
    graph = gsd.TokenGraph.empty(2, config, DEVICE)
    root, tail = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE), tails(2, 5, gen).to(DEVICE)
    tokens, log_probs = (t.to(DEVICE) for t in candidates("random", 5, (2, 1, 3), gen))
    logits = torch.randn(2, 16, 5000, device=DEVICE)
    positions = torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    keys = {"seed": torch.tensor(1, device=DEVICE), "sequence_ids": torch.arange(2, dtype=torch.int32, device=DEVICE)}
    eos, left = torch.tensor([3], dtype=torch.int32, device=DEVICE), torch.full_like(root, 99)
    done = torch.zeros(2, dtype=torch.bool, device=DEVICE)

    def step() -> tuple[torch.Tensor, ...]:
        graph.reset(root, tail)
        gsd.merge(graph, graph.root_frontier(), tokens, log_probs, level=0, width=4, merge_context=1, backend="triton")
        rows = gsd.flatten(graph, 16, config.max_path, backend="triton")
        out = gsd.dag_attention(**tensors, backend="triton")
        picked = gsd.sample_rows(logits, positions, **keys, temperature=0.8, top_p=0.9, backend="triton")
        budget = {"eos_ids": eos, "remaining": left, "done": done, "max_path": config.max_path}
        accepted = gsd.verify(rows, picked, **budget, backend="triton")
        return out, picked, *rows.tensors(), *accepted.tensors()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        static = step()
    for seed in range(4):
        torch.manual_seed(seed)
        tensors["kv_len"].copy_(torch.randint(80, 250, (2,)))
        tensors["q"].normal_()
        tokens.copy_(torch.randint(0, 9, tokens.shape).sort(-1).values + torch.arange(3))
        logits.normal_(std=2)
        positions.random_(0, 100)
        captured.replay()
        for got, expected in zip(static, step(), strict=True):
            assert torch.equal(got, expected)


def test_times_against_the_floor():
    """Prints median microseconds per op in a CUDA graph, the floor (bytes over copy bandwidth), and their ratio."""
    big = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    other = torch.empty_like(big)
    bandwidth = 2 * big.numel() / _microseconds(lambda: other.copy_(big))  # bytes per µs
    print(f"\n{torch.cuda.get_device_name()}: copy {bandwidth / 1e6:.2f} TB/s")
    for name, function, moved in _timed_calls():
        time_us = _microseconds(function)
        floor = moved / bandwidth
        print(f"{name:58} {time_us:8.1f} µs  floor {floor:8.1f} µs  {floor / time_us:5.0%}")
        assert time_us > 0


def _microseconds(function: Callable[[], Any], repeats: int = 20) -> float:
    """Median over replays of a captured graph, the L2 cache flushed before each."""
    for _ in range(3):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    flush = torch.empty(1 << 28, dtype=torch.uint8, device=DEVICE)
    times = []
    for _ in range(repeats):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1000 * start.elapsed_time(end))
        time.sleep(0.001)
    return sorted(times)[repeats // 2]


def _timed_calls() -> list[tuple[str, Callable[[], Any], int]]:
    calls: list[tuple[str, Callable[[], Any], int]] = []
    for heads, kv_heads, rows, prefix in ((32, 8, 32, 2048), (32, 8, 64, 8192), (32, 32, 64, 8192), (64, 8, 64, 8192)):
        base = Attention(dtype=torch.bfloat16, head_dim=128, kv_heads=kv_heads, group=heads // kv_heads)
        shape = {"rows": rows, "nodes": rows, "capacity": prefix + 512, "prefixes": (prefix,), "paddings": (0,)}
        tensors, _ = replace(base, **shape).build(DEVICE)
        moved = 2 * kv_heads * (prefix + rows) * 128 * 2 + 2 * tensors["q"].numel() * 2
        name = f"dag_attention {heads}/{kv_heads} heads D128 bf16 {rows} rows {prefix} prefix"
        calls.append((name, lambda t=tensors: gsd.dag_attention(**t, backend="triton"), moved))
    config = gsd.GraphConfig(depth=6, width=8, branch=4, max_rows=64)
    graph = drafted(config, batch=1, vocab=50, backend="triton", device=DEVICE)
    calls.append(("flatten 64 rows", lambda: gsd.flatten(graph, 64, 12, backend="triton"), graph.edge_targets.nbytes))
    gen = torch.Generator().manual_seed(0)
    tokens, log_probs = (t.to(DEVICE) for t in candidates("random", 50, (1, 8, 4), gen))
    frontier = torch.arange(8, dtype=torch.int32, device=DEVICE)[None]
    rules = {"level": 3, "width": 8, "merge_context": 1, "backend": "triton"}
    storage = graph.clone()

    def merge() -> None:
        storage.num_nodes.fill_(100)
        gsd.merge(storage, frontier, tokens, log_probs, **rules)

    calls.append(("merge 8×4 candidates into 100 nodes", merge, 100 * 60))
    for warpers in ({}, {"temperature": 0.7}, {"temperature": 0.7, "top_k": 50, "top_p": 0.9}):
        for rows in (8, 64):
            logits = torch.randn(1, rows, 128256, device=DEVICE, dtype=torch.bfloat16) * 3
            positions = torch.arange(rows, device=DEVICE, dtype=torch.int32)[None]
            keys = {"seed": torch.tensor(1, device=DEVICE), "sequence_ids": positions[:, :1].contiguous()[0]}

            def sample(
                logits: torch.Tensor = logits, positions: torch.Tensor = positions, options: Any = (keys, warpers)
            ) -> None:
                gsd.sample_rows(logits, positions, **options[0], **options[1], backend="triton")

            calls.append((f"sample_rows {rows} × 128256 bf16 {', '.join(warpers) or 'greedy'}", sample, logits.nbytes))
    caches = [list(torch.randn(32, 1, 8, 4096, 128, device=DEVICE, dtype=torch.bfloat16)) for _ in range(2)]
    accepted = torch.tensor([[0, 5, 9, 12, 20]], dtype=torch.int32, device=DEVICE)
    count, kv_len = (torch.tensor([n], dtype=torch.int32, device=DEVICE) for n in (5, 100))

    def commit() -> None:
        kv_len.fill_(100)
        gsd.commit_kv(*caches, accepted, count, kv_len, backend="triton")

    rows = [torch.randn(1, 64, 8, 128, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2) for _ in range(2)]
    places = torch.arange(100, 164, device=DEVICE)[None]

    def write() -> None:
        gsd.write_kv(caches[0][0], caches[1][0], *rows, places, backend="triton")

    case = Memory(capacity=1 << 15, ways=8, max_context=4, branch=4, vocab=50, rows=(64,), batch=1)
    table, entries, sources = case.empty(DEVICE), case.calls()[0], two_sources(0, 4, 4, rows=(1, 8))
    new, asked = [t.to(DEVICE) for t in entries], case.queries(8).to(DEVICE)
    mixing = [t.to(DEVICE) for t in sources]
    noisy = [t.to(DEVICE) for t in remembered(0, 4, rows=(1, 8))]
    keys = {"seed": torch.tensor(1, device=DEVICE), "sequence_ids": torch.zeros(1, dtype=torch.int32, device=DEVICE)}
    set_bytes = 8 * (8 + 4 * 4 + 4 * 4)
    for backend in ("triton", "cuda"):
        if unavailable_reason(backend, torch.device(DEVICE)) is not None:
            continue
        options = {"backend": backend}
        calls += [
            (f"ngram_insert 64 rows, {backend}", lambda o=options: gsd.ngram_insert(table, *new, **o), 512 * set_bytes),
            (f"ngram_lookup 8 rows, {backend}", lambda o=options: gsd.ngram_lookup(table, asked, **o), 8 * 4 * 8 * 8),
            (
                f"perturb_candidates 8 rows, {backend}",
                lambda o=keys | options: gsd.perturb_candidates(*noisy, **o),
                8 * 12 * 4,
            ),
            (f"mix_candidates 8 rows, {backend}", lambda o=options: gsd.mix_candidates(*mixing, **o), 8 * 12 * 8),
        ]
    calls.append(("write_kv 64 rows, 8 heads D128 bf16", write, 2 * 2 * rows[0].nbytes))
    calls.append(("commit_kv 32 layers × 5 rows, 8 heads D128 bf16", commit, 2 * 2 * 32 * 4 * 8 * 128 * 2))
    return calls
