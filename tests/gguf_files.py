"""Small GGUF files as llama.cpp's converters write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType
from ops.contracts.decoder import packed_matrix
from transformers import PreTrainedModel

from gsd_kernels.ops.packed import BY_NAME
from gsd_kernels_hf.packed.fields import PERMUTED, file_names


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order in which LLaMA's files have them: a head's two halves in turns."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    architecture: str,
    kinds: str | list[str],
    also: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
    *,
    of_a_part: int = 0,
) -> Path:
    """``model`` as a file, its matrices packed as the ``kinds`` in turns ("f32", "bf16", "q4_0", …).

    Kinds that the gguf package does not pack get random blocks. ``also`` adds what else is to be in the file;
    ``of_a_part``: split into parts of so many tensors, whose first part is returned.
    """
    kinds = [kinds] if isinstance(kinds, str) else kinds
    config, writer = model.config, gguf.GGUFWriter(path, architecture, split_max_tensors=of_a_part)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    if architecture == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    writer.add_token_list(["a"] * 7)  # a vocabulary that has to be passed over
    writer.add_eos_token_id(2)
    also(writer)
    number, places = 0, file_names(model)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        if architecture in PERMUTED and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = permuted(values, heads)
        kind = kinds[number % len(kinds)] if values.ndim == 2 else "f32"
        number += values.ndim == 2
        _add(writer, places[name], values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if of_a_part else path


def _add(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    of = GGMLQuantizationType[kind.upper()]
    if kind == "f32":
        return writer.add_tensor(name, np.ascontiguousarray(values))
    try:
        packed = gguf.quants.quantize(values, of)
    except NotImplementedError:
        packed = packed_matrix(BY_NAME[kind], *values.shape).data.numpy()
    writer.add_tensor(name, packed, raw_dtype=of)


def tiny(
    architecture: str, hidden: int = 64, *, tied: bool = False, head_dim: int | None = None, **config: Any
) -> PreTrainedModel:
    """A random model of an architecture, float32; ``config`` says what is special."""
    import transformers as t

    torch.manual_seed(3)
    shape = {
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "head_dim": hidden // 4 if head_dim is None else head_dim,
        "eos_token_id": 2,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    kind = getattr(t, f"{architecture.title()}ForCausalLM")
    model = kind(kind.config_class(**{**shape, **config})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    return model
