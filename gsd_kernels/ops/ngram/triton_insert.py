"""Insertion into the n-gram table in one launch a call, one program per sequence.

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

CHUNK = 256  # insertions at a time: 64 rows of 4 lengths
ROWS = 64
COLUMNS = 32
HASH = -7046029254386353131  # of reference.context_keys


@triton.jit
def next_hash(hash, token, HASH: tl.constexpr):
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
        hash = next_hash(hash, token, HASH)
        whole = whole & (token >= 0)
        key = tl.where(whole & (length == i), (hash + i) | 1, key)
    return key


@triton.jit
def _write_keys(
    new,  # pointers: contexts, tokens, log-probabilities, valid
    key_at,
    e0,  # first entry of the chunk
    size,
    C: tl.constexpr,
    L: tl.constexpr,
    HASH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the keys of a chunk's entries; 0: none."""
    contexts_ptr, _, _, valid_ptr = new
    rows = tl.arange(0, ROWS)
    for r0 in tl.range(0, size, ROWS):
        at = r0 + rows
        inside = at < size
        entry = (e0 + at).to(tl.int64)
        row = entry // L
        taken = inside & (tl.load(valid_ptr + row, mask=inside, other=0) != 0)
        key = _entry_key(contexts_ptr, row, entry % L, taken, C, L, HASH)
        tl.store(key_at + at, key, mask=inside)


@triton.jit
def _find_held(
    keys_ptr,
    key_at,
    bit_at,
    way_at,
    size,
    set_mask,
    WAYS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Find where its set holds an entry. Of equal keys the newest counts: way 0, −1 for the others."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    way = tl.arange(0, WAYS)
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


@triton.jit
def _make_room(
    table,  # pointers: keys, tokens, log-probabilities
    key_at,
    bit_at,
    way_at,
    size,
    set_mask,
    K: tl.constexpr,
    WAYS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Give the entries their ways. The newest of a set moves what stays, all of a column read before any is written."""
    keys_ptr, table_tokens_ptr, table_log_probs_ptr = table
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    way = tl.arange(0, WAYS)
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


@triton.jit
def _write_entries(
    table,
    new,
    key_at,
    way_at,
    e0,
    size,
    set_mask,
    K: tl.constexpr,
    L: tl.constexpr,
    WAYS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the entries themselves, where they have a way."""
    keys_ptr, table_tokens_ptr, table_log_probs_ptr = table
    _, tokens_ptr, log_probs_ptr, _ = new
    rows = tl.arange(0, ROWS)
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
    """Insert chunk by chunk. Barriers are where other threads read what was written."""
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
    table = (keys_ptr, table_tokens_ptr, table_log_probs_ptr)
    new = (contexts_ptr, tokens_ptr, log_probs_ptr, valid_ptr)
    for e0 in tl.range(0, num_entries, CHUNK):
        size = tl.minimum(num_entries - e0, CHUNK)
        _write_keys(new, key_at, e0, size, C, L, HASH, ROWS)
        tl.debug_barrier()
        _find_held(keys_ptr, key_at, bit_at, way_at, size, set_mask, WAYS, ROWS, COLUMNS)
        tl.debug_barrier()
        _make_room(table, key_at, bit_at, way_at, size, set_mask, K, WAYS, ROWS, COLUMNS)
        tl.debug_barrier()
        _write_entries(table, new, key_at, way_at, e0, size, set_mask, K, L, WAYS, ROWS)
        tl.debug_barrier()


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
