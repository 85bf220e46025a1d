"""The facts of a model as it is now, its fingerprint among them: looked up once a call, before it decodes, handed on.

Whether a model can be served, how it is forwarded and what it was at the last call are questions of several rooms.
Walking through its modules takes milliseconds, and no call changes its models before it decodes; so a call makes one
:class:`Facts` of each model, and what one room finds out the next one reads there.

The fingerprint, :attr:`Facts.structure`, is what a forward goes by, as far as it can be changed: names, settings,
hooks, tensors. A change of it is a reason to prove again, see :mod:`.probe` and :mod:`.proof`; it never says that
something is right. The code that a forward runs is known by the names that lead to it: of its classes, of the modules
that these were written in, of PyTorch's functions and of transformers' attention, masks and caches. Looking again is a
comparison of pointers. What is noticed, and what is not before ``handle.clear()``, says docs/how-it-works.md.

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
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as calls
from torch.utils._device import DeviceContext
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel, cache_utils, masking_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..packed.modules import Stored, stored_in
from ..packed.samples import samples, versions
from . import properties
from .attention import configs_in, implementation_of

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
OF_ALL = calls._global_forward_pre_hooks, calls._global_forward_hooks
"""Forward hooks of all modules of this process."""
ENTRIES = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})
CALLED_OUTSIDE = ("generate", "__reduce_ex__")
"""Functions on a model itself that no forward calls."""
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, enum.Enum, numbers.Number)
PLAIN_EXACTLY = frozenset(PLAIN)  # which most settings are, and a set is asked sooner
HOLDERS = {"rope_deltas", *(name for name, value in vars(nn.Module()).items() if not isinstance(value, PLAIN))}
"""Names of what PyTorch keeps of every module, parts and hooks, which are looked at apart, and of what transformers'
``generate`` leaves on modules for its own steps, where our forwards are given positions: they are no settings."""


def home_of(function: Any) -> str:
    """The module that a function, or the class of what is called as one, was written in."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__globals__", {}).get("__name__") or type(function).__module__)


def described(function: Any) -> str:
    """Where a function was written, in words."""
    return f"{home_of(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def package_of(function: Any) -> str:
    """The package that a function came with: this one's are set for the length of a forward."""
    return home_of(function).partition(".")[0]


def is_shipped(function: Any) -> bool:
    """Return whether transformers, PyTorch or this package brought a function."""
    return package_of(function) in HOME_PACKAGES


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
        named, self.is_class = vars(owner), isinstance(owner, type)
        home, title = (owner.__module__, owner.__qualname__) if self.is_class else (owner.__name__,) * 2
        package, self.size = home.partition(".")[0], len(named)
        self.names = {
            name: value
            for name, value in named.items()
            if self.is_class or not (isinstance(value, types.ModuleType) or name.startswith("_"))
        }
        functions = ((n, getattr(v, "__func__", getattr(v, "fget", v))) for n, v in self.names.items())
        looked_at = functions if self.is_class or package in HOME_PACKAGES else ()
        self.foreign = next((f"{title}.{n} is {described(f)}" for n, f in looked_at if is_strange(f, package)), None)

    def is_current(self, owner: Any) -> bool:
        """Return whether everything still stands there."""
        names = vars(owner)
        grown = self.is_class and len(names) != self.size
        return not grown and all(map(operator.is_, map(names.get, self.names), self.names.values()))


def is_strange(value: Any, package: str = OWN) -> bool:
    """Return whether a value is called as a function written in Python, in other packages than ``package`` or home."""
    written = callable(value) and not isinstance(value, (type, types.BuiltinFunctionType, types.MethodWrapperType))
    return written and not is_shipped(value) and package_of(value) != package


_spaces: weakref.WeakKeyDictionary[Any, Space] = weakref.WeakKeyDictionary()
"""The names of modules and classes; the same object as long as they stand for the same."""


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
    found = Own(hooks_of(module._forward_pre_hooks, module._forward_hooks), {}, {}, [])
    held: list[Any] = [*module._parameters.values(), *module._buffers.values()]
    for name, value in list(vars(module).items()):
        if name in HOLDERS:
            continue
        if type(value) in PLAIN_EXACTLY or isinstance(value, PLAIN):
            found.settings[name] = value
        elif isinstance(value, (list, tuple, dict)):
            parts = [*value, *value.values()] if isinstance(value, dict) else list(value)
            found.settings[name] = [part if isinstance(part, PLAIN) else type(part) for part in parts]
            held += parts
        elif isinstance(value, Tensor):
            held.append(value)
        elif (
            callable(value) and not isinstance(value, type) and name not in CALLED_OUTSIDE and package_of(value) != OWN
        ):
            found.functions[name] = value
    for value in held:
        if type(value) is nn.Parameter or type(value) is Tensor:  # as most are, and this is asked of all in every call
            found.tensors.append(value)
        elif isinstance(value, Tensor):
            found.tensors.extend(parts_of(value))
    return found


def hooks_of(before: Mapping[int, Any], after: Mapping[int, Any]) -> dict[int, Any]:
    """Forward hooks by their number, which is the process's, without those that this package sets for a forward."""
    if not before and not after:
        return {}
    return {number: hook for number, hook in {**before, **after}.items() if package_of(hook) != OWN}


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


_Answer = TypeVar("_Answer")


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
        """All names that a forward reads, and functions that configs choose; the same objects while none is another."""
        names = sorted(filter(None, {implementation_of(config) for config in self.configs}))
        interfaces = ALL_ATTENTION_FUNCTIONS, masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
        chosen = [interface.get(name) for interface in interfaces for name in names]
        classes = (*dict.fromkeys(type(module) for _, module in self.modules), *CACHES)
        bases = dict.fromkeys(base for cls in classes for base in cls.__mro__[:-1] if base not in NO_FORWARD)
        homes = [*(base.__module__ for base in bases), *map(home_of, filter(None, chosen))]
        owners = dict.fromkeys((*LIBRARIES, *filter(None, map(sys.modules.get, homes)), *bases))
        for owner in owners:
            if owner not in _spaces or not _spaces[owner].is_current(owner):
                _spaces[owner] = Space(owner)
        return *map(_spaces.get, owners), *chosen

    @cached_property
    def own(self) -> list[Own]:
        """Hooks, functions, settings and tensors on the modules themselves, in their order."""
        return [own_of(module) for _, module in self.modules]

    @cached_property
    def stored(self) -> list[Stored | None]:
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
        """Modes of this thread's PyTorch that every operation goes through: autocast, those of functions, operators."""
        # Weights that are offloaded are on meta, which no forward runs on.
        weights = (parameter for parameter in self.model.parameters() if not parameter.is_meta)
        kind = next((parameter.device.type for parameter in weights), "cpu")
        cast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        dispatched = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        modes = (*torch.overrides._get_current_function_mode_stack(), *dispatched)
        return cast, *(type(mode) for mode in modes if not isinstance(mode, DeviceContext))

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
                {name: pinned(function) for name, function in own.functions.items()},
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
        libraries = [(s.name, s.dtype, s.problem, s.kind) for s in self.stored if s is not None]
        around = [*map(pinned, hooks_of(*OF_ALL).values())]
        found = modules, configs, self.spaces, around, self.ambient, places, libraries
        kept = _kept.get(self.model)
        return found if kept is None or kept[0] != found else kept[0]

    @property
    def content(self) -> tuple[Any, ...]:
        """The numbers that keys and values in a cache depend on beside the structure; equal while nothing was written.

        Reads a few elements of every tensor, those that hooks hold included, so it waits for every device once.
        """
        hooks = (hook for own in self.own for hook in own.hooks.values())
        held = (part for hook in hooks for tensor in held_by(hook) for part in parts_of(tensor))
        tensors = [*self.tensors, *held]
        return versions(tensors), samples(tensors)

    @cached_property
    def proofs(self) -> dict[Hashable, Any]:
        """Answers of proofs since the structure is what it is, in whatever call they were found."""
        kept = _kept.get(self.model)
        if kept is None or kept[0] != self.structure:
            kept = _kept[self.model] = self.structure, {}
        return kept[1]

    def proved(self, key: Hashable, prove: Callable[[], _Answer]) -> _Answer:
        """The answer of a proof; one that says that it is passing is not kept."""
        answer: _Answer = self.proofs[key] if key in self.proofs else prove()
        if not getattr(answer, "passing", False):
            self.proofs[key] = answer
        return answer

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


@fact
def foreign_code(facts: Facts, *, shipped: bool = True) -> str | None:
    """Code in a model's forward that neither transformers nor PyTorch brought, or that runs round all code.

    ``shipped``: whether their own counts where it is a hook or stands in the place of a function or part of a module,
    as accelerate's does.
    """
    cast, *modes = facts.ambient
    if cast is not None:
        return f"autocast to {cast}"
    if modes:
        return f"a mode that PyTorch's operations go through, {modes[0].__qualname__}"
    for hook in hooks_of(*OF_ALL).values():
        return f"a hook of all modules, {described(hook)}"
    for (name, module), own in zip(facts.modules, facts.own, strict=True):
        if any(shipped or not is_shipped(hook) for hook in own.hooks.values()):
            return f"{name or 'the model'} has a hook"
        for function, value in own.functions.items():
            instead = shipped and (hasattr(type(module), function) or function in module._modules)
            if function in called_by(type(module)) and (instead or not is_shipped(value)):
                return f"{name or 'the model'} has a function of its own, {function}"
    for space in facts.spaces:
        if isinstance(space, Space) and space.foreign is not None:
            return space.foreign
        if is_strange(space):
            return f"attention or its mask is {described(space)}"
    return None
