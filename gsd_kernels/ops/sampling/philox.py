"""Philox 4x32-10, a counter-based random generator, in plain integer tensor operations.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox4x32(
    key: tuple[Tensor, Tensor], counter: tuple[Tensor, Tensor, Tensor, Tensor], rounds: int = 10
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words for every counter. All words are int64 tensors in [0, 2**32), broadcast together."""
    k0, k1 = key
    c0, c1, c2, c3 = counter
    for _ in range(rounds):
        hi0, lo0 = _multiply(c0, _MULTIPLIERS[0])
        hi1, lo1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = (k0 + _WEYL[0]) & MASK32, (k1 + _WEYL[1]) & MASK32
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32×32-bit product. int64 products wrap modulo 2**64, which keeps all 64 bits."""
    product = a * b
    return (product >> 32) & MASK32, product & MASK32


def gumbel_noise(seed: Tensor, positions: Tensor, sequence_ids: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise for every token at every position; the draw depends on nothing else.

    Key: the 64-bit seed. Counter: (token >> 2, position, sequence, 0); word: token & 3.
    u = (top 31 bits + ½)·2⁻³¹ keeps the upper tail, which a 24-bit uniform loses; g = −log(−log1p(−u)).

    Args:
        seed: int64 [], all 64 bits used.
        positions: int [...], index of the token being picked, padding excluded.
        sequence_ids: int [...], broadcastable to ``positions``.
        vocab_size: V.

    Returns:
        float32 [..., V].
    """
    blocks = torch.arange((vocab_size + 3) // 4, device=positions.device)
    words = _words(seed, blocks, positions, sequence_ids)
    return _gumbel(torch.stack(words, -1).flatten(-2)[..., :vocab_size])


def gumbel_of(seed: Tensor, positions: Tensor, sequence_ids: Tensor, tokens: Tensor) -> Tensor:
    """:func:`gumbel_noise` of single tokens: int [..., K] (−1 reads as 0) → float32 [..., K]."""
    tokens = tokens.long().clamp(min=0)
    words = torch.stack(_words(seed, tokens >> 2, positions, sequence_ids), -1)  # [..., K, 4]
    return _gumbel(words.gather(-1, (tokens & 3).unsqueeze(-1)).squeeze(-1))


def uniform_of(seed: Tensor, positions: Tensor, sequence_ids: Tensor) -> Tensor:
    """One number in (0, 1) for every position, float32 [...]: word 0 of the counter (0, position, sequence, 0)."""
    word = _words(seed, torch.zeros(1, dtype=torch.int64, device=positions.device), positions, sequence_ids)[0]
    return _uniform(word.squeeze(-1))


def derived_seed(seed: Tensor, stream: int) -> Tensor:
    """The seed of an independent stream, int64 []: words 0 and 1 of the counter (0, 0, 0, stream).

    ``stream`` is at least 1. The noise of :func:`gumbel_noise` has 0 in its place, so no word is used twice.
    """
    zero = torch.zeros_like(seed)
    low, high, *_ = philox4x32((seed & MASK32, (seed >> 32) & MASK32), (zero, zero, zero, zero + stream))
    return (high << 32) | low


def _words(seed: Tensor, blocks: Tensor, positions: Tensor, sequence_ids: Tensor) -> tuple[Tensor, ...]:
    position = positions.long().unsqueeze(-1)
    sequence = sequence_ids.long().unsqueeze(-1)
    seed = seed.to(positions.device)
    key = (seed & MASK32, (seed >> 32) & MASK32)
    return torch.broadcast_tensors(*philox4x32(key, (blocks, position, sequence, torch.zeros_like(blocks))))


def _uniform(bits: Tensor) -> Tensor:
    uniform = ((bits >> 1).to(torch.float32) + 0.5) * 2.0**-31
    return uniform.clamp(max=1.0 - 2.0**-24)  # float32 rounds the top of the range to 1


def _gumbel(bits: Tensor) -> Tensor:
    return -torch.log(-torch.log1p(-_uniform(bits)))  # finite, since no uniform number is 0 or 1
