"""A random decoder whose rows decoder_rows computes, and a drafter for feature_rows."""

from __future__ import annotations

from dataclasses import replace

import torch
from decoders import Sizes, decoder, random_tokens

from gsd_kernels.ops.decoder_rows import DecoderWeights
from gsd_kernels.ops.feature_rows import FeatureWeights, Projection

SIZES = Sizes(hidden=32, inner=40, head_dim=16)


def decoder_case(dtype=torch.float32):
    """A random decoder with caches of 40 positions, 20 and 17 of them filled, and rows that form a small tree."""
    gen = torch.Generator().manual_seed(0)
    shape = (2, SIZES.kv_heads, 40, SIZES.head_dim)
    k_caches, v_caches = (
        [(torch.randn(shape, generator=gen) / 4).to(dtype) for _ in range(SIZES.layers)] for _ in range(2)
    )
    kv_len = torch.tensor([20, 17], dtype=torch.int32)
    depths = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32).expand(2, -1)
    mask = torch.tensor([0b1, 0b11, 0b101, 0b1011, 0b10101], dtype=torch.int32).expand(2, -1)[..., None]
    return decoder(SIZES, dtype), {
        "token_ids": random_tokens(2, 5).int(),
        "positions": kv_len[:, None] + depths,
        "slots": kv_len[:, None] + torch.arange(5, dtype=torch.int32),
        "ancestor_mask": mask.contiguous(),
        "node_depths": depths.contiguous(),
        "kv_len": kv_len,
        "kv_start": torch.tensor([0, 3], dtype=torch.int32),
        "k_caches": k_caches,
        "v_caches": v_caches,
    }


WIRINGS = ("feature", "normed feature", "projection", "projection, feature first")
"""What the layers of a drafter begin with."""
STORED = "stored"
"""The wiring of a block drafter, whose layers store keys and values of features."""


def reading_features(of: DecoderWeights, wiring: str = "feature") -> FeatureWeights:
    """The weights of a drafter with these layers, one of :data:`WIRINGS` or :data:`STORED`."""
    if wiring == STORED:
        return FeatureWeights(of, None)
    gen, like = torch.Generator().manual_seed(1), of.final_norm

    def noise(*shape):
        return (torch.randn(shape, generator=gen) * shape[-1] ** -0.5).to(like)

    def norm():
        return (1 + 0.1 * torch.randn(len(like), generator=gen)).to(like)

    if wiring.startswith("projection"):
        bias = noise(len(like)) if "first" in wiring else None
        projection = Projection(noise(len(like), 2 * len(like)), norm(), bias, feature_first="first" in wiring)
        return FeatureWeights(of, norm(), projection=projection)
    first = of.layers[0]
    first = replace(
        first, **{name: torch.cat([getattr(first, name), noise(*getattr(first, name).shape)], 1) for name in "qkv"}
    )
    return FeatureWeights(replace(of, layers=[first, *of.layers[1:]]), norm(), wiring == "normed feature")


def feature_case(dtype=torch.float32, layers=2, wiring="feature"):
    """A drafter of random weights, and rows with features, of :func:`decoder_case`."""
    of, case = decoder_case(dtype)
    case |= {name: case[name][:layers] for name in ("k_caches", "v_caches")}
    case["features"] = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    return reading_features(replace(of, layers=of.layers[:layers]), wiring), case
