"""Limits on steps in time, which transformers' Mamba-2 has in its code for prompts and not in that for single tokens.

The first row behind a prompt is the prompt's last token read again, so there the limit holds as well.
"""

from __future__ import annotations

import math
import types
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import softplus

from ..fingerprint import code_names
from ..view import with_children
from .mixers import calling, written

STEP = "mamba2_selective_state_update"
"""The kernel of single tokens, by the name that modules call it by."""

Limit = tuple[float, float]


def limit_of(module: nn.Module) -> Limit | None:
    """The least and the largest step of a module's prompts; ``None``: any, as for single tokens."""
    forward = written(type(module).forward)
    limit = getattr(module, "time_step_limit", None)
    if limit is None or forward is None or STEP not in code_names(forward.__code__):
        return None
    least, most = limit
    return None if least <= 0 and most == math.inf else (float(least), float(most))  # softplus is above 0


class Limited:
    """A module's code for single tokens, with the limit of prompts for tokens that end one.

    Args:
        module: with such a limit.
        limit: as of :func:`limit_of`.

    Raises:
        ValueError: its forward is not its class's.
    """

    def __init__(self, module: nn.Module, limit: Limit) -> None:
        if "forward" in vars(module):
            raise ValueError(f"{type(module).__name__} limits steps in prompts alone and has a forward of its own")
        forward = written(type(module).forward)
        assert forward is not None
        self.limit, self.own = limit, forward.__globals__[STEP]
        self.module = with_children(module, {})
        self.module.__dict__["forward"] = types.MethodType(calling(forward, {STEP: self.step}), self.module)
        self.ends: Tensor | None = None  # bool [n]; of the tokens that come next, those that end a prompt

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
        """In place of the kernel."""
        if self.ends is None:
            return self.own(state, hidden_states, dt, *args, dt_bias=dt_bias, dt_softplus=dt_softplus, **options)
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = softplus(dt)
        dt = dt.clamp(*self.limit).where(self.ends[:, None, None], dt)
        return self.own(state, hidden_states, dt, *args, **options)
