"""A model's forward of rows as one operator, where that is possible.

A draft of a few million parameters spends most of a forward in calling modules; a target on a CPU reads its weights at
a fraction of the memory's speed, and its rounding depends on how many rows there are; on a GPU the modules of a layer
are 40 launches. Through :func:`gsd_kernels.ops.decoder_rows` weights are read once, and a row has the same bits alone
and among others: in any dtype plain decoding and speculation with any draft give the same text.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from gsd_kernels import cpu_levels
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.environment import forcing
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights, cuda, decoder_rows
from gsd_kernels.ops.state_rows import BLOCK
from gsd_kernels.ops.step import FedRows

from ..packed.modules import matrix_of, shape_of
from . import gpu_proof, proof, replay
from .asking import ask
from .attention import AttentionKind
from .facts import Facts, fact
from .foreign import foreign, foreign_code, foreign_name, layers_of
from .hidden import LAST
from .pieces import SEVERAL_TOKENS, WHOLE_TOKENS
from .probe import served
from .recurrent.mixers import mixers_of
from .recurrent.step_limit import limit_of
from .recurrent.tree import RowTree
from .recurrent.windowed import is_windowed
from .runner import Listener, RowModel

logger = logging.getLogger("gsd_kernels")
CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
SWITCH = "GSD_KERNELS_FUSED_ROWS"
"""Environment variable, see :data:`SETTINGS`."""
SETTINGS = {
    "0": "rows and prompts go through the model's modules",
    "1": "the default: as one operator on a CPU, and on GPUs that prove it right and no slower",
    "cuda": "on every GPU that can run it, unproved",
}
STATES, PROVED_BLOCK = proof.Passage(steps=2), 4
"""Text of a proof of recurrent layers, and tokens between two states in it: rows read the second one."""
PROMPT_ROWS = 512
"""Of a prompt at a time, all sequences together: what they need stays in a CPU's cache. A GPU's proof says it."""


def switch() -> str:
    """The value of ``GSD_KERNELS_FUSED_ROWS``, one of :data:`SETTINGS`.

    Raises:
        ValueError: it is none of them.
    """
    setting = os.environ.get(SWITCH, "1")
    if setting not in SETTINGS:
        raise ValueError(f"{SWITCH}: expected one of {', '.join(SETTINGS)}, got {setting!r}; or unset it")
    return setting


def missing(device: torch.device, backend: str = "auto") -> str | None:
    """The reason that keeps every model on ``device`` from one operator, or ``None``; GPUs prove it besides.

    Raises:
        ValueError: ``GSD_KERNELS_FUSED_ROWS`` is none of :data:`SETTINGS`.
    """
    if switch() == "0":
        return f"{SWITCH}=0"
    own = "cuda" if replay.is_gpu(device) else "cpu"
    if backend not in ("auto", own):
        return f"backend {backend!r} has no such operator"
    return unavailable_reason(own, device) or error_of(cuda.check_device, device)


def error_of(check: Callable[..., None], *arguments: object) -> str | None:
    """The message of the error that a check raises, or ``None``."""
    try:
        check(*arguments)
    except (TypeError, ValueError) as error:
        return str(error).removesuffix(cuda.OTHERWISE)
    return None


@fact
def why_not(facts: Facts, backend: str, hidden_layers: tuple[int, ...] = ()) -> str | None:
    """Name what keeps a model from being forwarded by one operator that keeps these hidden states, or ``None``.

    Raises:
        ValueError: a variable of the environment says what there is not.
    """
    model = facts.model
    reason = missing(model.device, backend)
    if reason is not None:
        return reason
    if model.device.type == "cpu":
        cpu_levels.active()  # else the proof's error would be a reason
    if type(model) not in CLASSES:
        return f"{type(model).__name__} is not one of {', '.join(c.__name__ for c in CLASSES)}"
    gpu = replay.is_gpu(model.device)
    reason = foreign(facts) or (_unserved_by_cuda(weights_of(model, served(facts).kinds)) if gpu else None)
    if reason is not None:
        return reason
    forward = proof.forward_of(FusedRows, backend)
    difference = proof.why_not_proved(facts, f"operator, backend {backend}", forward, closely=not gpu)
    return None if difference is None else difference.what


def _unserved_by_cuda(weights: DecoderWeights) -> str | None:
    """Why a GPU's operator does not multiply these weights, or ``None``."""
    return error_of(cuda.check, weights) or unproved(weights)


def unproved(weights: DecoderWeights) -> str | None:
    """Say what a GPU's operator, which takes such weights, has not proved; ``None``: nothing, or it is asked for."""
    return choice(weights).why


def choice(weights: DecoderWeights) -> gpu_proof.Choice:
    """The way that a GPU's operator goes with weights that it takes."""
    if switch() == "cuda":
        return gpu_proof.Choice(None, None)
    if weights.packing[0]:
        return gpu_proof.Choice(f"packed weights have not been measured on a GPU: on request, {SWITCH}=cuda")
    return gpu_proof.choice(weights.final_norm.device, weights.dtype, 2 * weights.inv_freq.shape[0], ways())


def ways() -> dict[str, gpu_proof.Way]:
    """The way that is proved, and the one that it is held to."""
    return {"operator": FusedRows, "modules": RowModel}


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


def storage_of(
    layers: Sequence[Any], batch: int, kv_heads: int, head_dim: int, like: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of layers of a cache, allocated in the dtype of ``like`` if nothing was read."""
    for layer in layers:
        if not layer.is_initialized:
            layer.lazy_initialization(like.new_empty(batch, kv_heads, 0, head_dim))
    return [layer.keys for layer in layers], [layer.values for layer in layers]


def check_rows(facts: Facts, name: str) -> None:
    """Raise unless rows through a target's modules are what the model computes, where anything may make a difference.

    Code that is not transformers' own may go by what it is called with: one token at a time, transformers' cache, the
    attention's name. Attention may leave out sinks, or be another function than softmax. And transformers takes a
    text's length from the first layer of its cache, written or not.

    Raises:
        ValueError: ``model``, the argument ``name``, computes something else of graph rows.
    """
    report, passage = served(facts), proof.SHORT
    code = foreign_code(facts, shipped=False)
    if mixers := mixers_of(facts):
        if block_of(facts, "auto"):
            return
        suspect, passage = f"its layers keep a recurrent state ({mixers[0][0]})", STATES
    elif report.unusual is not None or code is not None:
        suspect = report.unusual or f"it has code that is not transformers' own: {code}"
        if report.unusual is not None or foreign_name(facts) is not None:
            passage = proof.LONG
    elif report.unwritten:
        suspect = f"no layer of it has the number {min(report.unwritten)} (layer_idx)"
    else:
        return

    difference = why_not_by_modules(facts, passage)
    if difference is not None:
        raise ValueError(
            f"{name}: {type(facts.model).__name__} cannot be forwarded with graph rows, since {difference.what}; "
            f"{suspect}; not supported"
        ) from difference.cause


def why_not_by_modules(facts: Facts, passage: proof.Passage) -> proof.Difference | None:
    """Name what rows through the modules compute otherwise than the model, or ``None``."""
    forward = proof.forward_of(RowModel, "auto", passage, least=least_piece(facts))
    return proof.why_not_proved(facts, "modules", forward, singly=True, passage=passage)


def reads_whole(facts: Facts) -> bool:
    """Return whether its prompts are read in one piece, since its layers begin with no state at every one."""
    return bool(mixers_of(facts)) and proof.why_not_in_pieces(facts) is not None


def least_piece(facts: Facts) -> int:
    """Fewest tokens of a piece of its prompts behind the first, see :mod:`.pieces`."""
    if reads_whole(facts):
        return WHOLE_TOKENS
    return SEVERAL_TOKENS if any(limit_of(module) is not None for _, module in mixers_of(facts)) else 1


@fact
def block_of(facts: Facts, backend: str) -> int:
    """Tokens of a block where recurrent layers keep a window of the text; 0 where their rows are computed by depth."""
    mixers = mixers_of(facts)
    if not mixers or not any(is_windowed(module) for _, module in mixers) or reads_whole(facts):
        return 0
    devices = {parameter.device for _, module in mixers for parameter in module.parameters()}
    if backend not in ("auto", "cpu") or any(unavailable_reason("cpu", device) is not None for device in devices):
        return 0
    forward = proof.forward_of(RowModel, backend, STATES, block=PROVED_BLOCK, least=least_piece(facts))
    difference = proof.why_not_proved(facts, f"windows, backend {backend}", forward, singly=True, passage=STATES)
    return BLOCK if difference is None else 0


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
        self.head_dim = 2 * self.weights.inv_freq.numel()
        self.kv_heads = self.weights.layers[0].k.shape[0] // self.head_dim
        self.settings: dict[str, str] = {}  # what the operator does otherwise than the environment says
        self.prompt_rows = PROMPT_ROWS

    def changed(self) -> bool:
        """See :meth:`RowModel.changed`; matrices that a library keeps in an order of its own are read anew."""
        super().changed()
        before, self.weights = self.weights, weights_of(self.model, self.kinds)
        if before.inv_freq.shape == self.weights.inv_freq.shape:  # which may be a copy, that restart fills
            self.weights = replace(self.weights, inv_freq=before.inv_freq)
        return before.places != self.weights.places

    def restart(self, input_ids: Tensor, chunk: int | None = None) -> None:
        """Begin a text as :meth:`RowModel.restart` does. Frequencies that are a copy of the model's follow them."""
        inv_freq = self.model.model.rotary_emb.inv_freq
        if inv_freq.data_ptr() != self.weights.inv_freq.data_ptr():
            self.weights.inv_freq.copy_(inv_freq)
        super().restart(input_ids, chunk)

    def caches(self, batch: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of every layer that the model has, allocated if nothing was read."""
        layers, like = self.cache.layers[: len(self.weights.layers)], self.weights.final_norm.to(self.weights.dtype)
        return storage_of(layers, batch, self.kv_heads, self.head_dim, like)

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
        keys, values = self.caches(rows[0].shape[0])  # [B, Hkv, capacity, D] a layer
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


@lru_cache(maxsize=64)
def _log_once(kind: str, reason: str) -> None:
    logger.info("rows of %s go through its modules: %s", kind, reason)


def rows_of(
    model: PreTrainedModel | Facts, capacity: int, kv_start: Tensor, backend: str, hidden_layers: tuple[int, ...] = ()
) -> RowModel:
    """The fastest way to forward the rows of a target or draft; arguments as of :class:`RowModel`."""
    facts = Facts.of(model)
    reason = why_not(facts, backend, hidden_layers)
    if reason is None:
        fused = FusedRows(facts, capacity, kv_start, backend, hidden_layers)
        if fused.operator == "cuda":
            _, way, fused.prompt_rows = choice(fused.weights)
            fused.settings = cuda.settings(way, fused.device)
        return fused
    _log_once(type(facts.model).__name__, reason)
    block, least = block_of(facts, backend), least_piece(facts)
    rows = RowModel(facts, capacity, kv_start, backend, hidden_layers, block=block, least=least)
    rows.why_modules = reason
    return rows
