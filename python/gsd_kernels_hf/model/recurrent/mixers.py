"""The modules of a model that keep a recurrent state, found by what their code does with a cache.

A model is seen through a view in which each of them is a :class:`Mixer`: a prompt goes through the module as it is,
rows of a graph through a form of it. The model itself is left as it is.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

try:
    from transformers.cache_utils import LinearAttentionLayer
except ImportError:  # an earlier transformers, where modules keep states in caches of their own

    class LinearAttentionLayer:  # type: ignore[no-redef]
        """No layer is one."""


from ..facts import Facts, fact
from ..fingerprint import code_names
from ..view import seen, with_children
from .tree import RowTree

FIRST = "5.14"
"""transformers' first release whose caches hold the states of recurrent layers as they are read here."""

READABLE = "number_of_states" in inspect.signature(LinearAttentionLayer.__init__).parameters
"""Whether the installed one's do."""

UPDATES = {"update_conv_state", "update_recurrent_state"}
"""What code calls that moves a state of transformers' cache on."""

KINDS = ("conv_states", "recurrent_states")
"""What a layer of transformers' cache calls its states."""

MASKS = ("attention_mask", "conv_mask")
"""What mixers call the mask of tokens that are no padding."""


class RowsCache(Cache):
    """A cache of graph rows, as mixers see it.

    Attributes:
        tree: of the rows that are forwarded; ``None``: what is forwarded is a prompt.
        padding: bool [B, n], where a prompt's piece holds tokens; ``None``: everywhere.
    """

    tree: RowTree | None = None
    padding: Tensor | None = None


_Kind = TypeVar("_Kind")


def argument(kind: type[_Kind], args: tuple[Any, ...], options: dict[str, Any]) -> _Kind | None:
    """The first argument of a type among a mixer's, however it is named; ``None``: there is none."""
    return next((value for value in (*args, *options.values()) if isinstance(value, kind)), None)


class Form(Protocol):
    """How the rows of one mixer are computed, and what is kept of the text for that.

    Attributes:
        layer: of the cache, which holds the states that a prompt leaves.
        takes_states: whether :meth:`begin` takes them over, so that the cache need not keep them.
    """

    layer: Any
    takes_states: bool

    def rows(self, tree: RowTree, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Return what the module's forward does of rows [B, R], given what it was called with."""
        ...

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """Take the accepted rows int32 [B, P] of the last :meth:`rows` into the text; their number: int32 [B]."""
        ...

    def begin(self) -> None:
        """A prompt was read: go on from the states that it left in the cache."""
        ...

    def end(self) -> None:
        """Leave the states of the text in the cache, where the next prompt goes on from them."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes beside the cache's own states."""
        ...


class Mixer(nn.Module):
    """A module with a recurrent state, whose rows are computed by a form."""

    def __init__(self, module: nn.Module, form: Form) -> None:
        super().__init__()
        self.module, self.form = module, form
        self.train(module.training)

    def forward(self, *args: Any, **options: Any) -> Any:
        """Forward like the module; a cache of graph rows says which it is."""
        cache, hidden = argument(RowsCache, args, options), argument(Tensor, args, options)
        if cache is None or hidden is None:
            return self.module(*args, **options)
        mask = None  # rows are never padding
        if cache.tree is None:
            if cache.padding is None or cache.padding.shape[1] > 1:
                return self.module(*args, **options)
            mask = cache.padding.to(hidden.device)  # transformers takes a piece of one token for a generated one
        args, options = masked(self.module, args, options, mask)
        if cache.tree is None:
            return self.module(*args, **options)
        options.pop("graph", None)
        return self.form.rows(cache.tree.on(hidden.device), args, options)


def masked(
    module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], mask: Tensor | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a mixer, but for another mask [B, n] of its tokens, where it takes one."""
    code = inspect.unwrap(type(module).forward).__code__
    for place, name in enumerate(code.co_varnames[1 : code.co_argcount]):
        if name in MASKS:
            if place < len(args):
                return (*args[:place], mask, *args[place + 1 :]), options
            return args, {**options, name: mask}
    return args, options


@functools.lru_cache(maxsize=1024)
def keeps_state(cls: type) -> bool:
    """Return whether code of a module's class moves a recurrent state of a cache on."""
    if not hasattr(LinearAttentionLayer, "update_recurrent_state"):
        return False
    values = (value for base in cls.__mro__ if base not in (nn.Module, object) for value in vars(base).values())
    functions = (inspect.unwrap(getattr(value, "__func__", value)) for value in values)
    return any(UPDATES & {*code_names(f.__code__)} for f in functions if isinstance(f, types.FunctionType))


def with_kernels(module: nn.Module, kernels: dict[str, Callable[..., Any]]) -> Any:
    """``module`` seen with these functions where its class's forward calls others of their names."""
    forward = inspect.unwrap(type(module).forward)
    names, defaults = {**forward.__globals__, **kernels}, forward.__defaults__
    made = types.FunctionType(forward.__code__, names, forward.__name__, defaults, forward.__closure__)
    made.__kwdefaults__ = forward.__kwdefaults__
    view = with_children(module, {})
    view.__dict__["forward"] = types.MethodType(made, view)
    return view


State = tuple[str, int]
"""A kind of state, one of :data:`KINDS`, and its number in a layer."""


def states_in(layer: LinearAttentionLayer) -> dict[State, Tensor]:
    """The states that a layer of transformers' cache holds."""
    return {(kind, i): states for kind in KINDS for i, states in getattr(layer, kind).items() if states is not None}


def put_state(layer: LinearAttentionLayer, key: State, states: Tensor) -> None:
    """Put a state into a layer, as if the module's code had."""
    kind, index = key
    getattr(layer, kind)[index] = states
    getattr(layer, f"is_{kind}_initialized")[index] = layer.has_previous_state[index] = True
    if kind == "conv_states":
        layer.conv_kernel_size[index] = layer.conv_kernel_size[index] or states.shape[-1]
    layer.device, layer.dtype = layer.device or states.device, layer.dtype or states.dtype


@fact
def mixers_of(facts: Facts) -> tuple[tuple[str, nn.Module], ...]:
    """The modules of a model that keep a recurrent state in transformers' cache, by name."""
    return tuple((name, module) for name, module in facts.modules if keeps_state(type(module)))


@fact
def states_of(facts: Facts) -> dict[int, int]:
    """Layers of the cache that keep recurrent states, and how many each keeps."""
    indices = {getattr(module, "layer_idx", None) for _, module in mixers_of(facts)}
    own = DynamicCache(config=facts.model.config).layers if indices else ()
    return {i: getattr(layer, "number_of_states", 1) for i, layer in enumerate(own) if i in indices}


def with_mixers(model: PreTrainedModel, form_of: Callable[[nn.Module], Form]) -> PreTrainedModel:
    """``model`` seen with a :class:`Mixer` for each such module; the same one wherever a module is found again."""
    made: dict[int, Mixer] = {}

    def instead(module: Any) -> Any:
        if not keeps_state(type(module)):
            return module
        if id(module) not in made:
            made[id(module)] = Mixer(module, form_of(module))
        return made[id(module)]

    view: PreTrainedModel = seen(model, instead)
    return view
