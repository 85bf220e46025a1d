"""A Llama as a GGUF file, written by the ``gguf`` package from the torch model's own numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

FILE = "model.gguf"
_BASE = 10000.0  # of the frequencies that the factors correct
_TYPES = {torch.float32: gguf.GGMLQuantizationType.F32, torch.bfloat16: gguf.GGMLQuantizationType.BF16}


def write_gguf(model: LlamaForCausalLM, folder: Path, ends: Sequence[int]) -> None:
    """Write ``folder``/model.gguf: matrices in the model's dtype to the bit, norms in float32 as llama.cpp wants them.

    Its vocabulary has the right size and no meaning: prompts and texts are token ids. A text ends at the first of
    ``ends``; without one it goes on.

    Raises:
        ValueError: a rotary embedding whose cosines are scaled, for which there is no field.
    """
    if model.model.rotary_emb.attention_scaling != 1.0:
        raise ValueError(f"model: expected unscaled rotary cosines, got rope_type {model.model.rotary_emb.rope_type!r}")
    folder.mkdir(parents=True, exist_ok=True)
    config = model.config
    writer = gguf.GGUFWriter(folder / FILE, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(_BASE)
    writer.add_vocab_size(config.vocab_size)
    # Names that a text can be read back from; this kind of tokenizer has no end-of-text token of its own.
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([f"t{token}" for token in range(config.vocab_size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_add_bos_token(False)
    if ends:
        writer.add_eos_token_id(ends[0])

    # llama.cpp divides its frequencies by factors, so that they are the model's, scaled or rounded.
    inverse = model.model.rotary_emb.inv_freq
    own = _BASE ** (-torch.arange(len(inverse), dtype=torch.float64) / len(inverse))
    _add(writer, "rope_freqs.weight", own / inverse.double())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.named_parameters():  # a head that is the embedding is not among them
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # In llama.cpp's order: rotary pairs side by side, not half a head apart.
            halves = weight.reshape(-1, 2, config.head_dim // 2, weight.shape[1])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        _add(writer, str(names.get_name(name, try_suffixes=(".weight",))), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add(writer: gguf.GGUFWriter, name: str, weight: Tensor) -> None:
    """A matrix in its dtype, anything else in float32."""
    raw = weight.detach().contiguous()
    raw = raw if raw.dim() > 1 else raw.float()
    writer.add_tensor(name, raw.view(torch.uint8).numpy(), raw_shape=None, raw_dtype=_TYPES[raw.dtype])
