"""csrc/algorithms/step.h, on the CPU or the GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Acceptance, Rows, TokenGraph
from .records import Chain, FedRows


def start_graph(graph: TokenGraph, tokens: Tensor, out_len: Tensor, kv_start: Tensor) -> Tensor:
    return torch.ops.gsd_kernels.start_graph(graph.tensors(), tokens, out_len, kv_start)


def feed_rows(
    token_ids: Tensor,
    depths: Tensor,
    slots: Tensor | None,
    kv_len: Tensor,
    kv_start: Tensor,
    node_depths: Tensor | None,
    first_slot: int,
    shift: int,
    vocab: int,
    dtype: torch.dtype,
) -> FedRows:
    return FedRows(
        *torch.ops.gsd_kernels.feed_rows(
            token_ids.contiguous(),
            depths.contiguous(),
            None if slots is None else slots.contiguous(),
            kv_len,
            kv_start,
            node_depths,
            first_slot,
            shift,
            vocab,
            dtype == torch.int64,
        )
    )


def feed_chain(tokens: Tensor, end: Tensor, cached: Tensor, width: int) -> Chain:
    return Chain(*torch.ops.gsd_kernels.feed_chain(tokens, end, cached, width))


def accepted_path(accepted: Acceptance, rows: Rows) -> tuple[Tensor, Tensor]:
    inputs = (*accepted.tensors(), rows.token_ids, rows.node_ids)
    return torch.ops.gsd_kernels.accepted_path(*(t.contiguous() for t in inputs))


def commit_text(
    new_tokens: Tensor,
    num_accepted: Tensor,
    next_token: Tensor,
    eos_ids: Tensor,
    tokens: Tensor,
    out_len: Tensor,
    remaining: Tensor,
    done: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    counts: Tensor,
    nodes: Tensor | None,
    graph: TokenGraph | None,
) -> None:
    drafted = (None,) * 4 if graph is None else (nodes, graph.parents, graph.num_nodes, graph.num_merges)
    read = (t.contiguous() for t in (new_tokens, num_accepted, next_token, eos_ids))
    text = (tokens, out_len, remaining, done, emitted, num_emitted)
    torch.ops.gsd_kernels.commit_text(*read, *text, counts, *drafted)
