"""The attention function that graph rows go through, beside the attention the model had before.

For the duration of a forward of ours a model's configs name ``gsd_<its own implementation>``; at all other times they
are as they were, so that copies, checkpoints, callbacks and other features of the model see nothing of it. A forward
of another thread that falls into this time has no ``graph=`` and runs exactly what it ran before, mask included. A
forward with graph inputs runs :func:`gsd_kernels.dag_attention` over the whole cache.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from gsd_kernels import dag_attention
from gsd_kernels.ops.dag_attention import DenseMask, dense_mask

from ..locks import forkable_lock

SCALES = "transformers.models.llama4.modeling_llama4.Llama4TextAttention"
"""The class that scales its queries so."""


@dataclass(frozen=True)
class Temperature:
    """The factor of queries in layers of Llama 4 without rotary embedding: log1p(⌊(place + 1) / floor⌋) · scale + 1.

    A place counts padding in. For the module it is the cache's length plus the row's number, which is not where a row
    of a graph stands. While rows are forwarded the cache says ``−number`` for its length, so that every row is at place
    0, where the factor is 1; the attention function multiplies by the factor of the row's own place.
    """

    floor: float
    scale: float

    @classmethod
    def of(cls, module: Any) -> Temperature | None:
        """The numbers of Llama 4's own attention where it scales; ``None`` for any other, which may mean others."""
        known = f"{type(module).__module__}.{type(module).__qualname__}" == SCALES
        if not known or module.use_rope or not module.attn_temperature_tuning:
            return None
        return cls(float(module.floor_scale), float(module.attn_scale))

    def applied(self, query: Tensor, places: Tensor) -> Tensor:
        """``query`` [B, H, R, D], at ``places`` [B, R] rather than at place 0; rounded as transformers rounds it."""
        factor = torch.log1p(torch.floor((places.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (query * factor[:, None, :, None]).to(query.dtype)


EAGER = "eager_attention_forward"


class Attends(Protocol):
    """The object that a forward is given as ``graph=``.

    Attributes:
        attend: (module, query [B, Hq, R, D], key [B, Hkv, S, D], value, attention_mask, scaling, options) → the output
            of one attention module, [B, Hq, R, D]; ``options`` are its other keywords.
    """

    attend: Callable[..., Tensor]


@dataclass(frozen=True)
class AttentionKind:
    """The demands of an attention call beside softmax over all positions up to a row's own."""

    window: int | None = None  # positions that a row sees, its own included
    chunk: int | None = None  # positions of a chunk, of which a row sees its own alone; counted from the text's begin
    sinks: torch.dtype | None = None  # of s_aux, a score of each head that has no value
    temperature: Temperature | None = None  # of queries that come as of place 0

    def seen(self, row: Tensor, position: Tensor) -> Tensor:
        """Return whether rows at positions ``row`` of a text see ``position``."""
        visible = (position <= row) & (position >= 0)
        if self.window is not None:
            visible &= row - position < self.window
        if self.chunk is not None:
            visible &= row // self.chunk == position // self.chunk
        return visible

    @property
    def most(self) -> int | None:
        """Positions that a row sees at most; ``None``: all before it."""
        return self.chunk if self.window is None else self.window


@dataclass
class GraphInputs:
    """Inputs of the attention of graph rows; device tensors with static addresses. R rows over N graph nodes."""

    ancestor_mask: Tensor  # int32 [B, R, ceil(N/32)]
    kv_len: Tensor  # int32 [B]
    kv_start: Tensor  # int32 [B]
    row_depths: Tensor  # int32 [B, R]; position minus kv_len
    node_depths: Tensor  # int32 [B, N]
    backend: str = "auto"
    kinds: tuple[AttentionKind, ...] | None = None  # of every attention call; None: as each call says
    row_invariant: bool = False  # whether a row is to have the same bits alone and among others
    calls: int = 0  # so far
    _masks: dict[tuple[int, int | None, int | None], DenseMask] = field(default_factory=dict, repr=False)
    _parts: dict[tuple[torch.device, int], GraphInputs] = field(default_factory=dict, repr=False)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,  # [B, Hq, R, D]
        key: Tensor,  # [B, Hkv, S, D]
        value: Tensor,
        attention_mask: Any,
        scaling: float | None,
        options: dict[str, Any],
    ) -> Tensor:
        """Attend over the whole cache; see :class:`Attends`."""
        if self.kinds is None:
            kind = AttentionKind(options.get("sliding_window"))
        else:
            kind = self.kinds[min(self.calls, len(self.kinds) - 1)]  # of one more, check_complete says that it is
        self.calls += 1
        inputs = self.last(query.shape[2], query.device)
        if kind.temperature is not None:
            query = kind.temperature.applied(query, inputs.kv_len[:, None] + inputs.row_depths)  # [B, Hq, R, D]
        return dag_attention(
            query,
            key,
            value,
            inputs.ancestor_mask,
            inputs.kv_len,
            kv_start=inputs.kv_start,
            row_depths=inputs.row_depths,
            node_depths=inputs.node_depths,
            scale=scaling,
            softcap=options.get("softcap"),
            sliding_window=kind.window,
            chunk=kind.chunk,
            sinks=options.get("s_aux"),
            dense=inputs.dense(key.shape[2], kind),
            row_invariant=inputs.row_invariant,
            backend=inputs.backend,
        )

    def check_complete(self) -> None:
        """Raise unless every attention call of the forward has come this way."""
        if self.kinds is not None and self.calls != len(self.kinds):
            raise RuntimeError(
                f"model: {self.calls} attention calls saw the graph's rows where {len(self.kinds)} were expected; the "
                "model or its attention implementation was changed while it generated; change it between two calls"
            )

    def dense(self, capacity: int, kind: AttentionKind) -> DenseMask | None:
        """The mask written out, made once for all layers; only where it is used (not by GPU kernels)."""
        if self.kv_len.device.type != "cpu":
            return None
        key = (capacity, kind.window, kind.chunk)
        if key not in self._masks:
            self._masks[key] = dense_mask(
                self.ancestor_mask,
                self.kv_len,
                self.kv_start,
                self.row_depths,
                self.node_depths,
                kind.window,
                capacity,
                kind.chunk,
            )
        return self._masks[key]

    def last(self, rows: int, device: torch.device) -> GraphInputs:
        """These inputs of the last rows only, on a device: made once a step.

        Layers that store nothing may be given no more rows than logits need; a sharded model has several devices.
        """
        if rows == self.ancestor_mask.shape[1] and device == self.kv_len.device:
            return self
        if (device, rows) not in self._parts:
            own = vars(self).items()
            moved = {name: t.to(device, non_blocking=True) for name, t in own if isinstance(t, Tensor)}
            for name in ("ancestor_mask", "row_depths"):
                moved[name] = moved[name][:, -rows:].contiguous()
            self._parts[device, rows] = replace(self, **moved, _masks={}, _parts={})
        return self._parts[device, rows]


_watcher: ContextVar[Any] = ContextVar("watcher", default=None)


@contextmanager
def watching(watcher: Any) -> Iterator[None]:
    """Let ``watcher``, a :class:`~.probe.Probe`, see the masks and attention calls of this thread's forwards."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def _graph_attention(
    original: str,
    module: nn.Module,
    query: Tensor,  # [B, H, R, D]
    key: Tensor,  # [B, H, S, D]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    graph: Attends | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of a model whose own implementation is ``original``."""
    if (watcher := _watcher.get()) is not None:
        out = watcher.called(original, graph, module, query, key, value, attention_mask, kwargs)
    elif graph is not None:
        out = graph.attend(module, query, key, value, attention_mask, scaling, kwargs)
    else:
        return original_attention(original, module)(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
        )
    return out.transpose(1, 2).contiguous(), None  # [B, R, Hq, D]


def _watched_mask(original: str, *args: Any, **kwargs: Any) -> Any:
    """The mask function of a model whose own implementation is ``original``."""
    made = ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs)
    if (watcher := _watcher.get()) is not None:
        watcher.made(made, kwargs)
    return made


def original_attention(name: str, module: nn.Module) -> Callable[..., Any]:
    """The attention function of that name for ``module``, as its own forward would find it."""
    if name == "eager":  # every modelling file has its own; a subclass elsewhere uses its base's
        spaces = [
            space
            for base in type(module).__mro__
            for space in (
                getattr(inspect.unwrap(vars(base).get("forward", object)), "__globals__", {}),
                vars(sys.modules.get(base.__module__, types)),
            )
        ]
        return next(space[EAGER] for space in spaces if EAGER in space)
    function = ALL_ATTENTION_FUNCTIONS[name]
    if not name.startswith("flash_attention"):
        return function
    named = copy.copy(module)  # as it was: flash-attn's wrapper reads the implementation's name there
    named.config = types.SimpleNamespace(_attn_implementation=name)
    return functools.wraps(function)(lambda _, *args, **kwargs: function(named, *args, **kwargs))


def configs_in(modules: Iterable[nn.Module]) -> list[PretrainedConfig]:
    """Every config that modules may read their attention implementation from, and those inside them."""
    own = (module.config for module in modules if isinstance(vars(module).get("config"), PretrainedConfig))
    configs = list({id(config): config for config in own}.values())
    for config in configs:  # and what is found on the way
        nested = (getattr(config, key, None) for key in config.sub_configs)
        new = (sub for sub in nested if isinstance(sub, PretrainedConfig))
        configs += [sub for sub in new if all(sub is not known for known in configs)]
    return configs


_originals: dict[str, str] = {}
"""The models' own implementations, by the names that configs have while a forward of ours runs."""


def implementation_of(config: PretrainedConfig) -> str | None:
    """The attention implementation that ``config`` names, whether or not a forward of ours is running."""
    name = config._attn_implementation
    return _originals.get(name, name) if isinstance(name, str) else None


_lock = forkable_lock()
_users: dict[int, int] = {}  # id(config) → forwards that hold it (alive as long as that)


def _enter(config: PretrainedConfig) -> None:
    """Route the attention of ``config``'s modules through this module, once more; under the lock."""
    original = implementation_of(config)
    if original is not None and config._attn_implementation == original:
        if original != "eager" and original not in ALL_ATTENTION_FUNCTIONS:
            raise ValueError(f"has an unknown attention implementation, {original!r}; use 'sdpa'")
        if original not in ALL_MASK_ATTENTION_FUNCTIONS:
            raise ValueError(f"has an attention implementation without a mask function, {original!r}; use 'sdpa'")
        # Without "flash", for which transformers would look up a kernel.
        name = "gsd_" + original.replace("flash_attention_", "fa_")
        _originals[name] = original
        if name not in ALL_ATTENTION_FUNCTIONS:
            AttentionInterface.register(name, functools.partial(_graph_attention, original))
            AttentionMaskInterface.register(name, functools.partial(_watched_mask, original))
        config._attn_implementation_internal = name
    _users[id(config)] = _users.get(id(config), 0) + 1


def _leave(config: PretrainedConfig) -> None:
    """Undo one :func:`_enter`. An implementation that somebody has set meanwhile stays."""
    with _lock:
        _users[id(config)] -= 1
        if not _users[id(config)]:
            del _users[id(config)]
            config._attn_implementation_internal = implementation_of(config)


@contextmanager
def switched_configs(configs: Iterable[PretrainedConfig]) -> Iterator[None]:
    """Route the attention of the modules of ``configs`` through this module for the duration of a block.

    Raises:
        ValueError: an attention implementation is not one that transformers can choose.
    """
    with ExitStack() as entered:
        with _lock:
            for config in configs:
                _enter(config)
                entered.callback(_leave, config)
        yield
