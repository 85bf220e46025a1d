"""Hidden states of chosen layers, kept while a model is forwarded.

Layers are numbered as transformers numbers ``hidden_states``: 0 is what the first decoder layer reads, i what layer i
reads, and the number of layers what leaves the final norm. :data:`LAST` is what the output matrix reads, which any
model has; a prompt's forward computes it at the last position alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .properties import device_of

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
    return list(layers)[: model.config.get_text_config(decoder=True).num_hidden_layers], norm


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
    width = model.config.get_text_config(decoder=True).hidden_size
    try:
        with listening(model, chosen) as states:
            model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device_of(model)), use_cache=False)
    except ValueError as error:
        return str(error)
    for layer in chosen:
        shape = tuple(states[layer].shape) if layer in states else None
        if shape != (1, 1, width):
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
    thread = threading.get_ident()

    def before(number: int) -> Any:
        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if threading.get_ident() == thread:
                states[number] = args[0] if args else kwargs["hidden_states"]

        return keep

    def after(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        if threading.get_ident() == thread:
            states[len(blocks)] = output

    with ExitStack() as hooks:
        if LAST in layers:
            hooks.enter_context(model.get_output_embeddings().register_forward_pre_hook(before(LAST), with_kwargs=True))
        chosen = [number for number in layers if number != LAST]
        if chosen:
            blocks, norm = decoder_of(model)
            for number in chosen:
                if number == len(blocks):
                    hooks.enter_context(norm.register_forward_hook(after))
                else:
                    hooks.enter_context(blocks[number].register_forward_pre_hook(before(number), with_kwargs=True))
        yield states
