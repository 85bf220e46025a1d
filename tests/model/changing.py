"""How to change a function, a number, a tensor or a module of a model, and to undo it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch

Change = Callable[[Any, ExitStack], None]
"""Changes a model; the stack undoes it."""

CHANGES: dict[str, Change] = {}


def change(function: Change) -> Change:
    CHANGES[function.__name__.replace("_", " ")] = function
    return function


def put(owner: Any, name: str, value: Any) -> Change:
    def apply(model: Any, stack: ExitStack) -> None:
        stack.enter_context(mock.patch.object(owner, name, value, create=True))

    return apply


def around(owner: Any, name: str, what: Callable[..., Any]) -> Change:
    """``what(original, *args)`` in the place of a function of ``owner``."""

    def apply(model: Any, stack: ExitStack) -> None:
        original = getattr(owner, name)
        put(owner, name, lambda *args, **kwargs: what(original, *args, **kwargs))(model, stack)

    return apply


def wrapped(owner: Any, name: str, what: Callable[..., Any]) -> Change:
    """As :func:`around`, with the name and the module of the original."""

    def apply(model: Any, stack: ExitStack) -> None:
        original = getattr(owner, name)
        put(owner, name, functools.wraps(original)(lambda *a, **k: what(original, *a, **k)))(model, stack)

    return apply


def number(path: str, value: Callable[[Any], Any]) -> Change:
    """Another number on a module, ``model.layers.1.self_attn.scaling``."""

    def apply(model: Any, stack: ExitStack) -> None:
        owner, _, name = path.rpartition(".")
        module = model.get_submodule(owner) if not owner.startswith("config") else model.config
        put(module, name, value(getattr(module, name)))(model, stack)

    return apply


def tensor(path: str, value: Callable[[torch.Tensor], Any]) -> Change:
    """Another content of a tensor, in place."""

    def apply(model: Any, stack: ExitStack) -> None:
        owner, _, name = path.rpartition(".")
        found = getattr(model.get_submodule(owner), name)
        before = found.detach().clone()
        with torch.no_grad():
            found.copy_(value(before))
        stack.callback(lambda: found.data.copy_(before))

    return apply


def hooked(path: str, what: Callable[..., Any], *, before: bool = False) -> Change:
    def apply(model: Any, stack: ExitStack) -> None:
        module = model.get_submodule(path)
        register = module.register_forward_pre_hook if before else module.register_forward_hook
        stack.callback(register(what).remove)

    return apply


def mixed(x: Any) -> Any:
    """With some of every feature in the next one's place; no norm and no maximum hides that."""
    return (mixed(x[0]), *x[1:]) if isinstance(x, tuple) else x + 0.7 * x.roll(1, -1)


def mixing(_: Any, __: Any, output: Any) -> Any:
    return mixed(output)
