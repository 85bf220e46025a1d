"""The attention function that graph rows go through, beside the attention the model had before.

A model is switched to ``gsd_<its own implementation>``. A forward without ``graph=`` inputs then runs exactly what it
ran before, mask included; a forward with them runs :func:`gsd_kernels.dag_attention` over the whole cache.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gsd_kernels import dag_attention
from gsd_kernels.ops.dag_attention import DenseMask, dense_mask

PREFIX = "gsd_"


@dataclass
class GraphInputs:
    """What the attention of graph rows needs; device tensors with static addresses. R rows over N graph nodes."""

    ancestor_mask: Tensor  # int32 [B, R, ceil(N/32)]
    kv_len: Tensor  # int32 [B]
    kv_start: Tensor  # int32 [B]
    row_depths: Tensor  # int32 [B, R]; position minus kv_len
    node_depths: Tensor  # int32 [B, N]
    num_nodes: Tensor | None = None  # int32 [B]
    backend: str = "auto"
    _masks: dict[tuple[int, int | None], DenseMask] = field(default_factory=dict, repr=False)
    _by_device: dict[torch.device, GraphInputs] = field(default_factory=dict, repr=False)

    def dense(self, capacity: int, sliding_window: int | None) -> DenseMask | None:
        """The mask written out, made once for all layers; only where it is used (not by GPU kernels)."""
        if self.kv_len.device.type != "cpu":
            return None
        key = (capacity, sliding_window)
        if key not in self._masks:
            self._masks[key] = dense_mask(
                self.ancestor_mask,
                self.kv_len,
                self.kv_start,
                self.num_nodes,
                self.row_depths,
                self.node_depths,
                sliding_window,
                capacity,
            )
        return self._masks[key]

    def on(self, device: torch.device) -> GraphInputs:
        """These inputs on ``device``, copied once a step for every device of a sharded model."""
        if self.kv_len.device == device:
            return self
        if device not in self._by_device:
            moved = [
                None if t is None else t.to(device, non_blocking=True)
                for t in (
                    self.ancestor_mask,
                    self.kv_len,
                    self.kv_start,
                    self.row_depths,
                    self.node_depths,
                    self.num_nodes,
                )
            ]
            self._by_device[device] = GraphInputs(*moved, backend=self.backend)
        return self._by_device[device]


def _attention_beside(original: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The attention function of a model whose own implementation is ``original``."""

    def forward(
        module: nn.Module,
        query: Tensor,  # [B, Hq, R, D]
        key: Tensor,  # [B, Hkv, S, D]
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        graph: GraphInputs | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if graph is None:
            return _original(original, module)(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
        if kwargs.get("s_aux") is not None:
            raise ValueError("attention sinks (s_aux) are not supported by dag_attention")
        inputs = graph.on(query.device)
        out = dag_attention(
            query,
            key,
            value,
            inputs.ancestor_mask,
            inputs.kv_len,
            kv_start=inputs.kv_start,
            num_nodes=inputs.num_nodes,
            row_depths=inputs.row_depths,
            node_depths=inputs.node_depths,
            scale=scaling,
            softcap=kwargs.get("softcap"),
            sliding_window=kwargs.get("sliding_window"),
            dense=inputs.dense(key.shape[2], kwargs.get("sliding_window")),
            backend=inputs.backend,
        )
        return out.transpose(1, 2).contiguous(), None  # [B, R, Hq, D]

    return forward


class _WithOriginalName:
    """An attention module as it was: flash-attn's wrapper reads the implementation's name from ``module.config``."""

    def __init__(self, module: nn.Module, original: str) -> None:
        self._module = module
        self.config = types.SimpleNamespace(_attn_implementation=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _original(name: str, module: nn.Module) -> Callable[..., Any]:
    if name == "eager":
        return sys.modules[type(module).__module__].eager_attention_forward
    function = ALL_ATTENTION_FUNCTIONS[name]
    if name.startswith("flash_attention"):
        return lambda _, *args, **kwargs: function(_WithOriginalName(module, name), *args, **kwargs)
    return function


_lock = threading.RLock()
_users: dict[int, tuple[Any, int]] = {}  # id(config) → (config, users); models may share a config


def name_beside(original: str) -> str:
    """The name of :func:`_attention_beside`: without "flash", for which transformers would look up a kernel."""
    return PREFIX + original.replace("flash_attention_", "fa_")


def original_name(name: str) -> str:
    """The model's own implementation, whether ``name`` is switched or not."""
    if not name.startswith(PREFIX):
        return name
    own = name.removeprefix(PREFIX)
    return own.replace("fa_", "flash_attention_") if own.startswith("fa_") else own


def is_switched(model: PreTrainedModel) -> bool:
    return str(model.config._attn_implementation).startswith(PREFIX)


def switch(model: PreTrainedModel) -> None:
    """Route ``model``'s attention through this module; undone by as many :func:`unswitch`.

    Raises:
        ValueError: the model does not follow transformers' attention interface.
    """
    with _lock:
        config = model.config
        _, users = _users.get(id(config), (config, 0))
        if users == 0:
            original = original_name(str(config._attn_implementation))  # switched already: a patched model's copy
            name = name_beside(original)
            if original != "eager" and original not in ALL_ATTENTION_FUNCTIONS:
                raise ValueError(f"model: unknown attention implementation {original!r}")
            if original not in ALL_MASK_ATTENTION_FUNCTIONS:
                raise ValueError(f"model: attention implementation {original!r} has no mask function; use 'sdpa'")
            AttentionInterface.register(name, _attention_beside(original))
            AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
            model.set_attn_implementation(name)
            if config._attn_implementation != name:
                raise ValueError(
                    f"model: {type(model).__name__} does not use transformers' attention interface, so graph rows "
                    "cannot be verified in it; LLaMA-family models do"
                )
        _users[id(config)] = (config, users + 1)


def unswitch(model: PreTrainedModel) -> None:
    with _lock:
        config, users = _users.get(id(model.config), (model.config, 0))
        if users > 1:
            _users[id(config)] = (config, users - 1)
        elif users == 1:
            del _users[id(config)]
            model.set_attn_implementation(original_name(str(config._attn_implementation)))


@contextmanager
def switched(*models: PreTrainedModel) -> Iterator[None]:
    """:func:`switch` for the duration of a block."""
    done: list[PreTrainedModel] = []
    try:
        for model in models:
            switch(model)
            done.append(model)
        yield
    finally:
        for model in reversed(done):
            unswitch(model)
