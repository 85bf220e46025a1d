"""Checks of what one call hands over beside its options: model inputs, adapters, draft sources, listeners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from ..model.facts import Facts
from ..model.modes import LEAVE_OUT, OTHERWISE, Unsupported
from ..model.properties import CACHES
from .options import OF_DICTS

# How transformers feeds a model while it generates, which the decode loop does itself.
FEEDING = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_sample")
COUNTED = (*CACHES, "cache_position", "logits_to_keep", "use_cache")
"""What the decode loop says in any case; anything else may be an input of a prompt."""


def check_call(facts: Facts, model_kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Raise for what this call would have the model read, and graph-speculative generation does not.

    Args:
        facts: of the target.
        model_kwargs: the model inputs beside ``input_ids``, as transformers' ``generate`` prepared them.

    Returns:
        Names of inputs that the forward of a prompt reads, and text has none of.

    Raises:
        Unsupported: a model input that is not used, adapters that need more than their layers, a model that feeds
            itself in its own way, or weights that are not there.
    """
    check_feeding(facts.model)
    check_adapters(facts)
    mask = model_kwargs.get("attention_mask")
    unread = sorted(name for name, value in model_kwargs.items() if not _is_read(name, value, mask))
    for name in unread:
        if name in COUNTED or not reads_more(facts.model):
            raise Unsupported(f"{name}: {_why_unread(name)}; {LEAVE_OUT}")
    return tuple(unread)


def reads_more(model: PreTrainedModel) -> bool:
    """Return whether the model's prompts may have more than text."""
    modalities = getattr(model, "input_modalities", "text")
    return bool({modalities} - {"text"} if isinstance(modalities, str) else set(modalities) - {"text"})


def _is_read(name: str, value: Any, mask: Tensor | None) -> bool:
    """Return whether ignoring the model input changes nothing: it is used, empty, or what decoding says anyway."""
    if value is None or name in ("attention_mask", "use_cache", *OF_DICTS):  # the last were screened
        return True
    if name in ("position_ids", "cache_position"):
        return isinstance(value, Tensor) and _is_counted(value, mask if name == "position_ids" else None)
    if name in CACHES:  # transformers has made one
        return isinstance(value, Cache) and not value.get_seq_length() and not hasattr(value, "_is_user_defined")
    if name == "mm_token_type_ids":  # 0 is a token of text
        return isinstance(value, Tensor) and not bool(value.any())
    if name == "logits_to_keep":
        return isinstance(value, int) and value == 1
    return isinstance(value, (dict, list, tuple)) and not value


def _why_unread(name: str) -> str:
    if name in CACHES:
        return "a cache of its own is used, and continuing one is not supported; pass the whole prompt"
    if name == "position_ids":
        return "positions are counted from the first token that is not padding, and these differ"
    return "a model input that graph-speculative generation does not read"


def _is_counted(positions: Tensor, mask: Tensor | None) -> bool:
    """Return whether positions [..., P] are 0, 1, 2, … from each sequence's first token on; padding may have any."""
    if mask is None:
        counted = torch.arange(positions.shape[-1], device=positions.device)
        return bool((positions == counted).all())
    counted = mask.to(positions.device).long().cumsum(-1) - 1
    if positions.shape[-1] != counted.shape[-1] or positions.dim() < 2 or positions.shape[-2] not in (1, len(counted)):
        return False
    return bool(((positions == counted) | (counted < 0)).all())


def check_feeding(model: PreTrainedModel) -> None:
    """Raise where the model's inputs are prepared by code that transformers would call and the decode loop does not.

    Families of transformers override some of it for image inputs and for caches of their own, which are refused
    elsewhere; anything else, of a subclass, of a checkpoint's code or set on the instance, may do what it likes.
    """
    for name in FEEDING:
        method = getattr(model, name, None)
        if method is None:
            continue
        module = str(getattr(method, "__module__", ""))
        if getattr(method, "__self__", None) is model and module.startswith("transformers."):
            continue
        owner = type(getattr(method, "__self__", model)).__name__
        cure = "use transformers' own"
        if owner.startswith("Peft"):
            cure = "PEFT prompt learning puts virtual tokens before the text, which is not supported"
        raise Unsupported(
            f"model: {owner} has its own {name}, which graph-speculative generation does not call; {cure}"
        )


def check_adapters(facts: Facts) -> None:
    """Raise for activated LoRA: where its weights act depends on the text, which PEFT tells its layers every call."""
    configs = getattr(facts.model, "peft_config", None) or {}
    activated = {name for name, config in configs.items() if getattr(config, "alora_invocation_tokens", None)}
    if not activated:
        return
    for _, module in facts.modules:
        if getattr(module, "disable_adapters", False):
            continue
        used = activated & set(getattr(module, "lora_variant", ())) & set(getattr(module, "active_adapters", ()))
        if used:
            raise Unsupported(
                f"model: adapter {min(used)!r} is an activated LoRA (alora_invocation_tokens), which is not "
                "supported; disable it" + OTHERWISE
            )


def check_listeners(streamer: Any, observer: Any) -> None:
    """Raise unless these can be told of tokens and of steps."""
    if streamer is not None:
        usable = all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
        if isinstance(streamer, type) or not usable:
            raise TypeError(f"streamer: expected an object with put(tokens) and end(), got {_named(streamer)}")
    if observer is not None and not callable(observer):
        raise TypeError(f"observer: expected a function of a gsd_kernels.Verified, got {_named(observer)}")


def _named(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
