"""The layers of an EAGLE-3 drafter over rows as one operator, where that is possible.

Module by module a level of drafting on a CPU is many small calls, which take longer than reading the weights.
:func:`gsd_kernels.ops.feature_rows` computes what :class:`~gsd_kernels_hf.sources.eagle3.Eagle3` defines, to rounding:
it rounds less in between. Drafts need no proof: the target verifies them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from gsd_kernels.ops.feature_rows import FeatureWeights, feature_rows
from gsd_kernels.ops.packed.api import FLOATS
from gsd_kernels.ops.step import FedRows

from ..model.attention import windowed
from ..model.foreign import SILU, STATIC_ROPE, foreign_code
from ..model.fused import decoder_weights, missing, storage_of
from .features import FeatureCache


class FusedFeatures:
    """An :class:`~gsd_kernels_hf.sources.eagle3.Eagle3` over rows of its cache.

    Args:
        module: the drafter.
        embed: its embedding, or the target's.
        rows: its cache.
    """

    def __init__(self, module: Any, embed: Any, rows: FeatureCache) -> None:
        self.module, self.rows, self.weights = module, rows, weights_of(module, embed)

    def __call__(
        self, fed: FedRows, features: Tensor, ancestor_mask: Tensor, node_depths: Tensor, kv_len: Tensor, keep: int
    ) -> tuple[Tensor, Tensor]:
        """Of the last ``keep`` rows the vectors that nodes hand on [B, keep, D], and logits float32 [B, keep, V].

        Args:
            fed: R rows, int32.
            features: [B, R, D], of the target, or vectors of drafted nodes' parents.
            ancestor_mask, node_depths, kv_len: as of :class:`~gsd_kernels_hf.model.attention.GraphInputs`.
            keep: rows.
        """
        decoder = self.weights.decoder
        layers, size = self.rows.cache.layers, 2 * len(decoder.inv_freq)
        keys, values = storage_of(layers, len(features), decoder.layers[0].k.shape[0] // size, size, features)
        logits, normed, state = feature_rows(
            self.weights,
            fed.ids,
            features,
            fed.positions,
            fed.places,
            ancestor_mask,
            node_depths,
            kv_len,
            self.rows.text_kv_start,
            keys,
            values,
            keep=keep,
        )
        return (normed if self.module.config.norm_output else state).to(features.dtype), logits


def weights_of(module: Any, embed: Any) -> FeatureWeights:
    """A drafter's parameters as they lie in it."""
    first, kinds = module.layers[0], windowed(module.windows)
    frequencies = module.rotary.frequencies(module.fc.weight.device)
    decoder = decoder_weights(embed, module.layers, kinds, module.norm, module.lm_head, *frequencies)
    return FeatureWeights(decoder, first.hidden_norm.weight.detach(), first.norm_before_residual)


def why_not(module: Any, embed: Any, backend: str) -> str | None:
    """The reason that keeps a drafter from being one operator, or ``None``.

    Raises:
        ValueError: a variable of the environment says what there is not.
    """
    device, dtype = module.fc.weight.device, module.fc.weight.dtype
    if device.type != "cpu":
        return f"there is no such operator for {device.type}"
    reason = missing(device, backend) or foreign_code(module) or foreign_code(embed)
    if reason is not None:
        return reason
    if type(embed) is not nn.Embedding or embed.max_norm is not None:
        return f"the embedding is no plain one, but {type(embed).__name__}"
    config = module.config.layers
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act} instead of silu"
    if (config.rope_parameters or {}).get("rope_type", "default") not in STATIC_ROPE:
        return "frequencies of the rotary embedding that depend on the length"
    for name, part in parts_of(module):
        if type(part) not in (nn.Linear, LlamaRMSNorm, *SILU):
            return f"{name} is no plain module, but {type(part).__name__}"
        if isinstance(part, LlamaRMSNorm) and part.variance_epsilon != module.norm.variance_epsilon:
            return f"{name} has another epsilon"
    if module.lm_head.bias is not None:
        return "a bias of the output matrix"
    for name, parameter in (("the embedding", embed.weight), *module.named_parameters()):
        plain = type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter.device == device
        if not plain or parameter.dtype != dtype or dtype not in FLOATS:
            return f"{name} is no plain tensor of {dtype} on {device}, or that is none of float32, bfloat16, float16"
    return None


def parts_of(module: Any) -> Iterator[tuple[str, nn.Module]]:
    """The tensors that the layers and the output run, by name."""
    yield from (("norm", module.norm), ("lm_head", module.lm_head))
    for name, part in module.layers.named_modules():
        if not any(part.children()):
            yield f"layers.{name}", part
