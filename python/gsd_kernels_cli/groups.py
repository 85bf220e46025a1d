"""Options that several commands take, declared once: a dataclass whose fields are options."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters that are dataclasses become options, one a field.

    Typer reads a command's signature: this one has the fields in the groups' place, and ``command`` gets the groups.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @functools.wraps(command)
    def call(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        inside = signature(groups[name]).parameters.values() if name in groups else [parameter]
        kinds = get_type_hints(groups.get(name, command), include_extras=True)
        said = {p.name: kinds.get(p.name, p.annotation) for p in inside}  # a parameter may have no annotation
        parameters += [p.replace(kind=Parameter.KEYWORD_ONLY, annotation=said[p.name]) for p in inside]
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    call.__annotations__ = {p.name: p.annotation for p in parameters}
    return call
