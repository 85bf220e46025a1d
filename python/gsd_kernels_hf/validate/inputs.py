"""The prompt and the other tokens of a call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..model.modes import Unsupported


def check_reference(reference_ids: Any, batch: int, vocab_size: int, copies: int = 1) -> None:
    """Raise unless these are known tokens, [length] or [batch, length], or one text for all ``copies`` of a prompt."""
    if not isinstance(reference_ids, Tensor) or reference_ids.dtype not in (torch.int32, torch.int64):
        got = str(getattr(reference_ids, "dtype", type(reference_ids).__name__)).removeprefix("torch.")
        raise TypeError(f"reference_ids: expected a tensor of int64 token ids, got {got}; tokenize the text first")
    counts = sorted({1, batch // copies, batch})  # of texts
    if reference_ids.dim() not in (1, 2) or (reference_ids.dim() == 2 and reference_ids.shape[0] not in counts):
        shapes = ", ".join(f"[{count}, length]" for count in counts)
        raise ValueError(f"reference_ids: expected [length] or {shapes}, got shape {list(reference_ids.shape)}")
    check_values("reference_ids", reference_ids)
    if reference_ids.numel() and not 0 <= int(reference_ids.min()) <= int(reference_ids.max()) < vocab_size:
        raise ValueError(f"reference_ids: expected ids 0 … {vocab_size - 1}")


def check_values(name: str, tensor: Tensor) -> None:
    """Raise for a tensor without values."""
    if tensor.is_meta:
        raise ValueError(f"{name}: on the meta device, which holds no values; make it on the model's device")


def check_prompt(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> None:
    """Raise unless every sequence is a left-padded, non-empty prompt of known tokens."""
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
        if value is not None:
            check_values(name, value)
    if input_ids.dim() != 2 or input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected a non-empty prompt [batch, length], got shape {list(input_ids.shape)}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids: expected int64 token ids, got {str(input_ids.dtype).removeprefix('torch.')}")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids: expected ids 0 … {vocab_size - 1}, got {low if low < 0 else high}")
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: expected shape {list(input_ids.shape)}, got {list(attention_mask.shape)}")
    mask = attention_mask == 1
    if not bool((mask | (attention_mask == 0)).all()):
        wrong = attention_mask[~mask & (attention_mask != 0)][0].item()
        raise ValueError(f"attention_mask: expected 0 (padding) and 1 (a token), got {wrong}")
    check_padding(attention_mask)


def check_padding(attention_mask: Tensor | None, *, inferred: bool = False) -> None:
    """Raise unless a mask [B, P] of zeros and ones has no zero behind a one, and a token in every sequence.

    ``inferred``: nobody gave it; transformers takes every ``pad_token_id`` of a prompt for padding.
    """
    if attention_mask is None:
        return
    mask = attention_mask == 1
    cure = ", as transformers infers it from pad_token_id in input_ids; pass attention_mask=" if inferred else ""
    if not bool(mask[:, -1].all()):
        raise Unsupported(
            "attention_mask: a prompt is right-padded or empty; decoder-only generation needs padding_side='left'"
            + cure
        )
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise Unsupported("attention_mask: a prompt has a hole; only left padding is supported" + cure)
