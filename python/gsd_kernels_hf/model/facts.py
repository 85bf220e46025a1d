"""The facts of a model as it is now: looked up once a call, before it decodes, and handed on.

Whether a model can be served, how it is forwarded and what it was at the last call are questions of several rooms.
Walking through its modules takes milliseconds, and no call changes its models before it decodes; so a call makes one
:class:`Facts` of each model, and what one room finds out the next one reads there. The structure says when something
has to be found out anew, never that it is right: that say :mod:`.probe` and :mod:`.proof`. What is noticed of changes,
and what is not before ``handle.clear()``, says docs/how-it-works.md.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from ..packed.adapters import LibraryWeights, stored_in
from ..packed.samples import samples, versions
from . import properties
from .attention import configs_in, implementation_of
from .fingerprint import Own, Space, ambient, global_hooks, held_by, own_of, parts_of, pinned, spaces_of

_Answer = TypeVar("_Answer")


class ModelState(NamedTuple):
    """The state of a model at some time; equal while nothing was changed.

    Attributes:
        structure: what captured steps and prepared weights depend on.
        content: what keys and values in a cache depend on besides.
    """

    structure: tuple[Any, ...]
    content: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module | Facts) -> ModelState:
        """The state now. Reads a few elements of every tensor, so it waits for every device once."""
        facts = Facts.of(model)
        hooks = (hook for own in facts.own for hook in own.hooks.values())
        held = (part for hook in hooks for tensor in held_by(hook) for part in parts_of(tensor))
        tensors = [*facts.tensors, *held]
        return cls(facts.structure, (versions(tensors), samples(tensors)))

    @classmethod
    def built(cls, model: nn.Module | Facts) -> ModelState:
        """The structure now, of a module whose content no key or value depends on."""
        return cls(Facts.of(model).structure, ())


class Facts:
    """The facts of one model, each found when it is first asked for; the model is not changed meanwhile.

    Args:
        model: a model, or any other module.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

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
    def configs(self) -> list[PretrainedConfig]:
        """Every config that a module may read its attention implementation from."""
        return configs_in(module for _, module in self.modules)

    @cached_property
    def spaces(self) -> tuple[Space | Any, ...]:
        """The names that a forward reads; the same objects as long as they stand for the same."""
        names = {implementation_of(config) for config in self.configs}
        return spaces_of({type(module) for _, module in self.modules}, sorted(name for name in names if name))

    @cached_property
    def own(self) -> list[Own]:
        """Hooks, functions, settings and tensors on the modules themselves, in their order."""
        return [own_of(module) for _, module in self.modules]

    @cached_property
    def stored(self) -> list[LibraryWeights | None]:
        """How a library keeps the weights of the modules, in their order."""
        return [stored_in(module) for _, module in self.modules]

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors behind the modules' own parameters, buffers and variables, and a library's beside."""
        libraries = (stored.tensors for stored in self.stored if stored is not None)
        tensors = (tensor for held in (*(own.tensors for own in self.own), *libraries) for tensor in held)
        return list({id(tensor): tensor for tensor in tensors}.values())

    @cached_property
    def ambient(self) -> tuple[Any, ...]:
        """All that this thread's PyTorch does to operations on the device of the first parameter."""
        return ambient(next((parameter.device for parameter in self.model.parameters()), torch.device("cpu")))

    @cached_property
    def structure(self) -> tuple[Any, ...]:
        """Equal as long as names, modules, settings, hooks and configs are, and tensors lie where they lay.

        Modules are weak references, which equal only themselves. A forward of ours that is running changes nothing
        here. As long as it is equal it is one object, which is soon compared.
        """
        modules = [
            (
                weakref.ref(module),
                type(module),
                tuple(own.hooks),
                tuple((name, pinned(function)) for name, function in own.functions.items()),
                own.settings,
            )
            for (_, module), own in zip(self.modules, self.own, strict=True)
        ]
        configs = []
        for config in self.configs:
            fields = {k: repr(v) for k, v in list(vars(config).items()) if not isinstance(v, PretrainedConfig)}
            fields["_attn_implementation_internal"] = str(implementation_of(config))
            configs.append((weakref.ref(config), fields))
        places = [
            (t.data_ptr(), type(t), t.dtype, t.device, t.shape, t.stride()) for t in self.tensors if not t.is_meta
        ]
        libraries = [(s.name, s.dtype, s.problem, s.rounds_rows) for s in self.stored if s is not None]
        around = tuple(pinned(hook) for hook in global_hooks())
        found = modules, configs, self.spaces, around, self.ambient, places, libraries
        kept = _kept.get(self.model)
        return found if kept is None or kept[0] != found else kept[0]

    @cached_property
    def proofs(self) -> dict[Hashable, Any]:
        """Answers of proofs since the structure is what it is, in whatever call they were found."""
        kept = _kept.get(self.model)
        if kept is None or kept[0] != self.structure:
            kept = _kept[self.model] = self.structure, {}
        return kept[1]

    def proved(self, key: Hashable, prove: Callable[[], _Answer]) -> _Answer:
        """The answer of a proof; one that says that it is passing is not kept."""
        if key not in self.proofs:
            answer = prove()
            if getattr(answer, "passing", False):
                return answer
            self.proofs[key] = answer
        kept: _Answer = self.proofs[key]
        return kept

    @cached_property
    def device(self) -> torch.device:
        """Where the model takes its input."""
        return properties.device_of(self.model)

    @cached_property
    def vocabulary(self) -> int:
        """Rows of the output embedding, padding included."""
        return properties.vocabulary(self.model)


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
    """Find an answer once while the structure of a model is what it is; it may be given itself, or as its facts.

    An error is no answer.
    """

    @functools.wraps(function)
    def answer(model: nn.Module | Facts, *rest: Any, **options: Any) -> _Answer:
        facts = Facts.of(model)
        return facts.proved((function, rest, *options.items()), lambda: function(facts, *rest, **options))

    return answer
