"""The n-gram table's look-ups, one launch a call, and what its candidates go through."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..sampling.triton import gumbel_from
from .reference import LEAST_REST, MEAN_GUMBEL, weights_of

__all__ = ["mix_candidates", "ngram_lookup", "perturb_candidates"]

HASH = -7046029254386353131  # of reference.context_keys
MIX_TILE = 2048  # pairs of candidates a program


@triton.jit
def next_hash(hash, token, HASH: tl.constexpr):
    """One token more. The hash of no tokens is 0."""
    hash = (hash ^ (token.to(tl.int64) + 1)) * HASH
    return hash ^ (hash >> 29)


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
        hash = next_hash(hash, token, HASH)
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
    tokens: Tensor,
    log_probs: Tensor,
    other_tokens: Tensor,
    other_log_probs: Tensor,
    weight: Tensor,
    index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One launch, and two where weights are looked up."""
    (batch, width, branch), others = tokens.shape, other_tokens.shape[2]
    weight = weights_of(weight, index, (batch, width))
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
