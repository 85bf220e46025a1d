"""Files of ``gsd_kernels.learn`` that come with this package, each for one published model in all its forms.

A model is told by all its weights of one dimension, which are its norms' and biases. No format quantises these: rounded
to bfloat16 they are the same numbers in a checkpoint of any dtype and in a GGUF file of any number of bits. Further
training changes them. Adapters that are merged into matrices do not, and then the file may guess worse; the text is the
model's own in any case.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

FOLDER = Path(__file__).resolve().parents[1] / "shipped"

SHIPPED = {"smollm2-135m-instruct": "824cf4dfddc66fb5"}
"""The :func:`print_of_vectors` of a model, which its file has too, by the file's name."""


def shipped_file(model: PreTrainedModel) -> tuple[Path, str] | None:
    """The file that was learned of a model and comes with this package, and the fingerprint in it; else ``None``."""
    own = print_of_vectors(model)
    return next(((FOLDER / f"{name}.safetensors", own) for name, print_ in SHIPPED.items() if print_ == own), None)


def print_of_vectors(model: nn.Module) -> str | None:
    """64 bits of a model's weights of one dimension as hexadecimal digits.

    ``None`` where one is not a plain tensor of floats: sharded, quantised, not loaded.
    """
    content = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() != 1:
            continue
        plain = type(parameter) is nn.Parameter and type(parameter.data) is Tensor and not parameter.is_meta
        if not plain or not parameter.is_floating_point():
            return None
        rounded = parameter.detach().to(device="cpu", dtype=torch.bfloat16).contiguous()
        content.update(name.encode() + rounded.view(torch.int16).numpy().tobytes())
    return content.hexdigest()[:16]
