"""A preallocated key/value cache with room for graph rows behind the committed prefix."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from gsd_kernels import commit_kv, write_kv
from gsd_kernels.graph import num_words
from gsd_kernels.ops.write_kv.api import WRITE

from .attention import AttentionKind, GraphInputs
from .recurrent.mixers import Form, LinearAttentionLayer, RowsCache, RowTree
from .replay import hold, is_gpu

_asked: ContextVar[Callable[[], None] | None] = ContextVar("asked", default=None)


@contextmanager
def asking(function: Callable[[], None] | None) -> Iterator[None]:
    """Have ``function`` called by every :func:`ask` inside; it raises to end the call. ``None``: nobody is asked."""
    token = _asked.set(function)
    try:
        yield
    finally:
        _asked.reset(token)


def ask() -> None:
    """Ask whoever waits for this thread's text whether to go on: between pieces of a prompt, and between layers."""
    if (function := _asked.get()) is not None:
        function()


class GraphLayer(CacheLayerMixin):
    """One layer: keys and values [B, Hkv, capacity, D], allocated at the first update, on that layer's device."""

    is_compileable = False  # a true value makes generate() compile the model
    is_sliding = False
    is_croppable = False

    def __init__(self, parent: GraphCache, index: int) -> None:
        super().__init__()
        self.parent: GraphCache = weakref.proxy(parent)  # no cycle: storage goes with its last user, at once
        self.index = index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        value_states = key_states if value_states is None else value_states
        self.dtype, self.device = key_states.dtype, key_states.device
        shape = (*key_states.shape[:2], self.parent.capacity)
        if self.parent.stacked:
            if self.parent.block is None:
                sizes = len(self.parent.layers), 2, *shape, key_states.shape[-1]
                self.parent.block = key_states.new_zeros(sizes)  # [layers, 2, B, Hkv, capacity, D]
            self.keys, self.values = self.parent.block[self.index]
        else:
            self.keys, self.values = (s.new_zeros(*shape, s.shape[-1]) for s in (key_states, value_states))
        self.is_initialized = True

    def grow(self, capacity: int) -> None:
        """Move keys and values to storage of ``capacity`` positions; the parent's block has that already."""
        if self.parent.block is not None:
            self.keys, self.values = self.parent.block[self.index]
        else:
            self.keys, self.values = grown(self.keys, capacity), grown(self.values, capacity)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [B, Hkv, R, D]: graph rows into their slots (all of the cache comes back), a prompt at the end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.parent.positions is not None:
            # Finite, because another row's overflow must not reach rows that do not see it: 0 · NaN would be NaN.
            positions, spoiled = self.parent.rows_on(self.device)  # [B, R]
            rows = key_states, value_states, positions
            write_kv(self.keys, self.values, *rows, spoiled=spoiled, backend=self.parent.write_backend)
            return self.keys, self.values
        ask()
        begin = self.parent.prompt_length
        end = begin + key_states.shape[2]
        self.parent.check_room(end)
        self.keys[:, :, begin:end] = key_states.nan_to_num()  # padding may hold anything, attention wants it finite
        self.values[:, :, begin:end] = value_states.nan_to_num()
        if self.parent.marks is not None:
            zeros = (states * 0 for states in (key_states, value_states))  # NaN where they are not finite
            self.parent.mark(sum(part.sum((1, 3), dtype=torch.float32) for part in zeros))
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_seq_length(self, *args: Any) -> int:
        # A layer that was left out, such as cross-attention of a text without images, asks whether it ever ran.
        return self.parent.prompt_length if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        rows = query_length.shape[0] if isinstance(query_length, Tensor) else query_length  # a tensor in 5.0
        return self.parent.prompt_length + rows, 0

    def get_max_length(self) -> int:
        return self.parent.capacity

    get_max_cache_shape = get_max_length  # its name in 5.0


class StateLayer(LinearAttentionLayer, GraphLayer):
    """A layer with recurrent states, and keys and values where it also attends."""

    is_compileable = False
    is_croppable = False

    def __init__(self, parent: GraphCache, index: int, states: int) -> None:
        GraphLayer.__init__(self, parent, index)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values, which come by place, or of states, which come by name."""
        (GraphLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def get_seq_length(self, *args: Any) -> int:
        return self.parent.prompt_length if self.is_initialized or any(self.has_previous_state.values()) else 0

    def restart(self) -> None:
        """Keep no state of the last text; keys and values stay where they are."""
        kept = (self.device, self.dtype) if self.is_initialized else (None, None)
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self.device, self.dtype = kept

    @property
    def nbytes(self) -> int:
        """Bytes of the states."""
        states = (*self.conv_states.values(), *self.recurrent_states.values())
        return sum(state.nbytes for state in states if state is not None)


def grown(storage: Tensor, capacity: int) -> Tensor:
    """A copy of [..., S, D] with ``capacity`` positions."""
    new = storage.new_zeros(*storage.shape[:-2], capacity, storage.shape[-1])
    new[..., : storage.shape[-2], :] = storage
    hold(storage)
    return new


class GraphCache(RowsCache):
    """Cache of one model: prompt first, then committed tokens, then the slots of the current step.

    During the prompt its length is a host integer (all sequences are padded alike); afterwards the committed length
    of every sequence lives on the device, with the caller.

    Args:
        config: of the model.
        capacity: positions.
        backend: of the op that writes rows.
        stacked: keys and values of all layers, which are alike, in one allocation.
        recurrent: layers that keep recurrent states, and how many.

    Attributes:
        block: [layers, 2, B, Hkv, capacity, D], what layers are views of where they are stacked.
        by_length: layers to which rows are all at the cache's begin, see :class:`.Temperature`.
        forms: of the modules that keep recurrent states, by layer and class.
        begun: whether the forms go on from the states of a prompt.
        marks: float32 [B], NaN for a text with a key or value that is not finite in its prompt; ``None``: nobody asks.
        positions: int64 [B, R], where graph rows are written; ``None`` while none are forwarded.
        spoiled: float32 [B, R or more], NaN for such a row: of the last rows, one part a device.
    """

    block: Tensor | None = None
    marks: Tensor | None = None
    positions: Tensor | None = None

    def __init__(
        self,
        config: PretrainedConfig,
        capacity: int,
        backend: str = "auto",
        *,
        stacked: bool = False,
        recurrent: Mapping[int, int] | None = None,
    ) -> None:
        self.capacity, self.stacked = capacity, stacked
        self.by_length: frozenset[int] = frozenset()
        self.forms: dict[tuple[int, type], Form] = {}
        self.begun = False
        # A backend that does not implement write_kv ("cpu", "cuda") leaves the choice to "auto".
        self.write_backend = backend if backend in WRITE.implementations else "auto"
        self.prompt_length = 0
        self._rows: dict[torch.device, tuple[Tensor, Tensor | None]] = {}  # positions and marks of rows, by device
        self.spoiled: list[Tensor] = []
        layers, states = config.get_text_config(decoder=True).num_hidden_layers, recurrent or {}
        super().__init__(
            layers=[
                StateLayer(self, index, states[index]) if index in states else GraphLayer(self, index)
                for index in range(layers)
            ]
        )

    def form_of(self, module: Any, make: Callable[[Any, StateLayer], Form]) -> Form:
        """How the rows of a module that keeps a state are computed: one form, by whatever view of the model it comes.

        make: called with the module and its layer where there is none yet.
        """
        key = module.layer_idx, type(module)
        if key not in self.forms:
            self.forms[key] = make(module, self.layers[module.layer_idx])
        return self.forms[key]

    def restart(self, length: int) -> None:
        """Begin a prompt of which ``length`` positions are stored: where there are recurrent states, all or none."""
        self.prompt_length = length
        if self.marks is not None:
            self.marks.zero_()
        if length and self.begun:
            for form in self.forms.values():
                form.end()
        self.begun = False
        for layer in self.layers:
            if not length and isinstance(layer, StateLayer):
                layer.restart()

    def begin_rows(self) -> None:
        """After a prompt, before the rows behind it."""
        if not self.begun:
            for form in self.forms.values():
                form.begin()
            staying = {id(form.layer) for form in self.forms.values() if not form.takes_states}
            for form in self.forms.values():
                if id(form.layer) not in staying:
                    form.layer.restart()
            self.begun = True

    @property
    def alike_on_a_gpu(self) -> bool:
        """Return whether all layers store keys and values alike, on one GPU.

        There the commit of a stacked cache is one launch, whichever backend it has. On a CPU nothing is launched, and
        storage by layer grows layer by layer.
        """
        if not all(layer.is_initialized for layer in self.layers):
            return False
        stored = [t for layer in self.layers for t in (layer.keys, layer.values)]
        return len({(t.shape, t.dtype, t.device) for t in stored}) == 1 and is_gpu(stored[0].device)

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` positions; what is stored stays, at other addresses."""
        self.capacity = capacity
        if self.block is not None:
            self.block = grown(self.block, capacity)
        for layer in self.layers:
            if layer.is_initialized:
                layer.grow(capacity)

    def check_room(self, positions: int) -> None:
        """Raise where fewer positions are allocated."""
        if positions > self.capacity:
            raise ValueError(f"cache: full, {positions} positions needed and {self.capacity} allocated")

    def launch(
        self,
        config: PretrainedConfig,
        kv_len: Tensor,
        kv_start: Tensor,
        count: int,
        nodes: int,
        kinds: Iterable[AttentionKind],
        backend: str,
    ) -> None:
        """Write keys of ``count`` rows behind the prefix and attend, once for each geometry of layers and kind of call.

        Kernels are compiled when they are first launched. Layers that have stored nothing yet are passed over.

        Args:
            config: of the layers.
            kv_len, kv_start: int32 [B], the prefix; what lies behind it is written.
            count: rows.
            nodes: slots that a row may see behind the prefix.
            kinds: of the attention calls; of none, keys are stored only.
            backend: of the attention.
        """
        layers = {(layer.keys.shape, layer.values.shape): layer for layer in self.layers if layer.is_initialized}
        queries = config.num_attention_heads
        group = queries // (getattr(config, "num_key_value_heads", None) or queries)
        for layer in layers.values():
            batch, heads, _, size = layer.keys.shape
            lengths, starts = kv_len.to(layer.device), kv_start.to(layer.device)
            new = [
                cached.new_zeros(batch, count, cached.shape[1], cached.shape[3]).transpose(1, 2)
                for cached in (layer.keys, layer.values)
            ]
            positions = lengths[:, None].long() + torch.arange(count, device=layer.device)
            spoiled = self.new_marks(count, layer.device)
            write_kv(layer.keys, layer.values, *new, positions, spoiled=spoiled, backend=self.write_backend)
            zeros, capped = lengths.new_zeros, {"softcap": getattr(config, "attn_logit_softcapping", None)}
            graph = zeros(batch, count, num_words(nodes)), lengths, starts, zeros(batch, count), zeros(batch, nodes)
            query = layer.keys.new_zeros(batch, count, group * heads, size).transpose(1, 2)
            for kind in dict.fromkeys(kinds):
                sinks = None if kind.sinks is None else layer.keys.new_zeros(group * heads, dtype=kind.sinks)
                inputs = GraphInputs(*graph, backend, (kind,))
                inputs.attend(None, query, layer.keys, layer.values, None, None, {"s_aux": sinks, **capped})

    def get_seq_length(self, layer_idx: int = 0, *args: Any) -> Any:
        """Tokens of the prompt that are stored; for rows of graphs in layers ``by_length``, −number of each row [R]."""
        if self.positions is None or layer_idx not in self.by_length:
            return super().get_seq_length(layer_idx)
        return self.no_places(layer_idx, *self.positions.shape[1:], self.positions.device)

    def no_places(self, layer_idx: int, count: int, device: torch.device) -> Tensor:
        """Lengths by which ``count`` rows are all at place 0, [R], on the layer's device once something is stored."""
        return -torch.arange(count, device=getattr(self.layers[layer_idx], "device", None) or device)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first row of a prompt's chunk, the same for layers that have not run yet."""
        return self.prompt_length

    @contextmanager
    def writing(self, positions: Tensor, tree: RowTree | None = None) -> Iterator[None]:
        """Store what a forward computes at ``positions``, int64 [B, R], rather than at the end of the prompt."""
        self.positions, self.tree, self._rows, self.spoiled = positions, tree, {}, []
        try:
            yield
        finally:
            self.positions, self.tree = None, None

    def new_marks(self, count: int, device: torch.device, *, of_texts: bool = False) -> Tensor | None:
        """Zeros [B, count] that get NaN at rows with a key or value that is not finite; ``None``: nobody asks.

        ``of_texts``: the texts' own marks, and not zeros.
        """
        if self.marks is None:
            return None
        if of_texts:
            return self.marks.to(device)[:, None].repeat(1, count)
        return torch.zeros(len(self.marks), count, dtype=torch.float32, device=device)

    def rows_on(self, device: torch.device) -> tuple[Tensor, Tensor | None]:
        """Where to write rows [B, R], and their marks: once a step for every device of a sharded model."""
        if device not in self._rows:
            assert self.positions is not None
            marks = self.new_marks(self.positions.shape[1], device)
            self._rows[device] = self.positions.to(device, non_blocking=True), marks
            self.spoiled += [] if marks is None else [marks]
        return self._rows[device]

    def mark(self, spoiled: Tensor) -> None:
        """Take marks [B, R] of a piece of the prompt, but for those of its padding."""
        assert self.marks is not None
        if self.padding is not None and self.padding.shape == spoiled.shape:
            spoiled = spoiled.masked_fill(self.padding.to(spoiled.device) == 0, 0.0)
        self.marks += spoiled.sum(1).to(self.marks.device)

    def marked(self, logits: Tensor) -> Tensor:
        """Logits [B, R, V] of the last rows that were forwarded, NaN where transformers' are.

        Those of rows with a key or value that is not finite, which are stored finite, and of all rows of a text with
        one in its prompt.
        """
        if self.marks is None:
            return logits
        found = (self.marks, *self.spoiled)
        if all(type(part) is Tensor and part.device.type == "cpu" and not part.numpy().any() for part in found):
            return logits  # marks are 0 or NaN
        marks = self.marks.to(logits.device)[:, None]  # [B, 1], then [B, R]
        for part in self.spoiled:
            marks = marks + part[:, -logits.shape[1] :].to(logits.device)
        return logits + marks[..., None].to(logits.dtype)

    def keep_marks(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """Mark texts [B] of which a row that was just forwarded is accepted and was marked itself."""
        if self.marks is None:
            return
        kept = torch.arange(accepted_rows.shape[1], device=accepted_rows.device) < num_accepted[:, None]  # [B, P]
        for part in self.spoiled:
            marks = part.gather(1, accepted_rows.clamp(min=0).to(part.device, torch.int64))  # [B, P]
            self.marks += marks.masked_fill(~kept.to(part.device), 0.0).sum(1).to(self.marks.device)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor, kv_len: Tensor, *, backend: str = "auto") -> None:
        """Move the accepted rows of all layers behind the prefix and advance ``kv_len``; one call a device."""
        self.commit_states(accepted_rows, num_accepted)
        by_device: dict[torch.device, list[GraphLayer]] = {}
        for layer in self.layers:
            if layer.is_initialized:  # layers that share another's keys and values, or never run, store nothing
                by_device.setdefault(layer.device, []).append(layer)
        # Copied before any is advanced: a device's own length moves with its layers.
        lengths = {device: kv_len.to(device, non_blocking=True) for device in by_device}
        for device, layers in by_device.items():
            commit_kv(
                [layer.keys for layer in layers],
                [layer.values for layer in layers],
                accepted_rows.to(device, non_blocking=True),
                num_accepted.to(device, non_blocking=True),
                lengths[device],
                backend=backend,
            )
        if kv_len.device not in by_device:
            kv_len.add_(num_accepted)

    def commit_states(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """Take the accepted rows into the states alone: their keys and values lie where they belong."""
        for form in self.forms.values():
            form.commit(accepted_rows, num_accepted)

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        stored = sum(t.nbytes for layer in self.layers if layer.is_initialized for t in (layer.keys, layer.values))
        states = sum(layer.nbytes for layer in self.layers if isinstance(layer, StateLayer))
        return stored + states + sum(form.nbytes for form in self.forms.values())
