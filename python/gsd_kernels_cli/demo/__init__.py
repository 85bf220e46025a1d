"""The embedded demo pair: a small Llama target and a draft distilled from it, trained on Python source.

``README.md`` beside this file is their model card; it names the recipe that trained them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import LlamaForCausalLM, PreTrainedTokenizerBase


def path() -> Path:
    """Return the folder that holds ``target/`` and ``draft/``, two ordinary checkpoint folders."""
    return Path(__file__).resolve().parent


def load(
    dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> tuple[LlamaForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return (target, draft, tokenizer), the models in evaluation mode.

    Args:
        dtype: of the weights, stored as float16; default: float32.
        device: where the models go.
    """
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    target, draft = (
        LlamaForCausalLM.from_pretrained(path() / name, dtype=dtype or torch.float32).to(device).eval()
        for name in ("target", "draft")
    )
    return target, draft, AutoTokenizer.from_pretrained(path() / "target")


def _prompt_file() -> dict[str, Any]:
    return json.loads((path() / "prompts.json").read_text(encoding="utf-8"))


def prompts(kind: str | None = None) -> list[dict[str, Any]]:
    """Return the benchmark prompts, fixed before anything was measured on them, from files held out of training.

    Each has ``name``, ``kind`` ("code", or "copy" for text that repeats), ``file``, ``lines`` (first and last) and
    ``text``. ``kind`` restricts the list.
    """
    return [prompt for prompt in _prompt_file()["prompts"] if kind in (None, prompt["kind"])]


def questions(kind: str) -> list[str]:
    """Return what the demo asks a chat model: in its "chat", whose turns follow each other, or in its "race"."""
    return _prompt_file()[kind]
