"""A module seen with other children, which leaves it as it is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn


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
