"""The parameters that decoder_rows reads."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class LayerWeights:
    """One layer's parameters as they lie in the model; D is the head size."""

    input_norm: Tensor  # [hidden]
    q: Tensor  # [heads · D, hidden]
    k: Tensor  # [kv_heads · D, hidden]
    v: Tensor
    o: Tensor  # [hidden, heads · D]
    second_norm: Tensor  # [hidden]
    gate: Tensor  # [inner, hidden]
    up: Tensor
    down: Tensor  # [hidden, inner]
    q_bias: Tensor | None = None  # [outputs], as the others
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None  # [D], of every head before it is turned
    k_norm: Tensor | None = None
    window: int = 0  # positions that a row sees, itself among them; 0: all

    @property
    def tensors(self) -> list[Tensor]:
        """All of them in order, empty ones for those that there are not."""
        return [self.q.new_empty(0) if value is None else value for value in self.named.values()]

    @property
    def named(self) -> dict[str, Tensor | None]:
        """All of them by name, in order."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "window"}


@dataclass(frozen=True)
class DecoderWeights:
    """The parameters of a LLaMA-like decoder, as they lie in the model; nothing is copied."""

    embedding: Tensor  # [V, hidden]
    layers: list[LayerWeights]
    final_norm: Tensor  # [hidden]
    head: Tensor  # [V, hidden]
    inv_freq: Tensor  # float32 [D/2], of the rotary embedding
    rope_scale: float  # of its cosines and sines
    heads: int  # query heads
    eps: float  # of the norms

    @cached_property
    def flat_layers(self) -> list[Tensor]:
        return [t for layer in self.layers for t in layer.tensors]

    @cached_property
    def windows(self) -> list[int]:
        return [layer.window for layer in self.layers]
