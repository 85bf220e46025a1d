"""Rows through the module's own code for prompts, with kernels that know rows in place of transformers'.

What a module does before, between and behind its kernels is its own code, run as it is; the kernels are recognised by
the names that the code calls them by. A convolution keeps the end of the text, a recurrence a window of it, so rows are
rolled back by dropping them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..elementwise import own_bits, plain
from ..fingerprint import called_by
from .mixers import LinearAttentionLayer, RowsCache, State, put_state, with_kernels
from .recurrence import GatedDelta, Mamba2, Recurrence
from .short_convolution import ShortConvolution
from .tree import RowTree

CONVOLUTION = "causal_conv1d_fn"
RECURRENCES: dict[str, type[Recurrence]] = {
    "torch_chunk_gated_delta_rule": GatedDelta,
    "chunk_kimi_delta_attention": GatedDelta,
    "mamba2_chunk_scan": Mamba2,
}
"""Kernels of prompts, by the name that modules call them by."""


class Windowed:
    """The form of a module all of whose kernels are known.

    Args:
        module: whose forward is run.
        layer: of the model's cache, which holds the states that a prompt leaves.
        block: tokens between two states.
        backend: of the ops.
    """

    takes_states = True

    def __init__(self, module: nn.Module, layer: LinearAttentionLayer, block: int, backend: str) -> None:
        self.layer = layer
        names = called_by(type(module))
        self.recurrence = next((kind(block, backend) for name, kind in RECURRENCES.items() if name in names), None)
        self.parts: dict[State, ShortConvolution | Recurrence]
        self.parts = {("conv_states", index): ShortConvolution() for index in range(layer.number_of_states)}
        if self.recurrence is not None:
            self.parts["recurrent_states", 0] = self.recurrence
        ours: dict[str, Any] = {CONVOLUTION: self.convolve, **dict.fromkeys(RECURRENCES, self.recur)}
        self.code = with_kernels(module, ours)
        self.tree: RowTree

    def rows(self, tree: RowTree, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """See :class:`~.mixers.Form`."""
        self.tree, self.no_state = tree, NoState()
        given = [self.no_state if isinstance(value, RowsCache) else value for value in args]
        named = {name: self.no_state if isinstance(value, RowsCache) else value for name, value in options.items()}
        with own_bits(True, in_parts=True):
            out = self.code(*given, **named)
        return tuple(map(plain, out)) if isinstance(out, tuple) else plain(out)

    def convolve(self, *args: Any, **options: Any) -> Tensor:
        """In place of the convolution."""
        options = {name: plain(value) for name, value in options.items()}
        return self.parts["conv_states", self.no_state.state_idx](self.tree, *map(plain, args), **options)

    def recur(self, *args: Any, **options: Any) -> Any:
        """In place of the recurrence."""
        assert self.recurrence is not None
        options = {name: plain(value) for name, value in options.items()}
        return self.recurrence(self.tree, *map(plain, args), **options)

    def begin(self) -> None:
        """See :class:`~.mixers.Form`."""
        for (kind, index), part in self.parts.items():
            part.begin(getattr(self.layer, kind)[index] if self.layer.has_previous_state[index] else None)

    def end(self) -> None:
        """See :class:`~.mixers.Form`."""
        for key, part in self.parts.items():
            state = part.end()
            if state is not None and part.used:  # others may be another module's
                put_state(self.layer, key, state)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """See :class:`~.mixers.Form`."""
        for part in self.parts.values():
            part.commit(accepted_rows, num_accepted)

    @property
    def nbytes(self) -> int:
        """See :class:`~.mixers.Form`."""
        return sum(part.nbytes for part in self.parts.values())


class NoState(Cache):
    """A stand-in that a module's code finds in place of the cache: no state, so that it takes its way for prompts."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state_idx = 0  # of the convolution that comes next

    def get_conv_state(self, *args: Any, **options: Any) -> None:
        """None, for one token as for many."""

    def get_recurrent_state(self, *args: Any, **options: Any) -> None:
        """None."""

    def has_previous_state(self, *args: Any, **options: Any) -> bool:
        """No."""
        return False

    def is_recording_past(self, *args: Any, **options: Any) -> bool:
        """No."""
        return False

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **options: Any) -> Tensor:
        """The rows' own inputs; what is before them, the convolution knows."""
        self.state_idx = state_idx
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, *args: Any, **options: Any) -> Any:
        """Nothing is kept here."""
        return recurrent_states


def is_windowed(module: nn.Module) -> bool:
    """Return whether a module is tried in this form: it calls known kernels; a proof says whether it is right."""
    names = called_by(type(module))
    if "forward" in vars(module) or CONVOLUTION not in names:
        return False
    return "update_recurrent_state" not in names or len(names & RECURRENCES.keys()) == 1
