"""The way that a model's rows are forwarded, as one operator or through its modules, and why.

A proof sees another formula (:mod:`.proof`). Rounding hides a number that is slightly off, and a layer in the middle of
many in half precision; a few tokens do not show code that goes by how it is called. What they cannot see of a
LLaMA-like model that is not what the operator computes, :func:`foreign` names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)
from transformers.activations import ACT2CLS

from gsd_kernels import cpu_levels
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.cuda_common import OTHERWISE, check_device
from gsd_kernels.ops.decoder_rows import DecoderWeights, cuda
from gsd_kernels.ops.packed.api import FLOATS
from gsd_kernels.ops.state_rows import BLOCK

from ..packed.modules import Packed, PackedEmbedding, PackedLinear, device_of_weights, dtype_of, stored_in
from . import proof, replay
from .attention import AttentionKind
from .facts import Facts, fact, foreign_code
from .modes import Unsupported
from .probe import WHOLE_TOKENS, examine, least_piece, served
from .recurrent.mixers import mixers_of
from .recurrent.windowed import is_windowed
from .runner import FusedRows, RowModel, layers_of, weights_of

logger = logging.getLogger("gsd_kernels")
CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
STATIC_ROPE = ("default", "linear", "llama3", "yarn")  # one set of frequencies for all lengths
SILU = (nn.SiLU, ACT2CLS["silu"])
MATRICES = (nn.Linear, nn.Embedding, PackedLinear, PackedEmbedding)
PLAIN_MODULES = (*MATRICES, nn.ModuleList, *SILU)
SWITCH = "GSD_KERNELS_FUSED_ROWS"
"""Environment variable, see :data:`SETTINGS`."""
SETTINGS = ("0", "1", "cuda")
"""Rows and prompts go through the modules; as one operator on a CPU and on GPUs that prove it right and no slower (the
default); on every GPU that can run it, unproved."""
STATES, PROVED_BLOCK = proof.Passage(steps=2), 4
"""Text of a proof of recurrent layers, and tokens between two states in it: rows read the second one."""


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
    return unavailable_reason(own, device) or error_of(check_device, device)


def error_of(check: Callable[..., None], *arguments: object) -> str | None:
    """The message of the error that a check raises, or ``None``."""
    try:
        check(*arguments)
    except (TypeError, ValueError) as error:
        return str(error).removesuffix(OTHERWISE)
    return None


def why_not(model: PreTrainedModel | Facts, backend: str) -> str | None:
    """Name what keeps a model from being forwarded by one operator, or ``None``.

    Raises:
        ValueError: a variable of the environment says what there is not.
    """
    facts = Facts.of(model)
    model = facts.model
    reason = missing(model.device, backend)
    if reason is not None:
        return reason
    if model.device.type == "cpu":
        cpu_levels.active()  # else the proof's error would be a reason
    if type(model) not in CLASSES:
        return f"{type(model).__name__} is not one of {', '.join(c.__name__ for c in CLASSES)}"
    reason = foreign(facts)
    if reason is None and replay.is_gpu(model.device):
        weights = weights_of(model, served(facts).kinds)
        reason = error_of(cuda.check, weights) or choice(weights).why
    if reason is not None:
        return reason
    difference = proof.why_not_proved(facts, FusedRows, backend)
    return None if difference is None else difference.what


@fact
def foreign(facts: Facts) -> str | None:
    """Name what keeps a LLaMA-like model from being what the operator computes, or ``None``."""
    return foreign_code(facts) or next(_unread(facts), None)


def _unread(facts: Facts) -> Iterator[str]:
    """Name what a model has that the operator has no argument for, one thing after the other."""
    examine(facts)  # a forward: in the first one a library may rewrite its weights
    model, layers, rotary = facts.model, layers_of(facts.model), facts.model.model.rotary_emb
    dtype, device = dtype_of(model.lm_head), model.device
    if dtype not in FLOATS:
        yield f"an output matrix of {dtype}, which is none of float32, bfloat16 and float16"
    for name, module in facts.modules:
        kind, stored, found = type(module), stored_in(module), dtype
        places = {parameter.device for parameter in module.parameters(recurse=False)}
        plain = kind.__module__ == type(model).__module__ or kind in PLAIN_MODULES
        if not plain and (stored is None or isinstance(module, Packed)):  # a library's have classes of their own
            yield f"{name} is not a plain module of transformers or PyTorch but {kind.__module__}.{kind.__qualname__}"
        if stored is not None:
            if stored.problem is not None:
                yield f"{name} {stored.problem}"
            found, places = dtype if stored.any_dtype else stored.dtype, {tensor.device for tensor in stored.tensors}
        elif isinstance(module, MATRICES):
            found, places = dtype_of(module), {device_of_weights(module)}
        if found != dtype:
            yield f"{name} stands for {found}, the output matrix is {dtype}"
        if places - {device}:
            yield f"{name} lies on another device than the output matrix"
    kinds = served(facts).kinds
    epsilons = [module.variance_epsilon for _, module in facts.modules if hasattr(module, "variance_epsilon")]
    scales = [layer.self_attn.scaling for layer in layers]
    # A number of another kind, such as a tensor, could change in its place, which nobody would look at again.
    if any(type(number) not in (float, int) for number in (*epsilons, *scales, rotary.attention_scaling)):
        yield "a scale or epsilon that is no number"
    for what, found in (
        ("a tensor-parallel model", getattr(model, "_device_mesh", None) is not None),
        ("a bias of the output matrix", model.lm_head.bias is not None),
        ("an embedding with max_norm", getattr(model.model.embed_tokens, "max_norm", None) is not None),
        ("rotary frequencies by length", getattr(rotary, "rope_type", "default") not in STATIC_ROPE),
        ("another activation than SiLU", any(type(layer.mlp.act_fn) not in SILU for layer in layers)),
        ("a forward of another class", any(map(_borrows, {type(module) for _, module in facts.modules}))),
        ("attention of another kind", any(kind != AttentionKind(kind.window) for kind in kinds)),
        ("another scale of attention", {*scales} != {(2 * rotary.inv_freq.numel()) ** -0.5}),
        ("norms of several epsilons", len({*epsilons}) > 1),
        (f"{len(layers)} layers with {len(kinds)} attention calls", len(layers) != len(kinds)),
    ):
        if found:
            yield what


def _borrows(kind: Any) -> bool:
    """Return whether a class forwards by a function that was written in another one."""
    written = getattr(kind.forward, "__qualname__", "").rpartition(".")[0]
    return written not in {"", *(base.__qualname__ for base in kind.__mro__)}


def choice(weights: DecoderWeights) -> proof.Choice:
    """The way that a GPU's operator goes with weights that it takes."""
    if switch() == "cuda":
        return proof.Choice(None)
    if weights.packing[0]:
        return proof.Choice(f"packed weights have not been measured on a GPU: on request, {SWITCH}=cuda")
    return proof.choice(weights.final_norm.device, weights.dtype, 2 * weights.inv_freq.shape[0])


def check_rows(facts: Facts, name: str) -> None:
    """Raise unless rows through a target's modules are what the model computes, where anything may make a difference.

    Code that is not transformers' own may go by what it is called with: one token at a time, transformers' cache, the
    attention's name. Attention may leave out sinks, or be another function than softmax. And transformers takes a
    text's length from the first layer of its cache, written or not.

    Raises:
        Unsupported: ``model``, the argument ``name``, computes something else of graph rows.
    """
    report, passage = served(facts), proof.LONG
    if mixers := mixers_of(facts):
        if block_of(facts, "auto"):
            return
        suspect, passage = f"its layers keep a recurrent state ({mixers[0][0]})", STATES
    elif report.unusual is not None:
        suspect = report.unusual
    elif (code := foreign_code(facts, shipped=False)) is not None:
        suspect = f"it has code that is not transformers' own: {code}"
    elif report.unwritten:
        suspect, passage = f"no layer of it has the number {min(report.unwritten)} (layer_idx)", proof.SHORT
    else:
        return
    difference = proof.why_not_proved(facts, RowModel, "auto", passage, singly=True)
    if difference is not None:
        raise Unsupported(
            f"{name}: {type(facts.model).__name__} cannot be forwarded with graph rows, since {difference.what}; "
            f"{suspect}; not supported"
        ) from difference.cause


@fact
def block_of(facts: Facts, backend: str) -> int:
    """Tokens of a block where recurrent layers keep a window of the text; 0 where their rows are computed by depth."""
    mixers = mixers_of(facts)
    devices = {parameter.device for _, module in mixers for parameter in module.parameters()}
    windowed = (
        any(is_windowed(module) for _, module in mixers)
        and backend in ("auto", "cpu")
        and least_piece(facts) != WHOLE_TOKENS
        and not any(unavailable_reason("cpu", device) for device in devices)
        and proof.why_not_proved(facts, RowModel, backend, STATES, singly=True, block=PROVED_BLOCK) is None
    )
    return BLOCK if windowed else 0


def rows_of(
    model: PreTrainedModel | Facts, capacity: int, kv_start: Tensor, backend: str, hidden_layers: tuple[int, ...] = ()
) -> RowModel:
    """The fastest way to forward the rows of a target or draft; arguments as of :class:`RowModel`."""
    facts = Facts.of(model)
    given, reason = (facts, capacity, kv_start, backend, hidden_layers), why_not(facts, backend)
    if reason is None:
        fused = FusedRows(*given)
        if fused.operator == "cuda":
            _, way, fused.prompt_rows = choice(fused.weights)
            fused.settings = cuda.settings(way, fused.device)
        return fused
    name = type(facts.model).__name__
    logger.info_once("rows of %s go through its modules: %s", name, reason)  # type: ignore[attr-defined]
    rows = RowModel(*given, block=block_of(facts, backend))
    rows.why_modules = reason
    return rows
