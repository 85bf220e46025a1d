"""Properties of a transformers model: the one inside its wrappers, its vocabulary, where it takes its input; its views.

A view is the model seen with other modules in it, which leaves it as it is.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaModel, PretrainedConfig, PreTrainedModel

from ..packed.modules import Packed

OUTPUTS = ("output_router_logits", "output_attentions", "output_hidden_states")
CACHES = ("cache", "past_key_values")  # arguments of a forward: from transformers 5.24 on, and before


def unwrap(model: Any) -> Any:
    """The transformers model inside ``torch.compile`` and PEFT wrappers.

    Raises:
        ValueError: a PEFT method that prepends virtual tokens, which lives outside the model.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            if getattr(model.active_peft_config, "is_prompt_learning", False):
                raise ValueError("model: PEFT prompt learning is not supported, since virtual tokens precede the text")
            model = model.get_base_model()
        else:
            return model


def text_config(model: Any) -> PretrainedConfig:
    """The config of the language model in a model."""
    return model.config.get_text_config(decoder=True)


def vocabulary(model: PreTrainedModel) -> int:
    """Rows of the output embedding, padding included; what the config says, where a model has none."""
    head = model.get_output_embeddings()
    weight = getattr(head, "_parameters", {}).get("weight")
    if weight is not None and weight.is_floating_point() and weight.dim() == 2:
        return len(weight)
    rows = getattr(head, "out_features", None)  # of packed weights, which are not unpacked for it
    return int(text_config(model).vocab_size if rows is None else rows)


def positions(model: PreTrainedModel) -> int | None:
    """Tokens of a text that the model was made for; ``None`` where its config names no number.

    Rotary positions go on beyond, as do texts.
    """
    count = getattr(text_config(model), "max_position_embeddings", None)
    return count if isinstance(count, int) else None


def cache_argument(model: PreTrainedModel) -> str:
    """Name by which the model takes and returns a KV cache: ``cache`` from transformers 5.24 on.

    A model of foreign code may still have the name before that, ``past_key_values``.
    """
    for forward in (model.forward, LlamaModel.forward):
        names = inspect.signature(forward).parameters
        for name in CACHES:
            if name in names:
                return name
    raise AssertionError("transformers: LlamaModel.forward takes no cache")


def logits_alone(model: PreTrainedModel) -> dict[str, bool]:
    """Arguments of a forward that leave out what a config asks for beside logits.

    Of a router's logits models make a loss, of all tokens that the mask has: a forward of rows has others.
    """
    configs = (model.config, text_config(model))
    return {name: False for name in OUTPUTS if any(getattr(config, name, False) for config in configs)}


def storing(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """Arguments of a forward that fills a cache and returns logits alone."""
    return {cache_argument(model): cache, "use_cache": True, **logits_alone(model)}


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its input: the device of the input embedding, or where that runs if it is offloaded."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = (embedding.packed if isinstance(embedding, Packed) else embedding.weight).device
    return torch.device(embedding._hf_hook.execution_device) if device.type == "meta" else device


def size_in(config: PretrainedConfig, key: str) -> int | None:
    """A size of a config, ``None`` where it has none; of layers that differ in it, the largest."""
    try:
        sizes = getattr(config, key, None)
    except RuntimeError:  # transformers does not say which one is meant
        sizes = [getattr(layer, key, None) for layer in config.per_layer_config]
    return max(filter(None, sizes), default=None) if isinstance(sizes, list) else sizes


def with_children(module: Any, children: dict[str, nn.Module | None]) -> Any:
    """A shallow copy of ``module`` with other children."""
    view = copy.copy(module)
    view.__dict__["_modules"] = {**module._modules, **children}
    return view


def seen(module: Any, instead: Callable[[Any], Any]) -> Any:
    """``module`` with what ``instead`` gives in the place of each module in it, itself the last; itself if that is all.

    ``instead`` is called with a module whose parts are in place.
    """
    children = {name: child and seen(child, instead) for name, child in module._modules.items()}
    if any(child is not module._modules[name] for name, child in children.items()):
        module = with_children(module, children)
    return instead(module)
