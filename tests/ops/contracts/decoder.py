"""A random decoder whose rows decoder_rows computes, and a drafter for feature_rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights
from gsd_kernels.ops.feature_rows import FeatureWeights, Projection


def decoder_case(dtype=torch.float32, batch=2, rows=5):
    """A random decoder with caches of 40 positions, 20 and 17 of them filled, and rows that form a small tree."""
    gen = torch.Generator().manual_seed(0)
    vocab, hidden, inner, heads, kv_heads, dim = 50, 32, 48, 4, 2, 16

    def matrix(*shape):
        return (torch.randn(shape, generator=gen) * shape[-1] ** -0.5).to(dtype)

    def layer():
        norms = [(1 + 0.1 * torch.randn(hidden, generator=gen)).to(dtype) for _ in range(2)]
        attention = [matrix(n * dim, hidden) for n in (heads, kv_heads, kv_heads)] + [matrix(hidden, heads * dim)]
        return LayerWeights(
            norms[0], *attention, norms[1], matrix(inner, hidden), matrix(inner, hidden), matrix(hidden, inner)
        )

    weights = DecoderWeights(
        embedding=matrix(vocab, hidden),
        layers=[layer(), layer()],
        final_norm=torch.ones(hidden, dtype=dtype),
        head=matrix(vocab + 3, hidden),
        inv_freq=10000.0 ** -(torch.arange(dim // 2) / (dim // 2)),
        rope_scale=1.0,
        heads=heads,
        eps=1e-5,
    )
    k_caches, v_caches = ([matrix(batch, kv_heads, 40, dim) for _ in range(2)] for _ in range(2))
    kv_len = torch.tensor([20, 17], dtype=torch.int32)[:batch]
    depths = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)[:rows].expand(batch, -1)
    mask = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101], dtype=torch.int32)[:rows].expand(batch, -1)[..., None]
    return weights, {
        "token_ids": torch.randint(0, vocab, (batch, rows), generator=gen).int(),
        "positions": kv_len[:, None] + depths,
        "slots": kv_len[:, None] + torch.arange(rows, dtype=torch.int32),
        "ancestor_mask": mask.contiguous(),
        "node_depths": depths.contiguous(),
        "kv_len": kv_len,
        "kv_start": torch.tensor([0, 3], dtype=torch.int32)[:batch],
        "k_caches": k_caches,
        "v_caches": v_caches,
    }


WIRINGS = ("feature", "normed feature", "projection", "projection, feature first")
"""What the layers of a drafter begin with."""
STORED = "stored"
"""The wiring of a block drafter, whose layers store keys and values of features."""


def reading_features(decoder: DecoderWeights, wiring: str = "feature") -> FeatureWeights:
    """The weights of a drafter with these layers, one of :data:`WIRINGS` or :data:`STORED`."""
    if wiring == STORED:
        return FeatureWeights(decoder, None)
    gen, like = torch.Generator().manual_seed(1), decoder.final_norm

    def noise(*shape):
        return (torch.randn(shape, generator=gen) * shape[-1] ** -0.5).to(like)

    def norm():
        return (1 + 0.1 * torch.randn(len(like), generator=gen)).to(like)

    if wiring.startswith("projection"):
        bias = noise(len(like)) if "first" in wiring else None
        projection = Projection(noise(len(like), 2 * len(like)), norm(), bias, feature_first="first" in wiring)
        return FeatureWeights(decoder, norm(), projection=projection)
    first = decoder.layers[0]
    first = replace(
        first, **{name: torch.cat([getattr(first, name), noise(*getattr(first, name).shape)], 1) for name in "qkv"}
    )
    return FeatureWeights(replace(decoder, layers=[first, *decoder.layers[1:]]), norm(), wiring == "normed feature")


def feature_case(dtype=torch.float32, layers=2, wiring="feature"):
    """A drafter of random weights, and rows with features, of :func:`decoder_case`."""
    decoder, case = decoder_case(dtype)
    case |= {name: case[name][:layers] for name in ("k_caches", "v_caches")}
    case["features"] = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    return reading_features(replace(decoder, layers=decoder.layers[:layers]), wiring), case
