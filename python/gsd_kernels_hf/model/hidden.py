"""Listening to a forward: hidden states of chosen layers, and what is not finite first.

Layers are numbered as transformers numbers ``hidden_states``: 0 is what the first decoder layer reads, i what layer i
reads, and the number of layers what leaves the final norm. :data:`LAST` is what the output matrix reads, which any
model has; a prompt's forward computes it at the last position alone.

A cache holds finite numbers alone, so that what overflows in one row does not reach rows that do not see it; logits
behind a key or value that was not finite are NaN, see :meth:`.GraphCache.marked`. Nothing is looked through before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from ..packed.modules import Packed, unpacked
from .facts import Facts, parts_of
from .properties import device_of, logits_alone, text_config

LAST = -1


def decoder_of(model: PreTrainedModel) -> tuple[list[nn.Module], nn.Module]:
    """The decoder layers that a forward runs, and the norm behind them.

    Raises:
        ValueError: there is no list of layers, or not one norm beside it.
    """
    decoder = model.get_decoder()  # of a model of images and text, its language model
    layers, norm = getattr(decoder, "layers", None), getattr(decoder, "norm", None)
    if norm is None:
        norms = [child for child in decoder.children() if type(child).__name__.endswith("Norm")]
        norm = norms[0] if len(norms) == 1 else None
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise ValueError(
            f"model: hidden states of {type(model).__name__} cannot be read, since its decoder has no layers "
            "followed by a norm"
        )
    return list(layers)[: text_config(model).num_hidden_layers], norm


def hooked(module: Any, function: Callable[..., Any], *, before: bool = False) -> RemovableHandle:
    """Call ``function`` with a forward's arguments and output, in this thread alone, until the handle is left.

    ``before``: with its arguments and keywords, before it.
    """
    thread = threading.get_ident()

    def hook(_: nn.Module, *given: Any) -> Any:
        return function(*given) if threading.get_ident() == thread else None

    return module.register_forward_pre_hook(hook, with_kwargs=True) if before else module.register_forward_hook(hook)


def states_in(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a layer is called with."""
    return args[0] if args else kwargs["hidden_states"]


def kept(last: int, length: int, layers: Sequence[int], model: PreTrainedModel) -> int | Tensor:
    """``logits_to_keep`` of a forward of ``length`` tokens whose hidden states are wanted: its ``last`` ones.

    Where layers share keys and values, transformers leaves all other tokens out of them if this is a number.
    """
    states = any(layer != LAST for layer in layers)
    return torch.arange(length - last, length, device=device_of(model)) if states and length >= last else last


@torch.no_grad()
def why_no_states(model: PreTrainedModel, layers: Sequence[int]) -> str | None:
    """Name what keeps hidden states of these numbers from being read as [B, n, D], or ``None``: one token shows it."""
    chosen = [layer for layer in layers if layer != LAST]
    if not chosen:
        return None
    try:
        with listening(model, chosen) as states:
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)), use_cache=False)
    except ValueError as error:
        return str(error)
    for layer in chosen:
        shape = tuple(states[layer].shape) if layer in states else None
        if shape != (1, 1, text_config(model).hidden_size):
            what = (
                "is not computed for a text" if shape is None else f"is {list(shape)} for a token, and not one vector"
            )
            return f"hidden state {layer} of {type(model).__name__} {what}"
    return None


@contextmanager
def listening(model: PreTrainedModel, layers: Sequence[int]) -> Iterator[dict[int, Tensor]]:
    """Keep what a forward of this thread computes; nothing is kept, copied or computed for other layers.

    Args:
        model: whose forward follows.
        layers: numbers of the hidden states, see above.

    Yields:
        An empty dict, which the forward fills: [B, R, D] by number, on the device of their layer.
    """
    states: dict[int, Tensor] = {}
    blocks, norm = decoder_of(model) if any(number != LAST for number in layers) else ([], None)
    with ExitStack() as hooks:
        for number in layers:
            keep = partial(states.__setitem__, number)
            if number == len(blocks):
                hooks.enter_context(hooked(norm, lambda _, output, keep=keep: keep(output)))
            else:
                module = model.get_output_embeddings() if number == LAST else blocks[number]
                hooks.enter_context(hooked(module, lambda *given, keep=keep: keep(states_in(*given)), before=True))
        yield states


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
    if (dense := unpacked(module)) is not None:
        held["packed" if isinstance(module, Packed) else "weight"] = dense
    for name, tensor in held.items():
        for part in () if tensor is None else parts_of(tensor):
            if part.is_floating_point() and not part.is_meta and not bool(part.isfinite().all()):
                return name
    return None
