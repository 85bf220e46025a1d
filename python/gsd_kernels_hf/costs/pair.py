"""A target and its draft in this process and on disk: their identity, and their costs."""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, cpu_levels
from gsd_kernels.backends import unavailable_reason

from ..model import properties, replay
from ..model.attention import implementation_of
from ..model.facts import Facts
from ..model.fused import why_not
from ..packed.modules import stored_in
from ..store import Document, shared
from .model import CostModel, CostPrior, layers_of, weight_bytes

FINGERPRINT_VALUES = 16  # of a weight, that tell models of the same sizes apart


def own_costs(
    models: Sequence[nn.Module], backend: str, shapes: Mapping[str, GraphConfig]
) -> tuple[Document, CostModel]:
    """The document of a pair's costs and these, the same object for every call.

    Args:
        models: the target, and what is forwarded beside it.
        backend: of the ops.
        shapes: by name, those that its steps can have.
    """
    about = {  # everything that the cost of a step depends on
        "models": list(map(identity, models)),
        "machine": machine(properties.device_of(models[0])),
        "backend": backend,
        **forwards(models, backend),
        "compiled": unavailable_reason("cpu", torch.device("cpu")) is None,
        "attention": implementation_of(models[0].config),
        "shapes": list(shapes),
    }
    one_op, compiled = about.get("draft_forward") == "operator", about["compiled"] and backend in ("auto", "cpu")
    document = Document("pair", about)
    return document, shared(
        document, lambda: CostModel(CostPrior.of(*models[:2], one_op=one_op, compiled=compiled), shapes)
    )


def identity(model: nn.Module) -> tuple[Any, ...]:
    """All of a model that its seconds depend on."""
    formats = {
        f"{stored.name}, {stored.kind}" for module in model.modules() if (stored := stored_in(module)) is not None
    }
    return type(model).__name__, *map(str, placed(model)), weight_bytes(model), layers_of(model), sorted(formats)


def placed(module: nn.Module) -> tuple[Any, ...]:
    """Where a module lies, and in which dtype."""
    if isinstance(module, PreTrainedModel):
        return properties.device_of(module), module.dtype
    return tuple((first.device, first.dtype) for first in itertools.islice(module.parameters(), 1))


def machine(device: torch.device) -> tuple[Any, ...]:
    """The GPU; or the processor, the computer, and the number of threads that serve a step."""
    if replay.is_gpu(device):
        return (torch.cuda.get_device_name(device),)
    return platform.processor() or platform.machine(), platform.node(), torch.get_num_threads()


def forwards(models: Sequence[nn.Module], backend: str) -> dict[str, str | None]:
    """Say whether an operator or the modules forward a target's and a draft's rows, and with which instructions."""

    def way(m: nn.Module) -> str:
        whole = isinstance(m, PreTrainedModel) and "lacks" not in vars(m)  # a view shares its model's cache, by modules
        return "operator" if whole and why_not(m, backend) is None else "modules"

    ways = dict(zip(("target_forward", "draft_forward"), map(way, models), strict=False))
    on_cpu = "operator" in ways.values() and not replay.is_gpu(properties.device_of(models[0]))
    return {**ways, "cpu_level": cpu_levels.active() if on_cpu else None}


def fingerprint(model: PreTrainedModel | Facts) -> str:
    """Tells models of the same sizes apart by a few values of their first and last weights; it never fails."""
    digest, own = hashlib.sha256(), model.model if isinstance(model, Facts) else model
    weights = [p for p in own.parameters() if p.numel()] or list(own.buffers())
    for weight in (weights[0], weights[len(weights) // 2], weights[-1]) if weights else ():
        digest.update(_print_of(weight))
    return digest.hexdigest()[:16]


def _print_of(weight: Tensor) -> bytes:
    """A few values; of tensors whose operations are Python's to answer (quantised, sharded, fake) what they are.

    Such a tensor may lack any operation, or ask other ranks.
    """
    if weight.is_meta:
        return b""
    if type(weight).__torch_dispatch__ is Tensor.__torch_dispatch__:
        try:
            some = weight.detach().flatten()[:FINGERPRINT_VALUES]
            return some.to(device="cpu", dtype=torch.float32).numpy().tobytes()
        except Exception:  # a layout without these operations, or a class that answers in Python after all
            pass
    return f"{type(weight).__name__} {list(weight.shape)} {weight.dtype}".encode()
