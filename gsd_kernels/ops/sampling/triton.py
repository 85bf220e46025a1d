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

from ..triton_common import ordered
from .triton_cut import parameter, row_cut, row_warpers, scaled

STRETCH = 4096  # logits that one program perturbs at a time; where a row is cut, also what it collects of one
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
def _keep_best(score, tokens, spoiled, best, part, COUNT: tl.constexpr):
    """Store the COUNT best of a block as those of this part, ties by the lowest token; where there is NaN, token −1."""
    for i in tl.range(0, COUNT):
        highest = tl.max(score, 0)
        token = tl.min(tl.where(score == highest, tokens, 2147483647), 0)
        token = tl.where(highest > float("-inf"), token, 2147483647)  # fewer than COUNT are left
        score = tl.where(tokens == token, float("-inf"), score)
        tl.store(best[0] + part * COUNT + i, highest)
        tl.store(best[1] + part * COUNT + i, tl.where(spoiled, -1, token))


@triton.jit
def _pick(
    best,  # pointers: scores float32, tokens int32 [parts, COUNT]
    first,  # of this row's parts
    parts,
    top,  # with WITH_SUMS: largest score of the row, and the logarithm of Σ exp(score − top)
    log_sum,
    drawn,  # whether the row is sampled
    index,  # of the row
    tokens_ptr,  # int32 [rows, COUNT]
    log_probs_ptr,  # float32 [rows, COUNT]
    COUNT: tl.constexpr,
    WITH_SUMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The COUNT best of a row among the best of its parts, which other threads or programs have stored."""
    i = tl.arange(0, BLOCK)
    inside = i < parts * COUNT
    score = tl.load(best[0] + first * COUNT + i, mask=inside, other=float("-inf"), cache_modifier=".cg")
    token = tl.load(best[1] + first * COUNT + i, mask=inside, other=2147483647, cache_modifier=".cg")
    spoiled = tl.min(token, 0) < 0
    for j in tl.range(0, COUNT):
        highest = tl.max(score, 0)
        picked = tl.min(tl.where(score == highest, token, 2147483647), 0)
        score = tl.where(token == picked, float("-inf"), score)
        nothing = spoiled | (picked == 2147483647)
        if not WITH_SUMS:  # nothing to draw from: all is cut, or +∞ is there
            nothing = nothing | (drawn & ((highest <= CUT) | (highest == float("inf"))))
        out = index.to(tl.int64) * COUNT + j
        tl.store(tokens_ptr + out, tl.where(nothing, -1, picked))
        if WITH_SUMS:
            # (highest − top) − log Σ is at most 0 whatever the rounding; highest − log-sum-exp is not.
            log_prob = tl.where(highest > CUT, (highest - top) - log_sum, float("-inf"))
            tl.store(log_probs_ptr + out, tl.where(spoiled, float("nan"), log_prob))


@triton.jit(do_not_specialize=["rows"])
def _score_kernel(
    logits_ptr,
    keys,  # pointers: positions int32 [B, R], sequences int32 [B], seed
    warpers,  # of row_warpers, the temperature's alone
    tickets_ptr,  # int32 [rows]: programs of a row that have ended; 0 before and after
    best,  # pointers, scratch: scores float32, tokens int32 [rows, stretches, COUNT]
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
        temperature = parameter(warpers[0], warpers[1], b)
        drawn = temperature > 0.0
        x = tl.math.div_rn(raw, tl.zeros_like(raw) + tl.where(drawn, temperature, 1.0))
        noisy = x
        if NOISE:
            noisy = x + _gumbel(tl.load(keys[2]), tl.load(keys[0] + index), tl.load(keys[1] + b), v0, BLOCK)
        score = tl.where(drawn, tl.where(x > CUT, noisy, CUT), score)
    score = tl.where(v < vocab, score, float("-inf"))
    first = index.to(tl.int64) * stretches
    out = first + stretch
    if WITH_SUMS:
        largest = tl.max(score, 0)
        tl.store(sums_ptr + 2 * out, largest)
        tl.store(sums_ptr + 2 * out + 1, tl.sum(tl.exp(score - largest), 0))
    _keep_best(score, v, spoiled, best, out, COUNT)
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
            best, first, stretches, top, log_sum, drawn, index, tokens_ptr, log_probs_ptr,
            COUNT, WITH_SUMS, BLOCK_BEST,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "stretches"])
def _cut_kernel(
    logits_ptr,
    keys,  # pointers: positions int32 [B, R], sequences int32 [B], seed
    warpers,  # of row_warpers
    collected,  # pointers, scratch: logits / temperature float32, tokens int32 [rows, BLOCK]
    best,  # pointers, scratch: scores float32, tokens int32 [rows, stretches, COUNT]
    tokens_ptr,  # int32 [rows, COUNT]
    log_probs_ptr,  # float32 [rows, COUNT]; with a COUNT of 0 [rows, V], the distribution
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
    """The COUNT best of a row that warpers cut, or what they leave of its distribution. One program a row."""
    index = tl.program_id(0)
    b = index // rows
    x_ptr = logits_ptr + b.to(tl.int64) * stride_b + (index % rows).to(tl.int64) * stride_r
    drawn, temperature, k, p, least = row_warpers(warpers, b)
    place = index.to(tl.int64)
    few_ptr, ids_ptr = collected[0] + place * BLOCK, collected[1] + place * BLOCK
    spoiled, top, cut, listed, count = row_cut(
        x_ptr, few_ptr, ids_ptr, vocab, temperature, k, p, least, HAS_CUT, HAS_MIN_P, BLOCK
    )
    # What was collected, if all that is kept is there; else the whole row.
    n = tl.where(listed, count, vocab)
    # What is cut lies below what may be drawn; a distribution may be of tokens that lie as low.
    floor = CUT if COUNT > 0 else float("-inf")
    largest = top * 0.0 + CUT if COUNT > 0 else top
    total = top * 0.0
    for v0 in tl.range(0, n, BLOCK):
        i = v0 + tl.arange(0, BLOCK)
        here = i < tl.where(listed, n, 0)
        tokens = tl.where(listed, tl.load(ids_ptr + i, mask=here, other=0), i)
        few = tl.load(few_ptr + i, mask=here, other=float("-inf"))
        x = tl.where(listed, few, scaled(x_ptr, i, tl.where(listed, 0, n), temperature))
        keep = (x > floor) & (ordered(x) >= cut)
        if HAS_MIN_P:
            keep = keep & (tl.where(drawn, tl.exp(x - top), 1.0) >= least)
        score = x
        if NOISE:
            noise = _gumbel_of(tl.load(keys[2]), tl.load(keys[0] + index), tl.load(keys[1] + b), tokens)
            score = x + tl.where(drawn, noise, 0.0)
        score = tl.where(i < n, tl.where(keep, score, floor), float("-inf"))
        highest = tl.maximum(largest, tl.max(score, 0))
        total = total * tl.exp(largest - highest) + tl.sum(tl.exp(score - highest), 0)
        largest = highest
        if COUNT > 0:
            _keep_best(score, tokens, spoiled, best, place * stretches + v0 // BLOCK, COUNT)
    if COUNT > 0:
        tl.debug_barrier()
        _pick(
            best, place * stretches, tl.cdiv(n, BLOCK), largest, tl.log(total), drawn, index, tokens_ptr, log_probs_ptr,
            COUNT, WITH_SUMS, BLOCK_BEST,
        )  # fmt: skip
    else:
        # Nothing to draw from, as log_softmax says it.
        nothing = spoiled | (top == float("inf")) | (top == float("-inf"))
        log_sum = tl.where(nothing, float("nan"), tl.log(total))
        for v0 in tl.range(0, vocab, BLOCK):
            v = v0 + tl.arange(0, BLOCK)
            x = scaled(x_ptr, v, vocab, temperature)
            keep = (ordered(x) >= cut) & (tl.exp(x - top) >= least)
            tl.store(
                log_probs_ptr + place * vocab + v, tl.where(keep, x - top, float("-inf")) - log_sum, mask=v < vocab
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
    return best_tokens(logits, (positions, sequence_ids, seed), pairs(*warpers), 1)[0].squeeze(-1)


def draft_candidates(
    logits: Tensor, positions: Tensor, branch: int, seed: Tensor, sequence_ids: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """With the log-sum-exp; the warped distribution's own normaliser cancels."""
    *warpers, noise = rest
    return best_tokens(logits, (positions, sequence_ids, seed), pairs(*warpers), branch, noise, with_log_probs=True)


def warped_log_probs(logits: Tensor, *warpers: Any) -> Tensor:
    return best_tokens(logits, None, pairs(*warpers), 0, noise=False)[1]


def pairs(*warpers: Any) -> tuple[Any, ...]:
    """Of four numbers and four optional tensors each tensor and its number, which counts where that is None."""
    each = zip(warpers[4:], warpers[:4], strict=True)
    return tuple(part for tensor, number in each for part in (tensor, float(number)))


def best_tokens(
    logits: Tensor,  # [B, R, V]
    keys: tuple[Tensor, ...] | None,  # positions int32 [B, R], sequences int32 [B], seed; of the noise
    warpers: tuple[Any, ...],  # of pairs
    count: int,
    noise: bool = True,
    with_log_probs: bool = False,
) -> tuple[Tensor, Tensor]:
    """The ``count`` best perturbed scores of every row: tokens int32 [B, R, count], log-probabilities if wanted.

    With a ``count`` of 0 log-probabilities of the whole distribution, [B, R, V].
    """
    batch, rows, vocab = logits.shape
    if logits.stride(-1) != 1:
        logits = logits.contiguous()

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    log_probs = new(batch, rows, vocab if count == 0 else count if with_log_probs else 0)
    tokens = new(batch, rows, count, dtype=torch.int32)
    total, stretches = batch * rows, triton.cdiv(vocab, STRETCH)
    if total == 0:
        return tokens, log_probs
    temperatures, temperature, top_ks, top_k, top_ps, top_p, min_ps, min_p = warpers
    sampling = temperatures is not None or temperature > 0.0
    has_cut = sampling and (top_ks is not None or top_k > 0 or top_ps is not None or top_p < 1.0)
    has_min_p = sampling and (min_ps is not None or min_p > 0.0)
    best = new(total, stretches, count), new(total, stretches, count, dtype=torch.int32)
    keys = keys if keys is None else tuple(key.contiguous() for key in keys)
    sizes = {"COUNT": count, "NOISE": noise, "WITH_SUMS": with_log_probs, "BLOCK": STRETCH, "num_warps": 8}
    sizes["BLOCK_BEST"] = triton.next_power_of_2(stretches * count)
    found = tokens, log_probs, *logits.stride()[:2], rows, vocab
    if has_cut or has_min_p or count == 0:
        collected = new(total, STRETCH), new(total, STRETCH, dtype=torch.int32)
        options = {"HAS_CUT": has_cut, "HAS_MIN_P": has_min_p, **sizes}
        _cut_kernel[(total,)](logits, keys, warpers, collected, best, *found, stretches, **options)
        return tokens, log_probs
    sums = new(total, stretches, 2) if with_log_probs else None
    options = {"SAMPLING": sampling, "BLOCK_STRETCHES": triton.next_power_of_2(stretches), **sizes}
    tickets = _tickets.of(logits, total)
    _score_kernel[(total, stretches)](logits, keys, warpers[:2], tickets, best, sums, *found, **options)
    return tokens, log_probs
