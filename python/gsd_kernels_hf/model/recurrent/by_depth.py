"""Rows of one depth are a batch, each with the state of its parent, through the module's own code for one token.

Exact by construction, for any module; a state for every row is kept until it is known which rows stay.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as nested
from transformers.cache_utils import Cache

from ...records import last_rows
from ..fingerprint import called_by
from .mixers import LinearAttentionLayer, RowsCache, State, put_state, states_in, with_kernels
from .recurrence import Limit, time_steps
from .tree import RowTree

STEP = "mamba2_selective_state_update"
"""The kernel of single tokens, by the name that modules call it by."""


class ByDepth:
    """The form of a module that any can have.

    Args:
        module: whose forward takes hidden states [n, 1, D] and a cache.
        layer: of the model's cache, which holds the states of the text, [B, …] each.
    """

    takes_states = False

    def __init__(self, module: nn.Module, layer: LinearAttentionLayer) -> None:
        self.layer, self.code, self.limit = layer, module, limit_of(module)
        if self.limit is not None:
            if "forward" in vars(module):
                raise ValueError(f"{type(module).__name__} limits steps in prompts alone and has a forward of its own")
            self.code = with_kernels(module, {STEP: self.step})
        self.ends: Tensor | None = None  # bool [n]; of the tokens that come next, those that end a prompt
        self.behind_prompt = False  # whether no row was taken into the text yet
        self.after: dict[State, Tensor] = {}  # [B, 1 + T, …]: states after the text, and after the rows since

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
        shape = tree.parents[:, tree.first :].shape  # B, R
        text = {key: states[:, None] for key, states in states_in(self.layer).items()}
        kept = self.after if tree.first else text
        self.after = {key: grown(states[:, : 1 + tree.first], shape[1]) for key, states in kept.items()}
        outputs: list[Any] = []
        for sequence, row, parent in tree.levels:
            layer = self.layer_of(sequence, parent)

            def of_level(value: Any, at: tuple[Tensor, Tensor] = (sequence, row), own: Any = layer) -> Any:
                if isinstance(value, RowsCache):
                    return Cache(layers=[own] * len(value.layers))  # whichever it asks for, it is this one
                if isinstance(value, Tensor) and value.shape[:2] == shape:
                    return value[at].unsqueeze(1)  # [n, 1, …]
                return value

            given, named = nested.tree_map(of_level, (args, options), is_leaf=lambda v: isinstance(v, RowsCache))
            self.ends = parent < 0 if self.behind_prompt else None
            outputs.append(self.code(*given, **named))
            self.keep(layer, sequence, row, tree)
        return gathered(outputs, tree, shape)

    def step(
        self,
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,  # [n, H, V]
        *args: Any,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **options: Any,
    ) -> Tensor:
        """In place of a limited module's kernel of single tokens, with the limit of prompts for tokens that end one.

        transformers' Mamba-2 limits steps in time in its code for prompts and not in that for single tokens. The first
        row behind a prompt is the prompt's last token read again, so there the limit holds as well.
        """
        assert self.limit is not None
        if self.ends is not None:
            dt = time_steps(dt, dt_bias, dt_softplus, self.limit, self.ends[:, None, None])
            dt_bias, dt_softplus = None, False
        own = inspect.unwrap(type(self.code).forward).__globals__[STEP]
        return own(state, hidden_states, dt, *args, dt_bias=dt_bias, dt_softplus=dt_softplus, **options)

    def layer_of(self, sequence: Tensor, parent: Tensor) -> LinearAttentionLayer:
        """A cache layer with the states that rows [n] follow: of the text, or after their parents."""
        layer = LinearAttentionLayer(self.layer.number_of_states)
        for key, after in self.after.items():
            put_state(layer, key, after[sequence, 1 + parent])
        layer.device, layer.dtype = self.layer.device, self.layer.dtype
        return layer

    def keep(self, layer: LinearAttentionLayer, sequence: Tensor, row: Tensor, tree: RowTree) -> None:
        """Note the states after rows [n]."""
        for key, states in states_in(layer).items():
            if key not in self.after:  # the text has no state yet, which is one of zeros
                batch, count = tree.parents.shape
                self.after[key] = states.new_zeros(batch, 1 + count, *states.shape[1:])
            self.after[key][sequence, 1 + tree.first + row] = states

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """See :class:`~.mixers.Form`."""
        for key, after in self.after.items():
            count = num_accepted.to(after.device)
            last = torch.where(count > 0, 1 + last_rows(accepted_rows.to(after.device), count), 0)  # [B]
            put_state(self.layer, key, after[torch.arange(len(count), device=after.device), last])
        self.after, self.behind_prompt = {}, False


def grown(states: Tensor, rows: int) -> Tensor:
    """States after rows [B, T, …], with room for more."""
    return torch.cat([states, states.new_zeros(len(states), rows, *states.shape[2:])], 1)


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


def limit_of(module: nn.Module) -> Limit | None:
    """The least and the largest step of a module's prompts; ``None``: any, as for single tokens."""
    limit = getattr(module, "time_step_limit", None)
    if limit is None or STEP not in called_by(type(module)):
        return None
    least, most = limit
    return None if least <= 0 and most == math.inf else (float(least), float(most))  # softplus is above 0
