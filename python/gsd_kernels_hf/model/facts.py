"""The facts of a model as it is now: looked up once a call, before it decodes, and handed on.

Whether a model can be served, how it is forwarded and what it was at the last call are questions of several rooms.
Walking through its modules takes milliseconds, and no call changes its models before it decodes; so a call makes one
:class:`Facts` of each model, and what one room finds out the next one reads there. The structure says when something
has to be found out anew, never that it is right: that say :mod:`.probe` and :mod:`.proof`.
"""

from __future__ import annotations

import enum
import functools
import numbers
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as calls
from transformers import PretrainedConfig

from gsd_kernels.ops.packed import Kind as WeightFormat

from . import properties
from .attention import configs_in, implementation_of
from .code import MISSING, Code, ambient, code_of, own_callables

LEFT = ("rope_deltas",)
"""Names of what transformers' ``generate`` leaves on modules for its own steps; our forwards are given positions."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, WeightFormat, enum.Enum, numbers.Number)
PLAIN_EXACTLY = frozenset(PLAIN)  # which most settings are, and a set is asked sooner
MOST_PARTS = 256  # parts of a list or a dict of settings
HOLDERS = frozenset(name for name, value in vars(nn.Module()).items() if not isinstance(value, PLAIN))
"""Names of what PyTorch keeps of every module, parts and hooks: they are no settings, and looked at apart."""
OWN = __name__.partition(".")[0]

_Answer = TypeVar("_Answer")


class Facts:
    """The facts of one model, each found when it is first asked for; the model is not changed meanwhile.

    Args:
        model: a model, or any other module.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.answers: dict[Hashable, Any] = {}  # of functions that are :func:`fact`

    @classmethod
    def of(cls, model: nn.Module | Facts) -> Facts:
        """The facts that this call made of a model; new ones outside of :func:`looking`. Facts stay what they are."""
        if isinstance(model, Facts):
            return model
        made = _made.get()
        if made is None:
            return cls(model)
        if model not in made:
            made[model] = cls(model)
        return made[model]

    @cached_property
    def modules(self) -> tuple[tuple[str, nn.Module], ...]:
        """All modules, by name."""
        return tuple(self.model.named_modules())

    @cached_property
    def parameters(self) -> tuple[tuple[str, nn.Parameter], ...]:
        """All parameters, by name; a shared one once."""
        names: dict[nn.Parameter, str] = {}
        for prefix, module in self.modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    names.setdefault(parameter, f"{prefix}.{name}" if prefix else name)
        return tuple((name, parameter) for parameter, name in names.items())

    @cached_property
    def configs(self) -> list[PretrainedConfig]:
        """Every config that a module may read its attention implementation from."""
        return configs_in(module for _, module in self.modules)

    @cached_property
    def code(self) -> Code:
        """The code that a forward runs; the same object as long as that is."""
        names = {implementation_of(config) for config in self.configs}
        return code_of({type(module) for _, module in self.modules}, {name for name in names if name})

    @cached_property
    def variables(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The variables of the modules themselves, in their order: settings, and what is none."""
        return [variables_of(module) for _, module in self.modules]

    @cached_property
    def put(self) -> tuple[tuple[dict[int, Any], dict[str, Any]], ...]:
        """Code on the modules themselves, in their order: hooks, and functions by the names that forwards call."""
        names = self.code.names
        of = zip(self.modules, self.variables, strict=True)
        return tuple((hooks_of(module), own_callables(others, names)) for (_, module), (_, others) in of)

    @cached_property
    def ambient(self) -> tuple[Any, ...]:
        """All that this thread's PyTorch does to operations on the device of the first parameter."""
        return ambient(next((parameter.device for _, parameter in self.parameters), torch.device("cpu")))

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """Equal as long as the model's modules, their settings and its configs are.

        Modules are weak references, which equal only themselves. A forward of ours that is running changes nothing
        here. As long as it is equal it is one object, which is soon compared.
        """
        modules = [
            (
                weakref.ref(module),
                type(module),
                tuple(hooks),
                tuple((name, pinned(function)) for name, function in functions.items()),
                settings,
                tuple(map(type, module._parameters.values())),
            )
            for (_, module), (hooks, functions), (settings, _) in zip(
                self.modules, self.put, self.variables, strict=True
            )
        ]
        configs = []
        for config in self.configs:
            fields = {k: repr(v) for k, v in list(vars(config).items()) if not isinstance(v, PretrainedConfig)}
            fields["_attn_implementation_internal"] = str(implementation_of(config))
            configs.append((weakref.ref(config), fields))
        around = tuple(pinned(hook) for hook in foreign_global_hooks())
        found = modules, configs, self.code, around, self.ambient
        kept = _kept.get(self.model)
        return found if kept is None or kept[0] != found else kept[0]

    @cached_property
    def proofs(self) -> dict[Hashable, Any]:
        """Answers of proofs since the structure is what it is, in whatever call they were found."""
        kept = _kept.get(self.model)
        if kept is None or kept[0] != self.structure:
            kept = _kept[self.model] = self.structure, {}
        return kept[1]

    def proved(self, key: Hashable, prove: Callable[[], _Answer], *, anew: bool = False) -> _Answer:
        """The answer of a proof; one that says that it is passing is not kept. ``anew``: in every call."""
        answers = self.answers if anew else self.proofs
        if key not in answers:
            answer = prove()
            if getattr(answer, "passing", False):
                return answer
            answers[key] = answer
        kept: _Answer = answers[key]
        return kept

    @cached_property
    def device(self) -> torch.device:
        """Where the model takes its input."""
        return properties.device_of(self.model)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the output embedding, padding included."""
        return properties.vocabulary(self.model)

    @cached_property
    def cache_argument(self) -> str:
        """Name by which a forward takes a KV cache."""
        return properties.cache_argument(self.model)

    @cached_property
    def logits_alone(self) -> dict[str, bool]:
        """Arguments of a forward that leave out what a config asks for beside logits."""
        return properties.logits_alone(self.model)


_kept: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[Any, ...], dict[Hashable, Any]]] = weakref.WeakKeyDictionary()
"""The last structure of every model, and what was proved of it."""
_made: ContextVar[dict[nn.Module, Facts] | None] = ContextVar("facts", default=None)


@contextmanager
def looking() -> Iterator[None]:
    """Make facts of a model once, until :func:`looked` or the end of the block.

    A block inside it, of a call that a callback makes, makes facts of its own.
    """
    token = _made.set({})
    try:
        yield
    finally:
        _made.reset(token)


def looked() -> None:
    """Keep no facts any longer: from here on callbacks run, which may change a model."""
    _made.set(None)


def fact(function: Callable[..., _Answer]) -> Callable[..., _Answer]:
    """Find an answer once for the :class:`Facts` of a model, which may be given itself; an error is no answer."""

    @functools.wraps(function)
    def answer(model: nn.Module | Facts, *rest: Any, **options: Any) -> _Answer:
        facts, key = Facts.of(model), (function, rest, tuple(options.items()))
        if key not in facts.answers:
            facts.answers[key] = function(facts, *rest, **options)
        known: _Answer = facts.answers[key]
        return known

    return answer


def variables_of(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """A module's numbers, strings and flags, and lists, tuples and dicts of such; and its other variables.

    What PyTorch keeps in every module is left out, but for its flags.
    """
    settings, others = {}, {}
    for name, value in list(vars(module).items()):
        if type(value) in PLAIN_EXACTLY:
            found = value
        elif name in HOLDERS:
            continue
        else:
            found = setting(value)
        if found is MISSING:
            others[name] = value
        else:
            settings[name] = found
    for name in LEFT:
        settings.pop(name, None), others.pop(name, None)
    return settings, others


def setting(value: Any) -> Any:
    """A setting as it is now, or :data:`MISSING` for what is none."""
    if isinstance(value, PLAIN):
        return value
    if not isinstance(value, (list, tuple, dict)) or len(value) > MOST_PARTS:
        return MISSING
    parts = [setting(part) for part in (value.items() if isinstance(value, dict) else value)]
    return MISSING if any(part is MISSING for part in parts) else (type(value), *parts)


def pinned(value: Any) -> Any:
    """A stand-in that equals itself alone, and keeps ``value`` alive only where it must."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def foreign_global_hooks() -> list[Callable[..., Any]]:
    """Forward hooks of all modules of this process, without those of this package."""
    hooks = (*calls._global_forward_pre_hooks.values(), *calls._global_forward_hooks.values())
    return [hook for hook in hooks if not is_own(hook)]


def is_own(hook: Callable[..., Any]) -> bool:
    """Return whether this package set a hook, for the length of a forward."""
    return str(getattr(hook, "__module__", "")).startswith(OWN)


def hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The module's forward hooks by their number, without those that this package sets for a forward."""
    if not module._forward_pre_hooks and not module._forward_hooks:
        return {}
    hooks = [*list(module._forward_pre_hooks.items()), *list(module._forward_hooks.items())]
    return {key: hook for key, hook in hooks if not is_own(hook)}
