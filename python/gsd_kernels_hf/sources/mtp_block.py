"""The decoder layer of a multi-token-prediction head: one of the target's own class, found by its tensors."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from ..model.attention import implementation_of
from ..model.hidden import decoder_of
from ..model.properties import text_config
from ..validate.models import SERVED_LAYERS
from .checkpoints import bad
from .layers import Turns

Shapes = dict[str, tuple[int, ...]]
EXPERTS = re.compile(r"(?P<base>.*\.experts)\.(?P<what>gate_up_proj|down_proj)")
"""Weights of all experts in one tensor, as transformers holds them: [E, 2 · inner, D] and [E, D, inner]."""


@dataclass(frozen=True)
class Block:
    """A decoder layer that a head may have, without weights.

    Attributes:
        module: on the meta device.
        config: its own, all layers of one type.
        index: of the target's layer that it resembles.
        attention: its type, as in ``layer_types``; ``None`` where the target's layers have none.
        target: whose layers these are.
    """

    module: nn.Module
    config: PretrainedConfig
    index: int
    attention: str | None
    target: PreTrainedModel

    @property
    def window(self) -> int | None:
        """Its sliding window."""
        return self.config.sliding_window if self.attention == "sliding_attention" else None

    def shapes(self) -> Shapes:
        """Its tensors, by name."""
        return {name: tuple(value.shape) for name, value in self.module.state_dict().items()}

    def dtypes(self) -> dict[str, torch.dtype]:
        """In which precision the target keeps the same tensors."""
        theirs = decoder_of(self.target)[0][self.index].state_dict()
        found = {name: theirs[name].dtype if name in theirs else self.target.dtype for name in self.shapes()}
        return {name: dtype if dtype.is_floating_point else self.target.dtype for name, dtype in found.items()}


class TargetRotary:
    """Position → rotation as the target's own layers get it. No module, so that no cast reaches its frequencies."""

    def __init__(self, block: Block) -> None:
        self.module = getattr(block.target.get_decoder(), "rotary_emb", None)
        if not isinstance(self.module, nn.Module):
            raise bad(
                f"{type(block.target).__name__} has no rotary_emb in its decoder, so its "
                "multi-token-prediction heads cannot be placed; not served"
            )
        typed = "layer_type" in inspect.signature(self.module.forward).parameters
        self.options = {"layer_type": block.attention} if typed else {}

    def frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Frequencies of the rotation, float32 [head_dim / 2], and what cosines and sines are multiplied with."""
        return self.module.inv_freq.to(device, torch.float32), float(self.module.attention_scaling)

    def __call__(self, like: Tensor, positions: Tensor) -> Turns:
        """Of int positions [B, R], in the dtype and on the device of ``like``."""
        turns: Turns = self.module(like, positions, **self.options)
        return turns


def blocks_of(target: PreTrainedModel) -> Iterator[Block]:
    """Every decoder layer that differs from the others in its parts or its type of attention.

    Raises:
        BadCheckpoint: they cannot be made.
    """
    layers, _ = decoder_of(target)
    config = text_config(target)
    types = sorted(set(getattr(config, "layer_types", None) or ()) & SERVED_LAYERS) or [None]
    seen = set()
    for index, layer in enumerate(layers):
        parts = tuple(type(part) for part in layer.children())
        if parts in seen:
            continue
        seen.add(parts)
        for attention in types:
            own = copy.deepcopy(config)
            own._attn_implementation_internal = implementation_of(config)
            try:
                if attention is not None:
                    own.layer_types = [attention] * len(layers)
                with torch.device("meta"):
                    module = type(layer)(own, index)
            except (TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
                raise bad(
                    f"a layer of {type(target).__name__} cannot be made by itself: {error}; its "
                    "multi-token-prediction heads are not served"
                ) from error
            for part in module.modules():
                if hasattr(part, "layer_idx"):
                    part.layer_idx = 0  # of the head's own cache
            yield Block(module.eval().requires_grad_(False), own, index, attention, target)


def stored_as(name: str, shape: tuple[int, ...], files: Mapping[str, Any]) -> Shapes:
    """The tensors of a checkpoint that make up one of a layer: itself, or one of each expert and matrix."""
    experts = EXPERTS.fullmatch(name)
    if name in files or experts is None or len(shape) != 3:
        return {name: shape}
    matrices = ("gate_proj", "up_proj") if experts["what"] == "gate_up_proj" else ("down_proj",)
    part = (shape[1] // len(matrices), shape[2])
    return {f"{experts['base']}.{i}.{matrix}.weight": part for i in range(shape[0]) for matrix in matrices}


def assembled(name: str, shape: tuple[int, ...], found: Mapping[str, Tensor]) -> Tensor:
    """A layer's tensor from those of :func:`stored_as`."""
    parts = [found[part] for part in stored_as(name, shape, found)]
    if len(parts) == 1 and name in found:
        return parts[0]
    return torch.cat(parts).view(shape)  # experts one after the other, each with its gate before


def block_for(
    files: Shapes,
    target: PreTrainedModel,
    attention: str | None,
    named: object = None,
    name_in_file: Callable[[str], str] = str,
) -> Block:
    """The target's decoder layer that has exactly these tensors.

    Args:
        files: names, shapes of the head's decoder layer.
        target: whose layers are looked at.
        attention: type of the layer where neither tensors nor the config tell; ``None``: no such layer is served.
        named: the checkpoint's ``mtp_layer_types``, for a target whose config has none.
        name_in_file: of a tensor, for errors.

    Raises:
        BadCheckpoint: none has, or layers of several types have.
    """
    found: list[Block] = []
    nearest: tuple[int, list[str], list[str]] | None = None
    for block in blocks_of(target):
        expected: Shapes = {}
        for name, shape in block.shapes().items():
            expected |= stored_as(name, shape, files)
        missing, unknown = sorted(expected.keys() - files.keys()), sorted(files.keys() - expected.keys())
        if not missing and not unknown:
            found.append(block)
        elif nearest is None or len(missing) + len(unknown) < nearest[0]:
            nearest = len(missing) + len(unknown), missing, unknown
    kind = type(target).__name__
    if not found:
        assert nearest is not None
        _, missing, unknown = nearest
        what = (
            f"it has no {name_in_file(missing[0])}"
            if missing
            else f"it has {name_in_file(unknown[0])}, which theirs have not"
        )
        raise bad(f"the decoder layer of the multi-token-prediction head is none of {kind}'s layers: {what}")
    named = getattr(found[0].config, "mtp_layer_types", None) or named
    wanted = named[0] if isinstance(named, (list, tuple)) and named else attention
    kinds = [block.attention for block in found]
    if len(set(kinds)) == 1 and not named:
        return found[0]
    if wanted not in kinds:
        raise bad(
            f"the decoder layer of the multi-token-prediction head may be one of {kind}'s layers with "
            f"{' or '.join(str(one) for one in kinds)}, and its config's mtp_layer_types is {named!r}"
        )
    return found[kinds.index(wanted)]
