"""Where logits are NaN, the weight, the token's embedding or the module that made them so.

A cache holds finite numbers alone, so that what overflows in one row does not reach rows that do not see it; logits
behind a key or value that was not finite are NaN, see :meth:`.GraphCache.marked`. Nothing is looked through before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..packed.adapters import stored_in
from ..packed.modules import Packed, PackedEmbedding, shape_of
from .facts import Facts
from .fingerprint import parts_of
from .hidden import hooked

PIECE = 4096  # tokens whose embeddings are looked at at once


def not_finite_for(model: PreTrainedModel, ids: Tensor, *, words: bool = True) -> str | None:
    """Name what is not finite where ``model`` reads a text [n]: a token's embedding, a weight, or a module's output.

    words: whether tokens are all that it reads; else modules are not asked.
    """
    facts = Facts.of(model)
    entry = model.get_input_embeddings()
    wrong = ids[~finite_rows(entry, ids)]
    if len(wrong):
        return f"the embedding of token {int(wrong[0])} holds NaN or infinite numbers"
    for name, tensor in weights_of(facts):
        if not bool(tensor.isfinite().all()):
            return f"{name} of the model holds NaN or infinite numbers"
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


def weights_of(facts: Facts) -> Iterator[tuple[str, Tensor]]:
    """Floating-point numbers of the model's weights by their names, but for tables of embeddings.

    Those of a packed matrix are what its blocks are multiplied with. −∞ is a sink that takes nothing.
    """
    for prefix, module in facts.modules:
        if isinstance(module, (nn.Embedding, PackedEmbedding)):
            continue
        held = [(name, p) for name, p in module._parameters.items() if p is not None and not name.endswith("sinks")]
        if isinstance(module, Packed):
            if module.scales is not None:
                held.append(("scales", module.scales))
            elif halves := module.kind.halves:
                blocks = module.packed.unflatten(1, (-1, module.kind.bytes))[..., halves[0] : halves[-1] + 2]
                held.append(("packed", blocks.contiguous().view(torch.float16)))
        elif (stored := stored_in(module)) is not None:
            held += [("weight", tensor) for tensor in stored.tensors]
        for name, tensor in held:
            for part in parts_of(tensor):
                if part.is_floating_point() and part.element_size() > 1 and not part.is_meta:
                    yield f"{prefix}.{name}" if prefix else name, part


@torch.no_grad()
def finite_rows(entry: Any, ids: Tensor) -> Tensor:
    """Say of tokens [...] which embeddings are finite, bool of that shape."""
    found: Tensor = entry(ids).isfinite().all(-1)
    return found.to(ids.device)


def with_finite_embeddings(facts: Facts, ids: Tensor) -> Tensor:
    """Tokens ``ids`` [2, n], of which those whose embedding is not finite are replaced by others, if there are any."""
    entry: Any = facts.model.get_input_embeddings()
    finite = finite_rows(entry, ids)
    if bool(finite.all()):
        return ids
    size = min(facts.vocabulary, shape_of(entry)[0])
    everything = torch.arange(size, dtype=ids.dtype, device=ids.device)
    usable = torch.cat([part[finite_rows(entry, part)] for part in everything.split(PIECE)])
    return torch.where(finite, ids, usable[ids % len(usable)]) if len(usable) else ids
