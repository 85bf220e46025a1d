"""The walk along the target's own tokens, one program per sequence: all rows are judged at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...graph import num_words


@triton.jit(do_not_specialize=["num_eos", "rows", "words", "levels"])  # shapes share what is compiled
def _verify_kernel(
    token_ids_ptr,  # int32 [B, R], like the next two
    parent_rows_ptr,
    depths_ptr,
    ancestor_mask_ptr,  # int32 [B, R, words]
    num_rows_ptr,
    sampled_ptr,  # int32 [B, R]
    eos_ids_ptr,  # int32 [num_eos]
    remaining_ptr,
    done_ptr,  # uint8 [B]
    accepted_rows_ptr,  # int32 [B, levels]
    num_accepted_ptr,
    next_token_ptr,
    num_eos,
    rows,
    words,
    levels,
    BLOCK_R: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    b = tl.program_id(0)
    row = tl.arange(0, BLOCK_R)
    in_r = row < rows
    at = b * rows + row
    limit = tl.where(tl.load(done_ptr + b) != 0, 0, tl.load(num_rows_ptr + b))
    parent = tl.load(parent_rows_ptr + at, mask=in_r, other=-1)
    depth = tl.load(depths_ptr + at, mask=in_r, other=0)
    token = tl.load(token_ids_ptr + at, mask=in_r, other=-1)
    inside = (parent >= 0) & (parent < rows)
    picked = tl.load(sampled_ptr + b * rows + parent, mask=inside, other=-1)  # the target's token at the parent
    agrees = inside & (picked == token) & (depth < tl.load(remaining_ptr + b))
    for e in tl.range(0, num_eos):
        agrees = agrees & (picked != tl.load(eos_ids_ptr + e))
    agrees = agrees | (row == 0) | ~in_r  # places past the end are nobody's ancestors
    accepted = row < limit
    for w in tl.range(0, words):
        agreeing = tl.sum(tl.where(agrees & (row // 32 == w), 1 << (row % 32), 0), 0)  # this word's rows as bits
        path = tl.load(ancestor_mask_ptr + at * words + w, mask=in_r, other=0)
        if BLOCK_R < 32:
            path = path & ((1 << BLOCK_R) - 1)
        accepted = accepted & ((path & ~agreeing) == 0)

    level = tl.arange(0, BLOCK_L)
    here = accepted[None, :] & (depth[None, :] == level[:, None])  # [L, R], one row a level: no equal siblings
    found = tl.min(tl.where(here, row[None, :], rows), 1)
    tl.store(accepted_rows_ptr + b * levels + level, tl.where(found < rows, found, -1), mask=level < levels)
    count = tl.sum((found < rows).to(tl.int32), 0)
    tl.store(num_accepted_ptr + b, count)
    last = tl.max(tl.where(accepted & (depth == count - 1), row, 0), 0)
    tl.store(next_token_ptr + b, tl.load(sampled_ptr + b * rows + last))


def verify(
    token_ids: Tensor,
    parent_rows: Tensor,
    depths: Tensor,
    ancestor_mask: Tensor,
    num_rows: Tensor,
    sampled: Tensor,
    eos_ids: Tensor,
    remaining: Tensor,
    done: Tensor,
    max_path: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """One launch: accepted rows int32 [B, max_path + 1], their number and the next token int32 [B]."""
    batch, rows = token_ids.shape

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=token_ids.device)

    accepted_rows, num_accepted, next_token = new(batch, max_path + 1), new(batch), new(batch)
    if batch:
        _verify_kernel[(batch,)](
            *(t.contiguous() for t in (token_ids, parent_rows, depths, ancestor_mask, num_rows)),
            *(t.contiguous() for t in (sampled, eos_ids, remaining, done.view(torch.uint8))),
            accepted_rows,
            num_accepted,
            next_token,
            eos_ids.shape[0],
            rows,
            num_words(rows),
            max_path + 1,
            BLOCK_R=triton.next_power_of_2(rows),
            BLOCK_L=max(16, triton.next_power_of_2(max_path + 1)),
            num_warps=4,
        )
    return accepted_rows, num_accepted, next_token
