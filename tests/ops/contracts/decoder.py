"""A random decoder whose rows decoder_rows computes, and a drafter for feature_rows."""

from __future__ import annotations

from dataclasses import replace

import torch

from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights
from gsd_kernels.ops.feature_rows import FeatureWeights


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


def feature_case(dtype=torch.float32, layers=2, normed_residual=False):
    """A drafter of random weights, and rows with features, of :func:`decoder_case`."""
    decoder, case = decoder_case(dtype)
    gen = torch.Generator().manual_seed(1)

    def wide(matrix):
        return torch.cat([matrix, torch.randn(matrix.shape, generator=gen).to(dtype) * matrix.shape[1] ** -0.5], 1)

    first = replace(decoder.layers[0], **{name: wide(getattr(decoder.layers[0], name)) for name in "qkv"})
    decoder = replace(decoder, layers=[first, *decoder.layers[1:layers]])
    norm = (1 + 0.1 * torch.randn(32, generator=gen)).to(dtype)
    case |= {name: case[name][:layers] for name in ("k_caches", "v_caches")}
    case["features"] = torch.randn(2, 5, 32, generator=gen).to(dtype)
    return FeatureWeights(decoder, norm, normed_residual), case
