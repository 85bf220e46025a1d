"""A tiny model where a benchmark loads a large one."""

from __future__ import annotations

import pytest
import torch
from models import tiny
from sources.drafters import eagle3_config, fit_eagle3, random_eagle3
from transformers import AutoTokenizer

from gsd_kernels_bench.generation import chat_pair
from gsd_kernels_cli import demo


@pytest.fixture
def stand_in(monkeypatch):
    """A tiny model and drafter in place of SmolLM2 and its own, which are large."""
    tokenizer = AutoTokenizer.from_pretrained(demo.path() / "target")
    target = tiny(num_hidden_layers=3, vocab_size=len(tokenizer), dtype=torch.float32)
    drafter = fit_eagle3(random_eagle3(eagle3_config(target)), target, steps=8).float()
    monkeypatch.setattr(chat_pair.smollm2, "load", lambda dtype, device: (target, tokenizer))
    monkeypatch.setattr(chat_pair, "load_drafter", lambda name, model: drafter)
    return target
