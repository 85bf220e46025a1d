"""Arguments that the ops take, for the tests of their refusals and of the reference."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from graphs import drafted
from ops.contracts.attention import small_case
from ops.contracts.graph import rows_case
from ops.contracts.inputs import op_inputs
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.graph import unpack_bits


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
    return small_case(0) | {"backend": "reference"}


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
