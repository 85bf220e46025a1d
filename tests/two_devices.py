"""A second device on a machine that has only a CPU: tensors that say they lie elsewhere and refuse to mix.

``python two_devices.py`` decodes with a target whose second half lies there, and prints what was seen as JSON.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from typing import Any

import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from models import noised, prompts, tiny
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from transformers import PreTrainedModel

import gsd_kernels
from gsd_kernels import GraphConfig
from gsd_kernels_hf.model import proof

aten = torch.ops.aten
LAYERS_THERE = 2
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


_setup_privateuseone_for_python_backend()
SECOND = torch.device("privateuseone", 0)

if __name__ == "__main__":
    main()
