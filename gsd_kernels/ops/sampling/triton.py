"""Sampling from vocabularies of any size, with the noise of ``philox.py``: the random bits are identical.

How often the logits are read:

- once where nothing is cut (greedy, or temperature alone): every program takes a stretch of a row, perturbs it and
  keeps the stretch's best and its log-sum-exp; a second kernel merges the stretches;
- twice with min-p alone: the cut is relative to the row's maximum, so no token can be judged before all were seen;
- three times with top-k or top-p. The first pass takes the maximum and bounds the cut from below; the second collects
  the few tokens above the bound, on which the exact cut is searched in registers; the third samples. One pass less
  would mean to sample before the cut is known. Where the tokens above the bound do not fit (a nucleus or top-k of
  thousands of tokens), the search itself streams: up to 17 further reads a cut, two bits of the cut's key per read.

All reads but the first find the row in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STRETCH = 4096  # logits that one program perturbs at a time
COLLECT = 4096  # tokens above the bound that the exact search holds in registers

CUT = tl.constexpr(-3.0e38)
"""Score of a token that is cut: below every real one, above the −inf of what is not there."""


@triton.jit
def _parameter(values_ptr, value, b):
    """A sampling parameter as float32: one a sequence, or one for all."""
    if values_ptr is None:
        return value
    else:
        return tl.load(values_ptr + b).to(tl.float32)


@triton.jit
def _key(x):
    """float32 → int32 in the same order; −0 and +0 share a key."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The inverse of _key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(x_ptr, v, vocab, temperature):
    """logits / temperature, rounded like the reference's division; −inf past the end."""
    x = tl.load(x_ptr + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    return tl.math.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit
def _search(keys, weights, target, low, high):
    """The largest key in [low, high] at or above which the weights still sum to ``target``; low if there is none."""
    while low < high:
        middle = ((low + high + 1) >> 1).to(tl.int64)
        enough = tl.sum(tl.where(keys >= middle, weights, 0.0), 0) >= target
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _weights(x, v, vocab, top, floor, MASS: tl.constexpr):
    """1, or the unnormalised probability, of the tokens whose key is at least ``floor``."""
    weights = tl.full(x.shape, 1.0, tl.float32)
    if MASS:
        weights = tl.exp(x - top)
    return tl.where((v < vocab) & (_key(x) >= floor), weights, 0.0)


@triton.jit
def _stream_sum(x_ptr, vocab, temperature, top, floor, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the weights of a row, in one read."""
    lanes = tl.zeros([BLOCK], tl.float32)
    for v0 in tl.range(0, vocab, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        lanes += _weights(_scaled(x_ptr, v, vocab, temperature), v, vocab, top, floor, MASS)
    return tl.sum(lanes, 0)


@triton.jit
def _stream_search(x_ptr, vocab, temperature, top, floor, target, low, high, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """_search over a row that does not fit: every read tries three keys and quarters the interval."""
    while low < high:
        span = high - low
        first = low + ((span + 3) >> 2)
        second = low + ((2 * span + 3) >> 2)
        third = low + ((3 * span + 3) >> 2)
        above_first = tl.zeros([BLOCK], tl.float32)
        above_second = tl.zeros([BLOCK], tl.float32)
        above_third = tl.zeros([BLOCK], tl.float32)
        for v0 in tl.range(0, vocab, BLOCK):
            v = v0 + tl.arange(0, BLOCK)
            x = _scaled(x_ptr, v, vocab, temperature)
            weights = _weights(x, v, vocab, top, floor, MASS)
            key = _key(x)
            above_first += tl.where(key >= first, weights, 0.0)
            above_second += tl.where(key >= second, weights, 0.0)
            above_third += tl.where(key >= third, weights, 0.0)
        in_first = tl.sum(above_first, 0) >= target
        in_second = tl.sum(above_second, 0) >= target
        in_third = tl.sum(above_third, 0) >= target
        high = tl.where(in_third, high, tl.where(in_second, third - 1, tl.where(in_first, second - 1, first - 1)))
        low = tl.where(in_third, third, tl.where(in_second, second, tl.where(in_first, first, low)))
    return low


@triton.jit
def _cut_kernel(
    logits_ptr,
    temperatures_ptr,
    temperature,
    top_ks_ptr,
    top_k,
    top_ps_ptr,
    top_p,
    collected_ptr,  # float32 [rows, COLLECT] scratch
    cuts_ptr,  # float32 [rows]: smallest logit / temperature that top-k and top-p keep
    tops_ptr,  # float32 [rows]: the largest one
    stride_b,
    stride_r,
    rows,
    vocab,
    HAS_CUT: tl.constexpr,  # top-k or top-p, for any sequence
    BLOCK: tl.constexpr,
):
    """One program a row."""
    index = tl.program_id(0)
    b = index // rows
    x_ptr = logits_ptr + b.to(tl.int64) * stride_b + (index % rows).to(tl.int64) * stride_r
    temperature = _parameter(temperatures_ptr, temperature, b)
    temperature = tl.where(temperature > 0.0, temperature, 1.0)  # greedy rows ignore what is found here
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    for v0 in tl.range(0, vocab, BLOCK):
        lanes = tl.maximum(lanes, _scaled(x_ptr, v0 + tl.arange(0, BLOCK), vocab, temperature))
    top = tl.max(lanes, 0)
    tl.store(tops_ptr + index, top)
    if HAS_CUT:
        k = tl.minimum(_parameter(top_ks_ptr, top_k, b), vocab.to(tl.float32))
        p = _parameter(top_ps_ptr, top_p, b)
        limits_k = k > 0.0
        limits_p = p < 1.0
        lowest = _key(float("-inf") + 0.0 * k).to(tl.int64)
        highest = _key(top).to(tl.int64)
        # At least as many tokens as lanes reach the bound: with top-k, k of them, so the k-th largest is above it.
        wanted = tl.where(limits_k, k, BLOCK // 2)
        bound = lowest
        if (vocab > BLOCK) & (wanted <= BLOCK):
            bound = _search(_key(lanes), tl.full([BLOCK], 1.0, tl.float32), wanted, lowest, highest)
        # Collect the tokens at or above the bound.
        count = bound.to(tl.int32) * 0
        mass = tl.zeros([BLOCK], tl.float32)
        row_ptr = collected_ptr + index.to(tl.int64) * BLOCK
        for v0 in tl.range(0, vocab, BLOCK):
            v = v0 + tl.arange(0, BLOCK)
            x = _scaled(x_ptr, v, vocab, temperature)
            mass += tl.where(v < vocab, tl.exp(x - top), 0.0)
            keep = (v < vocab) & (_key(x) >= bound)
            found = tl.sum(keep.to(tl.int32), 0)
            if found > 0:
                place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
                tl.store(row_ptr + place, x, mask=keep & (place < BLOCK))
            count += found
        tl.debug_barrier()
        i = tl.arange(0, BLOCK)
        few = tl.load(row_ptr + i, mask=i < tl.minimum(count, BLOCK), other=float("-inf"))
        few_keys = _key(few)
        present = tl.where(i < count, 1.0, 0.0)
        complete = count <= BLOCK
        cut = lowest
        total = tl.sum(mass, 0)
        if limits_k:
            if complete:
                cut = _search(few_keys, present, k, bound, highest)
                total = tl.sum(tl.where(few_keys >= cut, present * tl.exp(few - top), 0.0), 0)
            else:
                cut = _stream_search(x_ptr, vocab, temperature, top, lowest, k, bound, highest, False, BLOCK)
                total = _stream_sum(x_ptr, vocab, temperature, top, cut, True, BLOCK)
        if limits_p:
            # A token stays if the mass before it is below p: the cut is the largest key with mass p at or above it.
            few_mass = tl.where(few_keys >= cut, present * tl.exp(few - top), 0.0)
            if complete & (tl.sum(few_mass, 0) >= p * total):
                cut = _search(few_keys, few_mass, p * total, tl.maximum(cut, bound), highest)
            else:
                cut = _stream_search(x_ptr, vocab, temperature, top, cut, p * total, cut, highest, True, BLOCK)
        tl.store(cuts_ptr + index, _value(cut.to(tl.int32)))


@triton.jit
def _gumbel(seed, position, sequence, v0, BLOCK: tl.constexpr):
    """Standard Gumbel noise of tokens v0 … v0 + BLOCK − 1 (v0 a multiple of 4); see philox.gumbel_noise."""
    group = v0 // 4 + tl.arange(0, BLOCK // 4)
    zero = group * 0
    w0, w1, w2, w3 = tl.philox(seed, group, zero + position, zero + sequence, zero)
    return gumbel_from(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))  # word token & 3 of every group


@triton.jit
def gumbel_from(bits):
    """32 random bits → Gumbel noise."""
    u = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # (top 31 bits + ½)·2⁻³¹
    u = tl.minimum(u, 0.99999994)  # 1 − 2⁻²⁴: float32 rounds the top of the range to 1
    # −log1p(−u). Below ½ by 2·atanh(s), s = u/(2 − u): the hardware's logarithm is not relative near 1.
    s = u / (2.0 - u)
    t = s * s
    series = 1.0 / 9 + t * (1.0 / 11 + t * (1.0 / 13 + t * (1.0 / 15)))
    series = 1.0 + t * (1.0 / 3 + t * (1.0 / 5 + t * (1.0 / 7 + t * series)))
    exponential = tl.where(u < 0.5, 2.0 * s * series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def _score_kernel(
    logits_ptr,
    positions_ptr,  # int32 [B, R]
    sequence_ids_ptr,  # int32 [B]
    seed_ptr,
    temperatures_ptr,
    temperature,
    min_ps_ptr,
    min_p,
    cuts_ptr,
    tops_ptr,
    best_scores_ptr,  # float32 [rows, stretches, COUNT]
    best_tokens_ptr,  # int32 [rows, stretches, COUNT]
    sums_ptr,  # float32 [rows, stretches, 2]: largest score, sum of exp(score − largest)
    stride_b,
    stride_r,
    rows,
    vocab,
    COUNT: tl.constexpr,
    SAMPLING: tl.constexpr,
    NOISE: tl.constexpr,
    HAS_CUT: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The COUNT best of one stretch of a row's perturbed scores. A stretch with NaN says so by the token −1."""
    index = tl.program_id(0)
    stretch = tl.program_id(1)
    b = index // rows
    x_ptr = logits_ptr + b.to(tl.int64) * stride_b + (index % rows).to(tl.int64) * stride_r
    v0 = stretch * BLOCK
    v = v0 + tl.arange(0, BLOCK)
    raw = tl.load(x_ptr + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    spoiled = tl.max((raw != raw).to(tl.int32), 0) > 0
    score = tl.maximum(raw, CUT)
    if SAMPLING:
        temperature = _parameter(temperatures_ptr, temperature, b)
        greedy = temperature <= 0.0
        x = tl.math.div_rn(raw, tl.zeros_like(raw) + tl.where(greedy, 1.0, temperature))
        noisy = x
        if NOISE:
            position, sequence = tl.load(positions_ptr + index), tl.load(sequence_ids_ptr + b)
            noisy = x + _gumbel(tl.load(seed_ptr), position, sequence, v0, BLOCK)
        keep = x > CUT
        if HAS_CUT:
            keep = keep & (x >= tl.load(cuts_ptr + index))
        if HAS_MIN_P:
            keep = keep & (tl.exp(x - tl.load(tops_ptr + index)) >= _parameter(min_ps_ptr, min_p, b))
        score = tl.where(greedy, score, tl.where(keep, noisy, CUT))
    score = tl.where(v < vocab, score, float("-inf"))
    out = index.to(tl.int64) * tl.num_programs(1) + stretch
    if WITH_SUMS:
        largest = tl.max(score, 0)
        tl.store(sums_ptr + 2 * out, largest)
        tl.store(sums_ptr + 2 * out + 1, tl.sum(tl.exp(score - largest), 0))
    for i in tl.range(0, COUNT):
        best = tl.max(score, 0)
        token = tl.min(tl.where(score == best, v, 2147483647), 0)
        token = tl.where(best > float("-inf"), token, 2147483647)  # fewer than COUNT are left
        score = tl.where(v == token, float("-inf"), score)
        tl.store(best_scores_ptr + out * COUNT + i, best)
        tl.store(best_tokens_ptr + out * COUNT + i, tl.where(spoiled, -1, token))


@triton.jit
def _pick_kernel(
    best_scores_ptr,
    best_tokens_ptr,
    sums_ptr,
    tokens_ptr,  # int32 [rows, COUNT]
    log_probs_ptr,  # float32 [rows, COUNT]
    temperatures_ptr,
    temperature,
    rows,
    stretches,
    COUNT: tl.constexpr,
    SAMPLING: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_STRETCHES: tl.constexpr,
):
    """The COUNT best of a row among the best of its stretches."""
    index = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = i < stretches * COUNT
    score = tl.load(best_scores_ptr + index * stretches * COUNT + i, mask=inside, other=float("-inf"))
    token = tl.load(best_tokens_ptr + index * stretches * COUNT + i, mask=inside, other=2147483647)
    spoiled = tl.min(token, 0) < 0
    if WITH_SUMS:
        s = tl.arange(0, BLOCK_STRETCHES)
        sum_ptr = sums_ptr + 2 * (index * stretches + s)
        largest = tl.load(sum_ptr, mask=s < stretches, other=float("-inf"))
        part = tl.load(sum_ptr + 1, mask=s < stretches, other=0.0)
        top = tl.max(largest, 0)
        log_sum = tl.log(tl.sum(part * tl.exp(largest - top), 0))
    for j in tl.range(0, COUNT):
        best = tl.max(score, 0)
        picked = tl.min(tl.where(score == best, token, 2147483647), 0)
        score = tl.where(token == picked, float("-inf"), score)
        nothing = spoiled | (picked == 2147483647)
        if SAMPLING and not WITH_SUMS:  # nothing to draw from: all is cut, or +∞ is there
            drawn = _parameter(temperatures_ptr, temperature, index // rows) > 0.0
            nothing = nothing | (drawn & ((best <= CUT) | (best == float("inf"))))
        tl.store(tokens_ptr + index * COUNT + j, tl.where(nothing, -1, picked))
        if WITH_SUMS:
            # (best − top) − log Σ is at most 0 whatever the rounding; best − log-sum-exp is not.
            log_prob = tl.where(best > CUT, (best - top) - log_sum, float("-inf"))
            tl.store(log_probs_ptr + index * COUNT + j, tl.where(spoiled, float("nan"), log_prob))


def best_tokens(
    logits: Tensor,  # [B, R, V]
    positions: Tensor,  # int32 [B, R]
    count: int,
    seed: Tensor,
    sequence_ids: Tensor,  # int32 [B]
    temperatures: Tensor | None,  # [B]; the number that follows counts where this is None
    temperature: float,
    top_ks: Tensor | None,
    top_k: float,
    top_ps: Tensor | None,
    top_p: float,
    min_ps: Tensor | None,
    min_p: float,
    noise: bool,
    with_log_probs: bool,
) -> tuple[Tensor, Tensor]:
    """The ``count`` best perturbed scores of every row: tokens int32 [B, R, count], log-probabilities if wanted."""
    batch, rows, vocab = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()
    tokens = _new(logits, batch, rows, count, dtype=torch.int32)
    log_probs = _new(logits, batch, rows, count if with_log_probs else 0)
    total = batch * rows
    if total == 0:
        return tokens, log_probs
    sampling = temperatures is not None or temperature > 0.0
    has_cut = sampling and (top_ks is not None or top_k > 0 or top_ps is not None or top_p < 1.0)
    has_min_p = sampling and (min_ps is not None or min_p > 0.0)
    cuts = tops = None
    if has_cut or has_min_p:
        cuts, tops = _find_cuts(logits, temperatures, temperature, top_ks, top_k, top_ps, top_p, has_cut)
    stretches = triton.cdiv(vocab, STRETCH)
    best_scores = _new(logits, total, stretches, count)
    best_ids = _new(logits, total, stretches, count, dtype=torch.int32)
    sums = _new(logits, total, stretches, 2) if with_log_probs else None
    _score_kernel[(total, stretches)](
        logits,
        positions.contiguous(),
        sequence_ids.contiguous(),
        seed,
        temperatures,
        temperature,
        min_ps,
        min_p,
        cuts,
        tops,
        best_scores,
        best_ids,
        sums,
        *logits.stride()[:2],
        rows,
        vocab,
        COUNT=count,
        SAMPLING=sampling,
        NOISE=noise,
        HAS_CUT=has_cut,
        HAS_MIN_P=has_min_p,
        WITH_SUMS=with_log_probs,
        BLOCK=STRETCH,
        num_warps=8,
    )
    _pick(best_scores, best_ids, sums, tokens, log_probs, temperatures, temperature)
    return tokens, log_probs


def _new(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _find_cuts(
    logits: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    top_ks: Tensor | None,
    top_k: float,
    top_ps: Tensor | None,
    top_p: float,
    has_cut: bool,
) -> tuple[Tensor, Tensor]:
    """Of every row the smallest logit / temperature that top-k and top-p keep, and the largest: float32 [B·R] each."""
    batch, rows, vocab = logits.shape
    total = batch * rows
    cuts, tops = _new(logits, total), _new(logits, total)
    _cut_kernel[(total,)](
        logits,
        temperatures,
        temperature,
        top_ks,
        top_k,
        top_ps,
        top_p,
        _new(logits, total, COLLECT) if has_cut else None,
        cuts,
        tops,
        *logits.stride()[:2],
        rows,
        vocab,
        HAS_CUT=has_cut,
        BLOCK=COLLECT,
        num_warps=8,
    )
    return cuts, tops


def _pick(
    best_scores: Tensor,
    best_ids: Tensor,
    sums: Tensor | None,
    tokens: Tensor,
    log_probs: Tensor,
    temperatures: Tensor | None,
    temperature: float,
) -> None:
    """Merge the stretches' best, [B·R, stretches, count], into ``tokens`` and, with ``sums``, ``log_probs``."""
    total, stretches, count = best_scores.shape
    _pick_kernel[(total,)](
        best_scores,
        best_ids,
        sums,
        tokens,
        log_probs,
        temperatures,
        temperature,
        tokens.shape[1],
        stretches,
        COUNT=count,
        SAMPLING=temperatures is not None or temperature > 0.0,
        WITH_SUMS=sums is not None,
        BLOCK=triton.next_power_of_2(stretches * count),
        BLOCK_STRETCHES=triton.next_power_of_2(stretches),
        num_warps=4,
    )
