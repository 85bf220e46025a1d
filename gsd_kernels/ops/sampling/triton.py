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

from .triton_cut import find_cuts, new, parameter

STRETCH = 4096  # logits that one program perturbs at a time

CUT = tl.constexpr(-3.0e38)
"""Score of a token that is cut: below every real one, above the −inf of what is not there."""


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
        temperature = parameter(temperatures_ptr, temperature, b)
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
            keep = keep & (tl.exp(x - tl.load(tops_ptr + index)) >= parameter(min_ps_ptr, min_p, b))
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
            drawn = parameter(temperatures_ptr, temperature, index // rows) > 0.0
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
    tokens = new(logits, batch, rows, count, dtype=torch.int32)
    log_probs = new(logits, batch, rows, count if with_log_probs else 0)
    total = batch * rows
    if total == 0:
        return tokens, log_probs
    sampling = temperatures is not None or temperature > 0.0
    has_cut = sampling and (top_ks is not None or top_k > 0 or top_ps is not None or top_p < 1.0)
    has_min_p = sampling and (min_ps is not None or min_p > 0.0)
    cuts = tops = None
    if has_cut or has_min_p:
        cuts, tops = find_cuts(logits, temperatures, temperature, top_ks, top_k, top_ps, top_p, has_cut)
    stretches = triton.cdiv(vocab, STRETCH)
    best_scores = new(logits, total, stretches, count)
    best_ids = new(logits, total, stretches, count, dtype=torch.int32)
    sums = new(logits, total, stretches, 2) if with_log_probs else None
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
