"""The mask written out, made once for all layers of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from ...graph import WORD_BITS, unpack_bits
from .records import AttentionCall


@dataclass
class DenseMask:
    """The cache positions that each row sees."""

    visible: Tensor  # bool [B, R, S]
    kv_len: Tensor  # int32 [B]
    nodes: int  # slots of the graph
    _biases: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def end(self) -> int:
        """Nobody sees positions from here on. Waits for the device."""
        return min(self.visible.shape[2], int(self.kv_len.max()) + self.nodes)

    def bias(self, groups: int, dtype: torch.dtype) -> Tensor:
        """The summand of the scores of ``groups`` query heads packed as rows: [B, 1, G·R, end], 0 or −inf."""
        key = (groups, dtype)
        if key not in self._biases:
            visible = self.visible[:, :, : self.end]
            bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
            self._biases[key] = bias.repeat(1, groups, 1)[:, None]
        return self._biases[key]


def dense_mask(
    ancestor_mask: Tensor,  # int32 [B, R, words]
    kv_len: Tensor,  # int32 [B]
    kv_start: Tensor | None,
    row_depths: Tensor | None,
    node_depths: Tensor | None,
    sliding_window: int | None,
    capacity: int,
    chunk: int | None = None,
) -> DenseMask:
    """The mask over ``capacity`` cache positions."""
    visible = visibility(ancestor_mask, kv_len, kv_start, row_depths, node_depths, sliding_window, capacity, chunk)
    return DenseMask(visible, kv_len, ancestor_mask.shape[-1] * WORD_BITS)


def dense_mask_of(call: AttentionCall) -> DenseMask:
    """That of a call, over its caches."""
    lengths = (call.kv_len, call.kv_start, call.row_depths, call.node_depths)
    return dense_mask(call.ancestor_mask, *lengths, call.sliding_window, call.k.shape[2], call.chunk)


def visibility(
    ancestor_mask: Tensor,
    kv_len: Tensor,
    kv_start: Tensor | None,
    row_depths: Tensor | None,
    node_depths: Tensor | None,
    sliding_window: int | None,
    capacity: int,
    chunk: int | None = None,
) -> Tensor:
    """The cache positions that each row sees: bool [B, R, S]."""
    bits = ancestor_mask.shape[-1] * WORD_BITS
    position = torch.arange(capacity, device=ancestor_mask.device)
    in_prefix = position < kv_len[:, None]  # [B, S]
    if kv_start is not None:
        in_prefix &= position >= kv_start[:, None]
    node = position - kv_len[:, None]  # [B, S]
    is_node = (node >= 0) & (node < bits)
    by_node = unpack_bits(ancestor_mask, bits)  # [B, R, bits]
    rows = by_node.shape[1]
    by_position = by_node.gather(2, node.clamp(0, bits - 1)[:, None].expand(-1, rows, -1))  # [B, R, S]
    visible = in_prefix[:, None] | (by_position & is_node[:, None])
    reach = positions_back(kv_len, kv_start, row_depths, sliding_window, chunk)
    if reach is not None and row_depths is not None and node_depths is not None:
        depth = node_depths.gather(1, node.clamp(0, node_depths.shape[1] - 1))  # [B, S]
        distance = row_depths[:, :, None] - torch.where(node >= 0, depth, node)[:, None]
        visible = visible & (distance <= reach)
    return visible


def positions_back(
    kv_len: Tensor, kv_start: Tensor | None, row_depths: Tensor | None, sliding_window: int | None, chunk: int | None
) -> Tensor | int | None:
    """How many positions before its own a row sees: int32 [B, R, 1], or the same for all; ``None``: all of them."""
    if sliding_window is not None:
        return sliding_window - 1
    if chunk is None or row_depths is None:
        return None
    position = kv_len[:, None] + row_depths  # [B, R]
    return ((position if kv_start is None else position - kv_start[:, None]) % chunk)[:, :, None]
