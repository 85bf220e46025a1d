"""The formulas in plain loops: over sequences, rows and the tokens on a row's path."""

from __future__ import annotations

import torch
from torch import Tensor

from .window import StateWindow


def state_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor | None,
    parents: Tensor,
    depths: Tensor,
    lengths: Tensor,
    window: StateWindow,
) -> Tensor:
    """Read a recurrent state for R rows of a tree, each of which reaches it by its own path.

    With S the state at the boundary before the one that row i last passed, G the sum of logarithms of decays from there
    to a token, and a ≺ i the tokens and rows on its path since:

        uᵢ = βᵢ (vᵢ − e^Gᵢ Sᵀkᵢ − Σ_{a≺i} e^(Gᵢ−Gₐ) (kᵢ·kₐ) uₐ)      the gated delta rule; uᵢ = vᵢ without β
        oᵢ = e^Gᵢ Sᵀqᵢ + Σ_{a⪯i} e^(Gᵢ−Gₐ) (qᵢ·kₐ) uₐ

    (arXiv 2412.06464, unrolled). Sums run over the path in the order of the text, so the bits of a row depend neither
    on other rows nor on which tokens of its path are committed. Rows are written behind the committed tokens.

    Args:
        query, key: float32 [B, R, G, K].
        value: float32 [B, R, H, V].
        decay: float32 [B, R, H, D], logarithms, at most 0.
        beta: float32 [B, R, H], or ``None``.
        parents: int32 [B, T], T ≥ R, a smaller row, or −1 for the text; the last R are the rows of this call, those
            before them were given to earlier ones.
        depths: int32 [B, T], rows before it on its path, at most ``window.block``.
        lengths: int32 [B], tokens that are committed.
        window: with room for the rows; see :meth:`StateWindow.reserve`.

    Returns:
        float32 [B, R, H, V]
    """
    batch, rows, groups, _ = key.shape
    heads, block, out = value.shape[2], window.block, torch.empty_like(value)
    first = parents.shape[1] - rows
    window.keys[:, window.places + first : window.places + first + rows] = key
    for b in range(batch):
        length, paths = int(lengths[b]), []
        for row in range(first + rows):
            parent = int(parents[b, row])
            check_row(row, parent, int(depths[b, row]), paths, block)
            paths.append([*(paths[parent] if parent >= 0 else ()), row])
            if row < first:
                continue
            r, position = row - first, length + len(paths[row]) - 1
            boundary = max(position // block - 1, 0) * block
            before = [t % window.places for t in range(boundary, length)]
            before += [window.places + a for a in paths[row][:-1]]
            own = window.places + row
            window.sums[b, own] = decay[b, r] + (window.sums[b, before[-1]] if position % block else 0.0)
            # Of the block before the row's own, if there is one, and of the row's.
            total = window.sums[b, before[block - 1]] if position >= block else torch.zeros_like(decay[b, r])
            since = window.sums[b, own]  # [H, D]
            state = window.state[boundary // block % 2, b]  # [H, K, V]
            keys, queries = (t[b, r].repeat_interleave(heads // groups, 0) for t in (key, query))  # [H, K]
            start = (since + total).exp()
            read = (state * (keys * start)[..., None]).sum(1)  # [H, V]
            found = (state * (queries * start)[..., None]).sum(1)
            for place, there in enumerate(before):
                left = (total - window.sums[b, there]) if place < block <= position else -window.sums[b, there]
                weight = (since + left).exp()
                other = window.keys[b, there].repeat_interleave(heads // groups, 0)
                update = window.updates[b, there]
                read = read + (keys * weight * other).sum(-1, keepdim=True) * update
                found = found + (queries * weight * other).sum(-1, keepdim=True) * update
            update = value[b, r] if beta is None else beta[b, r][:, None] * (value[b, r] - read)
            window.updates[b, own] = update
            out[b, r] = found + (queries * keys).sum(-1, keepdim=True) * update
    return out


def check_row(row: int, parent: int, depth: int, paths: list[list[int]], block: int) -> None:
    """Raise unless a row follows an earlier one at the depth that it says."""
    if not -1 <= parent < row:
        raise ValueError(f"parents: row {row} follows {parent}; expected a smaller row, or −1")
    expected = len(paths[parent]) if parent >= 0 else 0
    if depth != expected or depth > block:
        raise ValueError(f"depths: row {row} has {depth}; expected {expected}, and at most {block}")


def state_commit(accepted_rows: Tensor, num_accepted: Tensor, lengths: Tensor, window: StateWindow) -> None:
    """Append accepted rows of the last :func:`state_rows` to the text, and fold every block that is full into a state.

    ``lengths`` is left as it is: layers share it.

    Args:
        accepted_rows: int32 [B, P], a path from its first row on.
        num_accepted: int32 [B], how many of them; 0 leaves a text as it is.
        lengths: int32 [B], tokens that were committed before.
        window: in which the rows are.
    """
    block = window.block
    for b in range(len(lengths)):
        length, count = int(lengths[b]), int(num_accepted[b])
        for place, row in enumerate(accepted_rows[b, :count].tolist()):
            for stored in (window.keys, window.updates, window.sums):
                stored[b, (length + place) % window.places] = stored[b, window.places + row]
        for full in range(length // block + 1, (length + count) // block + 1):  # blocks that are full now
            tokens = range((full - 1) * block, full * block)
            window.state[full % 2, b] = window.folded(b, window.state[(full - 1) % 2, b], tokens)
