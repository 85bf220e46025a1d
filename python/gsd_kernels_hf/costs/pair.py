"""A target and its draft in this process and on disk: their identity, and their costs."""

from __future__ import annotations

import hashlib
import itertools
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, cpu_levels
from gsd_kernels.backends import unavailable_reason

from ..locks import forkable_lock
from ..model import properties, replay
from ..model.attention import implementation_of
from ..model.facts import Facts
from ..model.fused import why_not
from ..packed.modules import stored_in
from ..store import Document
from .model import CostModel, CostPrior, layers_of, weight_bytes

MAX_PAIRS = 32  # kept in a process; what was learned of the others is on disk
COSTS = "costs"  # section of a pair's document
FINGERPRINT_VALUES = 16  # of a weight, that tell models of the same sizes apart


class CostPair:
    """A target with a draft, or alone, on this machine: its document and its costs.

    Args:
        models: the target, and what is forwarded beside it.
        backend: of the ops.
        document: where its sections are kept.
        shapes: by name, those that its steps can have.
    """

    def __init__(
        self, models: Sequence[nn.Module], backend: str, document: Document, shapes: Mapping[str, GraphConfig]
    ) -> None:
        self.document = document
        self.sections = document.read()  # and what this process learned since, where generations ended
        about = document.about
        prior = CostPrior.of(
            *models[:2],
            one_op=about.get("draft_forward") == "operator",
            compiled=about["compiled"] and backend in ("auto", "cpu"),
        )
        self.costs = CostModel(prior, shapes)
        self.load(COSTS, self.costs)

    def load(self, section: str, part: Learned) -> None:
        """Load a section into ``part``, if there is one; one of other arrays is ignored, with a warning."""
        if section in self.sections:
            try:
                load(part, self.sections[section])
            except Exception as error:
                self.document.ignore(error)


class Learned(Protocol):
    """Something that was learned, whose arrays are kept on disk."""

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are kept, where they lie."""
        ...


def copied(part: Learned) -> dict[str, np.ndarray]:
    """A copy of what is kept of ``part``."""
    return {name: array.copy() for name, array in part.arrays().items()}


def load(part: Learned, kept: Mapping[str, Any]) -> None:
    """Write what was kept into ``part``: all of it, or nothing where an array is missing or of another size."""
    arrays = part.arrays()
    for array, value in [(a, np.array(kept[name], a.dtype).reshape(a.shape)) for name, a in arrays.items()]:
        array[...] = value


_pairs: dict[Path, CostPair] = {}
_lock = forkable_lock()


def pair_of(models: Sequence[nn.Module], backend: str, shapes: Mapping[str, GraphConfig]) -> CostPair:
    """The pair's place in this process, see :class:`CostPair`; costs are the same object for every call."""
    document = Document("pair", describe(models, backend))
    with _lock:
        pair = _pairs.pop(document.path, None) or CostPair(models, backend, document, shapes)
        _pairs[document.path] = pair  # the newest is last
        while len(_pairs) > MAX_PAIRS:
            del _pairs[next(iter(_pairs))]
    return pair


def describe(models: Sequence[nn.Module], backend: str) -> dict[str, Any]:
    """Everything that the cost of a step depends on: the identity of a pair."""
    target = models[0]

    def identity(m: nn.Module) -> tuple[Any, ...]:
        formats = {
            f"{stored.name}, {stored.kind}" for module in m.modules() if (stored := stored_in(module)) is not None
        }
        return type(m).__name__, *map(str, placed(m)), weight_bytes(m), layers_of(m), sorted(formats)

    return {
        "models": [identity(model) for model in models],
        "machine": machine(properties.device_of(target)),
        "backend": backend,
        **forwards(models, backend),
        "compiled": unavailable_reason("cpu", torch.device("cpu")) is None,
        "attention": implementation_of(target.config),
    }


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
