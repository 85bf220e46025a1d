"""Drafters for published models that a clone of this package has, each for the one model that it was trained for.

A model is told by its sizes and by elements of every weight, rounded to bfloat16, so that it is the same in float32 and
in bfloat16. Further training, merged adapters, another quantisation: all make another model. The output would be the
target's for these too, but the drafter would guess worse.
"""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..files import SHIPPED_FOLDER

__all__ = [
    "SHIPPED_DRAFTERS",
    "Shipped",
    "drafter_of",
    "fingerprint",
    "folder_of",
    "mention_drafter",
    "warn_of_other_weights",
]

logger = logging.getLogger("gsd_kernels")

SIZES = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""Of a config, those that are compared before any weight is read."""

SAMPLED_ELEMENTS = 64
"""Elements of every weight, evenly spaced."""


@dataclass(frozen=True)
class Shipped:
    """The model that a drafter is for.

    Attributes:
        sizes: its :data:`SIZES`.
        fingerprint: its :func:`fingerprint`.
    """

    sizes: tuple[str | int, ...]
    fingerprint: str


SHIPPED_DRAFTERS = {
    "smollm2-135m-instruct": Shipped(("llama", 576, 1536, 30, 9, 49152), "a69f287760ae602c"),
}
"""By name, which is that of the drafter's folder, too."""


def folder_of(where: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The folder of a drafter of ours by its name, unless a folder is called so; anything else as it is.

    Raises:
        ValueError: a name of ours, and the wheel is installed, which has none.
    """
    if where not in SHIPPED_DRAFTERS or Path(where).exists():
        return where
    if not (SHIPPED_FOLDER / where).is_dir():
        raise ValueError(
            f"drafter: {where} is in a clone of gsd_kernels, not in its wheel; expected a folder, as a clone's "
            f"bench/drafters/chat/{where}"
        )
    return SHIPPED_FOLDER / where


def warn_of_other_weights(where: str | os.PathLike[str], target: PreTrainedModel) -> None:
    """Say in a line of the log if ``where`` names a drafter of ours that was trained for other weights."""
    if folder_of(where) == where:
        return
    if fingerprint(target) not in (None, SHIPPED_DRAFTERS[str(where)].fingerprint):
        logger.warning(
            "drafter: %s was trained for other weights than this model's; the output is this model's all the same, and "
            "the guesses may be worse",
            where,
        )


def fingerprint(target: PreTrainedModel) -> str | None:
    """64 bits of a model's weights as hexadecimal digits.

    ``None`` where one is not a plain tensor in float32 or bfloat16: sharded, quantised, not loaded, in another dtype.
    """
    content = hashlib.sha256()
    for name, parameter in sorted(target.named_parameters()):
        plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor and not parameter.is_meta
        if not plain or parameter.dtype not in (torch.float32, torch.bfloat16):
            return None
        row = parameter.detach().reshape(-1)
        samples = row[:: max(1, row.numel() // SAMPLED_ELEMENTS)][:SAMPLED_ELEMENTS].to(torch.bfloat16)
        content.update(name.encode() + samples.cpu().view(torch.int16).numpy().tobytes())
    return content.hexdigest()[:16]


def drafter_of(target: PreTrainedModel) -> str | None:
    """The name of the drafter that was trained for ``target``, if this installation has one."""
    config = target.config.get_text_config(decoder=True)
    sizes = tuple(getattr(config, name, None) for name in SIZES)
    alike = {
        shipped.fingerprint: name
        for name, shipped in SHIPPED_DRAFTERS.items()
        if shipped.sizes == sizes and (SHIPPED_FOLDER / name).is_dir()
    }
    return alike.get(fingerprint(target) or "") if alike else None


def mention_drafter(target: PreTrainedModel) -> None:
    """Say in a line of the log if this package brings a drafter that was trained for ``target``."""
    name = drafter_of(target) if logger.isEnabledFor(logging.INFO) else None
    if name is not None:
        logger.info(
            "this package brings a drafter that was trained for this model, which is not used; "
            'drafter="%s" drafts with it (whether that pays on a machine is another question: docs/drafts.md)',
            name,
        )
