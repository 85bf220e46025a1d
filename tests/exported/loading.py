"""What the tests of model folders load and ask for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

TEXT = "import os\nimport sys\nimport"
CALL = {"max_new_tokens": 40, "do_sample": False}


def keep_modules(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have transformers copy the code of folders to ``folder``, not to the user's cache."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(folder))
    monkeypatch.syspath_prepend(folder)


def loaded(folder: Path | str, trust: bool | None = True, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A folder's model, as anybody loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, dtype=dtype)
