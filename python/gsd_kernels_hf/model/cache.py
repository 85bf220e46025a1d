"""A preallocated key/value cache with room for graph rows behind the committed prefix."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as nested
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin

from gsd_kernels import commit_kv, write_kv
from gsd_kernels.ops.state_rows import StateWindow

from .recurrent.mixers import ByDepth, Form, LinearAttentionLayer, RowsCache, RowTree
from .recurrent.windowed import Recurrence, ShortConvolution, Windowed, is_windowed
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
        cache, shape = self.parent, (*key_states.shape[:2], self.parent.capacity)
        if cache.stacked:
            if cache.block is None:
                sizes = len(cache.layers), 2, *shape, key_states.shape[-1]
                cache.block = key_states.new_zeros(sizes)  # [layers, 2, B, Hkv, capacity, D]
            self.keys, self.values = cache.block[self.index]
        else:
            self.keys, self.values = (s.new_zeros(*shape, s.shape[-1]) for s in (key_states, value_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store [B, Hkv, R, D]: graph rows into their slots (all of the cache comes back), a prompt at the end."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache, end, (batch, _, count, _) = self.parent, None, key_states.shape
        if cache.positions is None:
            ask()
            end = cache.prompt_length + count
            if end > cache.capacity:
                raise ValueError(f"cache: full, {end} positions needed and {cache.capacity} allocated")
        # Finite, because another row's overflow must not reach rows that do not see it: 0 · NaN would be NaN.
        positions, spoiled = cache.rows_on(self.device, (batch, count))  # [B, R]
        given = self.keys, self.values, key_states, value_states, positions
        write_kv(*given, spoiled=spoiled, backend=cache.write_backend)
        return (self.keys, self.values) if end is None else (self.keys[:, :, :end], self.values[:, :, :end])

    def get_seq_length(self, *args: Any) -> int:
        # A layer that was left out, such as cross-attention of a text without images, asks whether it ever ran.
        ran = self.is_initialized or any(getattr(self, "has_previous_state", {}).values())
        return self.parent.prompt_length if ran else 0

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
    get_seq_length = GraphLayer.get_seq_length

    def __init__(self, parent: GraphCache, index: int, states: int) -> None:
        GraphLayer.__init__(self, parent, index)
        LinearAttentionLayer.__init__(self, number_of_states=states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values, which come by place, or of states, which come by name."""
        (GraphLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def restart(self) -> None:
        """Keep no state of the last text; keys and values stay where they are."""
        device, dtype = self.device, self.dtype
        LinearAttentionLayer.__init__(self, number_of_states=self.number_of_states)
        self.device, self.dtype = device, dtype


def held_by(value: Any) -> Iterator[Tensor]:
    """The tensors that a layer or a form holds, and its parts."""
    for leaf in nested.tree_leaves(vars(value)):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, (Recurrence, ShortConvolution, StateWindow)):
            yield from held_by(leaf)


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

    Attributes:
        block: [layers, 2, B, Hkv, capacity, D], what layers are views of where they are stacked.
        by_length: layers to which rows are all at the cache's begin, see :class:`.Temperature`.
        forms: of the modules that keep recurrent states, by layer and class.
        begun: whether the forms go on from the states of a prompt.
        marks: float32 [B], NaN for a text with a key or value that is not finite in its prompt; ``None``: nobody asks.
        positions: int64 [B, R], where graph rows are written; ``None`` while none are forwarded.
    """

    block: Tensor | None = None
    marks: Any = None
    positions: Tensor | None = None

    def __init__(
        self,
        config: PretrainedConfig,
        capacity: int,
        backend: str = "auto",
        *,
        stacked: bool = False,
    ) -> None:
        self.capacity, self.stacked, self.backend = capacity, stacked, backend
        self.by_length: frozenset[int] = frozenset()
        self.forms: dict[tuple[int, type], Form] = {}
        self.begun = False
        self.write_backend = "auto" if backend == "cuda" else backend  # which does not implement it
        self.prompt_length = 0
        self._rows: dict[Any, tuple[Tensor, Tensor | None]] = {}  # positions and marks of rows, by device and shape
        own, count = DynamicCache(config=config).layers, config.get_text_config(decoder=True).num_hidden_layers
        states = {i: one.number_of_states for i, one in enumerate(own) if isinstance(one, LinearAttentionLayer)}
        super().__init__(
            layers=[StateLayer(self, i, states[i]) if i in states else GraphLayer(self, i) for i in range(count)]
        )

    def form_of(self, module: Any, block: int = 0) -> Form:
        """How the rows of a module that keeps a state are computed: one form, by whatever view of the model it comes.

        block: tokens between two states of a module that keeps a window of the text; 0: by depth.
        """
        key, layer = (module.layer_idx, type(module)), self.layers[module.layer_idx]
        if key not in self.forms:
            windowed = block and is_windowed(module)
            self.forms[key] = Windowed(module, layer, block, self.backend) if windowed else ByDepth(module, layer)
        return self.forms[key]

    def restart(self, length: int) -> None:
        """Begin a prompt of which ``length`` positions are stored: where there are recurrent states, all or none."""
        self.prompt_length, self._rows = length, {}
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
            staying = {id(form.layer) for form in self.forms.values() if isinstance(form, ByDepth)}
            for form in self.forms.values():
                if id(form.layer) not in staying:  # its windows hold the states
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
            if layer.is_initialized and self.block is not None:
                layer.keys, layer.values = self.block[layer.index]
            elif layer.is_initialized:
                layer.keys, layer.values = grown(layer.keys, capacity), grown(layer.values, capacity)

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
        self.positions, self.tree, self._rows = positions, tree, {}
        try:
            yield
        finally:
            self.positions, self.tree = None, None

    def rows_on(self, device: torch.device, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        """Where to write rows [B, R], and their marks, the text's to begin with: once for every device of a forward.

        NaN is the mark of a row with a key or value that is not finite; ``None``: nobody asks.
        """
        if (device, shape) not in self._rows:
            batch, count = shape
            places, marks = self.positions, self.marks
            if places is None:  # a prompt's
                places = torch.arange(self.prompt_length, self.prompt_length + count, device=device).repeat(batch, 1)
            if marks is not None:
                marks = marks.to(device)[:, None].repeat(1, count)
            self._rows[device, shape] = places.to(device, non_blocking=True), marks
        return self._rows[device, shape]

    @property
    def spoiled(self) -> list[Tensor]:
        """Marks of the last rows, float32 [B, R]: one part a device, none where nobody asks."""
        return [marks for _, marks in self._rows.values() if marks is not None]

    def advance(self, length: int) -> None:
        """Take what was just stored for the prompt up to ``length``."""
        self._mark(self.padding)
        self.prompt_length, self._rows = length, {}

    def keep_marks(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """Mark texts [B] of which a row that was just forwarded is accepted and was marked itself."""
        place = torch.arange(accepted_rows.shape[1], device=accepted_rows.device)
        self._mark(place < num_accepted[:, None], accepted_rows)

    def _mark(self, kept: Tensor | None, rows: Tensor | None = None) -> None:
        """Mark texts of whose last rows one is marked: of ``rows`` [B, P], or all, those that are ``kept``."""
        for part in self.spoiled:
            if rows is not None:
                part = part.gather(1, rows.clamp(min=0).to(part.device, torch.int64))
            if kept is not None and kept.shape == part.shape:
                part = part.masked_fill(kept.to(part.device) == 0, 0.0)
            self.marks += part.sum(1).to(self.marks.device)

    def marked(self, logits: Tensor) -> Tensor:
        """Logits [B, R, V] of the last rows that were forwarded, NaN where transformers' are.

        Those of rows with a key or value that is not finite, which are stored finite, and of all rows of a text with
        one in its prompt.
        """
        found = self.spoiled
        if all(type(part) is Tensor and part.device.type == "cpu" and not part.numpy().any() for part in found):
            return logits  # marks are 0 or NaN
        rows = logits.shape[1]  # which may be none
        marks: Any = sum(part[:, part.shape[1] - rows :].to(logits.device) for part in found)  # [B, R]
        return logits + marks[..., None].to(logits.dtype)

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
        """Bytes allocated so far; what several hold counts once."""
        held = [t.untyped_storage() for one in (*self.layers, *self.forms.values()) for t in held_by(one)]
        return sum({id(storage): storage.nbytes() for storage in held}.values())
