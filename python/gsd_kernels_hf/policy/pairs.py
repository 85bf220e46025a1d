"""What belongs to a pair in this process and on disk: its identity, its costs, what was learned of its sources."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

import gsd_kernels
from gsd_kernels import cpu_levels

from ..model import properties, replay
from ..model.attention import implementation_of
from ..model.fused import why_not
from ..packed.modules import packed_in
from ..sources.layer_skip import LayerSkip
from .auto import AutoPolicy, Experience
from .costs import CostModel, Known
from .ladder import every_shape, ladder, row_shape, shape_name
from .machine import bandwidth, machine, products
from .rows import RowExperience, RowPolicy
from .store import Document, Saver, cache_dir

SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
PAIRS = 32  # kept in a process; what was learned of the others is on disk
COSTS = "costs"
PRINT_VALUES = 16  # of a weight, that tell models of the same sizes apart

Draft = PreTrainedModel | LayerSkip | nn.Module | None
"""A draft model, a view of the target, or a drafter that reads its hidden states."""


class Pair:
    """A target with a draft, or alone, on this machine: its document and its costs.

    Args:
        model, draft: see :func:`~gsd_kernels.tune`.
        backend: of the ops.
    """

    def __init__(self, model: PreTrainedModel, draft: Draft, backend: str, document: Document) -> None:
        self.document = document
        self.sections = document.read()
        self.device = properties.device_of(model)
        self.shapes = every_shape(self.device.type, with_model=draft is not None)
        view = draft.view if isinstance(draft, LayerSkip) else draft
        about = document.about
        ways = {
            "one_op": about["draft_forward"] == "operator",
            "compiled": about["compiled"] and backend in ("auto", "cpu"),
            "products": None if replay.is_gpu(self.device) else products(model.dtype, target_level(about)),
        }
        known = Known.of(model, view, bandwidth(self.device), **ways)
        rows_vary = self.device.type == "cpu" and draft is None
        self.costs = CostModel(known, self.shapes, rows_vary=rows_vary)
        self._load(COSTS, self.costs)

    def _load(self, section: str, part: CostModel | Experience | RowExperience) -> None:
        if section in self.sections:
            try:
                part.load(self.sections[section])
            except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
                self.document.ignore(error)

    def experience(self, about: str, *, reuses: bool, counts_rows: bool) -> tuple[Experience | RowExperience, Saver]:
        """What was learned under ``about``, of shapes or of the rows of one, and what keeps it on disk."""
        found: Experience | RowExperience
        if counts_rows:
            found = RowExperience(self.costs, shape_name(row_shape()), row_shape())
        else:
            with_model = any(s.depth for s in self.shapes.values())
            found = Experience(self.costs, ladder(self.device.type, with_model=with_model, reuses=reuses))
        section = f"learned {hashlib.sha256(about.encode()).hexdigest()[:16]}"
        self._load(section, found)
        return found, Saver(self.document, lambda: {COSTS: self.costs.as_dict(), section: found.as_dict()})


_pairs: dict[Path, Pair] = {}
_lock = threading.Lock()


def pair_of(model: PreTrainedModel, draft: Draft, backend: str, others: Sequence[nn.Module] = ()) -> Pair:
    """The pair's place in this process; costs are the same object for every call.

    ``others``: what is forwarded beside ``draft``; costs with them are known apart.
    """
    document = Document("pair", describe(model, draft, backend, others))
    with _lock:
        found = _pairs.pop(document.path, None) or Pair(model, draft, backend, document)
        _pairs[document.path] = found  # the newest is last
        while len(_pairs) > PAIRS:
            del _pairs[next(iter(_pairs))]
    return found


def automatic_policy(
    kept: MutableMapping[Any, tuple[Experience | RowExperience, Saver]],
    model: PreTrainedModel,
    draft: Draft,
    *,
    others: Sequence[nn.Module] = (),
    sources: Sequence[str],
    reuses: bool,
    about: str,
    batch: int,
    prefix: int,
    reads_prompt: bool,
    trims: bool,
    backend: str,
) -> AutoPolicy | RowPolicy:
    """The policy of one generation.

    Args:
        kept: what the caller keeps of this pair between generations; filled here.
        model, draft: target and draft.
        others: models and drafters that are forwarded beside ``draft``.
        sources: names of the draft sources.
        reuses: whether one of them proposes without a forward.
        about: of all else that acceptance depends on: how tokens are sampled, the criterion.
        batch, prefix: sequences, and tokens of the prompt.
        reads_prompt: whether a source reads all of the prompt before it proposes.
        trims: whether the host may choose how many rows a step has.
        backend: of the ops.
    """
    counts_rows = trims and draft is None
    key = (cache_dir(), backend, counts_rows, *sources, *forwards(model, draft, backend).values())
    if key not in kept:
        models = [model, *([] if draft is None or isinstance(draft, LayerSkip) else [draft]), *others]
        about = " ".join([*(["rows"] if counts_rows else []), about, *sources, *(fingerprint(m) for m in models)])
        pair = pair_of(model, draft, backend, others)
        kept.setdefault(key, pair.experience(about, reuses=reuses, counts_rows=counts_rows))
    experience, saver = kept[key]
    if isinstance(experience, RowExperience):
        return RowPolicy(experience, batch=batch, prefix=prefix, saver=saver)
    return AutoPolicy(experience, batch=batch, prefix=prefix, reads_prompt=reads_prompt, saver=saver)


def known_steps(model: PreTrainedModel, draft: Draft, backend: str = "auto") -> int:
    """Steps whose times this machine remembers of the pair, from this process and earlier ones."""
    return pair_of(model, draft, backend).costs.steps


def describe(model: PreTrainedModel, draft: Draft, backend: str, others: Sequence[nn.Module] = ()) -> dict[str, Any]:
    """Everything that the cost of a step depends on; the identity of what is known of a pair."""
    device = properties.device_of(model)
    skip = isinstance(draft, LayerSkip)

    def identity(m: nn.Module) -> dict[str, Any]:
        if not isinstance(m, PreTrainedModel):
            first = next(m.parameters(), torch.empty(0))
            size = {name: list(p.shape) for name, p in m.named_parameters()}
            return {"class": type(m).__name__, "dtype": str(first.dtype), "device": str(first.device), **size}
        config = m.config.get_text_config(decoder=True)
        size = {key: properties.size_in(config, key) for key in SIZES}
        kinds = sorted({module.kind.name for module in packed_in(m)})
        size |= {"packed": kinds} if kinds else {}
        return {"class": type(m).__name__, "dtype": str(m.dtype), "device": str(properties.device_of(m)), **size}

    return {
        "target": identity(model),
        "draft": str(draft) if skip else None if draft is None else identity(draft),
        **({"others": [identity(other) for other in others]} if others else {}),
        "machine": machine(device),
        "backend": backend,
        **forwards(model, draft, backend),
        "compiled": gsd_kernels.backends.unavailable_reason("cpu", torch.device("cpu")) is None,
        "attention": implementation_of(model.config),
        "versions": [gsd_kernels.__version__, torch.__version__, transformers.__version__],
    }


def forwards(model: PreTrainedModel, draft: Draft, backend: str) -> dict[str, str | None]:
    """Whether an operator or the modules forward rows, and with which instructions the operator does."""

    def way(m: nn.Module | LayerSkip | None) -> str:
        return "operator" if isinstance(m, PreTrainedModel) and why_not(m, backend) is None else "modules"

    ways = {"target_forward": way(model), "draft_forward": way(draft)}
    on_cpu = "operator" in ways.values() and not replay.is_gpu(properties.device_of(model))
    return {**ways, "cpu_level": cpu_levels.active() if on_cpu else None}


def target_level(about: Mapping[str, Any]) -> str | None:
    """Instructions of the operator that forwards the target's rows; ``None``: modules do."""
    return about["cpu_level"] if about["target_forward"] == "operator" else None


def fingerprint(model: nn.Module) -> str:
    """Tells models of the same sizes apart by a few values of their first and last weights; it never fails."""
    digest = hashlib.sha256()
    weights = list(model.parameters()) or list(model.buffers())
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
            some = weight.detach().flatten()[:PRINT_VALUES]
            return some.to(device="cpu", dtype=torch.float32).numpy().tobytes()
        except Exception:  # a layout without these operations, or a class that answers in Python after all
            pass
    return f"{type(weight).__name__} {list(weight.shape)} {weight.dtype}".encode()
