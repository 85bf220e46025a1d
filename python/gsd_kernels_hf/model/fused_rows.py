"""Rows of graphs and of prompts as one operator, over a model's weights as they lie in it.

A draft of a few million parameters spends most of a forward in calling modules; a target on a CPU reads its weights at
a fraction of the memory's speed, and its rounding depends on how many rows there are; on a GPU the modules of a layer
are 40 launches. Through :func:`gsd_kernels.ops.decoder_rows` weights are read once, and a row has the same bits alone
and among others: in any dtype plain decoding and speculation with any draft give the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels.environment import forcing
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights, decoder_rows
from gsd_kernels.ops.step import FedRows

from ..packed.modules import matrix_of, shape_of
from . import replay
from .asking import ask
from .attention import AttentionKind
from .cache import GraphCache
from .foreign import layers_of
from .hidden import LAST
from .recurrent.mixers import RowTree
from .runner import Listener, RowModel

PROMPT_ROWS = 512
"""Of a prompt at a time, all sequences together: what they need stays in a CPU's cache. A GPU's proof says it."""


def layer_weights(layer: Any, kind: AttentionKind) -> LayerWeights:
    """The parameters of a LLaMA-like layer; ``kind``: what its attention does."""
    a, m = layer.self_attn, layer.mlp
    projections = {
        "q": a.q_proj,
        "k": a.k_proj,
        "v": a.v_proj,
        "o": a.o_proj,
        "gate": m.gate_proj,
        "up": m.up_proj,
        "down": m.down_proj,
    }
    parts = {f"{name}_bias": part.bias for name, part in projections.items() if part.bias is not None}
    norms = {name: getattr(a, name, None) for name in ("q_norm", "k_norm")}
    parts |= {name: norm.weight for name, norm in norms.items() if norm is not None}
    parts |= {"input_norm": layer.input_layernorm.weight, "second_norm": layer.post_attention_layernorm.weight}
    return LayerWeights(
        **{name: matrix_of(part) for name, part in projections.items()},
        **{name: vector.detach() for name, vector in parts.items()},
        window=kind.window or 0,
    )


def weights_of(model: PreTrainedModel, kinds: Sequence[AttentionKind]) -> DecoderWeights:
    """The parameters as they lie in the model; ``kinds``: what each attention call was seen to do.

    Some classes ignore the window of their configuration.
    """
    decoder: Any = model.model
    rotary, head = decoder.rotary_emb, model.lm_head
    inv_freq, scale = rotary.inv_freq.float(), float(rotary.attention_scaling)
    return decoder_weights(decoder.embed_tokens, layers_of(model), kinds, decoder.norm, head, inv_freq, scale)


def decoder_weights(
    embed: Any, layers: Any, kinds: Sequence[AttentionKind], norm: Any, head: Any, inv_freq: Tensor, scale: float
) -> DecoderWeights:
    """The parameters of modules, with the frequencies of the rotation and what cosines and sines are multiplied with.

    Args:
        embed, layers, norm, head: embedding, LLaMA-like layers, norm behind them, output layer.
        kinds: what the attention of each layer does.
        inv_freq: float32 [head_dim / 2].
        scale: see above.
    """
    return DecoderWeights(
        embedding=matrix_of(embed),
        layers=[layer_weights(*at) for at in zip(layers, kinds, strict=True)],
        final_norm=norm.weight.detach(),
        head=matrix_of(head),
        inv_freq=inv_freq,
        rope_scale=scale,
        heads=shape_of(layers[0].self_attn.q_proj)[0] // (2 * inv_freq.numel()),
        eps=norm.variance_epsilon,
    )


def storage_of(cache: GraphCache, weights: DecoderWeights, batch: int) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of every layer that the weights are of, allocated in their dtype if nothing was read."""
    layers, head_dim = cache.layers[: len(weights.layers)], 2 * weights.inv_freq.numel()
    shape = (batch, weights.layers[0].k.shape[0] // head_dim, 0, head_dim)
    for layer in layers:
        if not layer.is_initialized:
            layer.lazy_initialization(weights.final_norm.new_empty(shape, dtype=weights.dtype))
    return [layer.keys for layer in layers], [layer.values for layer in layers]


class FusedRows(RowModel):
    """A :class:`RowModel` whose rows, of graphs and of prompts, are one operator.

    Args:
        given: as of :class:`RowModel`, those that come by place.
    """

    ids_dtype = torch.int32

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.weights = weights_of(self.model, self.kinds)
        self.states = [layer for layer in self.hidden_layers if layer != LAST]
        # On a GPU "auto" never takes it; that rows come here is what the switch says.
        self.operator = "cuda" if replay.is_gpu(self.device) else self.backend
        self.settings: dict[str, str] = {}  # what the operator does otherwise than the environment says
        self.prompt_rows = PROMPT_ROWS

    def changed(self) -> bool:
        """See :meth:`RowModel.changed`; matrices that a library keeps in an order of its own are read anew."""
        super().changed()
        before, self.weights = self.weights, weights_of(self.model, self.kinds)
        if before.inv_freq.data_ptr() != self.weights.inv_freq.data_ptr():  # a copy, that captured steps read
            self.weights = replace(self.weights, inv_freq=before.inv_freq.copy_(self.weights.inv_freq))
        return before.places != self.weights.places

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None, chunk: int | None, listener: Listener | None = None
    ) -> None:
        """Read as :meth:`RowModel.read` does, ``chunk`` tokens at most at once. Padding is where ``kv_start`` says."""
        (batch, length), device = input_ids.shape, self.device
        input_ids = input_ids.to(device)
        most = min(chunk or self.prompt_rows, max(1, self.prompt_rows // batch))
        if length > self.cache.capacity:
            raise ValueError(f"cache: full, {length} positions needed and {self.cache.capacity} allocated")
        for begin in range(self.reused, length, most):
            ask()
            end = min(begin + most, length)
            at = torch.arange(begin, end, dtype=torch.int32, device=device)  # [R]
            pads = at < self.kv_start[:, None]  # [B, R]; they see themselves alone, and nobody sees them
            causal = torch.ones(end - begin, end - begin, dtype=torch.bool, device=device).tril()  # [R, R]
            seen = (causal & ~pads[:, None, :]) | torch.eye(end - begin, dtype=torch.bool, device=device)  # [B, R, R]
            self.cache.padding, spoiled = ~pads, self.cache.new_marks(end - begin, device)
            self._forward(
                self.known(input_ids[:, begin:end]).to(torch.int32),
                (at - self.kv_start[:, None]).clamp(min=0),
                at.expand(batch, -1),
                pack_bits(seen),
                (at - begin).expand(batch, -1),
                torch.full((batch,), begin, dtype=torch.int32, device=device),
                keep=int(end == length and LAST in self.hidden_layers),
                # Of what lies behind, a GPU would have memory for attention's partial sums, and blocks without work.
                seen=end if self.operator == "cuda" else None,
                spoiled=spoiled,
            )
            if spoiled is not None:
                self.cache.mark(spoiled)
            self.cache.prompt_length = end
            if listener is not None:
                listener(self.hidden, begin)

    def forward(
        self,
        fed: FedRows,
        ancestor_mask: Tensor,  # int32 [B, R, words]
        kv_len: Tensor,  # int32 [B]
        node_depths: Tensor,  # int32 [B, N]
        keep: int,
        tree: RowTree | None,
    ) -> Tensor:
        """Forward rows as they were fed; see :meth:`RowModel.forward`."""
        marks = self.operator == "cuda"  # it marks logits itself, by the marks that it is given
        spoiled = self.cache.new_marks(fed.ids.shape[1], self.device, of_texts=marks)  # [B, R]
        rows = fed.ids, fed.positions, fed.places, ancestor_mask, node_depths.to(torch.int32), kv_len
        logits = self._forward(*rows, keep=keep, spoiled=spoiled)  # [B, keep, V]
        return logits if spoiled is None else self.cache.marked(logits, spoiled, already=marks)

    def launch(self, kv_len: Tensor, count: int, nodes: int) -> None:
        """Nothing: the operator was compiled ahead, for sizes known at run time."""

    def _forward(self, *rows: Tensor, keep: int, seen: int | None = None, spoiled: Tensor | None = None) -> Tensor:
        """Logits of the last ``keep`` rows.

        Args:
            rows: int32 token_ids, positions, slots, ancestor_mask, node_depths and kv_len, as of the operator.
            keep, spoiled: likewise.
            seen: positions of the cache that any row reads or writes, at most.
        """
        keys, values = storage_of(self.cache, self.weights, len(rows[0]))  # [B, Hkv, capacity, D] a layer
        if seen is not None:
            keys, values = ([cache[:, :, :seen] for cache in caches] for caches in (keys, values))
        with forcing(self.settings):
            logits, hidden, read_by = decoder_rows(
                self.weights,
                *rows,
                self.kv_start,
                keys,
                values,
                keep=keep,
                states=self.states,
                spoiled=spoiled,
                backend=self.operator,
            )
        dtype = self.weights.dtype
        self.hidden = {LAST: hidden.to(dtype)} if LAST in self.hidden_layers and keep else {}
        self.hidden |= zip(self.states, read_by.to(dtype), strict=True)  # [B, R, D] each
        return logits.to(dtype)
