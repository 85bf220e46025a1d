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
from dataclasses import dataclass

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

__all__ = ["SHAPES", "ModelShape", "inflate", "inflated_config"]

# Rotary scalings that treat each pair by its frequency alone, so that a pair may move to another index.
_PAIRWISE_ROPE = ("default", "linear", "llama3")
# Final-norm activation at the constant dimension × RMS of the residual stream, and the head weight that reads it.
_CONSTANT_GAIN, _NEVER = 8.0, -(2.0**14)
_RANDOM_STD = 0.02


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide what a Llama costs."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool = False

    @classmethod
    def of(cls, config: LlamaConfig) -> ModelShape:
        """Return the shape that a configuration describes."""
        return cls(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            tie_word_embeddings=config.tie_word_embeddings,
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters of a Llama of this shape without biases."""
        attention = 2 * self.head_dim * self.hidden_size * (self.num_heads + self.num_key_value_heads)
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return self.num_layers * (attention + mlp + 2 * self.hidden_size) + embeddings + self.hidden_size


#: Published shapes, and ``250m``: large enough to cost something on a CPU, with the demo pair's vocabulary, so that its
#: draft fits without being inflated too.
SHAPES: dict[str, ModelShape] = {
    "250m": ModelShape(1024, 2816, 22, 16, 4, 64, 2048, tie_word_embeddings=True),
    "tinyllama-1.1b": ModelShape(2048, 5632, 22, 32, 4, 64, 32000),
    "llama-2-7b": ModelShape(4096, 11008, 32, 32, 32, 128, 32000),
    "llama-3-8b": ModelShape(4096, 14336, 32, 32, 8, 128, 128256),
    "llama-2-70b": ModelShape(8192, 28672, 80, 64, 8, 128, 32000),
}


def _check(source: ModelShape, shape: ModelShape, config: LlamaConfig) -> None:
    """Raise a ValueError that names the argument which cannot be honoured."""
    for name in ("hidden_size", "intermediate_size", "num_layers", "num_heads", "head_dim", "vocab_size"):
        have, want = getattr(source, name), getattr(shape, name)
        if want < have:
            raise ValueError(f"shape.{name} is {want}, smaller than the source model's {have}")
    if shape.num_key_value_heads < 1 or shape.num_heads % shape.num_key_value_heads:
        raise ValueError(
            f"shape.num_key_value_heads is {shape.num_key_value_heads}, which does not divide "
            f"shape.num_heads = {shape.num_heads}"
        )
    needed = source.num_key_value_heads * _copies_per_key_value_head(source, shape)
    if shape.num_key_value_heads < needed:
        raise ValueError(
            f"shape.num_key_value_heads is {shape.num_key_value_heads}; the source's {source.num_heads} query heads on "
            f"{source.num_key_value_heads} key/value heads need at least {needed}"
        )
    if shape.hidden_size % shape.num_heads:
        raise ValueError(
            f"shape.hidden_size is {shape.hidden_size}, which shape.num_heads = {shape.num_heads} does not divide "
            "(LlamaConfig asks for that, also where head_dim is given)"
        )
    if shape.head_dim % source.head_dim:
        raise ValueError(
            f"shape.head_dim is {shape.head_dim}, not a multiple of the source model's {source.head_dim}: "
            "the rotary frequencies would differ"
        )
    rope_type = config.rope_parameters["rope_type"]
    if shape.head_dim != source.head_dim and rope_type not in _PAIRWISE_ROPE:
        raise ValueError(f"shape.head_dim cannot grow under rope_type {rope_type!r}, whose frequencies depend on it")
    if shape.vocab_size > source.vocab_size and shape.hidden_size == source.hidden_size:
        raise ValueError(
            f"shape.vocab_size can only grow where shape.hidden_size does (both models have {source.hidden_size}): "
            "one added dimension keeps the added tokens from being picked"
        )


def _copies_per_key_value_head(source: ModelShape, shape: ModelShape) -> int:
    """Return how many key/value heads of the new shape one of the source's becomes."""
    old_group = source.num_heads // source.num_key_value_heads
    new_group = shape.num_heads // shape.num_key_value_heads
    return math.ceil(old_group / new_group)


def _constant(source: ModelShape, shape: ModelShape, eps: float) -> float:
    """Return c, zero where the vocabulary stays: a power of two (exact in any dtype) with c² at most half of eps·d."""
    if shape.vocab_size == source.vocab_size:
        return 0.0
    return 2.0 ** math.floor(0.5 * math.log2(0.5 * eps * source.hidden_size))


def inflated_config(config: LlamaConfig, shape: ModelShape | str) -> LlamaConfig:
    """Return the configuration of a ``config`` model inflated to ``shape``.

    The head is tied only where the source's is, ``shape`` asks for it, and the vocabulary stays.
    """
    if getattr(config, "model_type", None) != "llama":
        raise ValueError(f"model must be a Llama, not a {getattr(config, 'model_type', None)!r} model")
    if isinstance(shape, str):
        if shape not in SHAPES:
            raise ValueError(f"shape {shape!r} is unknown; named shapes: {', '.join(SHAPES)}")
        shape = SHAPES[shape]
    source = ModelShape.of(config)
    _check(source, shape, config)
    constant = _constant(source, shape, config.rms_norm_eps)
    result = copy.deepcopy(config)
    result.hidden_size = shape.hidden_size
    result.intermediate_size = shape.intermediate_size
    result.num_hidden_layers = shape.num_layers
    result.num_attention_heads = shape.num_heads
    result.num_key_value_heads = shape.num_key_value_heads
    result.head_dim = shape.head_dim
    result.vocab_size = shape.vocab_size
    result.tie_word_embeddings = (
        source.tie_word_embeddings and shape.tie_word_embeddings and shape.vocab_size == source.vocab_size
    )
    result.rms_norm_eps = (config.rms_norm_eps * source.hidden_size - constant**2) / shape.hidden_size
    return result


@dataclass(frozen=True)
class _HeadMap:
    """Places of the source's rows of q, k and v (= columns of o for v) in the new shape."""

    query: torch.Tensor
    key: torch.Tensor
    key_source: torch.Tensor
    value: torch.Tensor
    value_source: torch.Tensor
    output: torch.Tensor
    padded_query: torch.Tensor

    @classmethod
    def build(cls, source: ModelShape, shape: ModelShape) -> _HeadMap:
        """Place each source key/value head, as often as needed, with the query heads that read it."""
        old_group = source.num_heads // source.num_key_value_heads
        new_group = shape.num_heads // shape.num_key_value_heads
        copies = _copies_per_key_value_head(source, shape)
        query_heads = []
        for head in range(source.num_heads):
            key_value, member = divmod(head, old_group)
            query_heads.append((key_value * copies + member // new_group) * new_group + member % new_group)
        key_value_heads = torch.arange(source.num_key_value_heads * copies, device="cpu")

        half = source.head_dim // 2
        pairs = torch.arange(half, device="cpu") * (shape.head_dim // source.head_dim)
        rotary = torch.cat([pairs, pairs + shape.head_dim // 2])
        plain = torch.arange(source.head_dim, device="cpu")
        unused = torch.ones(shape.head_dim, dtype=torch.bool, device="cpu")
        unused[rotary] = False

        def rows(heads: torch.Tensor, size: int, within: torch.Tensor) -> torch.Tensor:
            return (heads[:, None] * size + within).flatten()

        queries = torch.tensor(query_heads, dtype=torch.int64, device="cpu")
        return cls(
            query=rows(queries, shape.head_dim, rotary),
            key=rows(key_value_heads, shape.head_dim, rotary),
            key_source=rows(key_value_heads // copies, source.head_dim, plain),
            value=rows(key_value_heads, shape.head_dim, plain),
            value_source=rows(key_value_heads // copies, source.head_dim, plain),
            output=rows(queries, shape.head_dim, plain),
            padded_query=rows(queries, shape.head_dim, unused.nonzero().flatten()),
        )


class _Filler:
    """Materialises the parameters of a model on the meta device, one at a time, in their final dtype and place."""

    def __init__(self, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype = dtype
        self.device = device
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def allocate(self, module: nn.Module, name: str, *, random: bool) -> torch.Tensor:
        """Replace a parameter by a random one, or by zeros, and return its data."""
        data = torch.empty(getattr(module, name).shape, dtype=self.dtype, device=self.device)
        if random:
            data.normal_(0.0, _RANDOM_STD, generator=self.generator)
        else:
            data.zero_()
        setattr(module, name, nn.Parameter(data, requires_grad=False))
        return data

    def put(self, data: torch.Tensor, index: tuple[torch.Tensor, ...], values: torch.Tensor) -> None:
        """Write ``values`` at the given rows (and columns) of ``data``."""
        if self.device.type == "meta":
            return
        index = tuple(part.to(self.device) for part in index)
        if len(index) == 2:
            index = (index[0][:, None], index[1][None, :])
        data[index] = values.to(device=self.device, dtype=self.dtype)

    def linear(
        self,
        block: nn.Module,
        old_block: nn.Module | None,
        projection: str,
        rows: torch.Tensor,
        columns: torch.Tensor,
        *,
        source_rows: torch.Tensor | None = None,
        scale: float = 1.0,
        output: bool = False,
        zero_rows: torch.Tensor | None = None,
    ) -> None:
        """Fill a projection of a block: the old one's entries at (rows, columns); around them random, or zero."""
        linear, old = getattr(block, projection), getattr(old_block, projection, None)
        for name in ("weight", "bias"):
            if getattr(linear, name) is None:
                continue
            data = self.allocate(linear, name, random=not output)
            if old is None:
                continue
            values = getattr(old, name).detach().float() * scale
            if source_rows is not None:
                values = values[source_rows.to(values.device)]
            self.put(data, (rows, columns) if name == "weight" else (rows,), values)
            if zero_rows is not None:
                data[zero_rows.to(self.device)] = 0

    def norm(self, module: nn.Module, source: nn.Module | None, width: torch.Tensor, scale: float) -> torch.Tensor:
        """Fill a norm's weight."""
        data = self.allocate(module, "weight", random=True)
        if source is not None:
            self.put(data, (width,), source.weight.detach().float() * scale)
        return data


@torch.no_grad()
def inflate(
    model: PreTrainedModel,
    shape: ModelShape | str,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> LlamaForCausalLM:
    """Return a Llama of exactly ``shape`` that computes what ``model`` computes, up to rounding.

    Args:
        model: the source, a ``LlamaForCausalLM``; it is left as it is.
        shape: a ``ModelShape`` or a name in ``SHAPES``; every size at least the source's, ``head_dim`` a multiple.
        dtype: of the result's weights; default: the source's.
        device: the result is built there, tensor by tensor, without a copy elsewhere; default: the source's.
        seed: of the random entries, which never influence the output.

    Returns:
        The inflated model in evaluation mode, its parameters without gradients. Logits of added tokens are negative
        enough never to be picked (in float16 they may be -inf).

    Raises:
        ValueError: where ``model`` or a size of ``shape`` cannot be honoured; the message names it.
    """
    config = inflated_config(model.config, shape)
    parameter = next(model.parameters())
    if not isinstance(model, LlamaForCausalLM) or not all(p.is_floating_point() for p in model.parameters()):
        raise ValueError(f"model must be a LlamaForCausalLM with floating-point weights, not {type(model).__name__}")
    dtype = parameter.dtype if dtype is None else dtype
    device = torch.device(parameter.device if device is None else device)
    config.dtype = dtype
    source, shape = ModelShape.of(model.config), ModelShape.of(config)

    with torch.device("meta"):
        result = LlamaForCausalLM(config)
    with torch.device("cpu"):
        result.model.rotary_emb = LlamaRotaryEmbedding(config).to(device)
    result.generation_config = copy.deepcopy(model.generation_config)

    fill = _Filler(dtype, device, seed)
    heads = _HeadMap.build(source, shape)
    width, inner = (torch.arange(n, device="cpu") for n in (source.hidden_size, source.intermediate_size))
    norm_scale = math.sqrt(source.hidden_size / shape.hidden_size)
    query_scale = math.sqrt(shape.head_dim / source.head_dim)
    constant = _constant(source, shape, model.config.rms_norm_eps)

    for index, layer in enumerate(result.model.layers):
        old = model.model.layers[index] if index < source.num_layers else None
        old_attention, old_mlp = getattr(old, "self_attn", None), getattr(old, "mlp", None)
        attention, mlp = layer.self_attn, layer.mlp
        fill.linear(
            attention, old_attention, "q_proj", heads.query, width, scale=query_scale, zero_rows=heads.padded_query
        )
        fill.linear(attention, old_attention, "k_proj", heads.key, width, source_rows=heads.key_source)
        fill.linear(attention, old_attention, "v_proj", heads.value, width, source_rows=heads.value_source)
        fill.linear(attention, old_attention, "o_proj", width, heads.output, output=True)
        fill.linear(mlp, old_mlp, "gate_proj", inner, width)
        fill.linear(mlp, old_mlp, "up_proj", inner, width)
        fill.linear(mlp, old_mlp, "down_proj", width, inner, output=True)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weight = fill.norm(getattr(layer, name), getattr(old, name, None), width, norm_scale)
            if constant:
                weight[source.hidden_size] = 0

    final = fill.norm(result.model.norm, model.model.norm, width, norm_scale)
    old_tokens = torch.arange(source.vocab_size, device="cpu")
    embedding = fill.allocate(result.model.embed_tokens, "weight", random=True)
    embedding[:, source.hidden_size :] = 0
    fill.put(embedding, (old_tokens, width), model.model.embed_tokens.weight.detach())
    if config.tie_word_embeddings:
        result.tie_weights()
    else:
        fill.linear(result, model, "lm_head", old_tokens, width)
    if constant:
        head = result.lm_head.weight
        embedding[:, source.hidden_size] = constant
        final[source.hidden_size] = norm_scale * _CONSTANT_GAIN / constant
        head[: source.vocab_size, source.hidden_size] = 0
        head[source.vocab_size :, source.hidden_size] = _NEVER
    return result.eval()
