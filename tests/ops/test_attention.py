"""dag_attention on every backend: as accurate as plain PyTorch, every row on its own, NaN where it belongs."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.attention import (
    ATTENTION,
    FLOAT_TYPES,
    HALF_PRECISION,
    INVARIANCE,
    Attention,
    check_attention,
    check_row_invariance,
)
from ops.contracts.backends import backends, cases, levels

import gsd_kernels as gsd
from gsd_kernels import cpu_levels
from gsd_kernels.ops.dag_attention import visibility
from gsd_kernels.ops.dag_attention.compiled import DTYPES, HEAD_DIMS

EVERY_SHAPE = {
    f"{dtype}-D{head_dim}-{group}x{rows}": Attention(
        dtype=dtype,
        head_dim=head_dim,
        group=group,
        rows=rows,
        nodes=max(rows, 33),
        capacity=5000,
        prefixes=(4500, 63, 0),
        paddings=(7, 0, 0),
    )
    for dtype, head_dim, group, rows in itertools.product(
        FLOAT_TYPES, (64, 80, 96, 128, 256), (1, 4, 8), (1, 16, 64, 128)
    )
}
SERVED_BY_CUDA = {
    f"{name}-D{head_dim}-{dtype}": replace(case, dtype=dtype, head_dim=head_dim)
    for (name, case), head_dim, dtype in itertools.product(HALF_PRECISION.items(), HEAD_DIMS, DTYPES)
}
FEW = ("one warp", "four warps", "several graph splits", "window", "chunk", "soft cap", "sinks")
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
        "interpreter": ATTENTION.items(),
        "triton": {**ATTENTION, **EVERY_SHAPE}.items(),
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


@backends("interpreter", "triton")
def test_the_output_needs_no_copy_before_the_projection(on):
    tensors, options = Attention().build(on.device)
    assert gsd.dag_attention(**tensors, **options, backend=on.name).transpose(1, 2).is_contiguous()


# The compiled CPU kernel by itself: by name, some shapes go to PyTorch's attention.


@st.composite
def attentions(draw):
    """Arguments of dag_attention in float32, unseen positions NaN, and a dtype to round q, k and v to."""
    gen = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 5))
    dim, value_dim, rows = draw(st.sampled_from((10, 16, 64))), draw(st.sampled_from((16, 37))), draw(st.integers(1, 9))
    words = draw(st.integers(1, 2))
    prefix = draw(st.sampled_from((0, 1, 7, 300, 511, 513, 1100)))
    kv_len = torch.tensor([prefix, max(0, prefix - 3)], dtype=torch.int32)[:batch]
    capacity = prefix + 32 * words + 5
    mask = torch.randint(-(2**31), 2**31, (batch, rows, words), generator=gen).int()
    mask[:, 0] = 0  # a row that sees the prefix only, or nothing
    node_depths = torch.randint(0, 6, (batch, 32 * words), generator=gen).int()
    args = {
        "kv_len": kv_len,
        "kv_start": (kv_len // 3).int() if draw(st.booleans()) else None,
        "row_depths": torch.randint(0, 6, (batch, rows), generator=gen).int(),
        "node_depths": node_depths,
        "sliding_window": None,
        "chunk": None,
    }
    args |= draw(st.sampled_from(({}, *({name: n} for name in ("sliding_window", "chunk") for n in (1, 2, 5, 400)))))
    visible = visibility(mask, **args, capacity=capacity)
    q = torch.randn(batch, rows, kv_heads * group, dim, generator=gen).transpose(1, 2)
    k, v = (torch.randn(batch, kv_heads, capacity, d, generator=gen) for d in (dim, value_dim))
    unseen = ~visible.any(1)[:, None, :, None]
    sinks = 3 * torch.randn(kv_heads * group, generator=gen)
    sinks[0] = draw(st.sampled_from((0.5, float("-inf"), float("inf"))))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.float16)))
    k, v = (torch.where(unseen, float("nan"), x).to(dtype) for x in (k, v))
    return {
        "q": q.to(dtype),
        "k": k,
        "v": v,
        "ancestor_mask": mask,
        **args,
        "softcap": draw(st.sampled_from((None, 5.0))),
        "sinks": sinks if draw(st.booleans()) else None,
    }


@levels
@settings(max_examples=50, deadline=None)
@given(attentions())
def test_the_compiled_kernel_equals_the_reference(level, case):
    exact = {name: x.double() if name in "qkv" else x for name, x in case.items()}
    expected, expected_lse = gsd.dag_attention(**exact, return_lse=True, backend="reference")
    order = "q k v ancestor_mask kv_len kv_start row_depths node_depths".split()
    with cpu_levels.forced(level):
        got, lse = torch.ops.gsd_kernels.dag_attention(
            *(case[name] for name in order), case["q"].shape[3] ** -0.5, case["softcap"], case["sliding_window"],
            case["chunk"], case["sinks"],
        )  # fmt: skip
        by_name = gsd.dag_attention(**case, backend="cpu")
    empty = expected_lse == float("-inf")
    assert torch.equal(lse == float("-inf"), empty) and (got[empty] == 0).all()
    torch.testing.assert_close(lse[~empty], expected_lse[~empty], atol=1e-4, rtol=1e-4)
    unit = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[got.dtype]
    torch.testing.assert_close(got.double(), expected, atol=unit, rtol=unit)
    torch.testing.assert_close(by_name.double(), expected, atol=4 * unit, rtol=4 * unit)


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 700])
def test_a_row_of_the_compiled_kernel_ignores_how_many_rows_there_are(level, dtype, window):
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(1, 6, 7, 64, generator=gen).to(dtype)
    k, v = torch.randn(2, 1, 2, 1300, 64, generator=gen).to(dtype)
    mask = torch.randint(0, 2**7, (1, 7, 1), generator=gen).int()
    depths, kv_len = torch.arange(7, dtype=torch.int32)[None], torch.tensor([1200], dtype=torch.int32)

    def attend(rows):
        sight = (mask[:, rows], kv_len, None, depths[:, rows].contiguous(), depths)
        return torch.ops.gsd_kernels.dag_attention(q[:, :, rows], k, v, *sight, 0.125, None, window)[0]

    with cpu_levels.forced(level):
        together = attend(slice(None))
        for row in range(7):
            assert torch.equal(attend(slice(row, row + 1))[:, :, 0], together[:, :, row])


@levels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nan_reaches_exactly_the_rows_that_see_it_in_the_compiled_kernel(level, dtype):
    q, (k, v) = torch.randn(1, 2, 4, 16).to(dtype), torch.randn(2, 1, 2, 40, 16).to(dtype)
    v[0, 0, 31] = float("nan")  # node 1, for head 0
    v[0, 1, 26] = k[0, 1, 26] = float("nan")  # of the prefix, for head 1
    mask = torch.tensor([[[1], [2], [3], [1]]], dtype=torch.int32)
    depths = torch.tensor([[0, 1, 2, 4]], dtype=torch.int32)  # the first row sees position 26, not the second
    sight = (torch.tensor([30], dtype=torch.int32), None, depths, depths, 0.25, None)
    for window, head, expected in (
        (None, 0, [False, True, True, False]),
        (5, 0, [False, True, True, False]),
        (None, 1, [True] * 4),
        (5, 1, [True, False, False, False]),
    ):
        with cpu_levels.forced(level):
            out, _ = torch.ops.gsd_kernels.dag_attention(q, k, v, mask, *sight, window)
        assert out.isnan().all(-1)[0, head].tolist() == expected == out.isnan().any(-1)[0, head].tolist()
