"""The cut of top-k and top-p in vocabularies of any size, without a sort; ``triton.py`` describes the passes."""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_common import ordered


@triton.jit
def parameter(values_ptr, value, b):
    """A sampling parameter as float32: one a sequence, or one for all."""
    if values_ptr is None:
        return value
    else:
        return tl.load(values_ptr + b).to(tl.float32)


@triton.jit
def row_warpers(warpers, b):
    """Of sequence b: whether its tokens are drawn, and temperature, k, p and min_p, which cut nothing where not.

    ``warpers`` are pointers to one of each a sequence, and numbers for all: of temperature, k, p, min_p in turn.
    """
    temperature = parameter(warpers[0], warpers[1], b)
    drawn = temperature > 0.0
    temperature = tl.where(drawn, temperature, 1.0)
    k = tl.where(drawn, parameter(warpers[2], warpers[3], b), 0.0)
    p = tl.where(drawn, parameter(warpers[4], warpers[5], b), 1.0)
    least = tl.where(drawn, parameter(warpers[6], warpers[7], b), 0.0)
    return drawn, temperature, k, p, least


@triton.jit
def scaled(x_ptr, v, vocab, temperature):
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
    return tl.where((v < vocab) & (ordered(x) >= floor), weights, 0.0)


@triton.jit
def _stream_sum(x_ptr, vocab, temperature, top, floor, MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of the weights of a row, in one read."""
    lanes = tl.zeros([BLOCK], tl.float32)
    for v0 in tl.range(0, vocab, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        lanes += _weights(scaled(x_ptr, v, vocab, temperature), v, vocab, top, floor, MASS)
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
            x = scaled(x_ptr, v, vocab, temperature)
            weights = _weights(x, v, vocab, top, floor, MASS)
            key = ordered(x)
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
def row_cut(
    x_ptr,
    collected_ptr,  # float32 [BLOCK] scratch of this row
    ids_ptr,  # int32 [BLOCK]
    vocab,
    temperature,  # above 0
    k,
    p,
    min_p,
    HAS_CUT: tl.constexpr,  # top-k or top-p, for any sequence
    HAS_MIN_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The cut of a row's warpers, by one program: (NaN is there, largest logit / temperature, key of the smallest one
    that top-k and top-p keep, whether all that is kept was collected, number of tokens collected)."""
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    spoiled = tl.full([BLOCK], 0, tl.int32)
    for v0 in tl.range(0, vocab, BLOCK):
        x = scaled(x_ptr, v0 + tl.arange(0, BLOCK), vocab, temperature)
        lanes = tl.maximum(lanes, x)
        spoiled = spoiled | (x != x).to(tl.int32)
    top = tl.max(lanes, 0)
    lowest = ordered(float("-inf") + 0.0 * temperature).to(tl.int64)
    highest = ordered(top).to(tl.int64)
    bound = lowest
    if HAS_CUT:
        k = tl.minimum(k, vocab.to(tl.float32))
        # At least as many tokens as lanes reach the bound: with top-k, k of them, so the k-th largest is above it.
        wanted = tl.where(k > 0.0, k, BLOCK // 2)
        if (vocab > BLOCK) & (wanted <= BLOCK):
            bound = _search(ordered(lanes), tl.full([BLOCK], 1.0, tl.float32), wanted, lowest, highest)
    # Collect the tokens at or above the bound.
    count = bound.to(tl.int32) * 0
    mass = tl.zeros([BLOCK], tl.float32)
    for v0 in tl.range(0, vocab, BLOCK):
        v = v0 + tl.arange(0, BLOCK)
        x = scaled(x_ptr, v, vocab, temperature)
        keep = (v < vocab) & (ordered(x) >= bound)
        if HAS_CUT:
            mass += tl.where(v < vocab, tl.exp(x - top), 0.0)
        elif HAS_MIN_P:
            keep = keep & (tl.exp(x - top) >= min_p)
        found = tl.sum(keep.to(tl.int32), 0)
        if found > 0:
            place = count + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(collected_ptr + place, x, mask=keep & (place < BLOCK))
            tl.store(ids_ptr + place, v, mask=keep & (place < BLOCK))
        count += found
    tl.debug_barrier()
    complete = count <= BLOCK
    cut = lowest
    if HAS_CUT:
        i = tl.arange(0, BLOCK)
        few = tl.load(collected_ptr + i, mask=i < tl.minimum(count, BLOCK), other=float("-inf"))
        few_keys = ordered(few)
        present = tl.where(i < count, 1.0, 0.0)
        total = tl.sum(mass, 0)
        if k > 0.0:
            if complete:
                cut = _search(few_keys, present, k, bound, highest)
                total = tl.sum(tl.where(few_keys >= cut, present * tl.exp(few - top), 0.0), 0)
            else:
                cut = _stream_search(x_ptr, vocab, temperature, top, lowest, k, bound, highest, False, BLOCK)
                total = _stream_sum(x_ptr, vocab, temperature, top, cut, True, BLOCK)
        if p < 1.0:
            # A token stays if the mass before it is below p: the cut is the largest key with mass p at or above it.
            few_mass = tl.where(few_keys >= cut, present * tl.exp(few - top), 0.0)
            if complete & (tl.sum(few_mass, 0) >= p * total):
                cut = _search(few_keys, few_mass, p * total, tl.maximum(cut, bound), highest)
            else:
                cut = _stream_search(x_ptr, vocab, temperature, top, cut, p * total, cut, highest, True, BLOCK)
    return tl.max(spoiled, 0) > 0, top, cut, complete & (cut >= bound), count
