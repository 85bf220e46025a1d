"""Where logits are NaN, the weight, the token's embedding or the module that made them so.

A cache holds finite numbers alone, so that what overflows in one row does not reach rows that do not see it; logits
behind a key or value that was not finite are NaN, see :meth:`.GraphCache.marked`. Nothing is looked through before.
"""

from __future__ import annotations

from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..packed.modules import as_packed
from .facts import Facts, parts_of
from .hidden import hooked
from .properties import logits_alone


def not_finite_for(model: PreTrainedModel, ids: Tensor) -> str | None:
    """Name what is not finite first where ``model`` reads a text [n]: a token's embedding, a weight, or an output."""
    entry, first = model.get_input_embeddings(), list[str]()

    def look(name: str, module: nn.Module, _: Any, output: Any) -> None:
        if first or not isinstance(output, Tensor) or not output.is_floating_point() or output.isfinite().all():
            return
        if module is entry:
            token = int(ids[(~output[0].isfinite().all(-1)).to(ids.device)][0])
            first.append(f"the embedding of token {token} holds NaN or infinite numbers")
        elif (weight := spoiled_in(module)) is not None:
            first.append(f"{name}.{weight} of the model holds NaN or infinite numbers")
        else:
            first.append(f"{name} computes NaN or infinite numbers for this text")

    facts = Facts.of(model)
    with ExitStack() as hooks:
        for name, module in facts.modules:
            hooks.enter_context(hooked(module, partial(look, name, module)))
        with suppress(RuntimeError, ValueError, TypeError):  # out of memory, say: there is an error already
            model(input_ids=ids[None].to(facts.device), use_cache=False, logits_to_keep=1, **logits_alone(model))
    return first[0] if first else None


def spoiled_in(module: nn.Module) -> str | None:
    """A parameter of a module, or its packed matrix, that holds NaN or infinite numbers."""
    held: dict[str, Any] = {**module._parameters}
    if (packed := as_packed(module)) is not None:
        held["packed" if packed is module else "weight"] = packed.weight
    for name, tensor in held.items():
        for part in () if tensor is None else parts_of(tensor):
            if part.is_floating_point() and not part.is_meta and not bool(part.isfinite().all()):
                return name
    return None
