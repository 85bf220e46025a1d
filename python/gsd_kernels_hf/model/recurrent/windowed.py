"""Rows through a module's own code for prompts, with kernels that know rows in place of transformers'.

What a module does before, between and behind its kernels is its own code, run as it is; the kernels are recognised by
the names that the code calls them by. A convolution over a few tokens keeps the end of the text, a recurrence a window
of it (:mod:`gsd_kernels.ops.state_rows`), so rows are rolled back by dropping them.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache

from gsd_kernels.ops.state_rows import StateWindow, state_commit, state_rows

from ...records import last_rows
from ..facts import called_by
from ..linear import as_rows, own_bits, plain
from .mixers import (
    Limit,
    LinearAttentionLayer,
    RowsCache,
    RowTree,
    State,
    put_state,
    states_in,
    time_steps,
    with_kernels,
)

EPS = 1e-6


class Recurrence:
    """A recurrent kernel of transformers over rows; a class each says what it is called with.

    Args:
        block: tokens between two states.
        backend: of the ops.
    """

    def __init__(self, block: int, backend: str) -> None:
        self.block, self.backend = block, backend
        self.window: Any = None  # a StateWindow, from the first rows on
        self.state: Tensor | None = None  # [B, H, K, V], of the prompt, until the first rows
        self.lengths: Tensor | None = None  # int32 [B], tokens since the prompt; None: no rows came since
        self.behind_prompt = False  # whether none was taken into the text

    def laid_out(self, state: Tensor) -> Tensor:
        """The state as transformers keeps it, as [B, H, K, V], and back."""
        return state

    def begin(self, state: Tensor | None) -> None:
        """Go on behind a prompt that left ``state``."""
        self.state, self.lengths = None if state is None else self.laid_out(state), None
        self.behind_prompt = True

    def end(self) -> Tensor | None:
        """The state at the end of the text, as transformers keeps it; ``None``: there is none yet."""
        state = self.state if self.lengths is None else self.window.end(self.lengths)
        return None if state is None else self.laid_out(state).contiguous()

    def rows(
        self,
        tree: RowTree,
        query: Tensor,  # [B, R, G, K]
        key: Tensor,
        value: Tensor,  # [B, R, H, V]
        decay: Tensor,  # [B, R, H, 1 or K], logarithms
        beta: Tensor | None,  # [B, R, H]
    ) -> Tensor:
        """See :func:`gsd_kernels.ops.state_rows.state_rows`; float32 [B, R, H, V]."""
        batch, _, groups, size = key.shape
        (heads, width), decays = value.shape[2:], decay.shape[3]
        if self.lengths is None:
            if self.window is None:
                self.window = StateWindow.empty(batch, heads, groups, size, width, decays, key.device, self.block)
            self.window.state[0] = 0.0 if self.state is None else self.state
            self.state = None
            self.lengths = torch.zeros(batch, dtype=torch.int32, device=key.device)
        parents, depths = tree.narrow
        self.window.reserve(parents.shape[1])
        given = (None if t is None else t.float() for t in (query, key, value, decay, beta))
        return state_rows(*given, parents, depths, self.lengths, self.window, backend=self.backend)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """See :class:`~.mixers.ByDepth`."""
        if self.lengths is None:
            return
        device = self.lengths.device
        accepted, count = accepted_rows.to(device, torch.int32), num_accepted.to(device, torch.int32)
        state_commit(accepted, count, self.lengths, self.window, backend=self.backend)
        self.lengths, self.behind_prompt = self.lengths + count, False


class GatedDelta(Recurrence):
    """The gated delta rule (arXiv 2412.06464), and Kimi's, whose decays are a key channel's own (arXiv 2510.26692).

    ``torch_chunk_gated_delta_rule`` and ``chunk_kimi_delta_attention`` over rows.
    """

    def __call__(
        self,
        tree: RowTree,
        query: Tensor,  # [B, R, G, K]
        key: Tensor,
        value: Tensor,  # [B, R, H, V]
        g: Tensor,  # [B, R, H] or [B, R, H, K]
        beta: Tensor,  # [B, R, H]
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        """Output of rows [B, R, H, V], and an empty state."""
        dtype = query.dtype
        query, key = query.float(), key.float()
        if use_qk_l2norm_in_kernel:
            query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPS) for x in (query, key))  # of length 1
        decay = g[..., None] if g.dim() == 3 else g
        out = self.rows(tree, query * query.shape[-1] ** -0.5, key, value, decay, beta)
        return out.to(dtype), out.new_empty(0)


class Mamba2(Recurrence):
    """The state space of Mamba-2 (arXiv 2405.21060), a gated delta rule without the delta: ``mamba2_chunk_scan``.

    Steps in time have their limit in what ends a prompt, as in transformers.
    """

    def laid_out(self, state: Tensor) -> Tensor:
        """transformers keeps [B, H, V, K]."""
        return state.transpose(-1, -2)

    def __call__(
        self,
        tree: RowTree,
        hidden_states: Tensor,  # [B, R, H, V]
        dt: Tensor,  # [B, R, H]
        A: Tensor,  # [H]
        B: Tensor,  # [B, R, G, K]
        C: Tensor,
        chunk_size: int = 0,
        D: Tensor | None = None,  # [H] or [H, V]
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: Limit = (0.0, torch.inf),
        return_final_states: bool = False,
        z: Tensor | None = None,
        **_: Any,
    ) -> Any:
        """Output of rows [B, R, H, V], and an empty state where one is asked for."""
        ends = tree.parents[:, tree.first :, None] < 0 if self.behind_prompt else None  # [B, R, 1]
        dt = time_steps(dt, dt_bias, dt_softplus, dt_limit, ends)
        x, step = hidden_states.float(), dt.float()[..., None]
        out = self.rows(tree, C, B, x * step, A.float()[:, None] * step, None)
        if D is not None:
            out = out + x * (D[:, None] if D.dim() == 1 else D).float()
        if z is not None:
            out = out * plain(silu(as_rows(z.float())))
        out = out.to(hidden_states.dtype)
        return (out, out.new_empty(0)) if return_final_states else out


class ShortConvolution:
    """transformers' ``causal_conv1d_fn`` over rows: a row reads its nearest ancestors, then the end of the text.

    Sums run from the oldest token to the row, in float32 at least.

    Attributes:
        last: [B, W − 1, C], inputs at the end of the text; ``None``: not known before the first row.
        rows: [B, W − 1 + T, C], those and, behind them, the rows' since.
        before: see :meth:`RowTree.before`; ``None``: the module does not have this convolution, or had no rows.
    """

    last: Any = None
    rows: Any = None
    before: Tensor | None = None

    def begin(self, state: Tensor | None) -> None:
        """Go on behind a prompt, of which ``state`` [B, C, W] holds the last inputs."""
        self.last = None if state is None else state[..., 1:].transpose(1, 2)

    def end(self) -> Tensor | None:
        """The state at the end of the text, [B, C, W]; its first token is not read any more."""
        if self.last is None or self.before is None:
            return None
        return pad(self.last, (0, 0, 1, 0)).transpose(1, 2).contiguous()

    def __call__(
        self,
        tree: RowTree,
        hidden_states: Tensor,  # [B, C, R]
        weight: Tensor,  # [C, W]
        bias: Tensor | None = None,
        activation: str | None = None,
        **_: Any,
    ) -> Tensor:
        """Rows [B, C, R], through the activation."""
        inputs, width = hidden_states.transpose(1, 2).to(weight.dtype), weight.shape[1]
        if self.last is None:
            self.last = inputs.new_zeros(inputs.shape[0], width - 1, inputs.shape[2])
        self.before = tree.before(width)
        earlier = (self.rows if tree.first else self.last)[:, : width - 1 + tree.first]
        self.rows = torch.cat([earlier.to(inputs), inputs], 1)
        exact = torch.promote_types(inputs.dtype, torch.float32)
        there = self.before[:, tree.first :, :, None].expand(-1, -1, -1, inputs.shape[2])  # [B, R, W, C]
        read = (self.rows.gather(1, there[:, :, back]).to(exact) for back in range(width - 1, -1, -1))
        terms = [*map(torch.mul, read, weight.to(exact).T), *(() if bias is None else (bias.to(exact),))]
        out = reduce(torch.add, terms).to(inputs.dtype)
        if activation is not None:
            out = plain(ACT2FN[activation](as_rows(out)))
        return out.to(hidden_states.dtype).transpose(1, 2)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """See :class:`~.mixers.ByDepth`."""
        if self.rows is None or self.before is None:
            return
        device = self.rows.device
        count = num_accepted.to(device)
        row = last_rows(accepted_rows.to(device), count)[:, None]  # [B, 1]
        width = self.before.shape[2]
        path = self.before.gather(1, row[..., None].expand(-1, -1, width))[:, 0, : width - 1].flip(1)  # [B, W − 1]
        new = self.rows.gather(1, path[..., None].expand(-1, -1, self.rows.shape[2]))
        self.last = torch.where((count == 0)[:, None, None], self.last, new)
        self.rows = None


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

    def __init__(self, module: nn.Module, layer: LinearAttentionLayer, block: int, backend: str) -> None:
        self.layer = layer
        self.parts: dict[State, ShortConvolution | Recurrence]
        self.parts = {("conv_states", index): ShortConvolution() for index in range(layer.number_of_states)}
        for name in called_by(type(module)) & RECURRENCES.keys():
            self.parts["recurrent_states", 0] = RECURRENCES[name](block, backend)
        ours = {CONVOLUTION: "conv_states", **dict.fromkeys(RECURRENCES, "recurrent_states")}
        self.code = with_kernels(module, {name: partial(self.run, kind) for name, kind in ours.items()})
        self.tree: RowTree

    def rows(self, tree: RowTree, options: dict[str, Any]) -> Any:
        """See :class:`~.mixers.ByDepth`."""
        self.tree, self.no_state = tree, NoState(layers=[])
        given = {name: self.no_state if isinstance(value, RowsCache) else value for name, value in options.items()}
        with own_bits(True, in_parts=True):
            out = self.code(**given)
        return tuple(map(plain, out)) if isinstance(out, tuple) else plain(out)

    def run(self, kind: str, *args: Any, **options: Any) -> Any:
        """In place of the kernel that moves a kind of state on."""
        part = self.parts[kind, self.no_state.state_idx if kind == "conv_states" else 0]
        return part(self.tree, *map(plain, args), **{name: plain(value) for name, value in options.items()})

    def begin(self) -> None:
        """See :class:`~.mixers.ByDepth`."""
        states = states_in(self.layer)
        for key, part in self.parts.items():
            part.begin(states.get(key))

    def end(self) -> None:
        """See :class:`~.mixers.ByDepth`."""
        for key, part in self.parts.items():
            if (state := part.end()) is not None:
                put_state(self.layer, key, state)

    def commit(self, accepted_rows: Tensor, num_accepted: Tensor) -> None:
        """See :class:`~.mixers.ByDepth`."""
        for part in self.parts.values():
            part.commit(accepted_rows, num_accepted)


class NoState(Cache):
    """A stand-in that a module's code finds in place of the cache: no state, so that it takes its way for prompts."""

    state_idx = 0  # of the convolution that comes next

    def get_conv_state(self, *args: Any, **options: Any) -> None:
        """None, for one token as for many."""

    def has_previous_state(self, *args: Any, **options: Any) -> bool:
        """No."""
        return False

    get_recurrent_state, is_recording_past = get_conv_state, has_previous_state

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
