"""The way that a model's rows are forwarded, as one operator or through its modules, and why."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import lru_cache

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
from gsd_kernels.ops.cuda_common import OTHERWISE, check_device
from gsd_kernels.ops.decoder_rows import DecoderWeights, cuda
from gsd_kernels.ops.state_rows import BLOCK

from . import gpu_proof, proof, replay
from .facts import Facts, fact
from .foreign import foreign, foreign_code
from .fused_rows import FusedRows, weights_of
from .modes import Unsupported
from .probe import served
from .recurrent.mixers import limit_of, mixers_of
from .recurrent.windowed import is_windowed
from .runner import SEVERAL_TOKENS, WHOLE_TOKENS, RowModel

logger = logging.getLogger("gsd_kernels")
CLASSES = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
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
    gpu = replay.is_gpu(model.device)
    reason = foreign(facts)
    if reason is None and gpu:
        weights = weights_of(model, served(facts).kinds)
        reason = error_of(cuda.check, weights) or choice(weights).why
    if reason is not None:
        return reason
    forward = proof.forward_of(FusedRows, backend)
    difference = proof.why_not_proved(facts, f"operator, backend {backend}", forward)
    return None if difference is None else difference.what


def choice(weights: DecoderWeights) -> gpu_proof.Choice:
    """The way that a GPU's operator goes with weights that it takes."""
    if switch() == "cuda":
        return gpu_proof.Choice(None, None)
    if weights.packing[0]:
        return gpu_proof.Choice(f"packed weights have not been measured on a GPU: on request, {SWITCH}=cuda")
    return gpu_proof.choice(weights.final_norm.device, weights.dtype, 2 * weights.inv_freq.shape[0])


def check_rows(facts: Facts, name: str) -> None:
    """Raise unless rows through a target's modules are what the model computes, where anything may make a difference.

    Code that is not transformers' own may go by what it is called with: one token at a time, transformers' cache, the
    attention's name. Attention may leave out sinks, or be another function than softmax. And transformers takes a
    text's length from the first layer of its cache, written or not.

    Raises:
        Unsupported: ``model``, the argument ``name``, computes something else of graph rows.
    """
    report = served(facts)
    code = foreign_code(facts, shipped=False)
    passage = proof.SHORT if report.unusual is None and code is None else proof.LONG
    if mixers := mixers_of(facts):
        if block_of(facts, "auto"):
            return
        suspect, passage = f"its layers keep a recurrent state ({mixers[0][0]})", STATES
    elif report.unusual is not None or code is not None:
        suspect = report.unusual or f"it has code that is not transformers' own: {code}"
    elif report.unwritten:
        suspect = f"no layer of it has the number {min(report.unwritten)} (layer_idx)"
    else:
        return
    forward = proof.forward_of(RowModel, "auto", passage, least=least_piece(facts))
    difference = proof.why_not_proved(facts, "modules", forward, singly=True, passage=passage)
    if difference is not None:
        raise Unsupported(
            f"{name}: {type(facts.model).__name__} cannot be forwarded with graph rows, since {difference.what}; "
            f"{suspect}; not supported"
        ) from difference.cause


def reads_whole(facts: Facts) -> bool:
    """Return whether its prompts are read in one piece, since its layers begin with no state at every one."""
    return bool(mixers_of(facts)) and proof.why_not_in_pieces(facts) is not None


def least_piece(facts: Facts) -> int:
    """Fewest tokens of a piece of its prompts behind the first, see :func:`~.runner.pieces`."""
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


@lru_cache(maxsize=64)
def _log_once(kind: str, reason: str) -> None:
    logger.info("rows of %s go through its modules: %s", kind, reason)


def rows_of(
    model: PreTrainedModel | Facts, capacity: int, kv_start: Tensor, backend: str, hidden_layers: tuple[int, ...] = ()
) -> RowModel:
    """The fastest way to forward the rows of a target or draft; arguments as of :class:`RowModel`."""
    facts = Facts.of(model)
    reason = why_not(facts, backend)
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
