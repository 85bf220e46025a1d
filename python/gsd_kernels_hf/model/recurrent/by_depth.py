"""Rows of one depth are a batch, each with the state of its parent, through the module's own code for one token.

Exact by construction, for any module; a state for every row is kept until it is known which rows stay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as nested
from transformers.cache_utils import Cache

from ...records import last_rows
from .mixers import LinearAttentionLayer, RowsCache, hidden_in, masked
from .step_limit import Limited, limit_of
from .tree import RowTree

KINDS = ("conv_states", "recurrent_states")


class ByDepth:
    """The form of a module that any can have.

    Args:
        module: whose forward takes hidden states [n, 1, D] and a cache.
        layer: of the model's cache, which holds the states of the text, [B, …] each.
    """

    takes_states = False

    def __init__(self, module: nn.Module, layer: LinearAttentionLayer) -> None:
        self.module, self.layer = module, layer
        limit = limit_of(module)
        self.limited = None if limit is None else Limited(module, limit)
        self.code = module if self.limited is None else self.limited.module
        self.behind_prompt = False  # whether no row was taken into the text yet
        self.after: dict[tuple[str, int], Tensor] = {}  # [B, T, …]: states after the rows since the text

    def begin(self) -> None:
        """Nothing: the states stay where the prompt left them."""
        self.after, self.behind_prompt = {}, True

    def end(self) -> None:
        """Nothing, for the same reason."""
        self.after = {}

    @property
    def nbytes(self) -> int:
        return sum(states.nbytes for states in self.after.values())

    def rows(self, tree: RowTree, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """See :class:`~.mixers.Form`."""
        hidden = hidden_in(args, options)
        shape, tree = hidden.shape[:2], tree.on(hidden.device)
        kept = self.after if tree.first else {}
        self.after = {kind: grown(states[:, : tree.first], shape[1]) for kind, states in kept.items()}
        args, options = masked(self.module, args, options, None)  # rows are never padding
        options.pop("graph", None)
        outputs: list[Any] = []
        for sequence, row, parent in tree.levels:
            layer = self.layer_of(sequence, parent)

            def of_level(value: Any, at: tuple[Tensor, Tensor] = (sequence, row), own: Any = layer) -> Any:
                if isinstance(value, RowsCache):
                    return standing_in(own, len(value.layers))
                if isinstance(value, Tensor) and value.shape[:2] == shape:
                    return value[at].unsqueeze(1)  # [n, 1, …]
                return value

            given, named = nested.tree_map(of_level, (args, options), is_leaf=lambda v: isinstance(v, RowsCache))
            if self.limited is not None:
                self.limited.ends = parent < 0 if self.behind_prompt else None
            outputs.append(self.code(*given, **named))
            self.keep(layer, sequence, row, tree)
        return gathered(outputs, tree, shape)

    def layer_of(self, sequence: Tensor, parent: Tensor) -> LinearAttentionLayer:
        """A cache layer with the states that rows [n] follow: of the text, or after their parents."""
        own, layer = self.layer, LinearAttentionLayer(self.layer.number_of_states)
        layer.device, layer.dtype = own.device, own.dtype
        follows = parent >= 0
        some, all_of_them = bool(follows.any()), bool(follows.all())
        for index in range(own.number_of_states):
            for kind in KINDS:
                states = getattr(own, kind)[index] if own.has_previous_state[index] and not all_of_them else None
                states = None if states is None else states[sequence]
                if some and (after := self.after.get((kind, index))) is not None:
                    moved = after[sequence, parent.clamp(min=0)]
                    if not all_of_them:
                        states = torch.zeros_like(moved) if states is None else states
                        moved = torch.where(follows.view(-1, *[1] * (moved.dim() - 1)), moved, states)
                    states = moved
                getattr(layer, kind)[index] = states
                getattr(layer, f"is_{kind}_initialized")[index] = states is not None
                if states is not None:
                    layer.has_previous_state[index] = True
            layer.conv_kernel_size[index] = own.conv_kernel_size[index] or _width(layer.conv_states[index])
        return layer

    def keep(self, layer: LinearAttentionLayer, sequence: Tensor, row: Tensor, tree: RowTree) -> None:
        """Note the states after rows [n]."""
        for kind in KINDS:
            for index, states in getattr(layer, kind).items():
                if states is None:
                    continue
                if (kind, index) not in self.after:
                    self.after[kind, index] = states.new_zeros(*tree.parents.shape, *states.shape[1:])
                self.after[kind, index][sequence, tree.first + row] = states

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """See :class:`~.mixers.Form`."""
        for (kind, index), after in self.after.items():
            count = num_accepted.to(after.device)
            last = last_rows(accepted_rows.to(after.device), count)
            new = after[torch.arange(len(count), device=after.device), last]
            states = getattr(self.layer, kind)
            old = states[index] if states[index] is not None else torch.zeros_like(new)
            stays = (count == 0).view(-1, *[1] * (new.dim() - 1))
            states[index] = torch.where(stays, old, new)
            getattr(self.layer, f"is_{kind}_initialized")[index] = True
            self.layer.has_previous_state[index] = True
            if kind == "conv_states" and self.layer.conv_kernel_size[index] is None:
                self.layer.conv_kernel_size[index] = new.shape[-1]
            self.layer.device, self.layer.dtype = self.layer.device or new.device, self.layer.dtype or new.dtype
        self.after, self.behind_prompt = {}, False


def grown(states: Tensor, rows: int) -> Tensor:
    """States after rows [B, T, …], with room for more."""
    return torch.cat([states, states.new_zeros(len(states), rows, *states.shape[2:])], 1)


def _width(states: Tensor | None) -> int | None:
    return None if states is None else states.shape[-1]


def standing_in(layer: LinearAttentionLayer, layers: int) -> Cache:
    """A cache all of whose layers are this one."""
    return Cache(layers=[layer] * layers)


def gathered(outputs: list[Any], tree: RowTree, shape: torch.Size) -> Any:
    """Outputs of the levels, [n, 1, …] each, as rows [B, R, …]."""

    def together(*values: Any) -> Any:
        if not isinstance(values[0], Tensor):
            return values[0]
        out = values[0].new_empty(*shape, *values[0].shape[2:])
        for (sequence, row, _), value in zip(tree.levels, values, strict=True):
            out[sequence, row] = value[:, 0]
        return out

    return nested.tree_map(together, *outputs)
