"""Noticing that a model was changed since it was last used.

What is noticed, before every call that could use something of an earlier one:

- **structure**: modules, layers and parameters that were added, removed, replaced or tied; dtype, device and shape;
  training mode; every number, string and flag on a module, in a list or dict on it or in a config (attention
  implementation, epsilons, scales, sliding windows, the kind of packed weights); hooks that were added or removed,
  those of all modules included; adapters that were added, switched, scaled, merged or disabled; functions: on a module,
  on its class, those that its forward names, attention functions of that name (see :mod:`.code`); autocast, and modes
  that PyTorch's operations go through.
- **content**: changes in place that PyTorch counts (an optimizer's step, ``load_state_dict``, anything under
  ``no_grad``), of parameters, buffers, other tensors on modules, and the tensors that a hook holds in its closure or on
  its object. Of changes that PyTorch does not count (``.data``, memory shared with another process or with NumPy, all
  changes of inference tensors) those that reach one of :data:`~gsd_kernels_hf.packed.samples.SAMPLES` elements, evenly
  spaced, of a tensor.

What is not: single elements edited through ``.data``; numbers in the state of a hook or of a function that was put in
a module's place, but for those in its closure or under a global name; weights that accelerate keeps off the device.
After those, ``handle.clear()`` forgets everything.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from gsd_kernels.ops.packed import Kind

from ..packed.adapters import stored_in
from ..packed.samples import samples, versions
from .attention import configs_of, implementation_of
from .code import MISSING, Code, ambient, code_of, global_hooks, own_callables
from .once import modules_of, once, parameters_of

LEFT = ("rope_deltas",)
"""What transformers' ``generate`` leaves on a module for its own steps; forwards of ours are given positions."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, Kind, enum.Enum)
MOST_PARTS = 256  # of a list or a dict of settings
HOLDERS = frozenset(vars(nn.Module()))
"""What PyTorch keeps of every module: its parts and hooks, which are looked at by themselves, and ``training``."""
OWN = __name__.partition(".")[0]


@dataclass(frozen=True)
class ModelState:
    """The state of a model at some time; equal while nothing was changed.

    Attributes:
        structure: what captured steps and prepared weights depend on.
        content: what keys and values in a cache depend on besides.
    """

    structure: tuple[Any, ...]
    content: tuple[Any, ...]

    @classmethod
    def of(cls, model: nn.Module) -> ModelState:
        """The state now. Reads a few elements of every tensor, so it waits for every device once."""
        modules = [module for _, module in modules_of(model)]
        hooks = [put.hooks for put in put_on(model)]
        tensors = [tensor for module in modules for tensor in tensors_of(module)]
        held = [part for found in hooks for hook in found.values() for t in held_by(hook) for part in parts_of(t)]
        places = tuple((t.data_ptr(), t.dtype, t.device, tuple(t.shape)) for t in tensors if not t.is_meta)
        structure = (structure_of(model), places)
        return cls(structure, (versions([*tensors, *held]), samples([*tensors, *held])))


@once
def structure_of(model: nn.Module) -> tuple[Any, ...]:
    """Equal as long as the model's modules, their settings and its configs are.

    Modules are weak references, which equal only themselves. A forward of ours that is running changes nothing here.
    """
    modules = []
    for (_, module), put in zip(modules_of(model), put_on(model), strict=True):
        variables = vars(module)
        modules.append(
            (
                weakref.ref(module),
                type(module),
                tuple(put.hooks),
                tuple((name, pinned(function)) for name, function in put.functions.items()),
                settings_of(variables),
                tuple(type(parameter) for parameter in module._parameters.values()),
            )
        )
    configs = []
    for config in configs_of(model):
        fields = {k: repr(v) for k, v in list(vars(config).items()) if not isinstance(v, PretrainedConfig)}
        fields["_attn_implementation_internal"] = str(implementation_of(config))
        configs.append((weakref.ref(config), fields))
    around = tuple(pinned(hook) for hook in foreign_global_hooks())
    return modules, configs, code_run_by(model), around, ambient(first_device(model))


def settings_of(variables: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The numbers, strings and flags among a module's variables, and the lists, tuples and dicts of such."""
    found = [(name, setting(value, name)) for name, value in list(variables.items()) if name not in LEFT]
    return tuple((name, value) for name, value in found if value is not MISSING)


def setting(value: Any, name: str = "") -> Any:
    """A setting as it is now, or :data:`MISSING` for what is none."""
    if isinstance(value, PLAIN):
        return value
    if not isinstance(value, (list, tuple, dict)) or name in HOLDERS or len(value) > MOST_PARTS:
        return MISSING
    parts = [setting(part) for part in (value.items() if isinstance(value, dict) else value)]
    return MISSING if any(part is MISSING for part in parts) else (type(value), *parts)


class Put(NamedTuple):
    """Code that was put on one module."""

    hooks: dict[int, Callable[..., Any]]
    functions: dict[str, Any]  # by the name that a forward may call them by


@once
def put_on(model: nn.Module) -> tuple[Put, ...]:
    """Code on the modules themselves, in the order of :func:`~.once.modules_of`."""
    names = code_run_by(model).names
    return tuple(Put(hooks_of(module), own_callables(module, names)) for _, module in modules_of(model))


@once
def code_run_by(model: nn.Module) -> Code:
    """The code that a forward runs; the same object as long as that is."""
    names = {implementation_of(config) for config in configs_of(model)}
    return code_of({type(module) for _, module in modules_of(model)}, {name for name in names if name})


def first_device(model: nn.Module) -> torch.device:
    """Of the first parameter."""
    return next((parameter.device for _, parameter in parameters_of(model)), torch.device("cpu"))


def pinned(value: Any) -> Any:
    """A stand-in that equals itself alone, and keeps ``value`` alive only where it must."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def foreign_global_hooks() -> list[Callable[..., Any]]:
    """Forward hooks of all modules of this process, without those of this package."""
    return [hook for hook in global_hooks() if not is_own(hook)]


def is_own(hook: Callable[..., Any]) -> bool:
    """Return whether this package set a hook, for the length of a forward."""
    return str(getattr(hook, "__module__", "")).startswith(OWN)


def hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The module's forward hooks by their number, without those that this package sets for a forward."""
    if not module._forward_pre_hooks and not module._forward_hooks:
        return {}
    found = [*list(module._forward_pre_hooks.items()), *list(module._forward_hooks.items())]
    return {key: hook for key, hook in found if not is_own(hook)}


def held_by(function: Callable[..., Any]) -> Iterator[Tensor]:
    """Tensors in a function's closure, or on the object that it is a method of."""
    cells: Iterable[Any] = getattr(function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells if cell != type(cell)()]
    owner = getattr(function, "__self__", function)
    values += getattr(owner, "__dict__", {}).values()
    return (value for value in values if isinstance(value, Tensor))


def tensors_of(module: nn.Module) -> Iterable[Tensor]:
    """The tensors behind the module's own parameters, buffers and variables, and a library's beside, each once."""
    values = [named for holder in (module._parameters, module._buffers, vars(module)) for named in list(holder.items())]
    own = [value for name, value in values if isinstance(value, Tensor) and name not in LEFT]
    found = {id(part): part for tensor in own for part in parts_of(tensor)}
    stored = stored_in(module)
    if stored is not None:
        found |= {id(tensor): tensor for tensor in stored.tensors}
    return found.values()


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data of a wrapper, such as a shard or a quantised weight; else the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a shard has its mesh of devices there too
                yield from parts_of(part)
    else:
        yield tensor
