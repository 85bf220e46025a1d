"""Seconds of a step, predicted without running it: bytes over bandwidth, multiplications over speed, operator calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig

from ..model.properties import size_in
from ..packed.adapters import stored_in
from ..packed.modules import Packed, packed_in

# What differs on a GPU, with compiled CPU ops, and where the draft's forward is one operator.
GPU = {"bandwidth": 1.5e12, "free_rows": 128.0, "layer_seconds": 1e-4, "draft_layer_seconds": 1e-4}
COMPILED = {"forward_seconds": 6e-4, "level_seconds": 1e-4, "step_seconds": 1e-3}
ONE_OP = {"draft_layer_seconds": 5e-5}


@dataclass(frozen=True)
class CostPrior:
    """Costs of a pair that are known without running it. Seconds are of calls alone, without reading and arithmetic.

    Attributes:
        target_bytes, draft_bytes: of weights that a forward reads; 0 without a draft model.
        target_layers, draft_layers: number of decoder layers.
        cache_bytes: keys and values of one token in the target.
        bandwidth: bytes a second that the device reads, to an order of magnitude: steps correct it.
        free_rows: number of rows whose arithmetic takes as long as reading the weights, which hides it.
        layer_seconds, draft_layer_seconds: calling the operators of a layer.
        forward_seconds: calling the operators of a draft forward besides its layers'.
        level_seconds, step_seconds: calling the other operators of a level, of a step.
    """

    target_bytes: float
    target_layers: int
    draft_bytes: float = 0.0
    draft_layers: int = 0
    cache_bytes: float = 0.0
    bandwidth: float = 1.5e10
    free_rows: float = 24.0
    layer_seconds: float = 2e-4
    draft_layer_seconds: float = 2e-4
    forward_seconds: float = 0.0
    level_seconds: float = 4e-4
    step_seconds: float = 1.5e-3

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        *drafts: nn.Module,
        one_op: bool,
        compiled: bool = False,
    ) -> CostPrior:
        """Of models as they lie in memory.

        Args:
            model, drafts: target and draft, if there is one.
            one_op: whether the draft's forward is one operator.
            compiled: whether a step's other operators are compiled ones of the CPU.
        """
        on_gpu = next(model.parameters()).device.type == "cuda"
        config = model.config.get_text_config(decoder=True)
        layers = layers_of(model)
        heads = _largest(size_in(config, "num_key_value_heads")) or config.num_attention_heads
        size = _largest(size_in(config, "head_dim")) or config.hidden_size // config.num_attention_heads
        speeds = GPU if on_gpu else COMPILED if compiled else {}
        return cls(
            target_bytes=weight_bytes(model),
            target_layers=layers,
            draft_bytes=sum(map(weight_bytes, drafts)),
            draft_layers=sum(map(layers_of, drafts)),
            cache_bytes=2.0 * layers * heads * size * model.dtype.itemsize,
            **speeds | (ONE_OP if one_op else {}),
        )

    def target_seconds(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """One target forward of ``rows`` [S] rows behind ``cached`` tokens, all sequences together: [S]."""
        reading = self.target_bytes * np.hypot(1.0, (rows - 1.0) / self.free_rows) + self.cache_bytes * cached
        return self.target_layers * self.layer_seconds + reading / self.bandwidth

    def other_seconds(self, config: GraphConfig | None) -> float:
        """All else in a step of one sequence: drafting, merging, flattening, verification, commit."""
        if config is None:
            return 0.25 * self.step_seconds
        rows = config.chain_rows + max(0, config.depth - 1) * config.width
        reading = self.draft_bytes * (config.depth + rows / self.free_rows if config.depth else 0.0)
        levels = (config.depth + config.history_depth) * self.level_seconds
        calls = config.depth * (self.forward_seconds + self.draft_layers * self.draft_layer_seconds)
        return self.step_seconds + levels + calls + reading / self.bandwidth


def layers_of(model: nn.Module) -> int:
    """Number of decoder layers of a model or a drafter."""
    if isinstance(model, PreTrainedModel):
        return int(model.config.get_text_config(decoder=True).num_hidden_layers)
    return max((len(m) for m in model.modules() if isinstance(m, nn.ModuleList)), default=1)


def weight_bytes(model: nn.Module) -> float:
    """Bytes of the weights that a forward of few rows reads: all but the input embedding, of which it reads rows."""
    if not isinstance(model, PreTrainedModel):
        return float(sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("embed_tokens")))
    read = {id(p): p.nbytes for p in model.parameters()}
    read |= {module.packed.data_ptr(): module.matrix.nbytes for module in packed_in(model)}
    for module in model.modules():
        if (stored := stored_in(module)) is not None:
            read[id(module._parameters.get("weight", module))] = stored.nbytes
    embedding, output = (_place(m) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    return float(sum(size for place, size in read.items() if place != embedding or embedding == output))


def _largest(size: Any) -> int | None:
    """Of the layers."""
    return max((n for n in size if n), default=None) if isinstance(size, list) else size


def _place(module: nn.Module | None) -> int | None:
    """A key that tells whether two modules have the same weights."""
    return module.packed.data_ptr() if isinstance(module, Packed) else id(getattr(module, "weight", None))
