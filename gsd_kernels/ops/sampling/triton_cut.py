"""The cut of top-k and top-p in vocabularies of any size: two of the passes that ``triton.py`` describes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

COLLECT = 4096  # tokens above the bound that the exact search holds in registers


@triton.jit
def parameter(values_ptr, value, b):
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
    temperature = parameter(temperatures_ptr, temperature, b)
    temperature = tl.where(temperature > 0.0, temperature, 1.0)  # greedy rows ignore what is found here
    lanes = tl.full([BLOCK], float("-inf"), tl.float32)
    for v0 in tl.range(0, vocab, BLOCK):
        lanes = tl.maximum(lanes, _scaled(x_ptr, v0 + tl.arange(0, BLOCK), vocab, temperature))
    top = tl.max(lanes, 0)
    tl.store(tops_ptr + index, top)
    if HAS_CUT:
        k = tl.minimum(parameter(top_ks_ptr, top_k, b), vocab.to(tl.float32))
        p = parameter(top_ps_ptr, top_p, b)
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


def new(like: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def find_cuts(
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
    cuts, tops = new(logits, total), new(logits, total)
    _cut_kernel[(total,)](
        logits,
        temperatures,
        temperature,
        top_ks,
        top_k,
        top_ps,
        top_p,
        new(logits, total, COLLECT) if has_cut else None,
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
