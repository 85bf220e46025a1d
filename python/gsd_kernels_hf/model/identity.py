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

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..packed.adapters import LibraryWeights, stored_in
from ..packed.samples import samples, versions
from .facts import Facts, fact


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
    def of(cls, model: nn.Module | Facts) -> ModelState:
        """The state now. Reads a few elements of every tensor, so it waits for every device once."""
        facts = Facts.of(model)
        tensors = tensors_in(facts)
        held = [
            part
            for hooks, _ in facts.put
            for hook in hooks.values()
            for tensor in held_by(hook)
            for part in parts_of(tensor)
        ]
        content = versions([*tensors, *held]), samples([*tensors, *held])
        return cls(cls.built(facts).structure, content)

    @classmethod
    def built(cls, model: nn.Module | Facts) -> ModelState:
        """The structure now, of a module whose content no key or value depends on."""
        facts = Facts.of(model)
        return cls((facts.structure, places(facts)), ())


@fact
def tensors_in(facts: Facts) -> list[Tensor]:
    """The tensors behind the modules' own parameters, buffers and variables, and a library's beside; of each once."""
    found = []
    for (_, module), (_, others), stored in zip(facts.modules, facts.variables, stored_by(facts), strict=True):
        values = [value for holder in (module._parameters, module._buffers, others) for value in list(holder.values())]
        tensors = {id(part): part for value in values if isinstance(value, Tensor) for part in parts_of(value)}
        if stored is not None:
            tensors |= {id(tensor): tensor for tensor in stored.tensors}
        found += tensors.values()
    return found


@fact
def stored_by(facts: Facts) -> list[LibraryWeights | None]:
    """How a library keeps the weights of the modules, in their order."""
    return [stored_in(module) for _, module in facts.modules]


@fact
def places(facts: Facts) -> tuple[Any, ...]:
    """Where the tensors of all modules lie, and as what."""
    tensors = (tensor for tensor in tensors_in(facts) if not tensor.is_meta)
    libraries = tuple((s.name, s.dtype, s.problem, s.rounds_rows) for s in stored_by(facts) if s is not None)
    return *((t.data_ptr(), type(t), t.dtype, t.device, t.shape, t.stride()) for t in tensors), libraries


def held_by(function: Callable[..., Any]) -> Iterator[Tensor]:
    """Tensors in a function's closure, or on the object that it is a method of."""
    cells: Iterable[Any] = getattr(function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells if cell != type(cell)()]
    owner = getattr(function, "__self__", function)
    values += getattr(owner, "__dict__", {}).values()
    return (value for value in values if isinstance(value, Tensor))


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data of a wrapper, such as a shard or a quantised weight; else the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a shard has its mesh of devices there too
                yield from parts_of(part)
    else:
        yield tensor
