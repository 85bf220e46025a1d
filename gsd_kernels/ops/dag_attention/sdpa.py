"""The CPU path: PyTorch's fused attention over a dense mask, query heads of one cache head packed as rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import reference
from .dense import DenseMask, dense_mask_of
from .records import AttentionCall
from .reference import share


def dag_attention(
    call: AttentionCall, *, dense: DenseMask | None = None, return_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attend like the reference, which takes calls with a soft cap or a log-sum-exp that the fused kernel lacks."""
    (q, k, v), scale, sinks = call[:3], call.scale, call.sinks
    trusted = dense is not None
    dense = dense_mask_of(call) if dense is None else dense
    hidden = sinks is not None and q.shape[3] != v.shape[3]
    if call.softcap is not None or return_lse or hidden:
        return reference.dag_attention(call, dense=dense)
    batch, heads, rows, _ = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    k, v = k[:, :, : dense.end], v[:, :, : dense.end]
    if not trusted:
        k, v = _finite_where_unseen(k, v, ~dense.visible[:, :, : dense.end].any(1))
    packed = q.reshape(batch, kv_heads, groups * rows, q.shape[3])
    bias = dense.bias(groups, q.dtype)
    if sinks is None:
        out = scaled_dot_product_attention(packed, k, v, attn_mask=bias, scale=scale)
        out = out.view(batch, heads, rows, -1)
    else:  # the kernel that the line above calls, which also has the log-sum-exp
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = kernel(packed, k, v, 0.0, False, attn_mask=bias, scale=scale)
        out, lse = out.view(batch, heads, rows, -1), lse.reshape(batch, heads, rows)
        out = (out * share(lse, sinks)).to(q.dtype)
    # The mask is added, and −∞ + ∞ is NaN: a score overflowed where no row may look. A CPU's memory is read as it is;
    # where a step is traced there are no values.
    if type(out) is Tensor and not out.detach().sum().isfinite().numpy():
        return reference.dag_attention(call, dense=dense)
    if trusted:
        return out, None
    return torch.where(dense.visible.any(-1)[:, None, :, None], out, 0.0), None


def _finite_where_unseen(k: Tensor, v: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
    """The fused kernel multiplies masked positions by 0, which NaN survives; copies only if there is one."""
    sequence, position = unseen.nonzero(as_tuple=True)
    by_position = k.transpose(1, 2)[sequence, position], v.transpose(1, 2)[sequence, position]
    if all(bool(x.isfinite().all()) for x in by_position):
        return k, v
    unseen = unseen[:, None, :, None]
    return torch.where(unseen, 0.0, k), torch.where(unseen, 0.0, v)
