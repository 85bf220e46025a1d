"""What keeps a model's rows from being one operator is in the statistics and, once, in the log."""

from __future__ import annotations

import logging

import torch
from models import noised, prompts, tiny
from ops.contracts.backends import needs_cpu

import gsd_kernels as gsd
from gsd_kernels_hf.model import fused

pytestmark = needs_cpu


def why(target, **options) -> str | None:
    inputs = prompts(1, 6)
    return gsd.generate(target, **inputs, max_new_tokens=3, return_dict_in_generate=True, **options).stats.why_modules


def test_the_statistics_and_the_log_say_why(caplog, monkeypatch):
    fused._log_once.cache_clear()
    target, changed = tiny(dtype=torch.float32), tiny(dtype=torch.float32)
    changed.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        assert why(target, assistant_model=noised(target)) is None
        assert not any("its modules" in record.getMessage() for record in caplog.records)
        for _ in range(2):
            assert why(changed) == "model.layers.1.mlp has a hook"
        assert "torch.float64, which is none of float32" in why(tiny())
        monkeypatch.setenv(fused.SWITCH, "0")
        assert why(target) == "GSD_KERNELS_FUSED_ROWS=0"
    said = [record.getMessage() for record in caplog.records if "through its modules" in record.getMessage()]
    assert len(said) == len(set(said)) == 3
    assert "rows of LlamaForCausalLM go through its modules: model.layers.1.mlp has a hook" in said
