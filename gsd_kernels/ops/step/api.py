"""Ops without a Triton kernel: ``backend="triton"`` takes what ``"auto"`` does."""

from __future__ import annotations

import torch
from torch import Tensor

from ...backends import implementations_of, resolve_without_triton
from ...checks import check_tensor
from ...graph import Acceptance, Rows, TokenGraph
from . import compiled, reference
from .records import NO_NODE, Chain, FedRows

__all__ = ["NO_NODE", "Chain", "FedRows", "accepted_path", "commit_text", "feed_chain", "feed_rows", "start_graph"]

INT32, INT64 = (torch.int32,), (torch.int64,)


START, FEED, CHAIN, PATH, TEXT = (
    implementations_of(name, cpu=compiled, cuda=compiled, reference=reference)
    for name in ("start_graph", "feed_rows", "feed_chain", "accepted_path", "commit_text")
)


def start_graph(
    graph: TokenGraph, tokens: Tensor, out_len: Tensor, kv_start: Tensor, *, backend: str = "auto"
) -> Tensor:
    """Make ``graph`` the root alone, in place: each text's last token, and the tokens before it as its context.

    Args:
        graph: of any content.
        tokens: int64 [B, S], the texts.
        out_len: int32 [B], tokens of each, padding included; at least 1.
        kv_start: int32 [B], left padding.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        int32 [B], the index in the text of the token after the root, padding excluded.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    batch, device = graph.token_ids.shape[0], graph.token_ids.device
    check_tensor("tokens", tokens, (batch, None), INT64, device)
    check_tensor("out_len", out_len, (batch,), INT32, device)
    check_tensor("kv_start", kv_start, (batch,), INT32, device)
    return resolve_without_triton(backend, device, START)(graph, tokens, out_len, kv_start)


def feed_rows(
    token_ids: Tensor,
    depths: Tensor,
    kv_len: Tensor,
    kv_start: Tensor,
    *,
    vocab: int,
    slots: Tensor | None = None,
    first_slot: int = 0,
    shift: int = 0,
    node_depths: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
    backend: str = "auto",
) -> FedRows:
    """Rows of a graph as a model reads them: ids, cache positions, text positions.

    Args:
        token_ids: int32 [B, R].
        depths: int32 [B, R]; after ``shift`` was subtracted, text position minus ``kv_len``.
        kv_len: int32 [B], committed positions of the model's cache.
        kv_start: int32 [B], left padding.
        vocab: size of the model's vocabulary; other ids become 0.
        slots: int32 [B, R], cache position minus ``kv_len``; ``None``: one after the other from ``first_slot`` on.
        first_slot: of the first row, without ``slots``.
        shift: what depths are larger by.
        node_depths: int32 [B, N], by slot; the rows' own are written, in place. Not with ``slots``.
        dtype: int64 or int32, of what the model reads.
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    (batch, rows), device = token_ids.shape, token_ids.device
    check_tensor("token_ids", token_ids, (None, None), INT32, device)
    check_tensor("depths", depths, (batch, rows), INT32, device)
    check_tensor("kv_len", kv_len, (batch,), INT32, device)
    check_tensor("kv_start", kv_start, (batch,), INT32, device)
    if slots is not None:
        check_tensor("slots", slots, (batch, rows), INT32, device)
    if node_depths is not None:
        check_tensor("node_depths", node_depths, (batch, None), INT32, device)
        if slots is not None or node_depths.shape[1] < first_slot + rows:
            raise ValueError(f"node_depths: expected no slots and at least {first_slot + rows} nodes")
    if dtype not in (torch.int64, torch.int32):
        raise TypeError(f"dtype: expected int64 or int32, got {dtype}")
    function = resolve_without_triton(backend, device, FEED)
    return function(token_ids, depths, slots, kv_len, kv_start, node_depths, first_slot, shift, vocab, dtype)


def feed_chain(tokens: Tensor, end: Tensor, cached: Tensor, width: int, *, backend: str = "auto") -> Chain:
    """The tokens before ``end`` that a cache lacks, up to ``width``, as rows of a chain; ``cached`` is advanced.

    Args:
        tokens: int64 [B, S], the texts.
        end: int32 [B], where the chains end.
        cached: int32 [B], tokens in the cache, at most ``end``.
        width: E, rows.
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type, shape or range.
    """
    device = tokens.device
    check_tensor("tokens", tokens, (None, None), INT64, device)
    check_tensor("end", end, (len(tokens),), INT32, device)
    check_tensor("cached", cached, (len(tokens),), INT32, device)
    if width < 1:
        raise ValueError(f"width: expected at least 1, got {width}")
    return resolve_without_triton(backend, device, CHAIN)(tokens, end, cached, width)


def accepted_path(accepted: Acceptance, rows: Rows, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """What a step emits, and the graph nodes that it went through.

    Args:
        accepted: a path of P rows.
        rows: that it is a path of.
        backend: see :mod:`gsd_kernels.backends`.

    Returns:
        int32 [B, P] each: the token emitted after each accepted row, 0 beyond them, and the node of each row,
        :data:`NO_NODE` beyond.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    batch, device = rows.token_ids.shape[0], rows.token_ids.device
    check_tensor("accepted_rows", accepted.accepted_rows, (batch, None), INT32, device)
    check_tensor("num_accepted", accepted.num_accepted, (batch,), INT32, device)
    check_tensor("next_token", accepted.next_token, (batch,), INT32, device)
    return resolve_without_triton(backend, device, PATH)(accepted, rows)


def commit_text(
    new_tokens: Tensor,
    accepted: Acceptance,
    *,
    eos_ids: Tensor,
    tokens: Tensor,
    out_len: Tensor,
    remaining: Tensor,
    done: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    counts: Tensor,
    nodes: Tensor | None = None,
    graph: TokenGraph | None = None,
    backend: str = "auto",
) -> None:
    """Append what a step emits to the texts, in place, and count.

    Args:
        new_tokens: int32 [B, P], emitted after each accepted row.
        accepted: how many of them count, and the last one.
        eos_ids: int32 [E], tokens that end a text.
        tokens: int64 [B, S], the texts. The caller keeps ``out_len + num_accepted ≤ S``.
        out_len: int32 [B], their lengths.
        remaining: int32 [B], tokens that may still be emitted.
        done: bool [B]; set where a text that gained tokens ended.
        emitted: int32 [B, P or more], gets ``new_tokens``.
        num_emitted: int32 [B], gets their number.
        counts: int64 [3]: nodes, merge edges, and merge edges on accepted paths are added.
        nodes: int32 [B, P], the node of each accepted row; with ``graph``, or neither.
        graph: what was drafted.
        backend: see :mod:`gsd_kernels.backends`.

    Raises:
        TypeError, ValueError: an argument has the wrong type or shape.
    """
    (batch, path), device = new_tokens.shape, new_tokens.device
    check_tensor("new_tokens", new_tokens, (None, None), INT32, device)
    check_tensor("num_accepted", accepted.num_accepted, (batch,), INT32, device)
    check_tensor("next_token", accepted.next_token, (batch,), INT32, device)
    check_tensor("eos_ids", eos_ids, (None,), INT32, device)
    check_tensor("tokens", tokens, (batch, None), INT64, device)
    check_tensor("out_len", out_len, (batch,), INT32, device)
    check_tensor("remaining", remaining, (batch,), INT32, device)
    check_tensor("done", done, (batch,), (torch.bool,), device)
    check_tensor("emitted", emitted, (batch, None), INT32, device)
    check_tensor("num_emitted", num_emitted, (batch,), INT32, device)
    check_tensor("counts", counts, (3,), INT64, device)
    if emitted.shape[1] < path:
        raise ValueError(f"emitted: expected at least {path} places, got {emitted.shape[1]}")
    if (nodes is None) != (graph is None):
        raise ValueError("nodes, graph: expected both or neither")
    if nodes is not None:
        check_tensor("nodes", nodes, (batch, path), INT32, device)
    function = resolve_without_triton(backend, device, TEXT)
    text = (tokens, out_len, remaining, done, emitted, num_emitted)
    function(new_tokens, accepted.num_accepted, accepted.next_token, eos_ids, *text, counts, nodes, graph)
