"""A comparison of a model's own attention with that of graph rows: softmax over what a row sees, and a sink.

Graph rows go through this package's attention. A function that the config names may do something else, leave sinks out
for instance, so it is called beside ours with the same numbers, in float32 where the model is in half precision: the
sum of a few values in two orders differs by 1e-6, by which a scale that is off by a ten-thousandth shows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.dag_attention import reference

from .fingerprint import described

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Largest difference, relative to the largest output; transformers takes the softmax of float64 in float32."""
SCORE_SPREAD = 3.0  # of scores, so that what bends them shows
MAX_SCORE = 100.0  # score: beyond, float32 has no digits left for the others
TOKENS = 160  # positions: a function's own window may be long
UNTRIED = ("transformers.integrations.flash", "transformers.integrations.flex", "kernels")
"""Transformers' own that take half precision alone, or compile first."""


@dataclass
class AttentionCall:
    """One attention call of a forward."""

    module: nn.Module
    own: Callable[..., Any]  # the model's attention function
    query: torch.Size  # [B, Hq, R, D]
    key: torch.Size  # [B, Hkv, S, D]
    value: torch.Size
    dtype: torch.dtype
    mask: Any
    scaling: float | None
    options: dict[str, Any]

    @property
    def layer(self) -> int | None:
        """Its layer of the cache."""
        return getattr(self.module, "layer_idx", None)

    @property
    def window(self) -> int | None:
        """The window that the call says."""
        return self.options.get("sliding_window")

    @property
    def sinks(self) -> Tensor | None:
        """A score of each query head that has no value, [Hq]."""
        return self.options.get("s_aux")


def check_attention(call: AttentionCall, visible: Tensor) -> str | None:
    """Name what differs between the model's attention function and ours, or ``None``.

    Args:
        call: as it was seen.
        visible: bool [B, R, S], what each row sees; rows that see nothing are not compared.
    """
    if str(getattr(call.own, "__module__", "")).startswith(UNTRIED):
        return None
    exact = torch.float64 if call.dtype == torch.float64 else torch.float32
    for seen, mask in ((visible, call.mask), _longer(call.mask, visible)):
        try:
            difference = _relative(call, seen, mask, dtype := exact)
        except Exception:
            if exact == call.dtype:
                raise
            difference = _relative(call, seen, mask, dtype := call.dtype)  # a kernel for half precision alone
        if difference > TOLERANCE.get(dtype, 0.05):
            return (
                f"{described(call.own)} in layer {call.layer} gives results that differ from softmax attention"
                f"{'' if call.sinks is None else ' with sinks'} by {difference:.1g}"
            )
    return None


def _longer(mask: Any, visible: Tensor) -> tuple[Tensor, Any]:
    """The same with more positions in front, all of which are seen, where the mask says all of what is."""
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.shape[-1] != visible.shape[-1]:
        return visible, mask
    front = visible.any(-1, keepdim=True).expand(-1, -1, TOKENS - visible.shape[-1])
    visible = torch.cat([front, visible], -1)
    if mask.dtype == torch.bool:
        return visible, visible[:, None]
    return visible, torch.zeros_like(visible[:, None], dtype=mask.dtype).masked_fill(
        ~visible[:, None], torch.finfo(mask.dtype).min
    )


def _relative(call: AttentionCall, visible: Tensor, mask: Any, dtype: torch.dtype) -> float:
    """The largest difference relative to the largest output."""
    generator = torch.Generator().manual_seed(0)
    length, device = visible.shape[-1], visible.device

    def values(batch: int, heads: int, rows: int, size: int) -> Tensor:
        return torch.randn(batch, heads, rows, size, generator=generator, dtype=torch.float32, device="cpu").to(
            device, dtype
        )

    scale = call.scaling if call.scaling is not None else call.query[-1] ** -0.5
    query = values(*call.query) * (SCORE_SPREAD / math.sqrt(call.query[-1]) / scale)
    key = values(*call.key[:2], length, call.key[-1])
    softcap = call.options.get("softcap")
    if call.sinks is not None and softcap is None:
        # All scores of a head are raised near its sink: far from it, neither would show.
        sinks = call.sinks.detach().to(query).nan_to_num(0.0).clamp(-MAX_SCORE, MAX_SCORE)
        query[..., 0], key[..., 0] = (sinks - SCORE_SPREAD)[:, None] / scale, 1.0
    value = values(*call.value[:2], length, call.value[-1])
    if isinstance(mask, Tensor) and mask.is_floating_point():
        mask = mask.to(dtype)
    out = call.own(call.module, query, key, value, mask, scaling=call.scaling, dropout=0.0, **call.options)[0]
    ours = reference.attend(query, key, value, visible, scale, softcap, call.sinks)[0]
    ours = ours.transpose(1, 2)  # [B, R, Hq, Dv]
    seen = visible.any(-1)
    out, ours = out.view(ours.shape)[seen].double(), ours[seen].double()
    difference = float((out - ours).abs().max() / ours.abs().max())
    return math.inf if math.isnan(difference) else difference
