"""The real model for tests: SmolLM2-135M-Instruct, converted once, where its package is installed."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels_cli.demo import smollm2
from gsd_kernels_hf.store import cache_dir

USERS = cache_dir()  # before the tests have one of their own: what is converted there already is only read


@dataclass(frozen=True)
class Model:
    """The model in one dtype, and its chats."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def chats(self, *messages: str) -> dict[str, Any]:
        """A left-padded batch: one chat a message."""
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
            )
            for message in messages
        ]
        options = {"return_tensors": "pt", "padding": True, "padding_side": "left", "add_special_tokens": False}
        return dict(self.tokenizer(texts, **options))


@pytest.fixture(scope="session")
def place(tmp_path_factory, own_cache):
    """Where the converted model is: the user's cache if it is there, else one for all processes of this run."""
    reason = smollm2.why_missing()
    if reason is not None:
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSD_KERNELS_CACHE", str(USERS))
        if not (smollm2.folder_path() / "config.json").is_file():
            patch.setenv("GSD_KERNELS_CACHE", str(shared / "smollm2"))
        return smollm2.folder(progress=False).parent


def loaded(place, dtype: torch.dtype) -> Model:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GSD_KERNELS_CACHE", str(place))
        return Model(*smollm2.load(dtype, progress=False))


@pytest.fixture(scope="session")
def full(place):
    """In float32."""
    return loaded(place, torch.float32)


@pytest.fixture(scope="session")
def half(place):
    """In bfloat16."""
    return loaded(place, torch.bfloat16)
