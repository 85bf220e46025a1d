"""The attention function: every sequence by itself, every row by its own position."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .ops.dag_attention import dag_attention

BLOCK = 64  # positions, counted from the text's beginning, whose rows are computed in one call
OTHER_MEANINGS = ("position_bias", "cu_seq_lens_q", "block_table", "cache")
"""Options that would change which positions a row sees, or how."""


def attention(
    module: Any,
    query: Tensor,  # [B, Hq, R, D], of the last R positions
    key: Tensor,  # [B, Hkv, S, D]
    value: Tensor,  # [B, Hkv, S, Dv]
    attention_mask: Tensor | None = None,  # [B, at most S], 0: padding; None: all S are text
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,  # [Hq], a score of each head that has no value
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention whose rows do not depend on their batch, as transformers calls it.

    A sequence's rows have the same bits alone and in any batch, however it is padded; on a CPU a row has them whether
    its text comes in one piece, in several, or token by token, as long as the cache keeps all of it. Rows that are
    padding are 0.

    Returns:
        [B, R, Hq, Dv], and None in place of attention weights.

    Raises:
        TypeError, ValueError: what this function does not compute is asked for.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    _check(query, attention_mask, dropout, causal, options)
    seen = key.shape[2] if attention_mask is None else attention_mask.shape[1]  # a static cache has more
    rows, how = query.shape[2], {"scale": scaling, "softcap": softcap, "sliding_window": sliding_window, "sinks": s_aux}
    out = query.new_zeros(query.shape[0], rows, query.shape[1], value.shape[3])
    for b in range(query.shape[0]):
        q, k, v = query[b : b + 1], key[b : b + 1, :, :seen], value[b : b + 1, :, :seen]
        if attention_mask is None:
            out[b] = _causal(q, k, v, how)[0]
            continue
        text, own = _places(attention_mask[b]), _places(attention_mask[b, seen - rows :])
        out[b, own] = _causal(q[:, :, own], k[:, :, text], v[:, :, text], how)[0]
    return out, None


def _places(mask: Tensor) -> slice | Tensor:
    """Where a mask [S] is not 0: a slice, which copies nothing, unless there is padding in between."""
    places = mask.nonzero().flatten()
    if not len(places) or int(places[-1] - places[0]) + 1 != len(places):
        return places
    return slice(int(places[0]), int(places[-1]) + 1)


def _causal(q: Tensor, k: Tensor, v: Tensor, how: dict[str, Any]) -> Tensor:
    """Attention of a text's last rows, [1, R, Hq, Dv]; blocks of rows end where the text's blocks do."""
    length, rows = k.shape[2], q.shape[2]
    first, pieces = length - rows, []
    while first < length:
        start = first - first % BLOCK  # of the block: the prefix ends here, whatever was computed before
        end = min(start + BLOCK, length)
        places, mask = _block(q.device)
        own = slice(first - start, end - start)
        piece = dag_attention(
            q[:, :, rows - length + first : rows - length + end],
            k[:, :, :end],
            v[:, :, :end],
            mask[:, own],
            torch.tensor([start], dtype=torch.int32, device=q.device),
            row_depths=places[:, own],
            node_depths=places,
            row_invariant=True,
            **how,
        )
        pieces.append(piece.transpose(1, 2))
        first = end
    return torch.cat(pieces, 1) if pieces else q.new_zeros(1, 0, q.shape[1], v.shape[3])


@cache
def _block(device: torch.device) -> tuple[Tensor, Tensor]:
    """A block's places [1, BLOCK], and a mask's words by which each sees all up to itself [1, BLOCK, BLOCK / 32]."""
    places = torch.arange(BLOCK, dtype=torch.int32, device=device)
    bits = (places[:, None] >= places).view(BLOCK, -1, 32).long()  # [row, word, bit]
    words = (bits << torch.arange(32, device=device)).sum(-1)
    return places[None], words.to(torch.int32)[None]  # the 32nd bit becomes the sign


def _check(query: Tensor, mask: Tensor | None, dropout: float, causal: bool, options: dict[str, Any]) -> None:
    """Raise for what :func:`attention` does not compute."""
    if not causal:
        raise ValueError("is_causal: expected True, got False; use attn_implementation='sdpa' for this module")
    if dropout:
        raise ValueError(f"dropout: expected 0, got {dropout}; call model.eval(), or train with 'sdpa'")
    if torch.is_grad_enabled() and query.requires_grad:
        raise ValueError("query: expected no gradient to be asked for; call the model under torch.no_grad()")
    if query.dtype == torch.float64:
        raise TypeError("query: expected float32, bfloat16 or float16, got float64; use model.float()")
    if mask is not None and mask.dim() != 2:
        got = list(mask.shape)
        raise ValueError(
            f"attention_mask: expected None or [batch, positions], got {got}; use 'sdpa' for a mask like it"
        )
    for name in OTHER_MEANINGS:
        if options.get(name) is not None:
            raise ValueError(f"{name}: expected None, got {type(options[name]).__name__}; use 'sdpa' for such a call")
