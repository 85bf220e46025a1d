"""Ops of a few elements, without a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ...graph import TokenGraph
from ..table import GRAPH, small_op
from . import reference
from .records import Chain, FedRows


def drafted(nodes: Tensor | None, graph: TokenGraph | None) -> tuple[Tensor | None, ...]:
    """Take of a graph all that commit_text reads, or nothing."""
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


start_graph = small_op(
    "start_graph",
    f"{GRAPH} tokens:int64[B,S] out_len[B] kv_start[B] -> [B]",
    reference.start_graph,
    flat=lambda graph, *text: (graph.tensors(), *text),
)
feed_rows = small_op(
    "feed_rows",
    "token_ids[B,R] depths[B,R] slots?[B,R] kv_len[B] kv_start[B] "
    "node_depths?![B,N] first_slot:int=f shift:int=s vocab:int=v wide:bool=w "
    "-> int64[B,R] int64[B,R] int64[B,R] [B,R] [B,R]",
    reference.feed_rows,
    flat=fed,
    result=FedRows,
    static=False,  # 32-bit integers where they are not asked for wide
)
feed_chain = small_op(
    "feed_chain",
    "tokens:int64[B,S] end[B] cached![B] width:int=E -> [B] [B,E] [B,E] [B,E] [B,E,E/32] [B,E]",
    reference.feed_chain,
    result=Chain,
)
accepted_path = small_op(
    "accepted_path",
    "accepted_rows[B,P] num_accepted[B] next_token[B] token_ids[B,R] node_ids[B,R] -> [B,P] [B,P]",
    reference.accepted_path,
    flat=lambda accepted, rows: (*accepted.tensors(), rows.token_ids, rows.node_ids),
)
commit_text = small_op(
    "commit_text",
    "new_tokens[B,P] num_accepted[B] next_token[B] eos_ids[E] tokens!:int64[B,S] "
    "out_len![B] remaining![B] done!:bool[B] emitted![B,M] num_emitted![B] counts!:int64[3] "
    "nodes?[B,P] parents?[B,N] num_nodes?[B] num_merges?[B]",
    reference.commit_text,
    flat=lambda new, accepted, *text: (
        *(new, accepted.num_accepted, accepted.next_token, *text[:-2]),
        *drafted(*text[-2:]),
    ),
)
