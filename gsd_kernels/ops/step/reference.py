from __future__ import annotations

import torch
from torch import Tensor

from ...graph import Acceptance, Rows, TokenGraph, pack_bits
from .records import NO_NODE, Chain, FedRows


def start_graph(graph: TokenGraph, tokens: Tensor, out_len: Tensor, kv_start: Tensor) -> Tensor:
    """Make ``graph`` the root alone, in place: each text's last token, and the tokens before it as its context.

    Args:
        graph: of any content.
        tokens: int64 [B, S], the texts.
        out_len: int32 [B], tokens of each, padding included; at least 1.
        kv_start: int32 [B], left padding.

    Returns:
        int32 [B], the index in the text of the token after the root, padding excluded.
    """
    root = out_len[:, None].long() - 1  # [B, 1]
    before = root - 1 - torch.arange(graph.contexts.shape[2], device=tokens.device)  # [B, C]
    tail = torch.where(before >= kv_start[:, None], tokens.gather(1, before.clamp(min=0)), -1)
    graph.reset(tokens.gather(1, root).squeeze(1), tail)
    return out_len - kv_start


def feed_rows(
    token_ids: Tensor,
    depths: Tensor,
    kv_len: Tensor,
    kv_start: Tensor,
    vocab: int,
    slots: Tensor | None = None,
    first_slot: int = 0,
    shift: int = 0,
    node_depths: Tensor | None = None,
    dtype: torch.dtype = torch.int64,
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
    """
    rows = token_ids.shape[1]
    if slots is None:
        slots = first_slot + torch.arange(rows, device=token_ids.device).expand_as(token_ids)
    depths = depths - shift
    positions = (kv_len - kv_start)[:, None] + depths
    if node_depths is not None:
        node_depths[:, first_slot : first_slot + rows] = depths
    ids = torch.where((token_ids >= 0) & (token_ids < vocab), token_ids, 0)
    return FedRows(ids.to(dtype), (kv_len[:, None] + slots).to(dtype), positions.to(dtype), depths, positions + 1)


def feed_chain(tokens: Tensor, end: Tensor, cached: Tensor, width: int) -> Chain:
    """The tokens before ``end`` that a cache lacks, up to ``width``, as rows of a chain; ``cached`` is advanced.

    Args:
        tokens: int64 [B, S], the texts.
        end: int32 [B], where the chains end.
        cached: int32 [B], tokens in the cache, at most ``end``.
        width: E, rows.
    """
    base = cached.clone()
    count = (end - base).clamp(max=width)  # [B]
    row = torch.arange(width, device=tokens.device)
    link = row - (width - count[:, None])  # [B, E]; place in the chain, negative for padding
    real = link >= 0
    slots = torch.where(real, link, count[:, None] + row)
    before = row <= torch.where(real, link, -1)[:, :, None]  # [B, E, E]
    mask = pack_bits(before | (row == slots[:, :, None]))  # padding sees itself alone, and nothing sees it
    depths = link.clamp(min=0).to(torch.int32)
    read = tokens.gather(1, (base[:, None] + depths).long())
    cached.add_(count)
    node_depths = row.to(torch.int32).repeat(len(tokens), 1)
    return Chain(base, torch.where(real, read, 0).to(torch.int32), slots.to(torch.int32), depths, mask, node_depths)


def accepted_path(accepted: Acceptance, rows: Rows) -> tuple[Tensor, Tensor]:
    """Say what a step emits, and the graph nodes that it went through.

    Args:
        accepted: a path of P rows.
        rows: that it is a path of.

    Returns:
        int32 [B, P] each: the token emitted after each accepted row, 0 beyond them, and the node of each row,
        :data:`NO_NODE` beyond.
    """
    path, count = accepted.accepted_rows, accepted.num_accepted[:, None]  # [B, P], [B, 1]
    after = torch.nn.functional.pad(path[:, 1:], (0, 1), value=-1)
    drafted = rows.token_ids.gather(1, after.clamp(min=0).long())
    place = torch.arange(path.shape[1], device=path.device)
    tokens = torch.where(place == count - 1, accepted.next_token[:, None], drafted)
    nodes = rows.node_ids.gather(1, path.clamp(min=0).long())
    return torch.where(place < count, tokens, 0), torch.where(path >= 0, nodes, NO_NODE)


def commit_text(
    new_tokens: Tensor,
    accepted: Acceptance,
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
    """
    count, place = accepted.num_accepted, torch.arange(new_tokens.shape[1], device=tokens.device)
    emitted[:, : new_tokens.shape[1]] = new_tokens
    num_emitted.copy_(count)
    at = (out_len[:, None] + place).long().clamp(max=tokens.shape[1] - 1)
    new = place < count[:, None]
    # Places beyond what is new keep what they hold: added, as two places may have been clamped to one.
    tokens.scatter_add_(1, at, torch.where(new, new_tokens.long() - tokens.gather(1, at), 0))
    out_len.add_(count)
    remaining.sub_(count)
    ended = (accepted.next_token[:, None] == eos_ids).any(1) | (remaining <= 0)
    done.logical_or_(ended & (count > 0))
    if nodes is None or graph is None:
        return
    primary = graph.parents.gather(1, nodes[:, 1:].clamp(min=0).long())
    merged = ((nodes[:, 1:] >= 0) & (primary != nodes[:, :-1])).sum()
    counts.add_(torch.stack([graph.num_nodes.sum(), graph.num_merges.sum(), merged]))
