"""The reference of dag_attention against plain statements of what it does, one position at a time."""

from __future__ import annotations

import math

import pytest
import torch
from ops.contracts.arguments import attention_case, dense_mask
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.dag_attention.dense import dense_mask as written_out


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


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 5},
        {"softcap": 3.0},
        {"sliding_window": 1, "softcap": 1.5},
        *({"chunk": chunk} for chunk in (1, 4, 7, 64)),
        {"sinks": SINKS},
        {"sinks": SINKS, "sliding_window": 5, "softcap": 3.0},
        {"sinks": SINKS, "chunk": 6},
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_attention_equals_dense_softmax(groups, options):
    for seed in range(6):
        shape = {"rows": (1, 9, 33)[seed % 3], "nodes": (1, 9, 70)[(seed + seed // 3) % 3], "kv_heads": 1 + seed % 2}
        case = attention_case(
            seed, groups=groups, prefix=(1, 20, 63)[seed // 2], **shape, value_dim=(None, 24)[seed % 2]
        )
        if "sinks" in options:
            options = {**options, "sinks": SINKS[: case["q"].shape[1]]}
        out, lse = attend(case, **options)
        exact, exact_lse = dense_attention(case, torch.float64, **options)
        assert out.shape == exact.shape and out.dtype == torch.float64 and lse.dtype == torch.float32
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-12)
        torch.testing.assert_close(lse, exact_lse.float(), rtol=1e-6, atol=1e-6)
        empty = ~dense_mask(case, options.get("sliding_window"), options.get("chunk")).any(-1)
        assert empty.any()
        for b, r in empty.nonzero().tolist():
            assert (out[b, :, r] == 0).all() and (lse[b, :, r] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("groups", [1, 4, 8])
def test_attention_error_is_at_most_twice_sdpas(dtype, groups):
    ours = sdpas = 0.0
    for seed in range(6):
        case = attention_case(seed, groups=groups, rows=33, prefix=111, head_dim=64, dtype=dtype)
        mask = dense_mask(case, None)
        exact, _ = dense_attention(case, torch.float64)
        seen = mask.any(-1)[:, None, :, None]
        k, v = (case[x].nan_to_num(0.0) for x in "kv")
        sdpa = torch.nn.functional.scaled_dot_product_attention(case["q"], k, v, mask[:, None], enable_gqa=True)
        out, _ = attend(case)
        assert out.dtype == dtype
        ours = max(ours, float((out - exact).abs().masked_fill(~seen, 0).max()))
        sdpas = max(sdpas, float((sdpa - exact).abs().masked_fill(~seen, 0).max()))
    assert 0 < ours <= 2 * sdpas, (ours, sdpas)


@pytest.mark.parametrize("sight", [{"sliding_window": 9}, {"chunk": 9}], ids=lambda sight: "".join(sight))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_bitwise_independent_of_other_rows(dtype, sight):
    """Other rows' queries, masks, positions, and every key and value that the row does not see, are replaced."""
    gen = torch.Generator().manual_seed(0)
    for seed in range(4):
        case = attention_case(seed, rows=17, groups=2, dtype=dtype)
        for name in "kv":
            case[name] = case[name].nan_to_num(0.0)
        out, lse = attend(case, **sight)
        mask = dense_mask(case, sight.get("sliding_window"), sight.get("chunk"))
        for row in (0, 5, 16):
            other = {name: x.clone() for name, x in case.items()}
            others = torch.arange(17) != row
            other["q"][:, :, others] = torch.randn(other["q"][:, :, others].shape, generator=gen).to(dtype)
            random_mask = torch.randint(-(2**31), 2**31 - 1, other["ancestor_mask"].shape, generator=gen).int()
            other["ancestor_mask"] = torch.where(others[:, None], random_mask, other["ancestor_mask"])
            other["row_depths"][:, others] = 3
            unseen = ~mask[:, row][:, None].expand(-1, case["k"].shape[1], -1)
            for name in "kv":
                noise = 100 * torch.randn(other[name][unseen].shape, generator=gen)
                other[name][unseen] = noise.to(dtype)
            again, again_lse = attend(other, **sight)
            assert torch.equal(again[:, :, row], out[:, :, row]) and torch.equal(again_lse[:, :, row], lse[:, :, row])
            assert not torch.equal(again, out)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("sight", [{}, {"sliding_window": 5}, {"chunk": 6}], ids=lambda sight: "".join(sight) or "all")
def test_auto_is_as_exact_in_float64(sight, sinks):
    """On a CPU it is PyTorch's fused attention, of both kinds of mask and with values of another size."""
    for seed in range(4):
        case = attention_case(seed, rows=9, nodes=33, groups=(1, 4)[seed % 2], value_dim=(None, 24)[seed // 2])
        options = {**sight, **({"sinks": SINKS[: case["q"].shape[1]]} if sinks else {})}
        exact, exact_lse = dense_attention(case, torch.float64, **options)
        out = gsd.dag_attention(**case, **options)
        assert out.dtype == torch.float64
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-12)
        capped, lse = gsd.dag_attention(**case, **options, softcap=3.0, return_lse=True)
        assert torch.equal(capped, attend(case, **options, softcap=3.0)[0]) and lse.dtype == torch.float32
        for name in "kv":
            case[name] = case[name].nan_to_num(0.0)  # as trusted masks ask for
        rest = (case[name] for name in ("ancestor_mask", "kv_len", "kv_start", "row_depths", "node_depths"))
        dense = written_out(*rest, sight.get("sliding_window"), case["k"].shape[2], sight.get("chunk"))
        trusted = gsd.dag_attention(**case, **options, dense=dense)
        sees = exact_lse.isfinite()
        torch.testing.assert_close(trusted[sees], exact[sees], rtol=0, atol=1e-12)


def test_attention_defaults_and_strides():
    """No optional argument, a transposed cache layout, an own scale."""
    case = attention_case(3, batch=1, groups=2)
    case["k"], case["v"] = case["k"].nan_to_num(0.0), case["v"].nan_to_num(0.0)
    plain = {name: case[name] for name in ("q", "k", "v", "ancestor_mask", "kv_len")}
    full = {**case, "kv_start": torch.zeros(1, dtype=torch.int32)}
    expected = dense_attention(full, torch.float64)[0]
    torch.testing.assert_close(gsd.dag_attention(**plain, backend="reference"), expected, rtol=0, atol=1e-12)
    strided = {**plain, "k": plain["k"].transpose(1, 2).contiguous().transpose(1, 2)}
    torch.testing.assert_close(gsd.dag_attention(**strided, backend="reference"), expected, rtol=0, atol=1e-12)
    doubled = gsd.dag_attention(**{**plain, "q": plain["q"] * 2}, scale=0.125, backend="reference")
    torch.testing.assert_close(doubled, expected, rtol=0, atol=1e-12)


def test_the_log_sum_exp_leaves_the_sink_out_and_the_output_does_not():
    case = attention_case(1, groups=2)
    sinks = torch.tensor([-math.inf, 0.0, 3.0, math.inf])
    plain, lse = attend(case)
    out, with_sinks = attend(case, sinks=sinks)
    assert torch.equal(with_sinks, lse)
    share = lse.double().exp() / (lse.double().exp() + sinks.double().exp()[:, None])
    torch.testing.assert_close(out, plain * share.nan_to_num(0.0)[..., None], rtol=0, atol=1e-6)
    assert torch.equal(out[:, 0], plain[:, 0]) and not out[:, 3].any() and out[:, 2].any()


def test_rows_of_one_graph_lie_in_two_chunks():
    """Position 12 begins a chunk of 4 behind padding of 4: rows before it see no node after, rows after none before."""
    path = torch.tensor([[1, 3, 7, 15]], dtype=torch.int32)[..., None]  # a chain of four nodes at positions 10 … 13
    depths = torch.arange(4, dtype=torch.int32)[None]
    k = torch.zeros(1, 1, 14, 16)
    v = torch.arange(14.0)[None, None, :, None].expand(-1, -1, -1, 16).contiguous()
    lengths = {"kv_len": torch.tensor([10], dtype=torch.int32), "kv_start": torch.tensor([4], dtype=torch.int32)}
    for backend in ("reference", "auto"):
        out = gsd.dag_attention(
            torch.zeros(1, 1, 4, 16), k, v, path, **lengths, row_depths=depths, node_depths=depths, chunk=4,
            backend=backend,
        )  # fmt: skip
        # Equal scores: the mean of the visible positions, 8 … p and 12 … p.
        torch.testing.assert_close(out[0, 0, :, 0], torch.tensor([9.0, 9.5, 12.0, 12.5]))
