"""The n-gram table in one launch a call, and what its candidates go through.

What a call leaves in a set follows from the set's own entries (see ``csrc/algorithms/ngram.h``). Here an entry finds
its place by comparing itself with all others of its chunk: the newest of equal keys counts, and its way is the number
of newer ones in its set. The newest entry of a set first moves what the set held. Between these steps the chunk lies in
scratch memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling.triton import gumbel_from
from .reference import LEAST_REST, MEAN_GUMBEL

CHUNK = 256  # insertions at a time: 64 rows of 4 lengths
ROWS = 64
COLUMNS = 32
MIX_TILE = 2048  # pairs of candidates a program
HASH = -7046029254386353131  # of reference.context_keys


@triton.jit
def _next_hash(hash, token, HASH: tl.constexpr):
    """One token more. The hash of no tokens is 0."""
    hash = (hash ^ (token.to(tl.int64) + 1)) * HASH
    return hash ^ (hash >> 29)


@triton.jit
def _entry_key(contexts_ptr, row, length, inside, C: tl.constexpr, L: tl.constexpr, HASH: tl.constexpr):
    """int64: the key of the row's first ``length`` + 1 tokens, 0 where there are not as many."""
    hash = tl.zeros_like(row)
    key = tl.zeros_like(row)
    whole = inside
    for i in tl.static_range(L):
        token = tl.load(contexts_ptr + row * C + i, mask=inside, other=-1)
        hash = _next_hash(hash, token, HASH)
        whole = whole & (token >= 0)
        key = tl.where(whole & (length == i), (hash + i) | 1, key)
    return key


@triton.jit(do_not_specialize=["num_entries"])
def _insert_kernel(
    keys_ptr,  # int64 [B, capacity]
    table_tokens_ptr,  # int32 [B, capacity, K]
    table_log_probs_ptr,  # float32 [B, capacity, K]
    contexts_ptr,  # int32 [B, M, C]
    tokens_ptr,  # int32 [B, M, K]
    log_probs_ptr,  # float32 [B, M, K]
    valid_ptr,  # uint8 [B, M]
    scratch_keys_ptr,  # int64 [B, CHUNK]
    scratch_ptr,  # int32 [B, 2, CHUNK]
    num_entries,  # M · L
    capacity,
    C: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    WAYS: tl.constexpr,
    HASH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    num_rows = num_entries // L
    keys_ptr += b * capacity
    table_tokens_ptr += b * capacity * K
    table_log_probs_ptr += b * capacity * K
    contexts_ptr += b * num_rows * C
    tokens_ptr += b * num_rows * K
    log_probs_ptr += b * num_rows * K
    valid_ptr += b * num_rows
    key_at = scratch_keys_ptr + b * CHUNK  # 0: none
    bit_at = scratch_ptr + b * 2 * CHUNK  # 1 << way: where its set holds the key; 0: nowhere
    way_at = bit_at + CHUNK  # where the entry goes, −1: nowhere
    set_mask = (capacity // WAYS - 1).to(tl.int64)
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    way = tl.arange(0, WAYS)

    for e0 in tl.range(0, num_entries, CHUNK):
        size = tl.minimum(num_entries - e0, CHUNK)

        # 1. Keys.
        for r0 in tl.range(0, size, ROWS):
            at = r0 + rows
            inside = at < size
            entry = (e0 + at).to(tl.int64)
            row = entry // L
            taken = inside & (tl.load(valid_ptr + row, mask=inside, other=0) != 0)
            key = _entry_key(contexts_ptr, row, entry % L, taken, C, L, HASH)
            tl.store(key_at + at, key, mask=inside)
        tl.debug_barrier()

        # 2. Of equal keys the newest counts; where does its set hold it?
        for r0 in tl.range(0, size, ROWS):
            at = r0 + rows
            inside = at < size
            key = tl.load(key_at + at, mask=inside, other=0)
            counts = key != 0
            for c0 in tl.range(r0, size, COLUMNS):
                c = c0 + columns
                other = tl.load(key_at + c, mask=c < size, other=0)
                newer = (other[None, :] == key[:, None]) & (c[None, :] > at[:, None])
                counts = counts & (tl.sum(newer.to(tl.int32), 1) == 0)
            first = ((key >> 17) & set_mask) * WAYS
            held = tl.load(keys_ptr + first[:, None] + way[None, :], mask=counts[:, None], other=0)
            bit = tl.sum(tl.where(held == key[:, None], 1 << way[None, :], 0), 1)
            tl.store(bit_at + at, tl.where(counts, bit, 0), mask=inside)
            tl.store(way_at + at, tl.where(counts, 0, -1), mask=inside)
        tl.debug_barrier()

        # 3. Places in the set. The newest entry moves what stays, all of a column read before any is written.
        for r0 in tl.range(0, size, ROWS):
            at = r0 + rows
            inside = at < size
            key = tl.load(key_at + at, mask=inside, other=0)
            counts = tl.load(way_at + at, mask=inside, other=-1) >= 0
            home = (key >> 17) & set_mask
            place = tl.zeros([ROWS], tl.int32)
            fresh = tl.zeros([ROWS], tl.int32)
            replaced = tl.zeros([ROWS], tl.int32)
            for c0 in tl.range(0, size, COLUMNS):
                c = c0 + columns
                other = tl.load(key_at + c, mask=c < size, other=0)
                other_counts = tl.load(way_at + c, mask=c < size, other=-1) >= 0
                other_bit = tl.load(bit_at + c, mask=c < size, other=0)
                beside = ((other >> 17) & set_mask)[None, :] == home[:, None]
                beside = beside & other_counts[None, :] & counts[:, None]
                place += tl.sum((beside & (c[None, :] > at[:, None])).to(tl.int32), 1)
                fresh += tl.sum(beside.to(tl.int32), 1)
                replaced += tl.sum(tl.where(beside, other_bit[None, :], 0), 1)
            first = home * WAYS
            leads = counts & (place == 0)
            stays = ((replaced[:, None] >> way[None, :]) & 1) == 0  # [ROWS, WAYS]
            before = tl.zeros([ROWS, WAYS], tl.int32)  # of those that stay
            for w in tl.static_range(WAYS - 1):
                before += ((((replaced >> w) & 1) == 0)[:, None] & (way > w)[None, :]).to(tl.int32)
            target = fresh[:, None] + before
            moves = leads[:, None] & stays & (target < WAYS) & (target != way[None, :])
            old = first[:, None] + way[None, :]
            new = first[:, None] + target
            held = tl.load(keys_ptr + old, mask=moves, other=0)
            tl.debug_barrier()
            tl.store(keys_ptr + new, held, mask=moves)
            for k in tl.range(0, K):
                held_token = tl.load(table_tokens_ptr + old * K + k, mask=moves, other=0)
                held_log_prob = tl.load(table_log_probs_ptr + old * K + k, mask=moves, other=0.0)
                tl.debug_barrier()
                tl.store(table_tokens_ptr + new * K + k, held_token, mask=moves)
                tl.store(table_log_probs_ptr + new * K + k, held_log_prob, mask=moves)
            # Other rows still ask whether this entry counts: it does, whatever its way.
            tl.store(way_at + at, tl.where(counts, place, -1), mask=inside)
        tl.debug_barrier()

        # 4. The entries themselves.
        for r0 in tl.range(0, size, ROWS):
            at = r0 + rows
            inside = at < size
            key = tl.load(key_at + at, mask=inside, other=0)
            place = tl.load(way_at + at, mask=inside, other=-1)
            kept = (place >= 0) & (place < WAYS)
            to = ((key >> 17) & set_mask) * WAYS + place
            row = (e0 + at).to(tl.int64) // L
            tl.store(keys_ptr + to, key, mask=kept)
            for k in tl.range(0, K):
                token = tl.load(tokens_ptr + row * K + k, mask=kept, other=0)
                log_prob = tl.load(log_probs_ptr + row * K + k, mask=kept, other=0.0)
                tl.store(table_tokens_ptr + to * K + k, token, mask=kept)
                tl.store(table_log_probs_ptr + to * K + k, log_prob, mask=kept)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["rows"])
def _lookup_kernel(
    keys_ptr,  # int64 [B, capacity]
    table_tokens_ptr,  # int32 [B, capacity, K]
    table_log_probs_ptr,  # float32 [B, capacity, K]
    contexts_ptr,  # int32 [B, W, C]
    tokens_ptr,  # int32 [B, W, K]
    log_probs_ptr,  # float32 [B, W, K]
    matched_ptr,  # int32 [B, W]
    rows,
    capacity,
    C: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    WAYS: tl.constexpr,
    HASH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program per sequence and stretch of rows."""
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    at = b * rows + row  # int64
    way = tl.arange(0, WAYS)
    set_mask = (capacity // WAYS - 1).to(tl.int64)
    hash = tl.zeros([BLOCK_R], tl.int64)
    whole = inside
    matched = tl.zeros([BLOCK_R], tl.int32)
    best = tl.zeros([BLOCK_R], tl.int64)
    for i in tl.static_range(L):
        token = tl.load(contexts_ptr + at * C + i, mask=inside, other=-1)
        hash = _next_hash(hash, token, HASH)
        whole = whole & (token >= 0)
        key = (hash + i) | 1
        first = ((key >> 17) & set_mask) * WAYS
        held = tl.load(keys_ptr + b * capacity + first[:, None] + way[None, :], mask=whole[:, None], other=0)
        found = tl.max(tl.where(held == key[:, None], way[None, :], -1), 1)
        hit = whole & (found >= 0)
        matched = tl.where(hit, i + 1, matched)
        best = tl.where(hit, first + found, best)
    tl.store(matched_ptr + at, matched, mask=inside)
    k = tl.arange(0, BLOCK_K)
    here = inside[:, None] & (k < K)[None, :]
    known = here & (matched > 0)[:, None]
    source = (b * capacity + best)[:, None] * K + k[None, :]
    target = at[:, None] * K + k[None, :]
    tl.store(tokens_ptr + target, tl.load(table_tokens_ptr + source, mask=known, other=-1), mask=here)
    tl.store(log_probs_ptr + target, tl.load(table_log_probs_ptr + source, mask=known, other=float("-inf")), mask=here)


@triton.jit(do_not_specialize=["rows", "width"])
def _perturb_kernel(
    tokens_ptr,  # int32 [R, K]
    log_probs_ptr,  # float32 [R, K]
    positions_ptr,  # int32 [R]
    seed_ptr,  # int64 [1]
    sequence_ids_ptr,  # int32 [B]
    perturbed_ptr,  # float32 [R, K]
    rows,
    width,  # rows of a sequence
    K: tl.constexpr,
    LEAST_REST: tl.constexpr,
    MEAN_GUMBEL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    k = tl.arange(0, BLOCK_K)
    inside = row < rows
    there = inside[:, None] & (k < K)[None, :]
    at = row[:, None] * K + k[None, :]
    token = tl.load(tokens_ptr + at, mask=there, other=-1)
    log_prob = tl.load(log_probs_ptr + at, mask=there, other=float("-inf"))
    position = tl.load(positions_ptr + row, mask=inside, other=0)[:, None]
    sequence = tl.load(sequence_ids_ptr + row // width, mask=inside, other=0)[:, None]

    known = tl.maximum(token, 0)
    zero = known * 0
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), known >> 2, zero + position, zero + sequence, zero)
    word = known & 3
    bits = tl.where(word == 0, w0, tl.where(word == 1, w1, tl.where(word == 2, w2, w3)))
    noisy = tl.where(token >= 0, log_prob + gumbel_from(bits), float("-inf"))

    rest = 1.0 - tl.sum(tl.exp(log_prob), 1)
    rest = tl.log(tl.where(rest < LEAST_REST, LEAST_REST, rest)) + MEAN_GUMBEL
    top = tl.maximum(tl.max(noisy, 1), rest)
    total = tl.sum(tl.exp(noisy - top[:, None]), 1) + tl.exp(rest - top)
    tl.store(perturbed_ptr + at, noisy - (top + tl.log(total))[:, None], mask=there)


@triton.jit(do_not_specialize=["rows"])
def _mix_kernel(
    tokens_ptr,  # int32 [R, K]
    log_probs_ptr,  # float32 [R, K]
    other_tokens_ptr,  # int32 [R, OTHERS]
    other_log_probs_ptr,  # float32 [R, OTHERS]
    weight_ptr,  # float32 [R]
    mixed_ptr,  # int32 [R, K]
    mixed_log_probs_ptr,  # float32 [R, K]
    rows,
    K: tl.constexpr,
    OTHERS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_J: tl.constexpr,  # candidates of both
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    j = tl.arange(0, BLOCK_J)
    inside = (row < rows)[:, None]  # [R, 1]
    ours = inside & (j < K)[None, :]
    theirs = inside & ((j >= K) & (j < K + OTHERS))[None, :]
    our_at = row[:, None] * K + j[None, :]
    their_at = row[:, None] * OTHERS + (j - K)[None, :]
    token = tl.load(tokens_ptr + our_at, mask=ours, other=-1)
    token = tl.where(theirs, tl.load(other_tokens_ptr + their_at, mask=theirs, other=-1), token)
    log_prob = tl.load(log_probs_ptr + our_at, mask=ours, other=0.0)
    log_prob = tl.where(theirs, tl.load(other_log_probs_ptr + their_at, mask=theirs, other=0.0), log_prob)
    weight = tl.load(weight_ptr + row, mask=row < rows, other=0.0)[:, None]
    prob = tl.where(token >= 0, tl.exp(log_prob) * tl.where(theirs, weight, 1.0 - weight), 0.0)

    same = (token[:, :, None] == token[:, None, :]) & (token >= 0)[:, :, None]  # [R, J, J]
    shared = same & ours[:, :, None] & theirs[:, None, :]  # of ours, of theirs
    added = tl.sum(tl.where(shared, prob[:, None, :], 0.0), 2)
    covered = tl.sum(shared.to(tl.int32), 1)
    prob = tl.where(covered > 0, 0.0, prob + added)

    # NaN comes before all numbers, as torch.sort has it; at ties the lower place.
    mine, other = prob[:, :, None], prob[:, None, :]
    nan_mine, nan_other = mine != mine, other != other
    earlier = (j[None, :] < j[:, None])[None, :, :]
    before = (other > mine) | (nan_other & (mine == mine))
    before = before | (((other == mine) | (nan_other & nan_mine)) & earlier)
    real = ours | theirs
    place = tl.sum((before & real[:, None, :]).to(tl.int32), 2)
    kept = real & (place < K)
    target = row[:, None] * K + place
    tl.store(mixed_ptr + target, tl.where(prob == 0.0, -1, token), mask=kept)
    tl.store(mixed_log_probs_ptr + target, tl.log(prob), mask=kept)


def ngram_insert(
    keys: Tensor,
    table_tokens: Tensor,
    table_log_probs: Tensor,
    contexts: Tensor,
    tokens: Tensor,
    log_probs: Tensor,
    valid: Tensor,
    max_context: int,
    ways: int,
) -> None:
    batch, rows, size = contexts.shape
    if batch == 0 or rows == 0:
        return

    def new(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=keys.device)

    _insert_kernel[(batch,)](
        keys,
        table_tokens,
        table_log_probs,
        contexts.contiguous(),
        tokens.contiguous(),
        log_probs.contiguous(),
        valid.contiguous().view(torch.uint8),
        new(torch.int64, batch, CHUNK),
        new(torch.int32, batch, 2, CHUNK),
        rows * max_context,
        keys.shape[1],
        C=size,
        K=table_tokens.shape[2],
        L=max_context,
        WAYS=ways,
        HASH=HASH,
        CHUNK=CHUNK,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=8,
    )


def ngram_lookup(
    keys: Tensor, table_tokens: Tensor, table_log_probs: Tensor, contexts: Tensor, max_context: int, ways: int
) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, size = contexts.shape
    branch, device = table_tokens.shape[2], keys.device
    tokens = torch.empty((batch, rows, branch), dtype=torch.int32, device=device)
    log_probs = torch.empty((batch, rows, branch), dtype=torch.float32, device=device)
    matched = torch.empty((batch, rows), dtype=torch.int32, device=device)
    block = 32
    if matched.numel() > 0:
        _lookup_kernel[(triton.cdiv(rows, block), batch)](
            keys,
            table_tokens,
            table_log_probs,
            contexts.contiguous(),
            tokens,
            log_probs,
            matched,
            rows,
            keys.shape[1],
            C=size,
            K=branch,
            L=max_context,
            WAYS=ways,
            HASH=HASH,
            BLOCK_R=block,
            BLOCK_K=triton.next_power_of_2(branch),
            num_warps=2,
        )
    return tokens, log_probs, matched


def perturb_candidates(
    tokens: Tensor, log_probs: Tensor, positions: Tensor, seed: Tensor, sequence_ids: Tensor
) -> Tensor:
    batch, width, branch = tokens.shape
    perturbed = torch.empty((batch, width, branch), dtype=torch.float32, device=tokens.device)
    rows, block = batch * width, 16
    if perturbed.numel() > 0:
        _perturb_kernel[(triton.cdiv(rows, block),)](
            tokens.contiguous(),
            log_probs.contiguous(),
            positions.contiguous(),
            seed,
            sequence_ids.contiguous(),
            perturbed,
            rows,
            width,
            K=branch,
            LEAST_REST=LEAST_REST,
            MEAN_GUMBEL=MEAN_GUMBEL,
            BLOCK_R=block,
            BLOCK_K=triton.next_power_of_2(branch),
            num_warps=2,
        )
    return perturbed


def mix_candidates(
    tokens: Tensor, log_probs: Tensor, other_tokens: Tensor, other_log_probs: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    (batch, width, branch), others = tokens.shape, other_tokens.shape[2]
    mixed = torch.empty((batch, width, branch), dtype=torch.int32, device=tokens.device)
    mixed_log_probs = torch.empty((batch, width, branch), dtype=torch.float32, device=tokens.device)
    rows = batch * width
    block_j = triton.next_power_of_2(branch + others)
    block_r = max(1, MIX_TILE // block_j**2)
    if mixed.numel() > 0:
        _mix_kernel[(triton.cdiv(rows, block_r),)](
            tokens.contiguous(),
            log_probs.contiguous(),
            other_tokens.contiguous(),
            other_log_probs.contiguous(),
            weight.contiguous(),
            mixed,
            mixed_log_probs,
            rows,
            K=branch,
            OTHERS=others,
            BLOCK_R=block_r,
            BLOCK_J=block_j,
            num_warps=4,
        )
    return mixed, mixed_log_probs
