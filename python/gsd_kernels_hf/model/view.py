"""A module seen with other children, which leaves it as it is."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def with_children(module: Any, children: dict[str, nn.Module | None]) -> Any:
    """A shallow copy of ``module`` with other children."""
    view = copy.copy(module)
    view.__dict__["_modules"] = {**module._modules, **children}
    return view
