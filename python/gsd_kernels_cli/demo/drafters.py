"""The drafters of the demo target, which a clone has, and drafters fitted to what their target was inflated to.

Inflating widens the residual stream by dimensions that the added weights alone read, so hidden states of the source's
layers are the first ones of the inflated target's, unscaled: only norms are rescaled, and a drafter reads states before
them. A fitted drafter reads these first dimensions, has the source's embedding and output matrix as its own, and costs
what it cost before.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels_hf.model.hidden import decoder_of
from gsd_kernels_hf.model.properties import device_of, vocabulary
from gsd_kernels_hf.sources.dflash import DFlash
from gsd_kernels_hf.sources.eagle3 import Eagle3
from gsd_kernels_hf.sources.load import load_drafter

__all__ = ["FOLDER", "KINDS", "embedded", "fitted_drafter", "heads_folder"]

KINDS = ("eagle3", "dflash")
FOLDER = Path(__file__).resolve().parents[3] / "bench/drafters/demo"
"""Of a clone: the kinds of drafters, and heads, each in a folder; not in the wheel."""

_Kind = TypeVar("_Kind", Eagle3, DFlash)


def embedded(source: PreTrainedModel, target: PreTrainedModel | None = None) -> dict[str, Eagle3 | DFlash]:
    """The drafters that are there, by kind: none in an installed wheel.

    Args:
        source: the demo target.
        target: what it was inflated to; ``None``: itself.
    """
    drafters = {}
    for kind in KINDS:
        if (FOLDER / kind / "config.json").is_file():
            drafter = load_drafter(FOLDER / kind, source)
            drafters[kind] = drafter if target is None or target is source else fitted_drafter(drafter, source, target)
    return drafters


def heads_folder() -> Path:
    """The folder of the demo target's heads.

    Raises:
        ValueError: it is not there.
    """
    if not (FOLDER / "heads").is_dir():
        raise ValueError("draft_heads: those of the demo are in a clone of gsd_kernels, not in its wheel")
    return FOLDER / "heads"


@torch.no_grad()
def fitted_drafter(drafter: _Kind, source: PreTrainedModel, target: PreTrainedModel) -> _Kind:
    """``drafter`` of ``source`` for ``target``, which ``source`` was inflated to: the same guesses.

    Raises:
        ValueError: the vocabulary grew, the drafter norms hidden states before it fuses them, or it reads what leaves
            the last norm.
    """
    config, width, wide = drafter.config, drafter.config.target_hidden_size, target.config.hidden_size
    if vocabulary(source) != vocabulary(target):
        raise ValueError(
            f"target: its vocabulary grew from {vocabulary(source)} to {vocabulary(target)}; inflate to a shape of the "
            "source's"
        )
    layers = drafter.layers_of(source)
    if isinstance(drafter, Eagle3) and (config.norm_before_fc or config.fc_norm):
        raise ValueError(
            "drafter: it norms hidden states before they are fused, whose mean square depends on the width"
        )
    if max(layers) >= len(decoder_of(source)[0]):
        raise ValueError("drafter: it reads what leaves the last norm, which an inflated target scales")
    changes = {"target_hidden_size": wide, "own_embedding": True, "hidden_layers": layers}
    if isinstance(drafter, DFlash):
        changes["own_head"] = True
    fitted = type(drafter)(replace(config, **changes))
    tensors: dict[str, Tensor] = dict(drafter.state_dict())
    columns = tensors["fc.weight"].unflatten(1, (len(layers), width))  # [D, fused, Dt]
    tensors["fc.weight"] = nn.functional.pad(columns, (0, wide - width)).flatten(1)
    own = {"embed_tokens.weight": source.get_input_embeddings(), "lm_head.weight": source.get_output_embeddings()}
    for name, module in own.items():
        if name not in tensors:
            tensors[name] = module.weight[: config.layers.vocab_size]
    fitted.load_state_dict(tensors)
    return fitted.to(device_of(target), target.dtype).eval().requires_grad_(False)
