"""Factors of a GGUF file that divide the frequencies of the rotary embedding, as LLaMA 3.1's files have them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .entries import TensorEntry
from .fields import FREQUENCIES
from .header import Header

FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
"""Kinds of tensors that are plain numbers."""


def copied(tensor: TensorEntry) -> Tensor:
    """A tensor's bytes. Read, not mapped: pages looked at once would count as this process' memory for good."""
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return torch.frombuffer(bytearray(file.read(tensor.nbytes)), dtype=torch.uint8)


@torch.no_grad()
def divide_frequencies(model: PreTrainedModel, header: Header) -> bool:
    """Divide the model's frequencies by the file's factors; whether that makes it another than its config says.

    Raises:
        ValueError: the factors are none.
    """
    stored = header.tensors.get(FREQUENCIES)
    if stored is None:
        return False
    if stored.kind not in FLOATS:
        raise header.refusal(FREQUENCIES, stored.kind, "plain floats")
    factors = copied(stored).view(FLOATS[stored.kind]).float()  # [head_dim / 2]
    if not (factors.isfinite() & (factors > 0)).all():
        raise header.refusal(FREQUENCIES, factors.tolist(), "factors above 0")
    model.get_decoder().rotary_emb.inv_freq /= factors
    return not torch.allclose(factors, torch.ones_like(factors), rtol=0, atol=1e-5)
