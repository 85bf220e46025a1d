"""Arguments that the ops take, for the tests of their refusals and of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from graphs import drafted
from ops.contracts.graph import rows_case
from ops.contracts.inputs import op_inputs
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.graph import pack_bits, unpack_bits


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
    held = torch.randint(1, nodes + 1, (batch, 1, 1), generator=gen)  # nodes of each graph
    bits = (torch.rand(batch, rows, nodes, generator=gen) < 0.4) & (torch.arange(nodes) < held)
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


def dense_mask(case: dict[str, Tensor], window: int | None, chunk: int | None = None) -> Tensor:
    """bool [B, R, S], one position at a time."""
    batch, rows = case["ancestor_mask"].shape[:2]
    capacity = case["k"].shape[2]
    bits = unpack_bits(case["ancestor_mask"], case["ancestor_mask"].shape[2] * 32).tolist()
    starts, lengths, row_depths, node_depths = (  # lists: one element of a tensor takes a microsecond
        case[name].tolist() for name in ("kv_start", "kv_len", "row_depths", "node_depths")
    )
    mask = [[[False] * capacity for _ in range(rows)] for _ in range(batch)]

    def near(here: int, there: int, start: int) -> bool:
        if chunk is not None and (there - start) // chunk < (here - start) // chunk:
            return False
        return window is None or here - there < window

    for b, length in enumerate(lengths):
        for r in range(rows):
            here = length + row_depths[b][r]
            for p in range(starts[b], length):
                mask[b][r][p] = near(here, p, starts[b])
            for j, depth in enumerate(node_depths[b]):
                mask[b][r][length + j] = bits[b][r][j] and near(here, length + depth, starts[b])
    return torch.tensor(mask)


def named_inputs(op: Callable[..., Any], count: int) -> dict[str, Any]:
    """The first of an op's inputs by name, for the reference."""
    return dict(zip(signature(op).parameters, op_inputs()[op.__name__][:count], strict=False)) | {
        "backend": "reference"
    }


def attention_arguments():
    return {name: x for name, x in attention_case(0).items()} | {"backend": "reference"}


def verify_arguments():
    rows, config, picked, more = rows_case(4)
    return {
        "rows": rows,
        "sampled": picked,
        **more,
        "done": torch.zeros(4, dtype=torch.bool),
        "max_path": config.max_path,
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
