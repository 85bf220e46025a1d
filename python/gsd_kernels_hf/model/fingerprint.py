"""A fingerprint of what a model's forward goes by, as far as it can be changed: names, settings, hooks, tensors.

A change of it is a reason to prove again, see :mod:`.proof`; it never says that something is right. The code that a
forward runs is known by the names that lead to it: of its classes, of the modules that these were written in, of
PyTorch's functions and of transformers' attention, masks and caches. Looking again is a comparison of pointers.

Code that was put in place of what transformers or PyTorch brought is *foreign*: it may go by how it is called, with one
token at a time for instance, and nobody but the modules themselves computes what it computes.
"""

from __future__ import annotations

import enum
import functools
import inspect
import numbers
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as calls
from torch.utils._device import DeviceContext
from transformers import DynamicCache, GenerationMixin, PreTrainedModel, cache_utils, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gsd_kernels.ops.packed import Kind as WeightFormat

OWN = __name__.partition(".")[0]
HOME_PACKAGES = {
    *("torch", "transformers", "accelerate", "peft", "gsd_kernels", "gsd_kernels_train", "gsd_kernels_serve"),
    *("gsd_kernels_cli", OWN, "numpy", "safetensors", "huggingface_hub", "tqdm", *sys.stdlib_module_names),
} - {"unittest"}
"""Packages whose functions are at home in a modelling file, those that transformers needs among them."""
LIBRARIES: tuple[Any, ...] = (torch, nn.functional, cache_utils, masking_utils)
CACHES = (DynamicCache, DynamicLayer, DynamicSlidingWindowLayer)
"""What a forward stores keys and values in."""
NO_FORWARD = {*PreTrainedModel.__mro__, *GenerationMixin.__mro__} - {nn.Module}
"""Bases of models whose functions load, save and generate."""
ENTRIES = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})
CALLED_OUTSIDE = ("generate", "__reduce_ex__")
"""Functions on a model itself that no forward calls."""
LEFT = ("rope_deltas",)
"""Names of what transformers' ``generate`` leaves on modules for its own steps; our forwards are given positions."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, WeightFormat, enum.Enum, numbers.Number)
PLAIN_EXACTLY = frozenset(PLAIN)  # which most settings are, and a set is asked sooner
HOLDERS = frozenset(name for name, value in vars(nn.Module()).items() if not isinstance(value, PLAIN))
"""Names of what PyTorch keeps of every module, parts and hooks: they are no settings, and looked at apart."""


def home_of(function: Any) -> str:
    """The module that a function, or the class of what is called as one, was written in."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__globals__", {}).get("__name__") or type(function).__module__)


def described(function: Any) -> str:
    """Where a function was written, in words."""
    return f"{home_of(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def top_of(name: str) -> str:
    """The package that a module's name begins with."""
    return name.partition(".")[0]


def is_shipped(function: Any) -> bool:
    """Return whether transformers, PyTorch or this package brought a function."""
    return top_of(home_of(function)) in HOME_PACKAGES


def is_own(function: Any) -> bool:
    """Return whether a function is this package's, which sets some for the length of a forward."""
    return top_of(home_of(function)) == OWN


@functools.lru_cache(maxsize=1024)
def called_by(cls: type) -> frozenset[str]:
    """Names by which PyTorch and a module's own forward look up what stands on the module itself."""
    forward = inspect.unwrap(cls.forward)
    return frozenset(code_names(forward.__code__)) | ENTRIES if hasattr(forward, "__code__") else ENTRIES


def code_names(code: types.CodeType) -> Iterator[str]:
    """Names that a function's code and the functions written inside it look up."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from code_names(constant)


class Space:
    """The names of a module or a class, and what stood there; equals itself alone.

    Args:
        owner: a module, whose submodules and private names are left out, or a class, all of whose names count.

    Attributes:
        foreign: the first function that is not what transformers or PyTorch brought, in words; ``None``: there is none.
    """

    def __init__(self, owner: Any) -> None:
        self.names: list[str] = []
        self.values: list[Any] = []
        self.size = len(vars(owner))
        self.is_class = isinstance(owner, type)
        self.foreign: str | None = None
        home = owner.__module__ if self.is_class else owner.__name__
        at_home = {*HOME_PACKAGES, top_of(home)}
        for name, value in vars(owner).items():
            if isinstance(value, types.ModuleType) or (name.startswith("_") and not self.is_class):
                continue
            self.names.append(name)
            self.values.append(value)
            function = getattr(value, "__func__", getattr(value, "fget", value))
            looked_at = self.foreign is None and (self.is_class or top_of(home) in HOME_PACKAGES)
            if looked_at and is_function(function) and top_of(home_of(function)) not in at_home:
                self.foreign = f"{owner.__qualname__ if self.is_class else home}.{name} is {described(function)}"

    def is_current(self, owner: Any) -> bool:
        """Return whether everything still stands there."""
        names = vars(owner)
        grown = self.is_class and len(names) != self.size
        return not grown and all(map(operator.is_, map(names.get, self.names), self.values))


def is_function(value: Any) -> bool:
    """Return whether a value is called as a function written in Python."""
    return callable(value) and not isinstance(value, (type, types.BuiltinFunctionType, types.MethodWrapperType))


_spaces: weakref.WeakKeyDictionary[Any, Space] = weakref.WeakKeyDictionary()


def space_of(owner: Any) -> Space:
    """The names of a module or class; the same object as long as they stand for the same."""
    known = _spaces.get(owner)
    if known is None or not known.is_current(owner):
        known = _spaces[owner] = Space(owner)
    return known


def spaces_of(classes: Iterable[type], implementations: Iterable[str]) -> tuple[Space | Any, ...]:
    """All names that forwards of ``classes`` read, with functions that configs choose by these names."""
    chosen = [
        interface.get(name)
        for interface in (ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)
        for name in implementations
    ]
    bases = dict.fromkeys(base for cls in (*classes, *CACHES) for base in cls.__mro__[:-1] if base not in NO_FORWARD)
    written = (sys.modules.get(home) for home in dict.fromkeys(base.__module__ for base in bases))
    homes = (sys.modules.get(home_of(function)) for function in chosen if function is not None)
    owners = dict.fromkeys((*LIBRARIES, *written, *homes, *bases))
    return *(space_of(owner) for owner in owners if owner is not None), *chosen


class Own(NamedTuple):
    """Things that a module itself holds, rather than its class.

    Attributes:
        hooks: of its forward, by their number, without those that this package sets for a forward.
        functions: by name; this package's left out.
        settings: numbers, strings and flags, and those in a list, tuple or dict.
        tensors: parameters, buffers, variables, and those in a list, tuple or dict.
    """

    hooks: dict[int, Any]
    functions: dict[str, Any]
    settings: dict[str, Any]
    tensors: list[Tensor]


def own_of(module: nn.Module) -> Own:
    """Look at what a module holds; of lists, tuples and dicts at their parts, but no deeper."""
    found = Own(hooks_of(module), {}, {}, [])
    held: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    for name, value in list(vars(module).items()):
        if type(value) in PLAIN_EXACTLY:
            found.settings[name] = value
        elif name in HOLDERS or name in LEFT:
            continue
        elif isinstance(value, PLAIN):
            found.settings[name] = value
        elif isinstance(value, (list, tuple, dict)):
            parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
            found.settings[name] = [part if isinstance(part, PLAIN) else type(part) for part in parts]
            held += parts
        elif isinstance(value, Tensor):
            held.append(value)
        elif callable(value) and not isinstance(value, type) and name not in CALLED_OUTSIDE and not is_own(value):
            found.functions[name] = value
    for name in LEFT:
        found.settings.pop(name, None)
    for value in held:
        if type(value) is nn.Parameter or type(value) is Tensor:  # as most are, and this is asked of all in every call
            found.tensors.append(value)
        elif isinstance(value, Tensor):
            found.tensors.extend(parts_of(value))
    return found


def hooks_of(module: nn.Module) -> dict[int, Callable[..., Any]]:
    """The module's forward hooks, see :class:`Own`."""
    if not module._forward_pre_hooks and not module._forward_hooks:
        return {}
    hooks = [*list(module._forward_pre_hooks.items()), *list(module._forward_hooks.items())]
    return {key: hook for key, hook in hooks if not is_own(hook)}


def global_hooks() -> list[Callable[..., Any]]:
    """Forward hooks of all modules of this process, without those of this package."""
    hooks = (*calls._global_forward_pre_hooks.values(), *calls._global_forward_hooks.values())
    return [hook for hook in hooks if not is_own(hook)]


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


def pinned(value: Any) -> Any:
    """A stand-in that equals itself alone, and keeps ``value`` alive only where it must."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value


def held_by(function: Callable[..., Any]) -> Iterator[Tensor]:
    """Tensors in a hook's closure, or on the object that it is a method of."""
    cells: Iterable[Any] = getattr(function, "__closure__", None) or ()
    values = [cell.cell_contents for cell in cells if cell != type(cell)()]
    owner: Mapping[str, Any] = getattr(getattr(function, "__self__", function), "__dict__", {})
    return (value for value in (*values, *owner.values()) if isinstance(value, Tensor))


def parts_of(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data of a wrapper, such as a shard or a quantised weight; else the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):  # a shard has its mesh of devices there too
                yield from parts_of(part)
    else:
        yield tensor
