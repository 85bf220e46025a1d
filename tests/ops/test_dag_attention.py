"""dag_attention: the reference by plain statements; every backend as accurate as plain PyTorch, rows alone."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from ops.contracts.backends import backends, cases, levels
from ops.contracts.decoder import (
    ATTENTION,
    HALF_PRECISION,
    INVARIANCE,
    Attention,
    check_attention,
    check_row_invariance,
    small_case,
)
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels import cpu_levels
from gsd_kernels.graph import pack_bits, unpack_bits
from gsd_kernels.ops.cuda_common import DTYPES, HEAD_DIMS
from gsd_kernels.ops.dag_attention.dense import dense_mask as written_out

pytestmark = pytest.mark.quick


def dense_mask(case: dict[str, Tensor], window: int | None, chunk: int | None = None) -> Tensor:
    """bool [B, R, S], one position at a time."""
    batch, rows = case["ancestor_mask"].shape[:2]
    bits = unpack_bits(case["ancestor_mask"], case["ancestor_mask"].shape[2] * 32).tolist()
    starts, lengths, row_depths, node_depths = (  # lists: one element of a tensor takes a microsecond
        case[name].tolist() for name in ("kv_start", "kv_len", "row_depths", "node_depths")
    )
    mask = [[[False] * case["k"].shape[2] for _ in range(rows)] for _ in range(batch)]

    def near(here: int, there: int, start: int) -> bool:
        if chunk is not None and (there - start) // chunk < (here - start) // chunk:
            return False
        return window is None or here - there < window

    for b, length in enumerate(lengths):
        for r in range(rows):
            here = length + row_depths[b][r]
            for p in range(starts[b], length):
                mask[b][r][p] = near(here, p, starts[b])
            for j, depth in enumerate(node_depths[b]):
                mask[b][r][length + j] = bits[b][r][j] and near(here, length + depth, starts[b])
    return torch.tensor(mask)


def dense_attention(
    case: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    sliding_window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Plain softmax attention in ``dtype``: output [B, Hq, R, Dv] and log-sum-exp of what is visible."""
    mask = dense_mask(case, sliding_window, chunk)[:, None]
    groups = case["q"].shape[1] // case["k"].shape[1]
    k, v = (case[x].nan_to_num(0.0).to(dtype).repeat_interleave(groups, 1) for x in "kv")
    scores = case["q"].to(dtype) @ k.mT * case["q"].shape[3] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    logits = scores
    if sinks is not None:  # one more position, which has no value
        logits = torch.cat([scores, sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    weights = logits.softmax(-1).nan_to_num(0.0)  # rows that see nothing
    return weights[..., : v.shape[2]] @ v, scores.logsumexp(-1)


SINKS = torch.linspace(-2.0, 6.0, 16, dtype=torch.float64)


def attend(case: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    return gsd.dag_attention(**case, **options, return_lse=True, backend="reference")


SIGHTS = (
    {},
    {"sliding_window": 5},
    *({"chunk": chunk} for chunk in (1, 6, 64)),
    {"sinks": SINKS, "sliding_window": 1},
    {"sinks": SINKS, "chunk": 6},
)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("sight", SIGHTS, ids=lambda sight: " ".join(sight))
def test_attention_equals_dense_softmax(sight, softcap):
    """And so does, on a CPU, ``auto``, which is PyTorch's fused attention, of both kinds of mask."""
    for seed in range(6):
        shape = {"rows": (1, 9, 33)[seed % 3], "nodes": (1, 9, 70)[(seed + seed // 3) % 3], "kv_heads": 1 + seed % 2}
        group, prefix, value_dim = (1, 4, 8)[seed % 3], (1, 20, 63)[seed // 2], (None, 24)[seed % 2]
        case = small_case(seed, group=group, prefix=prefix, **shape, value_dim=value_dim)
        options = {**sight, "softcap": softcap}
        if "sinks" in sight:
            options["sinks"] = SINKS[: case["q"].shape[1]]
        out, lse = attend(case, **options)
        exact, exact_lse = dense_attention(case, torch.float64, **options)
        assert out.shape == exact.shape and out.dtype == torch.float64 and lse.dtype == torch.float32
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-6, atol=1e-6)
        empty = ~dense_mask(case, sight.get("sliding_window"), sight.get("chunk")).any(-1)
        assert empty.any()
        for b, r in empty.nonzero().tolist():
            assert (out[b, :, r] == 0).all() and (lse[b, :, r] == -math.inf).all()
        torch.testing.assert_close(gsd.dag_attention(**case, **options), exact, rtol=0, atol=1e-12)
        if softcap is None:
            for name in "kv":
                case[name] = case[name].nan_to_num(0.0)  # as trusted masks ask for
            rest = (case[name] for name in ("ancestor_mask", "kv_len", "kv_start", "row_depths", "node_depths"))
            dense = written_out(*rest, sight.get("sliding_window"), case["k"].shape[2], sight.get("chunk"))
            trusted = gsd.dag_attention(**case, **options, dense=dense)
            sees = exact_lse.isfinite()
            torch.testing.assert_close(trusted[sees], exact[sees], rtol=0, atol=1e-12)


SERVED_BY_CUDA = {
    f"{name}-D{head_dim}-{dtype}": replace(case, dtype=dtype, head_dim=head_dim)
    for (name, case), head_dim, dtype in itertools.product(HALF_PRECISION.items(), HEAD_DIMS, DTYPES)
}
INTERPRETED = (
    *("float32-D64", "float16-D80", "bfloat16-D128", "one-row", "odd-63", "no-nodes-seen", "empty-prefix"),
    *("values-narrower", "positions-first", "window-shorter-than-depths", "window-softcap-bf16", "softcap"),
    *("chunk-begins-with-the-graph", "sinks-values-narrower-fp16", "sinks-chunk-softcap", "splits"),
)
"""Slow there: one of each kind."""
FEW = ("one warp", "four warps", "several graph splits", "window", "chunk", "sinks")
INVARIANT_ON_CUDA = {f"{n}-{dtype}": replace(HALF_PRECISION[n], dtype=dtype) for n in FEW for dtype in DTYPES}


@pytest.fixture(autouse=True)
def single_precision_is_single():
    """The baseline's float32 products without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@cases(
    "case",
    {
        "cpu": ATTENTION.items(),
        "interpreter": [(name, ATTENTION[name]) for name in INTERPRETED],
        "triton": ATTENTION.items(),
        "cuda": SERVED_BY_CUDA.items(),
    },
)
def test_the_error_is_at_most_twice_plain_pytorchs(on, case):
    """Against float64; NaN wherever no row looks."""
    check_attention(case, on)


@cases(
    "case",
    {
        **{name: INVARIANCE.items() for name in ("interpreter", "triton")},
        "cuda": INVARIANT_ON_CUDA.items(),
    },
)
def test_a_row_ignores_the_other_rows_bit_for_bit(on, case):
    check_row_invariance(case, on)


@backends("cpu", "interpreter", "triton", "cuda")
def test_nan_reaches_exactly_the_rows_that_see_it(on):
    problem = Attention(rows=6, nodes=6, dtype=torch.float16 if on.name == "cuda" else torch.float32)
    tensors, options = problem.build(on.device)
    masks = torch.tensor([1, 3, 5, 9, 17, 33], dtype=torch.int32)
    tensors["ancestor_mask"][:] = on.to(masks)[:, None]
    for b, prefix in enumerate(problem.prefixes):
        tensors["k"][b, :, prefix : prefix + 6] = 0.5
        tensors["v"][b, :, prefix : prefix + 6] = 0.5
        tensors["v"][b, 0, prefix + 2] = float("nan")  # node 2, for head 0
    out = gsd.dag_attention(**tensors, **options, backend=on.name)
    assert out[:, 0, 2].isnan().all() and out[:, 0, [0, 1, 3, 4, 5]].isfinite().all()
    assert out[:, 1].isfinite().all()


KERNELS = (*(name for name in INTERPRETED if name != "positions-first"), "bfloat16-D96")


@levels
@pytest.mark.parametrize("name", KERNELS)
def test_the_compiled_kernel_equals_the_reference(level, name):
    tensors, options = ATTENTION[name].build("cpu")
    exact = {name: x.double() if name in "qkv" else x for name, x in tensors.items()}
    expected, expected_lse = gsd.dag_attention(**exact, **options, return_lse=True, backend="reference")
    order = "q k v ancestor_mask kv_len kv_start row_depths node_depths".split()
    limits = (options.get(name) for name in ("softcap", "sliding_window", "chunk"))
    with cpu_levels.forced(level):
        got, lse = torch.ops.gsd_kernels.dag_attention(
            *map(tensors.get, order), tensors["q"].shape[3] ** -0.5, *limits, tensors.get("sinks")
        )
    empty = expected_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty) and (got[empty] == 0).all()
    torch.testing.assert_close(lse[~empty], expected_lse[~empty], atol=1e-4, rtol=1e-4)
    unit = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=unit, rtol=unit)


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sight", [{}, {"sliding_window": 20}, {"chunk": 99}], ids=lambda sight: "".join(sight))
def test_a_row_that_asks_for_it_has_the_same_bits_alone_and_wherever_the_prefix_ends(level, sight, dtype):
    """Some processors multiply two positions at once in bfloat16."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 300, 128, generator=gen).to(dtype) for heads in (6, 2, 2))

    def attend(begin, end):
        mask = pack_bits(torch.ones(1, end - begin, end - begin, dtype=torch.bool).tril())
        depths, kv_len = torch.arange(end - begin, dtype=torch.int32)[None], torch.tensor([begin], dtype=torch.int32)
        given = {"row_depths": depths, "node_depths": depths, "row_invariant": True, "backend": "cpu", **sight}
        return gsd.dag_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], mask, kv_len, **given)

    with cpu_levels.forced(level):
        found = []
        for step in (1, 64, 77):
            ends = [*range(step, 300, step), 300]
            found.append(torch.cat([attend(*piece) for piece in zip([0, *ends], ends, strict=False)], 2))
        assert torch.equal(found[0], found[1]) and torch.equal(found[1], found[2])
