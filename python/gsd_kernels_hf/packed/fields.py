"""The fields of a GGUF file's head, one by one: honoured, harmless, or a reason to refuse the file."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .entries import Strings
from .header import Header

logger = logging.getLogger("gsd_kernels")

ARCHITECTURE = "general.architecture"
VOCABULARY = "token_embd.weight"
LAYERS = "block_count"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a model by the part of a tensor's name in the file."""
PARTS = {module: part for part, module in NAMES.items()}
FREQUENCIES = "rope_freqs.weight"
PERMUTED = ("llama", "mistral")
"""Architectures whose rows of q and k lie in the file as pairs of a head's halves."""
PACKED = (*PERMUTED, "qwen2", "qwen3")
"""Architectures whose files are read whole here; transformers' loader reads the others."""
CHOSEN = {"attention_bias": "attn_output", "mlp_bias": "ffn_down"}
"""Settings of configs that give matrices a bias, and the one by whose bias a file says it."""
TOKENS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
}
"""What configs call ids of ``tokenizer.ggml``."""
ENDS = ("eot_token_id", "eom_token_id")
"""Ids of ``tokenizer.ggml`` that end a text as the end token does: of a turn, of a message."""
MAX_COUNT = (1 << 31) - 1
DENSE = "since mixtures of experts are not read from files of this architecture; load the checkpoint it was made from"
BY_YARN = "attention is scaled as yarn does, or not"
NEUTRAL: dict[str, tuple[tuple[Any, ...], str]] = {
    "attention.causal": ((True,), "true, since every token here sees those before it alone"),
    "attention.clamp_kqv": ((0,), "0: keys, queries and values are not clamped"),
    "attention.max_alibi_bias": ((0,), "0: positions are rotary"),
    "attn_logit_softcapping": ((0,), "0: scores are not capped"),
    "embedding_scale": ((0, 1), "0 or 1: embeddings are not scaled"),
    **dict.fromkeys((f"expert_{kind}count" for kind in ("", "shared_", "used_")), ((0,), f"0, {DENSE}")),
    "final_logit_softcapping": ((0,), "0: logits are not capped"),
    "leading_dense_block_count": ((0,), f"0, {DENSE}"),
    "logit_scale": ((0, 1), "0 or 1: logits are not scaled"),
    "nextn_predict_layers": ((0,), "0: layers that predict further tokens are not read"),
    "residual_scale": ((0, 1), "0 or 1: residuals are not scaled"),
    **dict.fromkeys((f"rope.scaling.{yarn}attn_factor" for yarn in ("", "yarn_")), ((1,), f"1: {BY_YARN}")),
    "rope.scaling.yarn_ext_factor": ((1, -1), "1 or -1: yarn extrapolates in full"),
    "rope.scaling.yarn_log_multiplier": ((0,), f"0: {BY_YARN}"),
    "use_parallel_residual": ((False,), "false: attention and MLP follow each other"),
}
"""Fields of an architecture that change nothing as long as they have one of these values, and what is expected."""
SCALINGS = ("none", "linear", "yarn")
"""Ways of stretching the rotary embedding that llama.cpp and transformers compute alike."""
SCALED_BY_TRANSFORMERS = ("gpt-oss",)
"""Architectures whose scaling of the rotary embedding transformers' loader reads."""
HARMLESS = ("classifier.output_labels", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout")
"""Fields of an architecture that change no logit whatever they say."""


class Fields:
    """The fields of a file's architecture, each asked for once: :meth:`close` refuses what nobody asked for."""

    def __init__(self, header: Header) -> None:
        self.header, self.architecture = header, architecture_of(header)
        prefix = f"{self.architecture}."
        self.left = {key.removeprefix(prefix): v for key, v in header.fields.items() if key.startswith(prefix)}

    def refusal(self, name: str, value: object, expected: str) -> ValueError:
        return self.header.refusal(f"{self.architecture}.{name}", value, expected)

    def take(self, name: str, default: Any, fits: Callable[[Any], bool], expected: str) -> Any:
        """A field's value.

        Raises:
            ValueError: it does not fit, or is missing and has no ``default``.
        """
        if name not in self.left:
            if default is None:
                raise self.header.missing(f"{self.architecture}.{name}", expected)
            return default
        value = self.left.pop(name)
        if not fits(value):
            raise self.refusal(name, value, expected)
        return value

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        expected = f"a whole number from {least} to {MAX_COUNT}"
        return self.take(name, default, lambda v: type(v) is int and least <= v <= MAX_COUNT, expected)

    def real(self, name: str, default: float | None = None, *, above: float = 0.0, below: float = math.inf) -> float:
        expected = f"a number above {above:g}" + ("" if below == math.inf else f" and below {below:g}")
        return self.take(name, default, lambda v: type(v) in (int, float) and above < v < below, expected)

    def close(self) -> None:
        """Refuse what was not asked for, unless it changes nothing."""
        for name, (values, expected) in NEUTRAL.items():
            self.take(name, values[0], lambda v, values=values: type(v) in (bool, int, float) and v in values, expected)
        for name in self.left.keys() - set(HARMLESS):
            raise self.refusal(name, self.left[name], "no such field: nothing here knows what it changes")


def architecture_of(header: Header) -> str:
    """The kind of model that a file holds.

    Raises:
        ValueError: it does not say.
    """
    if ARCHITECTURE not in header.fields:
        raise header.missing(ARCHITECTURE, "a name, such as 'llama'")
    name = header.fields[ARCHITECTURE]
    if not isinstance(name, str):
        raise header.refusal(ARCHITECTURE, name, "a name, such as 'llama'")
    return name


def check_layers(header: Header) -> None:
    """Compare the number of layers with the tensors', before a model of so many is made.

    Raises:
        ValueError: there are fewer in the file.
    """
    fields, blocks = Fields(header), {part[1] for name in header.tensors if (part := name.split("."))[0] == "blk"}
    count = fields.count(LAYERS)
    if count > len(blocks):
        raise fields.refusal(LAYERS, count, f"at most {len(blocks)}, the layers that the file has tensors of")


def check_foreign(header: Header) -> None:
    """Refuse what transformers' loader would pass over in a head of another architecture, and sizes without tensors.

    Raises:
        ValueError: there is such a field, or a size is missing.
    """
    check_layers(header)
    fields = Fields(header)
    _vocabulary(fields)
    width, length = header.tensors[VOCABULARY].shape[-1], fields.count("embedding_length")
    if length != width:
        raise fields.refusal("embedding_length", length, f"{width}, the width of {VOCABULARY}")
    if fields.architecture in SCALED_BY_TRANSFORMERS:
        return
    rope = _rope(fields, 1)
    if rope["rope_type"] != "default":
        raise fields.refusal("rope.scaling.factor", rope["factor"], "1: transformers' loader does not read it")
    values, expected = NEUTRAL["attention.causal"]
    fields.take("attention.causal", True, lambda v: v in values, expected)


def config_of(header: Header) -> PretrainedConfig:
    """The config of a file's model, as transformers reads it where it reads all of the head.

    Raises:
        ValueError: a field is missing, is none, contradicts another, or asks for what is not served.
    """
    check_layers(header)
    fields, architecture = Fields(header), architecture_of(header)
    heads, hidden = fields.count("attention.head_count"), fields.count("embedding_length")
    rotated = fields.count("rope.dimension_count", default=0)
    head_dim = fields.count("attention.key_length", default=rotated or hidden // heads)
    kv_heads = fields.count("attention.head_count_kv", default=heads)
    if head_dim < 2 or head_dim % 2:
        raise fields.refusal("attention.head_count", heads, f"heads of an even width, not {head_dim}")
    if heads % kv_heads:
        raise fields.refusal("attention.head_count_kv", kv_heads, f"a divisor of {heads}, the number of heads")
    for name, value in (
        ("rope.dimension_count", rotated or head_dim),
        ("attention.value_length", fields.count("attention.value_length", default=head_dim)),
    ):
        if value != head_dim:
            raise fields.refusal(name, value, f"{head_dim}, the width of a head")
    scale = fields.real("attention.scale", default=0.0, above=-1.0)
    if scale != 0 and not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        raise fields.refusal("attention.scale", scale, f"{head_dim**-0.5}, 1 over the root of a head's width")
    vocabulary, context = _vocabulary(fields), fields.count("context_length")
    values = {
        "num_hidden_layers": fields.count(LAYERS),
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": fields.count("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": fields.real("attention.layer_norm_rms_epsilon", below=1.0),
        "rope_parameters": _rope(fields, context),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **_window(fields, context),
        **{of: token for name, of in TOKENS.items() if (token := _token(header, name, vocabulary)) is not None},
        **{name: True for name, matrix in CHOSEN.items() if f"blk.0.{matrix}.bias" in header.tensors},
    }
    fields.close()
    if architecture != "qwen2" or head_dim * heads != hidden:  # whose config has no such name
        values["head_dim"] = head_dim
    try:
        config = AutoConfig.for_model(architecture, **values)
    except Exception as error:  # transformers checks configs in ways of its own
        raise ValueError(f"path: {header.path}: no {architecture} model has such fields: {error}") from error
    config.eos_token_id = _with_ends(config.eos_token_id, header, vocabulary)
    return config


def end_by(model: PreTrainedModel, header: Header) -> None:
    """Have a model that something else read from the file end its texts as the head says."""
    for place in (model.config.get_text_config(decoder=True), model.generation_config):
        if place is not None:
            place.eos_token_id = _with_ends(place.eos_token_id, header, model.get_input_embeddings().num_embeddings)


def _with_ends(ends: int | list[int] | None, header: Header, vocabulary: int) -> int | list[int] | None:
    """Tokens that end a text, together with those of the head."""
    more = [token for name in ENDS if (token := _token(header, name, vocabulary)) is not None]
    ids = list(dict.fromkeys([*(ends if isinstance(ends, list) else [] if ends is None else [ends]), *more]))
    return ends if not more else ids[0] if len(ids) == 1 else ids


def _token(header: Header, name: str, vocabulary: int) -> int | None:
    """Id of a special token; those that no text depends on may lie outside the vocabulary, as llama.cpp has it."""
    key = f"tokenizer.ggml.{name}"
    value = header.fields.get(key)
    if key not in header.fields:
        return None
    if type(value) is not int or not 0 <= value < vocabulary:
        error = header.refusal(key, value, f"a token from 0 to {vocabulary - 1}")
        if type(value) is not int or name not in ("padding_token_id", "unknown_token_id"):
            raise error
        logger.warning("%s; the file is read as without it", error)
        return None
    return value


def _vocabulary(fields: Fields) -> int:
    """Number of tokens."""
    header = fields.header
    if VOCABULARY not in header.tensors:
        raise header.missing(VOCABULARY, "the embedding")
    rows = header.tensors[VOCABULARY].shape[0]
    size = fields.count("vocab_size", default=rows)
    if size != rows:
        raise fields.refusal("vocab_size", size, f"{rows}, the rows of {VOCABULARY}")
    tokens = header.fields.get("tokenizer.ggml.tokens", Strings(0))
    if not isinstance(tokens, Strings) or tokens.count > rows:
        raise header.refusal("tokenizer.ggml.tokens", tokens, f"an array of {rows} strings, one a row of {VOCABULARY}")
    return size


def _rope(fields: Fields, context: int) -> dict[str, Any]:
    """Parameters of the rotary embedding, as transformers has them."""
    rope: dict[str, Any] = {"rope_theta": fields.real("rope.freq_base", default=10000.0, above=1.0, below=1e15)}
    old = fields.real("rope.scale_linear", default=1.0, above=1e-3, below=1e6)
    factor = fields.real("rope.scaling.factor", default=old, above=1e-3, below=1e6)
    kind = fields.take("rope.scaling.type", "linear", lambda v: v in SCALINGS, f"one of {', '.join(SCALINGS)}")
    original = fields.count("rope.scaling.original_context_length", default=context)
    fast = fields.real("rope.scaling.yarn_beta_fast", default=32.0)
    slow = fields.real("rope.scaling.yarn_beta_slow", default=1.0)
    if kind == "none" or factor == 1:
        return {**rope, "rope_type": "default"}
    if kind == "linear":
        return {**rope, "rope_type": "linear", "factor": factor}
    if factor < 1:
        raise fields.refusal("rope.scaling.factor", factor, "at least 1, with yarn")
    yarn = {"factor": factor, "original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
    return {**rope, "rope_type": "yarn", **yarn}


def _window(fields: Fields, context: int) -> dict[str, Any]:
    """Sliding window of attention: Mistral's config has one, the others are refused where it would be noticed."""
    window = fields.count("attention.sliding_window", default=-1, least=0)
    if fields.architecture == "mistral" and window >= 0:
        return {"sliding_window": window or None}
    if 0 < window < context:
        raise fields.refusal("attention.sliding_window", window, f"0, or at least the context's {context} tokens")
    return {}


def empty_model(header: Header, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The model of a file of :data:`PACKED`, on the meta device: it uses every field and every tensor of the file.

    Raises:
        ValueError: see :func:`config_of`; or a tensor is missing, of another shape, or would not be used.
    """
    config = config_of(header)
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    left = dict(header.tensors)
    tensors = {file_name(name): weight for name, weight in model.state_dict().items()}
    if config.tie_word_embeddings:
        del tensors["output.weight"]
    if architecture_of(header) in PERMUTED and FREQUENCIES in left:
        tensors[FREQUENCIES] = model.model.rotary_emb.inv_freq
    for place, weight in tensors.items():
        shape = list(weight.shape)
        if place not in left:
            raise header.missing(place, f"a tensor {shape}, by the fields of the head")
        if (found := list(left.pop(place).shape)) != shape:
            raise header.refusal(place, found, f"{shape}, by the fields of the head")
    for name, tensor in left.items():
        raise header.refusal(
            name, list(tensor.shape), f"no such tensor ({len(left)} in all): the model does not use it"
        )
    return model


def file_name(name: str) -> str:
    """Name in the file, ``blk.3.attn_q.weight``, of a tensor of the model."""
    module, _, kind = name.rpartition(".")
    if not module.startswith("model.layers."):
        return f"{PARTS[module]}.{kind}"
    _, _, layer, module = module.split(".", 3)
    return f"blk.{layer}.{PARTS[module]}.{kind}"
