"""Answers that a call finds about its models while it gets ready, once.

Whether a model can be served, how it is forwarded and what it is now is asked in several rooms, each for its own
reason. Walking through its modules takes milliseconds, and no call changes its models before it decodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

_Model = TypeVar("_Model", bound=nn.Module)
_Rest = ParamSpec("_Rest")
_Found = TypeVar("_Found")
_answers: ContextVar[dict[Hashable, Any] | None] = ContextVar("answers", default=None)


@contextmanager
def getting_ready() -> Iterator[None]:
    """Keep what :func:`once` functions answer, until :func:`ready` or the end of the block.

    A block inside it, of a call that a callback makes, keeps answers of its own.
    """
    token = _answers.set({})
    try:
        yield
    finally:
        _answers.reset(token)


def ready() -> None:
    """Keep no answer any longer: from here on callbacks run, which may change a model."""
    _answers.set(None)


def once(
    function: Callable[Concatenate[_Model, _Rest], _Found],
) -> Callable[Concatenate[_Model, _Rest], _Found]:
    """Ask a function of a model once while a call gets ready; an error is no answer."""

    @functools.wraps(function)
    def asked(model: _Model, *rest: _Rest.args, **options: _Rest.kwargs) -> _Found:
        answers = _answers.get()
        if answers is None:
            return function(model, *rest, **options)
        key = (function, model, rest, tuple(options.items()))
        if key not in answers:
            answers[key] = function(model, *rest, **options)
        return answers[key]

    return asked


@once
def modules_of(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """All modules of a model, by name."""
    return tuple(model.named_modules())


@once
def parameters_of(model: nn.Module) -> tuple[tuple[str, nn.Parameter], ...]:
    """All parameters of a model, by name; a shared one once."""
    found: dict[nn.Parameter, str] = {}
    for prefix, module in modules_of(model):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
    return tuple((name, parameter) for parameter, name in found.items())
