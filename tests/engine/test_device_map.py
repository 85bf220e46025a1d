"""Targets spread over devices: per-layer caches, inputs moved once a step for a device, the same texts.

The second device is a pretended one: tensors that say they lie elsewhere and refuse to mix. Run as a program, this file
decodes with a target whose second half lies there, and prints what was seen as JSON.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch
from models import noised, prompts, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import AutoModelForCausalLM, PreTrainedModel

import gsd_kernels
from gsd_kernels import GraphConfig
from gsd_kernels_hf.model import proof

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
    done = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300)
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


# A second device on a machine that has only a CPU: tensors that say they lie elsewhere and refuse to mix.


aten = torch.ops.aten
LAYERS_THERE = 2
SECOND = torch.device("privateuseone", 0)
COPIES = (aten._to_copy.default, aten.copy_.default)


class Elsewhere(Tensor):
    """A CPU tensor that says it lies on the second device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        outer = Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=SECOND
        )
        outer.inner = inner
        return outer

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("used outside SecondDevice")


class SecondDevice(TorchDispatchMode):
    """Runs what happens on the second device, counts what is copied there, and refuses what mixes the two."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: Counter[tuple[str, tuple[int, ...]]] = Counter()  # dtype and shape

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        there = [isinstance(t, Elsewhere) for t in tensors]
        asked = kwargs.get("device")
        to_second = torch.device(asked) == SECOND if asked is not None else any(there)
        if function not in COPIES and any(there):
            alone = [t for t, away in zip(tensors, there, strict=True) if not away and t.dim() > 0]
            assert not alone, f"{function}: tensors on two devices"
        if function is aten._to_copy.default and to_second and not any(there):
            self.copied[str(tensors[0].dtype).removeprefix("torch."), tuple(tensors[0].shape)] += 1
        if function is aten.copy_.default:
            to_second = there[0]
        if asked is not None:
            kwargs["device"] = torch.device("cpu")
        args, kwargs = tree_map_only(Elsewhere, lambda t: t.inner, (args, kwargs))
        result = function(*args, **kwargs)
        if not to_second:
            return result
        known = {id(t.inner): t for t in tensors if isinstance(t, Elsewhere)}
        return tree_map_only(Tensor, lambda r: known[id(r)] if id(r) in known else Elsewhere(r), result)


def split(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose last layers lie on the second device, dispatched as ``device_map`` does."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = copy.deepcopy(model)
    layers = list(model.model.layers)
    here, there = layers[:-LAYERS_THERE], layers[-LAYERS_THERE:]
    for module in (module for layer in there for module in layer.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(Elsewhere(parameter.data), requires_grad=False))
    for part in (*here, model.model.norm):
        add_hook_to_module(part, AlignDevicesHook("cpu", skip_keys=["cache", "past_key_values"]))
    for part in there:
        add_hook_to_module(part, AlignDevicesHook(SECOND, skip_keys=["cache", "past_key_values"]))
    return model


def main() -> None:
    torch.set_num_threads(1)
    whole = tiny(num_key_value_heads=4, num_hidden_layers=4)
    draft = noised(whole)
    arguments = {
        **prompts(2, 9),
        "assistant_model": draft,
        "max_new_tokens": 16,
        "do_sample": True,
        "seed": 3,
        "backend": "reference",
        "graph_config": GraphConfig(depth=3, width=2, branch=2, max_rows=7, max_path=5),
        "return_dict_in_generate": True,
    }
    alone = gsd_kernels.generate(whole, **arguments)
    # A mode makes the model's code suspect; the proof's own tensors would have to be made on the second device.
    proof.why_not_proved = lambda *_, **__: None
    with SecondDevice() as device, torch.no_grad():
        both = gsd_kernels.generate(split(whole), **arguments)
    print(
        json.dumps(
            {
                "same": torch.equal(alone.sequences, both.sequences),
                "steps": both.stats.steps,
                "cache_bytes": [alone.stats.cache_bytes, both.stats.cache_bytes],
                "copied": {f"{dtype} {list(shape)}": count for (dtype, shape), count in device.copied.items()},
            }
        )
    )


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend()
    main()
