"""Sampling from vocabularies of any size, with the noise of ``philox.py``: the random bits are identical. One launch.

- Where nothing is cut (greedy, or temperature alone) the logits are read once: every program takes a stretch of a row,
  perturbs it and keeps the stretch's best and its log-sum-exp. The program that ends last in a row merges them: a
  ticket, counted by all programs of a row, says who that is. The merge reads all stretches in their order, so the
  result does not depend on the order in which they ended.
- Where something is cut, one program takes a row and reads it twice. The first pass takes the maximum and bounds the
  cut from below; the second collects the few tokens above the bound, on which the exact cut is searched in registers,
  and which alone are perturbed then. One pass less would mean to sample before the cut is known. Where the tokens
  above the bound do not fit (a nucleus or top-k of thousands of tokens), the search itself streams: up to 17 further
  reads a cut, two bits of the cut's key per read, and a last one for the noise.

All reads but the first find the row in L2.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_cut import COLLECT, log_probs, new, ordered, parameter, row_cut, row_warpers, scratch

STRETCH = COLLECT  # logits that one program perturbs at a time; where a row is cut, also what it collects
TICKETS = 4096  # rows of a launch that the kept tickets serve
STREAMS = 64  # of a GPU

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
def _gumbel_of(seed, position, sequence, tokens):
    """The same of any tokens, one Philox call each."""
    zero = tokens * 0
    w0, w1, w2, w3 = tl.philox(seed, tokens // 4, zero + position, zero + sequence, zero)
    word = tokens & 3
    return gumbel_from(tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3)))


@triton.jit
def _keep_best(score, tokens, spoiled, best_scores_ptr, best_tokens_ptr, COUNT: tl.constexpr):
    """Store the COUNT best of a block, ties by the lowest token; where there is NaN, token −1."""
    for i in tl.range(0, COUNT):
        best = tl.max(score, 0)
        token = tl.min(tl.where(score == best, tokens, 2147483647), 0)
        token = tl.where(best > float("-inf"), token, 2147483647)  # fewer than COUNT are left
        score = tl.where(tokens == token, float("-inf"), score)
        tl.store(best_scores_ptr + i, best)
        tl.store(best_tokens_ptr + i, tl.where(spoiled, -1, token))


@triton.jit
def _pick(
    best_scores_ptr,  # of this row: float32 [parts, COUNT]
    best_tokens_ptr,  # int32 [parts, COUNT]
    parts,
    top,  # with WITH_SUMS: largest score of the row, and the logarithm of Σ exp(score − top)
    log_sum,
    drawn,  # whether the row is sampled
    tokens_ptr,  # int32 [COUNT]
    log_probs_ptr,  # float32 [COUNT]
    COUNT: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The COUNT best of a row among the best of its parts, which other threads or programs have stored."""
    i = tl.arange(0, BLOCK)
    inside = i < parts * COUNT
    score = tl.load(best_scores_ptr + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(best_tokens_ptr + i, mask=inside, other=2147483647, cache_modifier=".cg")
    spoiled = tl.min(token, 0) < 0
    for j in tl.range(0, COUNT):
        best = tl.max(score, 0)
        picked = tl.min(tl.where(score == best, token, 2147483647), 0)
        score = tl.where(token == picked, float("-inf"), score)
        nothing = spoiled | (picked == 2147483647)
        if not WITH_SUMS:  # nothing to draw from: all is cut, or +∞ is there
            nothing = nothing | (drawn & ((best <= CUT) | (best == float("inf"))))
        tl.store(tokens_ptr + j, tl.where(nothing, -1, picked))
        if WITH_SUMS:
            # (best − top) − log Σ is at most 0 whatever the rounding; best − log-sum-exp is not.
            log_prob = tl.where(best > CUT, (best - top) - log_sum, float("-inf"))
            tl.store(log_probs_ptr + j, tl.where(spoiled, float("nan"), log_prob))


@triton.jit(do_not_specialize=["rows"])
def _score_kernel(
    logits_ptr,
    positions_ptr,  # int32 [B, R]
    sequence_ids_ptr,  # int32 [B]
    seed_ptr,
    temperatures_ptr,
    temperature,
    tickets_ptr,  # int32 [rows]: programs of a row that have ended; 0 before and after
    best_scores_ptr,  # float32 [rows, stretches, COUNT] scratch
    best_tokens_ptr,  # int32 [rows, stretches, COUNT] scratch
    sums_ptr,  # float32 [rows, stretches, 2] scratch: largest score, sum of exp(score − largest)
    tokens_ptr,  # int32 [rows, COUNT]
    log_probs_ptr,  # float32 [rows, COUNT]
    stride_b,
    stride_r,
    rows,
    vocab,
    COUNT: tl.constexpr,
    SAMPLING: tl.constexpr,
    NOISE: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_BEST: tl.constexpr,
    BLOCK_STRETCHES: tl.constexpr,
):
    """The COUNT best of one stretch of a row's perturbed scores; the last program of a row merges its stretches."""
    index = tl.program_id(0)
    stretch = tl.program_id(1)
    stretches = tl.num_programs(1)
    b = index // rows
    x_ptr = logits_ptr + b.to(tl.int64) * stride_b + (index % rows).to(tl.int64) * stride_r
    v0 = stretch * BLOCK
    v = v0 + tl.arange(0, BLOCK)
    raw = tl.load(x_ptr + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
    spoiled = tl.max((raw != raw).to(tl.int32), 0) > 0
    score = tl.maximum(raw, CUT)
    drawn = False
    if SAMPLING:
        temperature = parameter(temperatures_ptr, temperature, b)
        drawn = temperature > 0.0
        x = tl.math.div_rn(raw, tl.zeros_like(raw) + tl.where(drawn, temperature, 1.0))
        noisy = x
        if NOISE:
            position, sequence = tl.load(positions_ptr + index), tl.load(sequence_ids_ptr + b)
            noisy = x + _gumbel(tl.load(seed_ptr), position, sequence, v0, BLOCK)
        score = tl.where(drawn, tl.where(x > CUT, noisy, CUT), score)
    score = tl.where(v < vocab, score, float("-inf"))
    first = index.to(tl.int64) * stretches
    out = first + stretch
    if WITH_SUMS:
        largest = tl.max(score, 0)
        tl.store(sums_ptr + 2 * out, largest)
        tl.store(sums_ptr + 2 * out + 1, tl.sum(tl.exp(score - largest), 0))
    _keep_best(score, v, spoiled, best_scores_ptr + out * COUNT, best_tokens_ptr + out * COUNT, COUNT)
    tl.debug_barrier()  # all threads have stored before one of them says so
    if tl.atomic_add(tickets_ptr + index, 1, sem="acq_rel") == stretches - 1:
        tl.store(tickets_ptr + index, 0)
        top = 0.0
        log_sum = 0.0
        if WITH_SUMS:
            s = tl.arange(0, BLOCK_STRETCHES)
            sum_ptr = sums_ptr + 2 * (first + s)
            tops = tl.load(sum_ptr, mask=s < stretches, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(sum_ptr + 1, mask=s < stretches, other=0.0, cache_modifier=".cg")
            top = tl.max(tops, 0)
            log_sum = tl.log(tl.sum(part * tl.exp(tops - top), 0))
        _pick(
            best_scores_ptr + first * COUNT,
            best_tokens_ptr + first * COUNT,
            stretches,
            top,
            log_sum,
            drawn,
            tokens_ptr + index.to(tl.int64) * COUNT,
            log_probs_ptr + index.to(tl.int64) * COUNT,
            COUNT,
            WITH_SUMS,
            BLOCK_BEST,
        )


@triton.jit
def _kept_scores(
    x_ptr,  # of this row: [vocab]
    collected_ptr,  # float32 [BLOCK]
    ids_ptr,  # int32 [BLOCK]
    v0,
    n,  # how many tokens to score: those collected if ``listed``, else the vocabulary
    listed,
    draw,  # whether the row is sampled; seed, position, sequence
    temperature,
    top,
    cut,
    least,
    NOISE: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Perturbed scores of BLOCK tokens from place v0 of the list or the row on, CUT where cut, and the tokens."""
    drawn, seed, position, sequence = draw
    i = v0 + tl.arange(0, BLOCK)
    here = i < tl.where(listed, n, 0)
    few = tl.load(collected_ptr + i, mask=here, other=float("-inf"))
    raw = tl.load(x_ptr + i, mask=i < tl.where(listed, 0, n), other=float("-inf")).to(tl.float32)
    tokens = tl.where(listed, tl.load(ids_ptr + i, mask=here, other=0), i)
    x = tl.where(listed, few, tl.math.div_rn(raw, tl.zeros_like(raw) + temperature))
    noisy = x
    if NOISE:
        noisy = x + tl.where(drawn, _gumbel_of(seed, position, sequence, tokens), 0.0)
    keep = (x > CUT) & (ordered(x) >= cut)
    if HAS_MIN_P:
        keep = keep & (tl.where(drawn, tl.exp(x - top), 1.0) >= least)
    return tl.where(i < n, tl.where(keep, noisy, CUT), float("-inf")), tokens


@triton.jit(do_not_specialize=["rows", "stretches"])
def _cut_kernel(
    logits_ptr,
    positions_ptr,  # int32 [B, R]
    sequence_ids_ptr,  # int32 [B]
    seed_ptr,
    temperatures_ptr,
    temperature,
    top_ks_ptr,
    top_k,
    top_ps_ptr,
    top_p,
    min_ps_ptr,
    min_p,
    collected_ptr,  # float32 [rows, BLOCK] scratch
    ids_ptr,  # int32 [rows, BLOCK] scratch
    best_scores_ptr,  # float32 [rows, stretches, COUNT] scratch
    best_tokens_ptr,  # int32 [rows, stretches, COUNT] scratch
    tokens_ptr,  # int32 [rows, COUNT]
    log_probs_ptr,  # float32 [rows, COUNT]
    stride_b,
    stride_r,
    rows,
    vocab,
    stretches,
    COUNT: tl.constexpr,
    NOISE: tl.constexpr,
    HAS_CUT: tl.constexpr,
    HAS_MIN_P: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_BEST: tl.constexpr,
):
    """The COUNT best of a row that warpers cut. One program a row."""
    index = tl.program_id(0)
    b = index // rows
    x_ptr = logits_ptr + b.to(tl.int64) * stride_b + (index % rows).to(tl.int64) * stride_r
    drawn, temperature, k, p, least = row_warpers(
        b, temperatures_ptr, temperature, top_ks_ptr, top_k, top_ps_ptr, top_p, min_ps_ptr, min_p
    )
    place = index.to(tl.int64)
    collected_ptr += place * BLOCK
    ids_ptr += place * BLOCK
    spoiled, top, cut, listed, count = row_cut(
        x_ptr, collected_ptr, ids_ptr, vocab, temperature, k, p, least, HAS_CUT, HAS_MIN_P, BLOCK
    )
    # Noise for what was collected, if all that is kept is there; else for the whole row.
    n = tl.where(listed, count, vocab)
    largest = top * 0.0 + CUT
    total = top * 0.0
    position, sequence, seed = tl.load(positions_ptr + index), tl.load(sequence_ids_ptr + b), tl.load(seed_ptr)
    draw = (drawn, seed, position, sequence)
    best_scores_ptr += place * stretches * COUNT
    best_tokens_ptr += place * stretches * COUNT
    for v0 in tl.range(0, n, BLOCK):
        score, tokens = _kept_scores(
            x_ptr, collected_ptr, ids_ptr, v0, n, listed, draw, temperature, top, cut, least, NOISE, HAS_MIN_P, BLOCK
        )
        highest = tl.maximum(largest, tl.max(score, 0))
        total = total * tl.exp(largest - highest) + tl.sum(tl.exp(score - highest), 0)
        largest = highest
        stretch = v0 // BLOCK
        _keep_best(score, tokens, spoiled, best_scores_ptr + stretch * COUNT, best_tokens_ptr + stretch * COUNT, COUNT)
    tl.debug_barrier()
    _pick(
        best_scores_ptr,
        best_tokens_ptr,
        tl.cdiv(n, BLOCK),
        largest,
        tl.log(total),
        drawn,
        tokens_ptr + place * COUNT,
        log_probs_ptr + place * COUNT,
        COUNT,
        WITH_SUMS,
        BLOCK_BEST,
    )


class Tickets:
    """Zeros for :func:`_score_kernel`, which leaves them as they were: made once a GPU, of a stream each.

    Launches on one stream follow each other. Graphs that were captured on one stream share its tickets, as they share
    the workspace of cuBLAS: replays of them must follow each other as well.
    """

    def __init__(self) -> None:
        self.kept: dict[torch.device, Tensor] = {}
        self.streams: dict[tuple[torch.device, int], int] = {}
        self.lock = threading.Lock()

    def of(self, like: Tensor, rows: int) -> Tensor:
        """int32 [rows], 0; of the current stream, on the device of ``like``."""
        if rows > TICKETS or not like.is_cuda:
            return torch.zeros(rows, dtype=torch.int32, device=like.device)
        with self.lock:
            if like.device not in self.kept:
                if torch.cuda.is_current_stream_capturing():  # what is made here would be the graph's own
                    return torch.zeros(rows, dtype=torch.int32, device=like.device)
                self.kept[like.device] = torch.zeros(STREAMS, TICKETS, dtype=torch.int32, device=like.device)
                torch.cuda.current_stream(like.device).synchronize()  # other streams may use them next
            stream = like.device, torch.cuda.current_stream(like.device).cuda_stream
            place = self.streams.setdefault(stream, sum(device == like.device for device, _ in self.streams))
        if place >= STREAMS:
            return torch.zeros(rows, dtype=torch.int32, device=like.device)
        return self.kept[like.device][place, :rows]


_tickets = Tickets()


def sample_rows(logits: Tensor, positions: Tensor, seed: Tensor, sequence_ids: Tensor, *warpers: Any) -> Tensor:
    return best_tokens(logits, positions, 1, seed, sequence_ids, *_pairs(*warpers), True, False)[0].squeeze(-1)


def draft_candidates(
    logits: Tensor, positions: Tensor, branch: int, seed: Tensor, sequence_ids: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """With the log-sum-exp; the warped distribution's own normaliser cancels."""
    *warpers, noise = rest
    return best_tokens(logits, positions, branch, seed, sequence_ids, *_pairs(*warpers), noise, True)


def warped_log_probs(logits: Tensor, *warpers: Any) -> Tensor:
    return log_probs(logits, *_pairs(*warpers))


def _pairs(*warpers: Any) -> list[Any]:
    """Of four numbers and four optional tensors each tensor and its number, which counts where that is None."""
    pairs = zip(warpers[4:], warpers[:4], strict=True)
    return [part for each, number in pairs for part in (each, float(number))]


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
    stretches = triton.cdiv(vocab, STRETCH)
    best = new(logits, total, stretches, count), new(logits, total, stretches, count, dtype=torch.int32)
    keys = positions.contiguous(), sequence_ids.contiguous(), seed, temperatures, temperature
    sizes = {"COUNT": count, "NOISE": noise, "WITH_SUMS": with_log_probs, "BLOCK": STRETCH, "num_warps": 8}
    sizes["BLOCK_BEST"] = triton.next_power_of_2(stretches * count)
    where = *logits.stride()[:2], rows, vocab
    if has_cut or has_min_p:
        warpers = top_ks, top_k, top_ps, top_p, min_ps, min_p
        found = *scratch(logits), *best, tokens, log_probs
        options = {"HAS_CUT": has_cut, "HAS_MIN_P": has_min_p, **sizes}
        _cut_kernel[(total,)](logits, *keys, *warpers, *found, *where, stretches, **options)
        return tokens, log_probs
    sums = new(logits, total, stretches, 2) if with_log_probs else None
    found = _tickets.of(logits, total), *best, sums, tokens, log_probs
    options = {"SAMPLING": sampling, "BLOCK_STRETCHES": triton.next_power_of_2(stretches), **sizes}
    _score_kernel[(total, stretches)](logits, *keys, *found, *where, **options)
    return tokens, log_probs
