"""The layers of a drafter that reads features, over rows as one operator, where that is possible.

Module by module a level of drafting is many small calls, which take longer than reading the weights.
:func:`gsd_kernels.ops.feature_rows` computes what :class:`~gsd_kernels_hf.sources.eagle3.Eagle3`,
:class:`~gsd_kernels_hf.sources.mtp.Mtp` and the features of :class:`~gsd_kernels_hf.sources.dflash.DFlash` define, to
rounding: it rounds less in between. Drafts need no proof: the target verifies them.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer, MistralRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm

from gsd_kernels.ops.decoder_rows import DecoderWeights
from gsd_kernels.ops.feature_rows import FeatureWeights, cuda
from gsd_kernels.ops.packed.api import FLOATS

from ..model import replay
from ..model.attention import windowed
from ..model.foreign import SILU, STATIC_ROPE, foreign_code
from ..model.fused import decoder_weights, error_of, missing, unproved
from ..model.linear import CpuLinear, RowLinear
from .layers import Layer

LAYERS = (LlamaDecoderLayer, MistralDecoderLayer, Qwen2DecoderLayer, Qwen3DecoderLayer)
NORMS = (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)
PLAIN = (nn.Linear, CpuLinear, RowLinear, nn.Embedding, *NORMS, *SILU)


def weights_of(module: Any, embed: Any, head: Any) -> FeatureWeights:
    """A drafter's parameters as they lie in it."""
    return FeatureWeights(decoder_of(module, embed, head), **module.first_parameters())


def decoder_of(module: Any, embed: Any, head: Any) -> DecoderWeights:
    """The parameters of a drafter's layers as they lie in it, with an embedding and an output matrix."""
    kinds = windowed(module.windows)
    frequencies = module.rotary.frequencies(module.norm.weight.device)
    return decoder_weights(embed, module.layers, kinds, module.norm, head, *frequencies)


def why_not(module: Any, embed: Any, head: Any, backend: str) -> str | None:
    """The reason that keeps a drafter from being one operator, or ``None``.

    Raises:
        ValueError: a variable of the environment says what there is not.
    """
    device = module.norm.weight.device
    reason = missing(device, backend) or foreign_code(module) or foreign_code(embed) or foreign_code(head)
    if reason is not None:
        return reason
    if not module.plain:
        return "its layers are no plain decoder's"
    # Parts first: configs of other families need not have the fields that are read.
    reason = _foreign_part(module, embed, head) or _foreign_config(module) or _foreign_tensor(module, embed, head)
    if reason is not None or not replay.is_gpu(device):
        return reason
    weights = weights_of(module, embed, head)
    return error_of(cuda.check, weights) or unproved(weights.decoder)


def _foreign_config(module: Any) -> str | None:
    config = module.sizes
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act} instead of silu"
    if (config.rope_parameters or {}).get("rope_type", "default") not in STATIC_ROPE:
        return "frequencies of the rotary embedding that depend on the length"
    return None


def _foreign_part(module: Any, embed: Any, head: Any) -> str | None:
    if type(embed) is not nn.Embedding or embed.max_norm is not None:
        return f"the embedding is no plain one, but {type(embed).__name__}"
    for layer in module.layers:
        if not isinstance(layer, Layer) and type(layer) not in LAYERS:
            return f"its layer is a {type(layer).__name__}"
    for name, part in (("the output matrix", head), *module.named_modules()):
        if any(part.children()):
            continue
        if type(part) not in PLAIN:
            return f"{name} is no plain module, but {type(part).__name__}"
        if type(part) in NORMS and part.variance_epsilon != module.norm.variance_epsilon:
            return f"{name} has another epsilon"
    return None if head.bias is None else "a bias of the output matrix"


def _foreign_tensor(module: Any, embed: Any, head: Any) -> str | None:
    device, dtype = module.norm.weight.device, module.norm.weight.dtype
    others = ("the embedding", embed.weight), ("the output matrix", head.weight)
    for name, parameter in (*others, *module.named_parameters()):
        plain = type(parameter) is nn.Parameter and parameter.is_contiguous() and parameter.device == device
        if not plain or parameter.dtype != dtype or dtype not in FLOATS:
            return f"{name} is no plain tensor of {dtype} on {device}, or that is none of float32, bfloat16, float16"
    return None
