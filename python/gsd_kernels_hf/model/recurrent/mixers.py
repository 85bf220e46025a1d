"""The modules of a model that keep a recurrent state, found by what their code does with a cache; rows through them.

A model is seen through a view in which each of them is a :class:`Mixer`: a prompt goes through the module as it is,
rows of a graph, which are a tree, through a form of it. The model itself is left as it is. The form that any module can
have is here: rows of one depth are a batch, each with the state of its parent, through the module's own code for one
token. That is exact by construction; a state for every row is kept until it is known which rows stay.
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torch.utils import _pytree as nested
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from gsd_kernels.graph import unpack_bits

from ...records import last_rows
from ..facts import Facts, called_by, code_names, fact
from ..linear import as_rows, plain
from ..properties import seen, with_children


@dataclass(eq=False)
class RowTree:
    """T rows behind the stored text of each of B sequences, the last R of which are forwarded now.

    Attributes:
        parents: int64 [B, T], the row that a row follows; −1: the stored text.
        depths: int64 [B, T], rows before it on its path.
        first: T − R, rows that were forwarded before, since a path was stored.
        kept: what was made of it for all layers.
    """

    parents: Tensor
    depths: Tensor
    first: int = 0
    kept: dict[Any, Any] = field(default_factory=dict, repr=False)

    def followed(self, first: int, ancestor_mask: Tensor, count: int, slots: Tensor | None, stem: int) -> RowTree:
        """Its first rows with others that may follow them, from what these see.

        Args:
            first: how many stay.
            ancestor_mask: int32 [B, R, words], bits of slots; a row's own need not be set.
            count: R.
            slots: int64 [B, R], of the rows; ``None``: one after the other, behind those that stay.
            stem: how many of those have no slot: a path that all others follow.
        """
        sees = unpack_bits(ancestor_mask, first - stem + count)
        if slots is not None:
            sees = sees.gather(2, slots[:, None].expand(-1, count, -1))
        sees = pad(sees, (stem, 0), value=True)
        rows = torch.arange(first + count, device=ancestor_mask.device)
        before = sees & (rows != rows[first:, None])  # [B, R, T]
        depths = torch.cat([self.depths[:, :first], before.sum(-1)], 1)
        # Of the rows on a path the deepest is the last.
        last = torch.where(before, depths[:, None, :] + 1, 0).max(-1)
        parents = torch.where(last.values > 0, last.indices, -1)
        return RowTree(torch.cat([self.parents[:, :first], parents], 1), depths, first)

    def shallow(self, deepest: int) -> RowTree:
        """With rows that are deeper apart from all others: no path that can be accepted holds one."""
        deep = self.depths > deepest
        return RowTree(torch.where(deep, -1, self.parents), torch.where(deep, 0, self.depths), self.first)

    @cached_property
    def narrow(self) -> tuple[Tensor, Tensor]:
        """Parents and depths, int32 [B, T]."""
        return self.parents.to(torch.int32), self.depths.to(torch.int32)

    def before(self, width: int) -> Tensor:
        """Each row and the ``width`` − 1 tokens before it, nearest first: int64 [B, T, width].

        They index the last ``width`` − 1 tokens of the text, followed by the rows.
        """
        if width not in self.kept:
            batch, count = self.parents.shape
            text = torch.arange(-1, width - 2, device=self.parents.device).expand(batch, -1)
            follows = torch.cat([text, self.parents + (width - 1)], 1)  # [B, width − 1 + T]; what each one follows
            rows = [torch.arange(width - 1, width - 1 + count, device=text.device).expand(batch, -1)]
            for _ in range(width - 1):
                rows.append(follows.gather(1, rows[-1]))
            self.kept[width] = torch.stack(rows, -1)
        return self.kept[width]

    @cached_property
    def levels(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """The rows that are forwarded now, so that each is behind its parent: sequence, row of R and parent of T,
        int64 [n] each (waits for the device)."""
        parents, depths = self.parents[:, self.first :], self.depths[:, self.first :]
        places = [(depths == depth).nonzero(as_tuple=True) for depth in depths.unique()]
        return [(sequence, row, parents[sequence, row]) for sequence, row in places]

    def on(self, device: torch.device) -> RowTree:
        """The same on another device, copied once for all layers there."""
        if self.parents.device == device:
            return self
        if device not in self.kept:
            self.kept[device] = RowTree(self.parents.to(device), self.depths.to(device), self.first)
        return self.kept[device]


try:
    from transformers.cache_utils import LinearAttentionLayer
except ImportError:  # an earlier transformers, where modules keep states in caches of their own

    class LinearAttentionLayer:  # type: ignore[no-redef]
        """No layer is one."""


FIRST = "5.14"
"""transformers' first release whose caches hold the states of recurrent layers as they are read here."""

READABLE = "number_of_states" in inspect.signature(LinearAttentionLayer.__init__).parameters
"""Whether the installed one's do."""

UPDATES = {"update_conv_state", "update_recurrent_state"}
"""What code calls that moves a state of transformers' cache on."""

KINDS = ("conv_states", "recurrent_states")
"""What a layer of transformers' cache calls its states."""

MASKS = {"attention_mask", "conv_mask"}
"""What mixers call the mask of tokens that are no padding."""


class RowsCache(Cache):
    """A cache of graph rows, as mixers see it.

    Attributes:
        tree: of the rows that are forwarded; ``None``: what is forwarded is a prompt.
        padding: bool [B, n], where a prompt's piece holds tokens; ``None``: everywhere.
    """

    tree: RowTree | None = None
    padding: Tensor | None = None


Form = Any
"""How the rows of one mixer are computed, and what is kept of the text for that: :class:`ByDepth`, or what has its
methods and attributes."""


class Mixer(nn.Module):
    """A module with a recurrent state, whose rows are computed by a form."""

    def __init__(self, module: nn.Module, form: Form) -> None:
        super().__init__()
        self.module, self.form = module, form

    def forward(self, *args: Any, **options: Any) -> Any:
        """Forward like the module; a cache of graph rows says which it is."""
        given = (*args, *options.values())  # by whatever names
        cache = next((value for value in given if isinstance(value, RowsCache)), None)
        if cache is None:
            return self.module(*args, **options)
        device = next(value.device for value in given if isinstance(value, Tensor))
        if cache.tree is not None:
            options = masked(self.module, args, options, None)  # rows are never padding
            options.pop("graph", None)
            return self.form.rows(cache.tree.on(device), options)
        if cache.padding is not None and cache.padding.shape[1] == 1:
            # transformers takes a piece of one token for a generated one
            args, options = (), masked(self.module, args, options, cache.padding.to(device))
        return self.module(*args, **options)


def masked(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], mask: Tensor | None) -> dict[str, Any]:
    """The arguments of a mixer by name, but for another mask [B, n] of its tokens, where it takes one."""
    code = inspect.unwrap(type(module).forward).__code__
    names = code.co_varnames[1 : code.co_argcount]
    return {**dict(zip(names, args, strict=False)), **options, **dict.fromkeys(MASKS & {*names}, mask)}


@functools.lru_cache(maxsize=1024)
def keeps_state(cls: type) -> bool:
    """Return whether code of a module's class moves a recurrent state of a cache on."""
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


def with_mixers(model: PreTrainedModel, form_of: Callable[[nn.Module], Form]) -> PreTrainedModel:
    """``model`` seen with a :class:`Mixer` for each such module; the same one wherever a module is found again."""

    @functools.cache
    def instead(module: Any) -> Any:
        return Mixer(module, form_of(module)) if keeps_state(type(module)) else module

    view: PreTrainedModel = seen(model, instead)
    return view


STEP = "mamba2_selective_state_update"
"""The kernel of single tokens, by the name that modules call it by."""


Limit = tuple[float, float]
"""The least and the largest step in time."""


class ByDepth:
    """The form of a module that any can have.

    Args:
        module: whose forward takes hidden states [n, 1, D] and a cache.
        layer: of the model's cache, which holds the states of the text, [B, …] each.
    """

    def __init__(self, module: nn.Module, layer: LinearAttentionLayer) -> None:
        self.layer, self.code, self.limit = layer, module, limit_of(module)
        if self.limit is not None:
            if "forward" in vars(module):
                raise ValueError(f"{type(module).__name__} limits steps in prompts alone and has a forward of its own")
            self.code = with_kernels(module, {STEP: self.step})
        self.ends: Tensor | None = None  # bool [n]; of the tokens that come next, those that end a prompt
        self.behind_prompt = False  # whether no row was taken into the text yet
        self.after: dict[State, Tensor] = {}  # [B, 1 + T, …]: states after the text, and after the rows since

    def begin(self) -> None:
        """A prompt was read: go on from the states that it left in the cache, where they stay."""
        self.after, self.behind_prompt = {}, True

    def end(self) -> None:
        """Leave the states of the text in the cache, where they are, and the next prompt goes on from them."""

    def rows(self, tree: RowTree, options: dict[str, Any]) -> Any:
        """Return what the module's forward does of rows [B, R], given what it was called with, by name."""
        batch, total = tree.parents.shape
        shape = batch, total - tree.first  # B, R
        known = self.after if tree.first else {key: states[:, None] for key, states in states_in(self.layer).items()}
        self.after, outputs = {}, dict[int, Any]()
        for key, states in known.items():  # with room for the rows
            room = states.new_zeros(batch, shape[1], *states.shape[2:])
            self.after[key] = torch.cat([states[:, : 1 + tree.first], room], 1)
        for sequence, row, parent in tree.levels:
            layer = LinearAttentionLayer(self.layer.number_of_states)  # of the text, or after the parents
            for key, after in self.after.items():
                put_state(layer, key, after[sequence, 1 + parent])

            def of_level(value: Any, at: tuple[Tensor, Tensor] = (sequence, row), own: Any = layer) -> Any:
                if isinstance(value, RowsCache):
                    return Cache(layers=[own] * len(value.layers))  # whichever it asks for, it is this one
                if isinstance(value, Tensor) and value.shape[:2] == shape:
                    return value[at].unsqueeze(1)  # [n, 1, …]
                return value

            given = nested.tree_map(of_level, options, is_leaf=lambda v: isinstance(v, RowsCache))
            self.ends = parent < 0 if self.behind_prompt else None
            leaves, kind = nested.tree_flatten(self.code(**given))
            for number, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    put_rows(outputs, number, shape, (sequence, row), leaf[:, 0])
                else:
                    outputs[number] = leaf
            for key, states in states_in(layer).items():  # a text that has none yet has one of zeros
                put_rows(self.after, key, (batch, 1 + total), (sequence, 1 + tree.first + row), states)
        return nested.tree_unflatten([*outputs.values()], kind)

    def step(
        self,
        state: Tensor,
        hidden_states: Tensor,
        dt: Tensor,  # [n, H, V]
        *args: Any,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        **options: Any,
    ) -> Tensor:
        """In place of a limited module's kernel of single tokens, with the limit of prompts for tokens that end one.

        transformers' Mamba-2 limits steps in time in its code for prompts and not in that for single tokens. The first
        row behind a prompt is the prompt's last token read again, so there the limit holds as well.
        """
        assert self.limit is not None
        if self.ends is not None:
            dt = time_steps(dt, dt_bias, dt_softplus, self.limit, self.ends[:, None, None])
            dt_bias, dt_softplus = None, False
        own = inspect.unwrap(type(self.code).forward).__globals__[STEP]
        return own(state, hidden_states, dt, *args, dt_bias=dt_bias, dt_softplus=dt_softplus, **options)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """Take the accepted rows int32 [B, P] of the last :meth:`rows` into the text; their number: int32 [B]."""
        for key, after in self.after.items():
            count = num_accepted.to(after.device)
            last = torch.where(count > 0, 1 + last_rows(accepted_rows.to(after.device), count), 0)  # [B]
            put_state(self.layer, key, after[torch.arange(len(count), device=after.device), last])
        self.after, self.behind_prompt = {}, False


def put_rows(whole: dict[Any, Any], key: Any, shape: tuple[int, int], at: tuple[Tensor, Tensor], rows: Tensor) -> None:
    """Put rows [n, …] in their places of a tensor of this shape, [B, S, …]: zeros where there is none yet."""
    if key not in whole:
        whole[key] = rows.new_zeros(*shape, *rows.shape[1:])
    whole[key][at] = rows


def limit_of(module: nn.Module) -> Limit | None:
    """The least and the largest step of a module's prompts; ``None``: any, as for single tokens."""
    limit = getattr(module, "time_step_limit", None)
    if limit is None or STEP not in called_by(type(module)):
        return None
    least, most = limit
    return None if least <= 0 and most == math.inf else (float(least), float(most))  # softplus is above 0


def time_steps(dt: Tensor, bias: Tensor | None, rectified: bool, limit: Limit, ends: Tensor | None) -> Tensor:
    """Mamba-2's steps in time, within the limit for tokens that end a prompt.

    ``ends``: bool, which ones do; ``None``: none of them.
    """
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if rectified:
        dt = plain(softplus(as_rows(dt)))
    return dt if ends is None else dt.clamp(*limit).where(ends, dt)
