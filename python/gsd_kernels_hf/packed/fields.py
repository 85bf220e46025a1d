"""The fields of a GGUF file's head, a row each: what a model is made of, what changes nothing, what is refused."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .header import Header

logger = logging.getLogger("gsd_kernels")

VOCABULARY = "token_embd.weight"
FREQUENCIES = "rope_freqs.weight"
PERMUTED = ("llama", "mistral")
"""Architectures whose rows of q and k lie in the file as pairs of a head's halves."""
PACKED = (*PERMUTED, "qwen2", "qwen3")
"""Architectures whose files are read whole here; transformers' loader reads the others."""
CHOSEN = {"attention_bias": "attn_output", "mlp_bias": "ffn_down"}
"""Settings of configs that give matrices a bias, and the one by whose bias a file says it."""
TOKENS = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
"""Tokens whose ids are in ``tokenizer.ggml``, and what configs call them."""
ENDS = ("eot", "eom")
"""Those that end a text as the end token does: of a turn, of a message."""
SCALED_BY_TRANSFORMERS = ("gpt-oss",)
"""Architectures whose scaling of the rotary embedding transformers' loader reads."""
MAX_COUNT = (1 << 31) - 1


class Field(NamedTuple):
    """A field of an architecture, and the values that it may have.

    Attributes:
        fits: says whether a value can be served.
        expected: in words.
        default: where the field is missing; ``None``: it must be there.
    """

    fits: Callable[[Any], bool]
    expected: str
    default: Any = None


def count(default: int | None = None, least: int = 1) -> Field:
    """A whole number."""
    expected = f"a whole number from {least} to {MAX_COUNT}"
    return Field(lambda value: type(value) is int and least <= value <= MAX_COUNT, expected, default)


def real(default: float | None = None, *, above: float = 0.0, below: float = math.inf) -> Field:
    """A number."""
    expected = f"a number above {above:g}" + ("" if below == math.inf else f" and below {below:g}")
    return Field(lambda value: type(value) in (int, float) and above < value < below, expected, default)


def one_of(*values: bool | float | str, why: str = "") -> Field:
    """One of these values, the first by default."""
    expected = f"{' or '.join(map(str, values))}{why}"
    return Field(lambda value: value in values, expected, values[0])


SIZES = {
    "block_count": count(),
    "embedding_length": count(),
    "vocab_size": count(0),  # 0: as many as the embedding has rows
}
ROPE = {
    "rope.freq_base": real(10000.0, above=1.0, below=1e15),
    "rope.scale_linear": real(1.0, above=1e-3, below=1e6),
    "rope.scaling.factor": real(0.0, above=1e-3, below=1e6),  # 0: as the field before, its old name
    "rope.scaling.type": one_of("linear", "none", "yarn"),
    "rope.scaling.original_context_length": count(0),  # 0: the context
    "rope.scaling.yarn_beta_fast": real(32.0),
    "rope.scaling.yarn_beta_slow": real(1.0),
}
BESIDE = ", since nothing else is computed for files of this architecture; load the checkpoint it was made from"
NEUTRAL = {
    name: one_of(*values, why=BESIDE)
    for names, *values in (
        ("attention.causal", True),
        ("use_parallel_residual", False),
        ("attention.clamp_kqv attention.max_alibi_bias attn_logit_softcapping final_logit_softcapping", 0),
        ("expert_count expert_shared_count expert_used_count leading_dense_block_count nextn_predict_layers", 0),
        ("embedding_scale logit_scale residual_scale", 0, 1),
        ("rope.scaling.attn_factor rope.scaling.yarn_attn_factor", 1),
        ("rope.scaling.yarn_ext_factor", 1, -1),
        ("rope.scaling.yarn_log_multiplier", 0),
    )
    for name in names.split()
}
"""Fields that change nothing as long as they have one of these values."""
HARMLESS = ("classifier.output_labels", "pooling_type", "rope.scaling.finetuned", "tensor_data_layout")
"""Fields that change no logit whatever they say."""
FIELDS = {
    **SIZES,
    **ROPE,
    "context_length": count(),
    "feed_forward_length": count(),
    "attention.head_count": count(),
    "attention.head_count_kv": count(0),  # 0: as many as heads
    "attention.key_length": count(0),  # 0: as the next one
    "rope.dimension_count": count(0),  # 0: what the hidden size has for each head
    "attention.value_length": count(0),
    "attention.layer_norm_rms_epsilon": real(below=1.0),
    "attention.scale": real(0.0, above=-1.0),
    "attention.sliding_window": count(-1, least=0),
    **NEUTRAL,
    **dict.fromkeys(HARMLESS, Field(lambda value: True, "", "")),
}
"""All that is known of :data:`PACKED`; any other field is refused."""


def read(header: Header, fields: dict[str, Field]) -> dict[str, Any]:
    """The values of these fields of the file's architecture.

    Raises:
        ValueError: one is missing, or does not fit.
    """
    values = {}
    for name, (fits, expected, default) in fields.items():
        key = f"{header.architecture}.{name}"
        values[name] = value = header.fields.get(key, default)
        if value is None or (key in header.fields and not fits(value)):
            raise header.refusal(key, value, expected)
    return values


def check(header: Header, values: dict[str, Any], rules: Iterable[tuple[str, bool, str]]) -> None:
    """Raise for the first field that contradicts others: name, whether it agrees, and what would."""
    for name, agrees, expected in rules:
        if not agrees:
            raise header.refusal(f"{header.architecture}.{name}", values[name], expected)


def _check_sizes(header: Header, values: dict[str, Any]) -> int:
    """Compare sizes with the tensors', before a model of so many is made; the number of tokens."""
    if VOCABULARY not in header.tensors:
        raise header.refusal(VOCABULARY, None, "the embedding")
    shape = header.tensors[VOCABULARY].shape
    layers = len({part[1] for name in header.tensors if (part := name.split("."))[0] == "blk"})
    rules = (
        ("block_count", values["block_count"] <= layers, f"at most {layers}, the layers that the file has tensors of"),
        ("embedding_length", values["embedding_length"] == shape[-1], f"{shape[-1]}, the width of {VOCABULARY}"),
        ("vocab_size", values["vocab_size"] in (0, shape[0]), f"{shape[0]}, the rows of {VOCABULARY}"),
    )
    check(header, values, rules)
    tokens = header.fields.get("tokenizer.ggml.tokens", range(0))
    if not isinstance(tokens, range) or len(tokens) > shape[0]:
        expected = f"an array of {shape[0]} strings, one a row of {VOCABULARY}"
        raise header.refusal("tokenizer.ggml.tokens", tokens, expected)
    return shape[0]


def check_foreign(header: Header) -> None:
    """Refuse what transformers' loader would pass over in a head of another architecture, and sizes without tensors.

    Raises:
        ValueError: there is such a field, or a size is missing.
    """
    _check_sizes(header, read(header, SIZES))
    if header.architecture in SCALED_BY_TRANSFORMERS:
        return
    rope = _rope(values := read(header, ROPE | {"attention.causal": NEUTRAL["attention.causal"]}), 1)
    plain = rope["rope_type"] == "default"
    check(header, values, [("rope.scaling.factor", plain, "1: transformers' loader does not read it")])


def config_of(header: Header) -> PretrainedConfig:
    """The config of a file's model, as transformers reads it where it reads all of the head.

    Raises:
        ValueError: a field is missing, is none, contradicts another, or asks for what is not served.
    """
    architecture, fields = header.architecture, read(header, FIELDS)
    for key in header.fields:
        if key.startswith(f"{architecture}.") and key.partition(".")[2] not in FIELDS:
            raise header.refusal(key, header.fields[key], "no such field: nothing here knows what it changes")
    vocabulary = _check_sizes(header, fields)
    heads, hidden, context = (fields[k] for k in ("attention.head_count", "embedding_length", "context_length"))
    head_dim = fields["attention.key_length"] or fields["rope.dimension_count"] or hidden // heads
    kv_heads, window = fields["attention.head_count_kv"] or heads, fields["attention.sliding_window"]
    rope, scale, slides = _rope(fields, context), fields["attention.scale"], architecture == "mistral"
    scaled = scale == 0 or math.isclose(scale * head_dim**0.5, 1.0, rel_tol=1e-6)
    rules = (
        ("attention.head_count", head_dim >= 2 and head_dim % 2 == 0, f"heads of an even width, not {head_dim}"),
        ("attention.head_count_kv", heads % kv_heads == 0, f"a divisor of {heads}, the number of heads"),
        *(
            (name, fields[name] in (0, head_dim), f"{head_dim}, the width of a head")
            for name in ("rope.dimension_count", "attention.value_length")
        ),
        ("attention.scale", scaled, f"1 over the root of {head_dim}, the width of a head"),
        ("attention.sliding_window", slides or not 0 < window < context, f"0, or at least the context's {context}"),
        ("rope.scaling.factor", rope["rope_type"] != "yarn" or rope["factor"] > 1, "at least 1, with yarn"),
    )
    check(header, fields, rules)
    values = {
        "num_hidden_layers": fields["block_count"],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": fields["feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_parameters": rope,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **({"sliding_window": window or None} if slides and window >= 0 else {}),
        **(
            {"head_dim": head_dim} if architecture != "qwen2" or head_dim * heads != hidden else {}
        ),  # it has no such name
        **{
            f"{of}_token_id": token
            for name, of in TOKENS.items()
            if (token := _token(header, name, vocabulary)) is not None
        },
        **{name: True for name, matrix in CHOSEN.items() if f"blk.0.{matrix}.bias" in header.tensors},
    }
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
    key = f"tokenizer.ggml.{name}_token_id"
    value = header.fields.get(key)
    if key not in header.fields:
        return None
    if type(value) is not int or not 0 <= value < vocabulary:
        error = header.refusal(key, value, f"a token from 0 to {vocabulary - 1}")
        if type(value) is not int or name not in ("padding", "unknown"):
            raise error
        logger.warning("%s; the file is read as without it", error)
        return None
    return value


def _rope(fields: dict[str, Any], context: int) -> dict[str, Any]:
    """Parameters of the rotary embedding, as transformers has them."""
    factor, kind = fields["rope.scaling.factor"] or fields["rope.scale_linear"], fields["rope.scaling.type"]
    rope: dict[str, Any] = {"rope_theta": fields["rope.freq_base"]}
    if kind == "none" or factor == 1:
        return {**rope, "rope_type": "default"}
    rope |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = fields["rope.scaling.original_context_length"] or context
        rope |= {name: fields[f"rope.scaling.yarn_{name}"] for name in ("beta_fast", "beta_slow")}
    return rope


def empty_model(header: Header, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    """The model of a file of :data:`PACKED`, on the meta device: it uses every field and every tensor of the file.

    Raises:
        ValueError: see :func:`config_of`; or a tensor is missing, of another shape, or would not be used.
    """
    config = config_of(header)
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = model.state_dict()
    tensors = {name: list(weights[own].shape) for own, name in file_names(model).items()}
    if config.tie_word_embeddings:
        del tensors["output.weight"]
    if header.architecture in PERMUTED and FREQUENCIES in header.tensors:
        tensors[FREQUENCIES] = list(model.model.rotary_emb.inv_freq.shape)
    found = {name: list(tensor.shape) for name, tensor in header.tensors.items()}
    for name, shape in tensors.items():
        if found.get(name) != shape:
            raise header.refusal(name, found.get(name), f"a tensor {shape}, by the fields of the head")
    for name in (left := found.keys() - tensors.keys()):
        raise header.refusal(name, found[name], f"no such tensor ({len(left)} in all): the model does not use it")
    return model


def file_names(model: PreTrainedModel) -> dict[str, str]:
    """Names in the file, ``blk.3.attn_q.weight``, by those of the model's tensors."""
    import gguf

    # Of all architectures here Qwen3's has the most tensors, and those that others have are called alike.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, model.config.num_hidden_layers)
    return {name: names.get_name(name, (".weight", ".bias")) for name in model.state_dict()}
