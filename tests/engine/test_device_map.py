"""Targets spread over devices: per-layer caches, inputs moved once a step for a device, the same texts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import noised, prompts, tiny
from transformers import AutoModelForCausalLM

import gsd_kernels
from gsd_kernels import GraphConfig

TWO_DEVICES = Path(__file__).parents[1] / "two_devices.py"

pytest.importorskip("accelerate", reason="device_map needs accelerate")

CONFIG = GraphConfig(depth=3, width=2, branch=2, max_rows=7, max_path=5)
PARTS = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head")


def generate(target, draft, device="cpu"):
    inputs = {name: value.to(device) for name, value in prompts(2, 9).items()}
    arguments = {"max_new_tokens": 16, "do_sample": True, "seed": 3, "graph_config": CONFIG}
    output = gsd_kernels.generate(target, **inputs, assistant_model=draft, **arguments, return_dict_in_generate=True)
    assert len(output.stats.accepted) > 2  # several tokens were accepted in one step
    return output


@pytest.mark.slow
def test_two_devices_without_a_gpu():
    """The second device is a pretended one: its tensors are kept apart from the CPU's, and copies are counted."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, TWO_DEVICES], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen["same"], "another text than on one device"
    assert seen["cache_bytes"][0] == seen["cache_bytes"][1]
    steps, copied = seen["steps"], seen["copied"]
    assert steps < 16, "nothing was accepted"
    # Two of the layers lie there, and still everything arrives once a step.
    assert copied["int32 [2, 7, 1]"] == steps  # ancestor mask
    assert copied["int32 [2, 7]"] == 2 * steps  # depths of rows and nodes
    assert copied["int32 [2, 6]"] == steps  # accepted rows
    assert copied["int32 [2]"] == 4 * steps  # kv_len and kv_start; num_accepted and the length to advance
    assert copied["int64 [2, 7]"] == (1 + 2) * steps  # cache positions; accelerate's hooks move position_ids a layer


@pytest.mark.parametrize("offloaded", [(), ("model.layers.1",), ("model.embed_tokens", "model.layers.0")], ids=len)
def test_offloaded_to_disk(offloaded, tmp_path):
    whole = tiny(num_key_value_heads=4)
    whole.save_pretrained(tmp_path)
    spread = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        dtype=torch.float64,
        device_map={part: "disk" if part in offloaded else "cpu" for part in PARTS},
        offload_folder=tmp_path / "offload",
    ).eval()
    draft = noised(whole)
    expected, found = generate(whole, draft), generate(spread, draft)
    assert torch.equal(expected.sequences, found.sequences)
    assert expected.stats.cache_bytes == found.stats.cache_bytes
