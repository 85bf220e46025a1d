"""Grow a Llama to the shape of a larger one without changing what it computes.

A small trained pair has a real acceptance rate but not the cost of a model that anyone serves; random weights in a real
shape have the cost but accept nothing. An inflated target has both, so its speedups are measured, not extrapolated.

Why the function stays the same:

* *Width.* The first dimensions of the residual stream are the source's; the others are zero in the embedding and in the
  rows of every output projection, so they stay zero. A norm over D instead of d dimensions sees a mean square that is
  d/D of the source's: its weights times sqrt(d/D) and its epsilon times d/D undo that.
* *Heads, MLP rows, layers.* What is added is cut off by zeros in ``o_proj`` and ``down_proj``.
* *Key/value heads.* One that must serve query heads of several groups of the new shape is copied.
* *Head size.* Rotary pair i of h/2 turns as fast as pair i·H/h of H/2. Added query dimensions are zero, and the query
  is scaled by sqrt(H/h), because attention divides by the square root of the head size.
* *Vocabulary.* One added dimension of the residual stream holds a constant c, which only the added rows of the output
  head read, with a large negative weight. The norms' mean square grows by c²/D: epsilon = (eps·d − c²)/D undoes it.

Everything else that is added is random: a device multiplies zeros at less power, hence at higher clocks.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# Final-norm activation at the constant dimension × RMS of the residual stream, and the head weight that reads it.
_CONSTANT_GAIN, _NEVER = 8.0, -(2.0**14)
_RANDOM_STD = 0.02

_AXES = {
    **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), ("width",)),
    **dict.fromkeys(("embed_tokens", "lm_head"), ("vocabulary", "width")),
    **dict.fromkeys(("gate_proj", "up_proj"), ("inner", "width")),
    **{"q_proj": ("query", "width"), "k_proj": ("key", "width"), "v_proj": ("value", "width")},
    **{"o_proj": ("width", "output"), "down_proj": ("width", "inner")},
}
"""What the rows, and the columns, of a module's weight are."""


SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
"""The sizes that decide what a Llama costs, as its configuration calls them."""


def llama(*sizes: int, tied: bool = False) -> LlamaConfig:
    """A Llama's configuration by its :data:`SIZES`; ``tied``: the output head is the embedding."""
    return LlamaConfig(**dict(zip(SIZES, sizes, strict=True)), tie_word_embeddings=tied)


#: Published shapes, and ``250m``: large enough to cost something on a CPU, with the demo pair's vocabulary, so that its
#: draft fits without being inflated too.
SHAPES: dict[str, LlamaConfig] = {
    "250m": llama(1024, 2816, 22, 16, 4, 64, 2048, tied=True),
    "tinyllama-1.1b": llama(2048, 5632, 22, 32, 4, 64, 32000),
    "llama-2-7b": llama(4096, 11008, 32, 32, 32, 128, 32000),
    "llama-3-8b": llama(4096, 14336, 32, 32, 8, 128, 128256),
    "llama-2-70b": llama(8192, 28672, 80, 64, 8, 128, 32000),
}


def _group(shape: LlamaConfig) -> int:
    """Query heads of a key/value head."""
    return shape.num_attention_heads // shape.num_key_value_heads


def _copies(source: LlamaConfig, shape: LlamaConfig) -> int:
    """Return how many key/value heads of the new shape one of the source's becomes."""
    return math.ceil(_group(source) / _group(shape))


def _constant(source: LlamaConfig, shape: LlamaConfig) -> float:
    """Return c, zero where the vocabulary stays: a power of two (exact in any dtype) with c² at most half of eps·d."""
    if shape.vocab_size == source.vocab_size:
        return 0.0
    return 2.0 ** math.floor(0.5 * math.log2(0.5 * source.rms_norm_eps * source.hidden_size))


def inflated_config(source: LlamaConfig, shape: LlamaConfig) -> LlamaConfig:
    """Return the configuration of a ``source`` model inflated to the sizes of ``shape``.

    The head is tied only where the source's is, ``shape`` asks for it, and the vocabulary stays.

    Raises:
        ValueError: a size that cannot be had; the message names it.
    """
    least = {name: getattr(source, name) for name in SIZES} | {
        "num_key_value_heads": source.num_key_value_heads * _copies(source, shape),
        "hidden_size": source.hidden_size + (shape.vocab_size > source.vocab_size),  # a dimension holds the constant
        "head_dim": math.lcm(source.head_dim, shape.head_dim),
    }
    for name, size in least.items():
        if getattr(shape, name) < size:
            raise ValueError(f"shape.{name}: expected {size} or more, got {getattr(shape, name)}")
    result = copy.deepcopy(source)
    result.update({name: getattr(shape, name) for name in SIZES})
    result.tie_word_embeddings &= shape.tie_word_embeddings and shape.vocab_size == source.vocab_size
    result.rms_norm_eps = (source.rms_norm_eps * source.hidden_size - _constant(source, shape) ** 2) / shape.hidden_size
    return result


def _places(source: LlamaConfig, shape: LlamaConfig) -> dict[str, Tensor]:
    """Where the source's entries go in the new shape, axis by axis; ``heads``: its query heads."""
    head, plain = torch.arange(source.num_attention_heads), torch.arange(source.head_dim)
    group, new_group, copies = _group(source), _group(shape), _copies(source, shape)
    member = head % group
    key_heads = torch.arange(source.num_key_value_heads * copies)
    heads = (head // group * copies + member // new_group) * new_group + member % new_group
    pairs = plain[: source.head_dim // 2] * (shape.head_dim // source.head_dim)
    rotary = torch.cat([pairs, pairs + shape.head_dim // 2])

    def rows(heads: Tensor, within: Tensor) -> Tensor:
        return (heads[:, None] * shape.head_dim + within).flatten()

    return {
        "width": torch.arange(source.hidden_size),
        "inner": torch.arange(source.intermediate_size),
        "vocabulary": torch.arange(source.vocab_size),
        "heads": heads,
        "query": rows(heads, rotary),
        "key": rows(key_heads, rotary),
        "value": rows(key_heads, plain),
        "output": rows(heads, plain),
    }


@torch.no_grad()
def inflate(
    model: PreTrainedModel,
    shape: LlamaConfig,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Return a Llama of exactly the sizes of ``shape`` that computes what ``model`` computes, up to rounding.

    Args:
        model: the source, a Llama without biases whose rotary embedding is not scaled; it is left as it is.
        shape: every size at least the source's, ``head_dim`` a multiple.
        dtype: of the result's weights; default: the source's.
        device: the result is built there, without a copy elsewhere; default: the source's.
        seed: of the random entries, which never influence the output.

    Returns:
        The inflated model in evaluation mode, its parameters without gradients. Logits of added tokens are negative
        enough never to be picked (in float16 they may be -inf).

    Raises:
        ValueError: a size of ``shape`` that cannot be had; the message names it.
    """
    source, config = model.config, inflated_config(model.config, shape)
    config.dtype, device = dtype or model.dtype, device or model.device
    with torch.device("meta"):
        result = LlamaForCausalLM(config)
    result = result.to(config.dtype).to_empty(device=device).requires_grad_(False)
    result.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    result.generation_config = copy.deepcopy(model.generation_config)

    places, old, copies = _places(source, shape), model.state_dict(), _copies(source, shape)
    generator = torch.Generator(device).manual_seed(seed)
    norm_scale = math.sqrt(source.hidden_size / shape.hidden_size)
    scales = {"q_proj": math.sqrt(shape.head_dim / source.head_dim)}
    scales |= {name: norm_scale for name, axes in _AXES.items() if axes == ("width",)}
    for name, data in result.named_parameters():
        part = name.split(".")[-2]
        data.normal_(0.0, _RANDOM_STD, generator=generator)
        if part in ("o_proj", "down_proj"):
            data.zero_()
        if name not in old:
            continue
        values = old[name].float() * scales.get(part, 1.0)
        if part == "embed_tokens":
            data[:, source.hidden_size :] = 0
        elif part == "q_proj":  # so are the dimensions that the source's heads have not
            data.unflatten(0, (shape.num_attention_heads, shape.head_dim))[places["heads"].to(device)] = 0
        elif part in ("k_proj", "v_proj"):
            values = values.unflatten(0, (-1, source.head_dim)).repeat_interleave(copies, 0).flatten(0, 1)
        where = torch.meshgrid(*(places[axis].to(device) for axis in _AXES[part]), indexing="ij")
        data[where] = values.to(data)
    result.tie_weights()
    if constant := _constant(source, shape):
        at, core, head = source.hidden_size, result.model, result.lm_head.weight
        for layer in core.layers:
            layer.input_layernorm.weight[at] = layer.post_attention_layernorm.weight[at] = 0
        core.norm.weight[at] = norm_scale * _CONSTANT_GAIN / constant
        core.embed_tokens.weight[:, at] = constant
        head[: source.vocab_size, at] = 0
        head[source.vocab_size :, at] = _NEVER
    return result.eval()
