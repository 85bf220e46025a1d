"""The Triton ops on a GPU beyond their contracts: in CUDA graphs."""

from __future__ import annotations

import os

import pytest
import torch
from graphs import candidates, tails
from ops.contracts.attention import Attention

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
