"""The Python that a model's forward runs; a change of it is noticed cheaply.

Looked at once for a set of classes: their ``forward`` and how ``torch.nn.Module`` calls it, the functions that these
name, and what those name in turn, as far as they lie in the modelling file, in transformers or in ``torch.nn``; the
attention and mask functions that the configs name. Afterwards a look is a comparison of some hundred pointers.

Code that was put in place of what transformers or PyTorch brought is *foreign*: it may do anything at any time, and
nobody but the modules themselves computes what it computes. All other changes are reasons to prove again, see
:mod:`.proof`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._device import DeviceContext
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.utils.generic import GeneralInterface

ENTRIES = ("forward", "__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "__getattribute__")
OWN = {"gsd_kernels", "gsd_kernels_hf", "gsd_kernels_train", "gsd_kernels_serve", "gsd_kernels_cli"}
HOME_PACKAGES = ({"torch", "transformers", "accelerate", "peft", *OWN} | sys.stdlib_module_names) - {"unittest"}
"""Packages whose functions are at home in a modelling file."""
CACHES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)
"""What a forward stores keys and values in."""
DEEPEST_CALLS = 3  # from a forward down to the last function that is looked into
MOST_SETS = 64  # of classes, that are remembered
MISSING = object()
ATTRIBUTED = (types.FunctionType, types.CellType)


def top_of(name: str | None) -> str:
    """The package that a module's name begins with."""
    return str(name).partition(".")[0]


@dataclass(eq=False)
class Code:
    """The code that forwards of some classes run; the same object as long as that is.

    Attributes:
        foreign: the first function that is not what transformers or PyTorch brought, in words; ``None``: there is none.
        names: everything that the functions name, and their own names.
        places: objects, names in them and what stood there: of classes and modules, of functions, of closures' cells.
        sizes: of classes, how many names each has.
    """

    foreign: str | None = None
    names: set[str] = field(default_factory=set)
    places: dict[tuple[int, str], tuple[Any, str, Any]] = field(default_factory=dict)
    sizes: dict[int, tuple[Mapping[str, Any], int]] = field(default_factory=dict)

    def is_current(self) -> bool:
        """Return whether everything still is where it was found."""
        return all(standing(owner, name) is value for owner, name, value in self.places.values()) and all(
            len(space) == size for space, size in self.sizes.values()
        )


def standing(owner: Any, name: str) -> Any:
    """Return what stands under a name: of a module's or class's names, or an attribute of a function or a cell."""
    if not isinstance(owner, ATTRIBUTED):
        return owner.get(name, MISSING)
    try:
        return getattr(owner, name)
    except ValueError:  # a cell that is empty
        return MISSING


def code_names(code: types.CodeType) -> Iterator[str]:
    """Names that a function's code and the functions written inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


def home_of(function: Any) -> str:
    """The module that a function, or the class of what is called as one, was written in."""
    function = getattr(function, "__func__", function)
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__globals__", {}).get("__name__") or type(function).__module__)


def described(function: Any) -> str:
    """Where a function was written, in words."""
    return f"{home_of(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def is_shipped(function: Any) -> bool:
    """Return whether transformers, PyTorch or this package brought a function."""
    return top_of(home_of(function)) in HOME_PACKAGES


class _Look:
    """One look at the code of some classes."""

    def __init__(self, implementations: Iterable[str]) -> None:
        self.code, self.implementations = Code(), sorted(implementations)
        self.counted(torch.Tensor)
        for name in vars(torch.Tensor):  # operators, which no code names
            if name.startswith("__") and callable(vars(torch.Tensor)[name]):
                self.check(self.at(torch.Tensor, name), f"torch.Tensor.{name}", "torch")
        for base in dict.fromkeys(base for cls in CACHES for base in cls.__mro__[:-1]):
            self.counted(base)
            for name, value in vars(base).items():
                if isinstance(value, types.FunctionType):
                    self.follow(
                        self.at(base, name), f"{base.__qualname__}.{name}", top_of(base.__module__), DEEPEST_CALLS
                    )

    def at(self, owner: Any, name: str) -> Any:
        """Note what ``name`` is in a class, in the names of a module, of a function or of a closure's cell."""
        space = vars(owner) if isinstance(owner, type) else owner
        value = standing(space, name)
        self.code.places[id(owner), name] = (space, name, value)
        return value

    def counted(self, cls: type) -> None:
        """Note how many names a class has, so that a new one shows."""
        self.code.sizes[id(cls)] = (vars(cls), len(vars(cls)))

    def at_class(self, cls: type) -> None:
        """Note what a forward of a class runs."""
        for base in cls.__mro__[:-1]:
            self.counted(base)
            for name in ENTRIES:
                if name in vars(base):
                    self.follow(self.at(base, name), f"{base.__qualname__}.{name}", top_of(base.__module__), 0)
        for name in self.code.names:  # methods that a forward calls
            for base in cls.__mro__[:-1]:
                if name in vars(base) and name not in ENTRIES:
                    value = self.at(base, name)
                    self.check(value, f"{base.__qualname__}.{name}", top_of(base.__module__))

    def check(self, value: Any, where: str, home: str) -> Any:
        """The function in ``value``, if there is one; noted as foreign where it does not belong to ``home``."""
        value = getattr(value, "__func__", getattr(value, "fget", value))
        if isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, types.FunctionType):
            written = top_of(value.__globals__.get("__name__"))
        elif callable(value) and not isinstance(value, (type, types.BuiltinFunctionType, types.MethodWrapperType)):
            written = top_of(type(value).__module__)
        else:
            return None
        if written not in HOME_PACKAGES and written != home and self.code.foreign is None:
            self.code.foreign = f"{where} is {described(value)}"
        return value if isinstance(value, types.FunctionType) else None

    def follow(self, value: Any, where: str, home: str, depth: int) -> None:
        """Note a function, what it holds and what it names."""
        function = self.check(value, where, home)
        if function is None or (id(function), "__code__") in self.code.places:
            return
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self.at(function, name)
        for cell in function.__closure__ or ():
            self.follow(self.at(cell, "cell_contents"), where, home, depth)
        if depth >= DEEPEST_CALLS or not looked_into(function):
            return
        names = set(code_names(function.__code__))
        self.code.names |= names
        self.named(function.__globals__, names, home, depth)
        for name in names & vars(torch.Tensor).keys():
            self.check(self.at(torch.Tensor, name), f"torch.Tensor.{name}", "torch")

    def named(
        self, space: dict[str, Any], names: set[str], home: str, depth: int, inside: tuple[int, ...] = ()
    ) -> None:
        """Note what ``names`` are in a module, and in those of PyTorch's that are among them."""
        prefix = space.get("__name__")
        for name in names & space.keys():
            value = self.at(space, name)
            if isinstance(value, GeneralInterface):
                self.chosen(value, home, depth)
            elif not isinstance(value, types.ModuleType):
                self.follow(value, f"{prefix}.{name}", home, depth + 1)
            elif top_of(value.__name__) == "torch" and id(value) not in inside:
                self.named(vars(value), names, "torch", depth, (*inside, id(value)))

    def chosen(self, interface: GeneralInterface, home: str, depth: int) -> None:
        """Note the functions that configs choose by name."""
        for name in self.implementations:
            for space in (interface._local_mapping, interface._global_mapping):
                value = self.at(space, name)
                if value is not MISSING:
                    self.follow(value, f"{type(interface).__name__}[{name!r}]", home, depth + 1)


def looked_into(function: types.FunctionType) -> bool:
    """Return whether what a function names may matter: PyTorch outside of its modules is taken as a whole."""
    home = str(function.__globals__.get("__name__"))
    return top_of(home) not in (HOME_PACKAGES - {"transformers"}) or home.startswith("torch.nn")


_known: OrderedDict[tuple[frozenset[type], frozenset[str]], Code] = OrderedDict()


def code_of(classes: Iterable[type], implementations: Iterable[str]) -> Code:
    """The code that forwards of ``classes`` run with these attention ``implementations``."""
    key = frozenset(classes), frozenset(implementations)
    code = _known.get(key)
    if code is None or not code.is_current():
        look = _Look(key[1])
        for cls in sorted(key[0], key=lambda cls: cls.__qualname__):
            look.at_class(cls)
        look.code.names.update(ENTRIES)
        code = _known[key] = look.code
        while len(_known) > MOST_SETS:
            _known.popitem(last=False)
    with suppress(KeyError):  # of another thread, which made others
        _known.move_to_end(key)  # what is in use is the last to go
    return code


def ambient(device: torch.device) -> tuple[Any, ...]:
    """Modes of this thread's PyTorch that every operation goes through: autocast, those of functions and operators."""
    kind = "cpu" if device.type == "meta" else device.type  # of weights that are offloaded, which no forward runs on
    cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    modes = torch.overrides._get_current_function_mode_stack() if torch._C._len_torch_function_stack() else ()
    dispatched = (
        torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        if (torch._C._len_torch_dispatch_stack())
        else ()
    )
    return cast, *(type(mode) for mode in (*modes, *dispatched) if not isinstance(mode, DeviceContext))


def own_callables(variables: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """Functions among the ``variables`` of a module itself, rather than of its class, of those ``names``."""
    own = ((name, variables[name]) for name in sorted(variables.keys() & names))
    return {name: value for name, value in own if callable(value) and not isinstance(value, type)}
