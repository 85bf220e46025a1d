"""A preallocated key/value cache with room for graph rows behind the committed prefix."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin

from gsd_kernels import commit_kv, write_kv
from gsd_kernels.ops.write_kv.api import IMPLEMENTATIONS


class GraphLayer(CacheLayerMixin):
    """One layer: keys and values [B, Hkv, capacity, D], allocated at the first update, on that layer's device."""

    is_compileable = False  # a true value makes generate() compile the model
    is_sliding = False
    is_croppable = False

    def __init__(self, parent: GraphCache) -> None:
        super().__init__()
        self.parent: GraphCache = weakref.proxy(parent)  # no cycle: storage goes with its last user, at once

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, _, _ = key_states.shape
        shape = (batch, heads, self.parent.capacity)
        self.keys = key_states.new_zeros((*shape, key_states.shape[-1]))
        self.values = value_states.new_zeros((*shape, value_states.shape[-1]))
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        """Move keys and values to storage of ``capacity`` positions."""
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = old.new_zeros(*old.shape[:2], capacity, old.shape[3])
            new[:, :, : old.shape[2]] = old
            setattr(self, name, new)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [B, Hkv, R, D]: graph rows into their slots (all of the cache comes back), a prompt at the end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        positions = self.parent.positions_on(self.device)
        if positions is not None:
            # Finite, because another row's overflow must not reach rows that do not see it: 0 · NaN would be NaN.
            write_kv(self.keys, self.values, key_states, value_states, positions, backend=self.parent.write_backend)
            return self.keys, self.values
        begin = self.parent.prompt_length
        end = begin + key_states.shape[2]
        if end > self.parent.capacity:
            raise ValueError(f"cache: full, {end} positions needed and {self.parent.capacity} allocated")
        self.keys[:, :, begin:end] = key_states.nan_to_num()  # padding may hold anything, attention wants it finite
        self.values[:, :, begin:end] = value_states.nan_to_num()
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self, *args: Any) -> int:
        # A layer that was left out, such as cross-attention of a text without images, asks whether it ever ran.
        return self.parent.prompt_length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        rows = query_length.shape[0] if isinstance(query_length, Tensor) else query_length  # a tensor in 5.0
        return self.parent.prompt_length + rows, 0

    def get_max_length(self) -> int:
        return self.parent.capacity

    get_max_cache_shape = get_max_length  # its name in 5.0


class GraphCache(Cache):
    """Cache of one model: prompt first, then committed tokens, then the slots of the current step.

    During the prompt its length is a host integer (all sequences are padded alike); afterwards the committed length
    of every sequence lives on the device, with the caller.
    """

    def __init__(self, config: PretrainedConfig, capacity: int, backend: str = "auto") -> None:
        self.capacity = capacity
        # A backend that does not implement write_kv ("cpu", "cuda") leaves the choice to "auto".
        self.write_backend = backend if backend in IMPLEMENTATIONS else "auto"
        self.prompt_length = 0
        self._positions: dict[torch.device, Tensor] = {}  # int64 [B, R] while graph rows are forwarded
        layers = config.get_text_config(decoder=True).num_hidden_layers
        super().__init__(layers=[GraphLayer(self) for _ in range(layers)])

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` positions; what is stored stays, at other addresses."""
        self.capacity = capacity
        for layer in self.layers:
            if layer.is_initialized:
                layer.grow(capacity)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first row of a prompt's chunk, the same for layers that have not run yet."""
        return self.prompt_length

    @contextmanager
    def writing(self, positions: Tensor) -> Iterator[None]:
        """Store what a forward computes at ``positions``, int64 [B, R], rather than at the end of the prompt."""
        self._positions = {positions.device: positions}
        try:
            yield
        finally:
            self._positions = {}

    def positions_on(self, device: torch.device) -> Tensor | None:
        """Where to write, copied once a step for every device of a sharded model."""
        if self._positions and device not in self._positions:
            self._positions[device] = next(iter(self._positions.values())).to(device, non_blocking=True)
        return self._positions.get(device)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor, kv_len: Tensor, *, backend: str = "auto") -> None:
        """Move the accepted rows of all layers behind the prefix and advance ``kv_len``; one call a device."""
        by_device: dict[torch.device, list[GraphLayer]] = {}
        for layer in self.layers:
            if layer.is_initialized:  # layers that share another's keys and values, or never run, store nothing
                by_device.setdefault(layer.device, []).append(layer)
        # Copied before any is advanced: a device's own length moves with its layers.
        lengths = {device: kv_len.to(device, non_blocking=True) for device in by_device}
        for device, layers in by_device.items():
            commit_kv(
                [layer.keys for layer in layers],
                [layer.values for layer in layers],
                accepted_rows.to(device, non_blocking=True),
                num_accepted.to(device, non_blocking=True),
                lengths[device],
                backend=backend,
            )
        if kv_len.device not in by_device:
            kv_len.add_(num_accepted)

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return sum(t.nbytes for layer in self.layers if layer.is_initialized for t in (layer.keys, layer.values))
