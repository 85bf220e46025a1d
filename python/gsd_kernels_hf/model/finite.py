"""A look through a model's weights for numbers that are not finite.

A cache holds finite numbers alone, so that what overflows in one row does not reach rows that do not see it. Where a
weight makes every key or value NaN, or a token's embedding is, the logits behind it would look like any others. So the
weights are looked through once, and again when PyTorch counted a change of theirs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..packed.adapters import stored_in
from ..packed.modules import Packed, PackedEmbedding, shape_of
from ..packed.samples import versions
from .facts import Facts, fact
from .hidden import hooked
from .identity import parts_of

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SINKS = "sinks"  # −∞ is a sink that takes nothing


@dataclass(frozen=True)
class Table:
    """A table of embeddings with rows that are not finite.

    Attributes:
        name: of its weight.
        by_token: whether it has a row for every token; else for positions or kinds of tokens.
        rows: int64 [n], on the CPU.
    """

    name: str
    by_token: bool
    rows: Tensor


@dataclass(frozen=True)
class Spoiled:
    """The weights that are not finite: the first one that every token goes through, if there is one, and tables."""

    weight: str | None = None
    tables: tuple[Table, ...] = ()


_known: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Spoiled]] = weakref.WeakKeyDictionary()


@fact
def spoiled(facts: Facts) -> Spoiled:
    """Find the weights of a text's way that are not finite; once, and again after changes that PyTorch counts.

    Of a model that is sharded nothing is: ranks must not go different ways.
    """
    model = facts.model
    if getattr(model, "_device_mesh", None) is not None:
        return Spoiled()
    weights = list(weights_of(facts))
    tensors = [tensor for _, _, tensor in weights]
    key = tuple(tensor.data_ptr() for tensor in tensors), versions(tensors)
    known = _known.get(model)
    if known is None or known[0] != key:
        known = _known[model] = key, _look(facts, weights)
    return known[1]


def weights_of(facts: Facts) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Floating-point weights of the decoder by their names, each once, and the bytes of those that are packed."""
    model = facts.model
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    inside = {id(module) for module in (decoder if isinstance(decoder, nn.Module) else model).modules()}
    seen: set[int] = set()
    for prefix, module in facts.modules:
        if id(module) not in inside:
            continue
        named = [(name, p) for name, p in module._parameters.items() if p is not None and not name.endswith(SINKS)]
        if isinstance(module, Packed):
            named += [("packed", module.packed)] if module.scales is None else [("scales", module.scales)]
        elif (stored := stored_in(module)) is not None:
            named += [("weight", tensor) for tensor in stored.tensors]
        for name, tensor in named:
            for part in parts_of(tensor):
                usable = part.dtype in FLOATS or (name == "packed" and module.kind.halves)
                if usable and part.numel() and not part.is_meta and id(part) not in seen:
                    seen.add(id(part))
                    yield f"{prefix}.{name}" if prefix else name, module, part


def numbers_in(module: nn.Module, tensor: Tensor) -> Tensor:
    """Floating-point numbers of a weight, a row each: those of a packed one are what its blocks are multiplied with."""
    if tensor.dtype in FLOATS:
        return tensor.detach()
    assert isinstance(module, Packed)
    blocks, halves = tensor.unflatten(1, (-1, module.kind.bytes)), module.kind.halves
    return blocks[..., halves[0] : halves[-1] + 2].contiguous().view(torch.float16).flatten(1)


@torch.no_grad()
def _look(facts: Facts, weights: list[tuple[str, nn.Module, Tensor]]) -> Spoiled:
    """Sum every weight, which leaves no number out that is not finite, and wait for each device once."""
    sums: dict[torch.device, list[Tensor]] = {}
    for _, module, tensor in weights:
        wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        sums.setdefault(tensor.device, []).append(numbers_in(module, tensor).sum(dtype=wide).double())
    finite = {device: iter(torch.stack(parts).isfinite().cpu().tolist()) for device, parts in sums.items()}
    suspects = [weight for weight in weights if not next(finite[weight[2].device])]
    entry, tables, first = facts.model.get_input_embeddings(), [], None
    for name, module, tensor in suspects:
        numbers = numbers_in(module, tensor)
        if bool(numbers.isfinite().all()):  # large ones, whose sum is not
            continue
        if isinstance(module, (nn.Embedding, PackedEmbedding)) or module is entry:
            rows = (~numbers.flatten(1).isfinite().all(1)).nonzero()[:, 0].cpu()
            by_token = module is entry or len(numbers) >= facts.vocabulary
            tables.append(Table(name, by_token, rows))
        elif first is None:
            first = name
    return Spoiled(first, tuple(tables))


def not_finite_for(model: PreTrainedModel, ids: Tensor, *, words: bool = True) -> str | None:
    """Name what is not finite where ``model`` reads a text [n]: a token's embedding, or the first module's output.

    words: whether tokens are all that it reads; else modules are not asked.
    """
    facts = Facts.of(model)
    for table in spoiled(facts).tables:
        used = ids[torch.isin(ids.cpu(), table.rows).to(ids.device)] if table.by_token else ids[:0]
        if len(used):
            return f"the embedding of token {int(used[0])} in {table.name} holds NaN or infinite numbers"
    first: list[str] = []

    def look(name: str, _: Any, output: Any) -> None:
        if not first and isinstance(output, Tensor) and output.is_floating_point() and not output.isfinite().all():
            first.append(name)

    with ExitStack() as hooks:
        for name, module in model.named_modules() if words else ():
            hooks.enter_context(hooked(module, partial(look, name)))
        try:
            model(input_ids=ids[None].to(facts.device), use_cache=False, logits_to_keep=1, **facts.logits_alone)
        except (RuntimeError, ValueError, TypeError):  # out of memory, say: there is an error already
            return None
    return f"{first[0]} computes NaN or infinite numbers for this text" if first else None


def with_finite_embeddings(facts: Facts, ids: Tensor) -> Tensor:
    """Tokens ``ids``, of which those whose embedding is not finite are replaced by others, if the model has any."""
    wrong = [table.rows for table in spoiled(facts).tables if table.by_token]
    if not wrong:
        return ids
    rows = torch.cat(wrong)
    size = min(facts.vocabulary, shape_of(facts.model.get_input_embeddings())[0])
    usable = torch.ones(size, dtype=torch.bool, device="cpu")
    usable[rows[rows < size]] = False
    others = usable.nonzero()[:, 0].to(ids.device)
    if not len(others):
        return ids
    return torch.where(torch.isin(ids, rows.to(ids.device)), others[ids % len(others)], ids)
