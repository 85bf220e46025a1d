"""Ops of a few elements, without a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph import TokenGraph
from ..table import Op
from . import reference
from .records import NO_NODE, Chain, FedRows

__all__ = ["NO_NODE", "Chain", "FedRows", "accepted_path", "commit_text", "feed_chain", "feed_rows", "start_graph"]


def drafted(nodes: Tensor | None, graph: TokenGraph | None) -> tuple[Tensor | None, ...]:
    """The parts of a graph that commit_text reads: all or nothing."""
    return (nodes, None, None, None) if graph is None else (nodes, graph.parents, graph.num_nodes, graph.num_merges)


def fed(
    token_ids: Tensor,
    depths: Tensor,
    kv_len: Tensor,
    kv_start: Tensor,
    vocab: int,
    slots: Tensor | None,
    first_slot: int,
    shift: int,
    node_depths: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor | int | None, ...]:
    """The operator's order of feed_rows."""
    lengths = slots, kv_len, kv_start, node_depths
    return (token_ids, depths, *lengths, first_slot, shift, vocab, dtype == torch.int64)


start_graph = Op(
    "start_graph(Tensor(a!)[] graph, Tensor tokens, Tensor out_len, Tensor kv_start) -> Tensor",
    reference.start_graph,
    ranked=("cpu", "cuda"),
    lacks=("triton",),
    flat=lambda graph, *text: (graph.tensors(), *text),
)
feed_rows = Op(
    "feed_rows(Tensor token_ids, Tensor depths, Tensor? slots, Tensor kv_len, Tensor kv_start, "
    "Tensor(a!)? node_depths, int first_slot, int shift, int vocab, bool wide) -> (Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
    reference.feed_rows,
    ranked=("cpu", "cuda"),
    lacks=("triton",),
    flat=fed,
    result=FedRows,
)
feed_chain = Op(
    "feed_chain(Tensor tokens, Tensor end, Tensor(a!) cached, int width) -> (Tensor, Tensor, Tensor, Tensor, Tensor, "
    "Tensor)",
    reference.feed_chain,
    ranked=("cpu", "cuda"),
    lacks=("triton",),
    result=Chain,
)
accepted_path = Op(
    "accepted_path(Tensor accepted_rows, Tensor num_accepted, Tensor next_token, Tensor token_ids, "
    "Tensor node_ids) -> (Tensor, Tensor)",
    reference.accepted_path,
    ranked=("cpu", "cuda"),
    lacks=("triton",),
    flat=lambda accepted, rows: (*accepted.tensors(), rows.token_ids, rows.node_ids),
)
commit_text = Op(
    "commit_text(Tensor new_tokens, Tensor num_accepted, Tensor next_token, Tensor eos_ids, Tensor(a!) tokens, "
    "Tensor(b!) out_len, Tensor(c!) remaining, Tensor(d!) done, Tensor(e!) emitted, Tensor(f!) num_emitted, "
    "Tensor(g!) counts, Tensor? nodes, Tensor? parents, Tensor? num_nodes, Tensor? num_merges) -> ()",
    reference.commit_text,
    ranked=("cpu", "cuda"),
    lacks=("triton",),
    flat=lambda new, accepted, *text: (
        *(new, accepted.num_accepted, accepted.next_token, *text[:-2]),
        *drafted(*text[-2:]),
    ),
)
