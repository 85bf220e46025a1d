"""What can be served and what is refused, by name, before anything is changed."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from gsd_kernels import BACKENDS

logger = logging.getLogger("gsd_kernels")

HONOURED, IRRELEVANT, REFUSED = "honoured", "irrelevant", "refused"
BEAMS = "beam search keeps several hypotheses; use num_beams=1, or unpatch(model)"
OTHER_SPECULATION = "another way of speculating; pass assistant_model instead, or unpatch(model)"

# Every field of GenerationConfig: (how it is treated, why, the values that are neutral although it is refused).
CONFIG_FIELDS: dict[str, tuple[str, str, tuple[Any, ...]]] = {
    **{
        name: (HONOURED, "", ())
        for name in (
            "bad_words_ids begin_suppress_tokens bos_token_id do_sample encoder_no_repeat_ngram_size "
            "encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
            "forced_bos_token_id forced_eos_token_id max_length max_new_tokens max_time min_length min_new_tokens "
            "min_p no_repeat_ngram_size num_return_sequences output_logits output_scores pad_token_id "
            "prefill_chunk_size remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate "
            "sequence_bias stop_strings suppress_tokens temperature top_h top_k top_p typical_p watermarking_config"
        ).split()
    },
    **{
        name: (IRRELEVANT, "", ())
        for name in (
            # bookkeeping, compilation, other caches, options of beam search and of transformers' own assisted modes
            "_commit_hash _from_model_config transformers_version compile_config disable_compile "
            "continuous_batching_config decoder_start_token_id max_cache_len low_memory cache_config "
            "diversity_penalty early_stopping length_penalty "
            "assistant_confidence_threshold assistant_ensemble_weight assistant_lookbehind target_lookbehind "
            "num_assistant_tokens num_assistant_tokens_schedule max_matching_ngram_size"
        ).split()
    },
    "num_beams": (REFUSED, BEAMS, (1,)),
    "num_beam_groups": (REFUSED, BEAMS, (1,)),
    "constraints": (REFUSED, BEAMS, ()),
    "force_words_ids": (REFUSED, BEAMS, ()),
    "penalty_alpha": (REFUSED, "contrastive search re-ranks with hidden states", (0, 0.0)),
    "dola_layers": (REFUSED, "DoLa contrasts hidden layers", ()),
    "guidance_scale": (REFUSED, "classifier-free guidance needs a second target forward at every token", (1, 1.0)),
    "prompt_lookup_num_tokens": (REFUSED, OTHER_SPECULATION, (0,)),
    "assistant_early_exit": (REFUSED, OTHER_SPECULATION, (0,)),
    "use_mtp": (REFUSED, OTHER_SPECULATION, (False,)),
    "speculation_type": (REFUSED, OTHER_SPECULATION, ()),
    "is_assistant": (REFUSED, "the model is another generation's assistant", (False,)),
    "output_attentions": (REFUSED, "attention weights are never formed for graph rows", (False,)),
    "output_hidden_states": (REFUSED, "hidden states of rejected rows would be mixed in", (False,)),
    "token_healing": (REFUSED, "heal the prompt first with model.heal_tokens(input_ids, tokenizer)", (False,)),
    "use_cache": (REFUSED, "graph rows are verified in a key/value cache", (True,)),
    "cache_implementation": (
        REFUSED,
        "a preallocated full-precision cache with graph slots is used; quantised and offloaded caches cannot hold it",
        ("static", "dynamic", "dynamic_full", "hybrid", "sliding_window"),
    ),
}

# Every parameter of transformers' generate, and every keyword that it hands on.
GENERATE_PARAMETERS: dict[str, str] = {
    **dict.fromkeys(
        "inputs input_ids attention_mask generation_config logits_processor stopping_criteria "
        "prefix_allowed_tokens_fn assistant_model streamer tokenizer assistant_tokenizer custom_generate".split(),
        HONOURED,
    ),
    **dict.fromkeys("trust_remote_code kwargs".split(), IRRELEVANT),
    **dict.fromkeys(
        "synced_gpus negative_prompt_ids negative_prompt_attention_mask past_key_values inputs_embeds position_ids "
        "cache_position encoder_outputs head_mask labels".split(),
        REFUSED,
    ),
}

SERVED_LAYERS = {"full_attention", "sliding_attention"}
MAX_VOCABULARY_PADDING = 1024


def unwrap(model: Any) -> Any:
    """The transformers model inside ``torch.compile`` and PEFT wrappers.

    Raises:
        ValueError: a PEFT method that prepends virtual tokens, which lives outside the model.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
            if getattr(model.active_peft_config, "is_prompt_learning", False):
                raise ValueError("model: PEFT prompt learning is not supported, since virtual tokens precede the text")
            model = model.get_base_model()
        else:
            return model


def check_backend(backend: object) -> None:
    """Raise unless ``backend`` is the name of one; whether it can run here, every op says for itself."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")


def check_model(name: str, model: Any) -> None:
    """Raise unless graph rows can be verified in (or drafted by) ``model``."""
    if not isinstance(model, PreTrainedModel) or not callable(getattr(model, "generate", None)):
        raise TypeError(f"{name}: expected a transformers causal language model, got {type(model).__name__}")
    config = model.config.get_text_config(decoder=True)
    kind = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name}: {kind} is an encoder-decoder; only decoder-only models are supported")
    if not hasattr(config, "rope_parameters") and not hasattr(config, "rope_theta"):
        raise ValueError(f"{name}: {kind} has no rotary position embedding; LLaMA-family models have")
    for rope in _rope_types(config):
        if rope in ("dynamic", "longrope"):
            raise ValueError(f"{name}: rope type {rope!r} changes with the length; not supported")
    unserved = set(getattr(config, "layer_types", None) or ()) - SERVED_LAYERS
    if unserved:
        raise ValueError(f"{name}: {kind} has layers of type {sorted(unserved)[0]!r}; not supported")
    if any(parameter.endswith(".sinks") for parameter, _ in model.named_parameters()):
        raise ValueError(f"{name}: {kind} has attention sinks; not supported")
    if not model._supports_logits_to_keep():
        raise ValueError(f"{name}: {kind}.forward does not take logits_to_keep; not supported")


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [p for p in parameters.values() if isinstance(p, Mapping)] or [parameters]
    return {str(p.get("rope_type", p.get("type", "default"))) for p in nested}


def check_pair(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: Any = None, assistant_tokenizer: Any = None
) -> None:
    """Raise unless draft and target read the same tokens; a few padded vocabulary entries may differ."""
    cure = "transformers' universal assisted generation (generate(..., assistant_tokenizer=...)) serves such pairs"
    sizes = vocabulary(target), vocabulary(draft)
    if abs(sizes[0] - sizes[1]) > MAX_VOCABULARY_PADDING:
        raise ValueError(
            f"assistant_model: vocabulary sizes {sizes[0]} (target) and {sizes[1]} (draft) mean different tokenizers; "
            + cure
        )
    for token in ("bos_token_id", "eos_token_id"):
        ids = [_as_set(getattr(m.config.get_text_config(decoder=True), token, None)) for m in (target, draft)]
        if ids[0] and ids[1] and not ids[0] & ids[1]:
            raise ValueError(
                f"assistant_model: {token} {sorted(ids[0])} (target) and {sorted(ids[1])} (draft) mean different "
                f"tokenizers; {cure}"
            )
    if tokenizer is None or assistant_tokenizer is None:
        return
    if tokenizer.get_vocab() != assistant_tokenizer.get_vocab():
        raise ValueError(f"assistant_tokenizer: its vocabulary differs from the tokenizer's; {cure}")


def vocabulary(model: PreTrainedModel) -> int:
    """Rows of the output embedding, padding included."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _as_set(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, (list, tuple)) else {int(value)}


def check_generation_config(config: GenerationConfig) -> None:
    """Raise for every option that is set and cannot be served; report one that is unknown."""
    for name, value in vars(config).items():
        if name not in CONFIG_FIELDS and value is not None and not name.startswith("_"):
            # Checkpoints carry options of their own code, so an unknown one is no reason to refuse the model.
            logger.warning("generation option %s=%r is not known to gsd_kernels and may have no effect", name, value)
        treatment, why, neutral = CONFIG_FIELDS.get(name, (IRRELEVANT, "", ()))
        if treatment == REFUSED and value is not None and value not in neutral:
            raise ValueError(f"{name}={value!r}: not supported by graph-speculative generation: {why}")


def check_arguments(kwargs: Mapping[str, Any]) -> None:
    """Raise for a ``generate`` argument that is set and cannot be served."""
    for name, value in kwargs.items():
        if GENERATE_PARAMETERS.get(name) == REFUSED and value is not None and value is not False:
            raise ValueError(f"{name}: not supported by graph-speculative generation; leave it out or unpatch(model)")


def check_reference(reference_ids: Any, batch: int, vocab_size: int) -> None:
    """Raise unless these are known tokens, [length] or [batch, length]."""
    if not isinstance(reference_ids, Tensor) or reference_ids.dtype not in (torch.int32, torch.int64):
        got = str(getattr(reference_ids, "dtype", type(reference_ids).__name__)).removeprefix("torch.")
        raise TypeError(f"reference_ids: expected a tensor of int64 token ids, got {got}; tokenize the text first")
    if reference_ids.dim() not in (1, 2) or (reference_ids.dim() == 2 and reference_ids.shape[0] not in (1, batch)):
        raise ValueError(
            f"reference_ids: expected [length] or [{batch}, length], got shape {list(reference_ids.shape)}"
        )
    if reference_ids.numel() and not 0 <= int(reference_ids.min()) <= int(reference_ids.max()) < vocab_size:
        raise ValueError(f"reference_ids: expected ids 0 … {vocab_size - 1}")


def check_prompt(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> None:
    """Raise unless every sequence is a left-padded, non-empty prompt of known tokens."""
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
    if input_ids.dim() != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"input_ids: expected a non-empty prompt [batch, length], got shape {list(input_ids.shape)}")
    if input_ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids: expected int64 token ids, got {str(input_ids.dtype).removeprefix('torch.')}")
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(f"input_ids: expected ids 0 … {vocab_size - 1}, got {low if low < 0 else high}")
    if attention_mask is None:
        return
    if attention_mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: expected shape {list(input_ids.shape)}, got {list(attention_mask.shape)}")
    mask = attention_mask.bool()
    if not bool(mask[:, -1].all()):
        raise ValueError(
            "attention_mask: a prompt is right-padded or empty; decoder-only generation needs padding_side='left'"
        )
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError("attention_mask: a prompt has a hole; only left padding is supported")


def check_length(model: PreTrainedModel, name: str, length: int) -> None:
    """Raise if ``length`` tokens do not fit the model's positions."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"max_new_tokens: prompt and new tokens are {length} positions and the {name} has {limit}; "
            "lower max_new_tokens or shorten the prompt"
        )


def device_of(model: nn.Module) -> torch.device:
    """Where the model takes its input: the device of the input embedding, or where that runs if it is offloaded."""
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    device = embedding.weight.device
    return torch.device(embedding._hf_hook.execution_device) if device.type == "meta" else device
