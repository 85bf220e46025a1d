"""What a decoder's ops are given: random attention problems, packed matrices, decoders and drafters."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from decoders import Sizes, decoder, random_tokens
from ops.contracts.backends import Backend
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.dag_attention import visibility
from gsd_kernels.ops.decoder_rows import DecoderWeights
from gsd_kernels.ops.feature_rows import FeatureWeights, Projection
from gsd_kernels.ops.packed import KINDS, Kind, PackedMatrix

__all__ = ["KINDS"]

NAN = math.nan


@dataclass(frozen=True)
class Attention:
    """One attention problem; ragged in every length, NaN wherever nothing may be read."""

    dtype: torch.dtype = torch.float32
    head_dim: int = 64
    value_dim: int | None = None
    group: int = 1
    kv_heads: int = 2
    rows: int = 9
    nodes: int = 40
    capacity: int = 311
    prefixes: tuple[int, ...] = (130, 233)
    paddings: tuple[int, ...] = (3, 70)
    softcap: float | None = None
    window: int | None = None
    chunk: int | None = None
    sinks: bool = False
    positions_first: bool = False  # caches stored [B, S, H, D]
    density: float = 0.4
    depths: bool = False  # where nothing goes by them, too
    blind: bool = False  # the last sequence's first row sees no node
    seed: int = 0

    def build(self, device: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        gen = torch.Generator().manual_seed(self.seed)
        batch, value_dim = len(self.prefixes), self.value_dim or self.head_dim

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=gen).to(self.dtype)

        def cache(dim: int) -> Tensor:
            if self.positions_first:
                return normal(batch, self.capacity, self.kv_heads, dim).transpose(1, 2)
            return normal(batch, self.kv_heads, self.capacity, dim)

        tensors = {
            "q": normal(batch, self.kv_heads * self.group, self.rows, self.head_dim),
            "k": cache(self.head_dim),
            "v": cache(value_dim),
            "kv_len": torch.tensor(self.prefixes, dtype=torch.int32),
            "kv_start": torch.tensor(self.paddings, dtype=torch.int32),
        }
        bits = torch.rand(batch, self.rows, self.nodes, generator=gen) < self.density
        bits[-1, 0] &= not self.blind
        tensors["ancestor_mask"] = pack_bits(bits)
        options: dict[str, Any] = {"softcap": self.softcap}
        if self.depths or self.window is not None or self.chunk is not None:
            depths = torch.randint(0, 12, (2, batch, max(self.rows, self.nodes)), generator=gen, dtype=torch.int32)
            tensors["row_depths"] = depths[0, :, : self.rows].contiguous()
            tensors["node_depths"] = depths[1, :, : self.nodes].contiguous()
        if self.window is not None or self.chunk is not None:
            options |= {"sliding_window": self.window, "chunk": self.chunk}
        if self.sinks:  # about as large as the log-sum-exp, so that they take from a tenth to nine tenths
            tensors["sinks"] = 5 + 2 * torch.randn(self.kv_heads * self.group, generator=gen)
        for b in range(batch):  # positions that no row sees
            unseen = ~self.visible(tensors)[b].any(0)
            tensors["k"][b, :, unseen] = NAN
            tensors["v"][b, :, unseen] = NAN
        return {name: t.to(device) for name, t in tensors.items()}, options

    def visible(self, tensors: dict[str, Tensor]) -> Tensor:
        names = ("ancestor_mask", "kv_len", "kv_start", "row_depths", "node_depths")
        return visibility(*map(tensors.get, names), self.window, self.capacity, self.chunk)


def small_case(seed: int, *, prefix: int = 20, batch: int = 2, **sizes: Any) -> dict[str, Tensor]:
    """A small one in float64 with all that may be given; of two sequences the second's first row sees nothing."""
    half = -(-prefix // 2)
    given = {"dtype": torch.float64, "head_dim": 16, "nodes": 9, "depths": True, "blind": batch > 1} | sizes
    lengths = {"prefixes": (prefix, half)[:batch], "paddings": (prefix // 3, half)[:batch]}
    return Attention(seed=seed, capacity=prefix + given["nodes"] + 7, **lengths, **given).build("cpu")[0]


def check_attention(case: Attention, on: Backend) -> None:
    """Error against float64 at most twice that of plain PyTorch in the same dtype; the log-sum-exp; empty rows."""
    tensors, options = case.build(on.device)
    out, lse = gsd.dag_attention(**tensors, **options, return_lse=True, backend=on.name)
    wide = {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()}
    exact, exact_lse = gsd.dag_attention(**wide, **options, return_lse=True, backend="reference")
    plain = _plain_attention(case, tensors)
    empty = exact_lse == float("-inf")
    assert out.dtype == case.dtype and torch.equal(lse == float("-inf"), empty)
    assert not empty.any() or out[empty].abs().max() == 0
    error = (out.double() - exact)[~empty].norm()  # one wrong element would stand out: the norms are about 1e-5
    allowed = (plain.double() - exact)[~empty].norm()
    # The interpreter multiplies with numpy, which sums 256 products in one chain: twice the error of torch's product.
    assert error <= (4 if on.interpreted else 2) * allowed, f"error {error:.2e}, plain PyTorch {allowed:.2e}"
    assert (lse.double() - exact_lse)[~empty].abs().max() < (1e-5 if case.dtype == torch.float32 else 1e-2)


def _plain_attention(case: Attention, tensors: dict[str, Tensor]) -> Tensor:
    """scaled_dot_product_attention, or its formula where that cannot be had, in the case's own dtype."""
    k, v = (torch.nan_to_num(tensors[n]).repeat_interleave(case.group, 1) for n in "kv")
    mask = case.visible(tensors)[:, None]
    if case.softcap is None and not case.sinks:
        return torch.nn.functional.scaled_dot_product_attention(tensors["q"], k, v, attn_mask=mask)
    scores = tensors["q"] @ k.mT * case.head_dim**-0.5
    if case.softcap is not None:
        scores = torch.tanh(scores / case.softcap) * case.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if case.sinks:
        sinks = tensors["sinks"].to(case.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    return scores.softmax(-1)[..., : v.shape[2]] @ v


def check_row_invariance(case: Attention, on: Backend, row: int = 1) -> None:
    """A row keeps every bit when all other rows' queries, masks, depths and own cache slots become NaN."""
    tensors, options = case.build(on.device)

    def attend(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return gsd.dag_attention(**given, **options, return_lse=True, backend=on.name)

    (before, lse), changed = attend(tensors), {n: t.clone() for n, t in tensors.items()}
    seen = case.visible(tensors)[:, row]  # [B, S]
    others = torch.arange(case.rows) != row
    changed["q"][:, :, others] = NAN
    changed["ancestor_mask"][:, others] = -1
    if "row_depths" in changed:
        changed["row_depths"][:, others] = 3
    for b, prefix in enumerate(case.prefixes):
        slots = ~seen[b]
        slots[:prefix] = False
        for name in "kv":
            changed[name][b, :, slots] = NAN
    after, after_lse = attend(changed)
    assert before[:, :, row].isfinite().all() and not torch.equal(before, after)
    assert torch.equal(before[:, :, row], after[:, :, row]) and torch.equal(lse[:, :, row], after_lse[:, :, row])


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ATTENTION = {
    **{
        f"{str(t).removeprefix('torch.')}-D{d}": Attention(dtype=t, head_dim=d, group=g, seed=d)
        for t in FLOATS
        for d, g in ((64, 4), (80, 1), (96, 8), (128, 4), (256, 1))
    },
    "one-row": Attention(rows=1, nodes=1, density=1.0),
    "odd-63": Attention(rows=5, nodes=63, group=4, dtype=torch.float16, kv_heads=1),
    "1000-nodes": Attention(rows=3, nodes=1000, kv_heads=1, capacity=1100, prefixes=(97,), paddings=(1,), group=8),
    "no-nodes-seen": Attention(density=0.0),
    "empty-prefix": Attention(prefixes=(0, 70), paddings=(0, 70), density=0.1, rows=13),
    "values-narrower": Attention(head_dim=96, value_dim=64),
    "positions-first": Attention(positions_first=True, group=4),
    "window": Attention(window=31, group=4),
    "window-shorter-than-depths": Attention(window=5, rows=16),
    "softcap": Attention(softcap=20.0, group=4),
    "chunk": Attention(chunk=31, group=4),
    "chunk-begins-with-the-graph": Attention(chunk=127, prefixes=(130, 197)),
    "sinks": Attention(sinks=True, group=4),
    "sinks-window-odd-heads-bf16": Attention(sinks=True, window=50, group=3, kv_heads=3, dtype=torch.bfloat16),
    "sinks-values-narrower-fp16": Attention(sinks=True, head_dim=96, value_dim=64, group=8, dtype=torch.float16),
    "sinks-chunk-softcap": Attention(sinks=True, chunk=17, softcap=5.0, rows=5, group=2),
    "window-softcap-bf16": Attention(window=50, softcap=5.0, dtype=torch.bfloat16, group=8, rows=5),
    "splits": Attention(sinks=True, capacity=3000, prefixes=(2900,), paddings=(0,), kv_heads=1, rows=3, head_dim=80),
}
INVARIANCE = {
    "float32": Attention(rows=20, nodes=40),
    "bfloat16": Attention(rows=20, nodes=40, dtype=torch.bfloat16, group=4),
    "window": Attention(rows=20, nodes=40, window=20),
    "chunk": Attention(rows=20, nodes=40, chunk=20),
    "sinks": Attention(rows=20, nodes=40, sinks=True, group=2),
}
# Shapes for kernels that take half precision and a few head sizes, which their test adds.
HALF_PRECISION = {
    "one row": Attention(rows=1, nodes=1, group=1),
    "one warp": Attention(rows=5, nodes=33, group=3),
    "four warps": Attention(rows=16, nodes=64, group=4),
    "several blocks": Attention(rows=63, nodes=111, group=8, capacity=1000, prefixes=(800, 63)),
    "several graph splits": Attention(rows=40, nodes=964, capacity=1500, prefixes=(530, 111)),
    "the cache ends with the last node": Attention(nodes=40, capacity=273, prefixes=(233, 233)),
    "no prefix": Attention(prefixes=(0, 4), paddings=(0, 4), nodes=31),
    "window": Attention(window=50, group=4),
    "narrow window, soft cap": Attention(window=3, softcap=2.0, rows=30, nodes=100),
    "chunk": Attention(chunk=50, group=4),
    "narrow chunk, soft cap, sinks": Attention(chunk=3, softcap=2.0, rows=30, nodes=100, sinks=True),
    "sinks": Attention(sinks=True, group=3, rows=9),
    "long": Attention(rows=64, nodes=64, group=4, capacity=5000, prefixes=(4500, 63), paddings=(7, 0)),
}


def packed_matrix(kind: Kind, outputs: int, inputs: int, seed: int = 0, *, groups: int | None = None) -> PackedMatrix:
    """A random one of sensible scales, which random bytes have not: weights are about ``inputs`` ** −½.

    ``groups``: of its scales, ``None`` for some of 64.
    """
    gen = torch.Generator().manual_seed(seed)
    if kind.beside:
        data = torch.randint(0, 256, (outputs, kind.row_bytes(inputs)), generator=gen, dtype=torch.uint8)
        groups = groups or next(n for n in (inputs // 64, 2, 1) if n and inputs % (n * kind.weights) == 0)
        scales = ((torch.rand(outputs, groups, generator=gen) + 0.1) / 100).bfloat16().float()
        if kind.name == "int8_vectorwise":  # of a row, where others are of a code
            scales *= 127
        if kind.beside == 2:
            second = torch.randint(0, 16, scales.shape, generator=gen) * (scales if kind.name == "int4_offset" else 1.0)
            scales = torch.stack([scales, second], -1)
        return PackedMatrix(kind, data.view(torch.int8) if kind.signed else data, inputs, scales)
    shape = (outputs, inputs // kind.weights, kind.bytes)
    blocks = torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)
    for at in kind.halves:
        scale = (torch.rand(shape[:2], generator=gen) + 0.1) * (0.02 if kind.weights == 32 else 0.0001)
        blocks[..., at : at + 2] = scale.half()[..., None].view(torch.uint8)
    if kind.name == "mxfp4":
        blocks[..., 0] = torch.randint(118, 125, shape[:2], generator=gen, dtype=torch.uint8)
    return PackedMatrix(kind, blocks.flatten(1), inputs)


def width_of(kind: Kind, least: int) -> int:
    """The smallest number of inputs from ``least`` on that makes whole blocks."""
    return -(-least // kind.weights) * kind.weights


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
