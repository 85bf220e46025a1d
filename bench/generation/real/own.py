"""A user's own model, draft and prompts as a pair that :mod:`~gsd_kernels_bench.generation.generate` races."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from ..pairs import Pair
from .models import load_real
from .prompts import encoded, read_chats


def own_pair(
    model: str, draft: str | None, prompts: Path | None, *, device: torch.device, dtype: torch.dtype, count: int
) -> Pair:
    """The model and its draft with the first ``count`` prompts, without an end of text: all texts get the same length.

    Args:
        model, draft: folders, hub ids; the model also a GGUF file.
        prompts: see :func:`~gsd_kernels_bench.generation.real.prompts.read_chats`; default: those of ``bench real``.
        device, dtype: of both models.
        count: at most so many prompts.

    Raises:
        OSError, ValueError: a model or the prompts cannot be found or read.
    """
    real = load_real(model, draft, None, dtype)
    if real.tokenizers:
        raise ValueError("--draft: it has another tokenizer than the model; `bench real` races such a pair")
    target, small = real.model.to(device), None if real.draft is None else real.draft.to(device)
    for one in filter(None, (target, small)):
        one.generation_config.eos_token_id = None
        one.generation_config.pad_token_id = 0
    asked = encoded(read_chats(prompts)[0][:count], real.tokenizer)
    return Pair(real.name, target, small, [replace(p, input_ids=p.input_ids.to(device)) for p in asked])
