"""The options and arguments of transformers' ``generate``: honoured, without meaning here, or refused."""

from __future__ import annotations

import logging
import numbers
from typing import Any

from transformers import GenerationConfig

from ..model.modes import OTHERWISE, Unsupported

logger = logging.getLogger("gsd_kernels")

BEAMS = "beam search keeps several hypotheses, one is served (num_beams=1)"
LISTS = "constrained beam search; prefix_allowed_tokens_fn and logits_processor constrain one text"
AFTERWARDS = (
    "a forward of the finished text has them: model(sequences, output_hidden_states=True, output_attentions=True)"
)

# Every field of GenerationConfig is in one of three.
HONOURED = set(
    "bad_words_ids begin_suppress_tokens bos_token_id do_sample encoder_no_repeat_ngram_size "
    "encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff exponential_decay_length_penalty "
    "forced_bos_token_id forced_eos_token_id max_length max_new_tokens max_time min_length min_new_tokens "
    "min_p no_repeat_ngram_size num_return_sequences output_logits output_scores pad_token_id "
    "prefill_chunk_size remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate "
    "sequence_bias stop_strings suppress_tokens temperature top_h top_k top_p typical_p watermarking_config".split()
)
IRRELEVANT = set(
    # bookkeeping, compilation, other caches, options of beam search and of transformers' own assisted modes
    "_commit_hash _from_model_config transformers_version compile_config disable_compile "
    "continuous_batching_config decoder_start_token_id max_cache_len low_memory cache_config "
    "diversity_penalty early_stopping length_penalty "
    # the text is the same with a cache and without
    "use_cache "
    "assistant_confidence_threshold assistant_ensemble_weight assistant_lookbehind target_lookbehind "
    "num_assistant_tokens num_assistant_tokens_schedule max_matching_ngram_size".split()
)
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "num_beams": (BEAMS, (1,)),
    "num_beam_groups": (BEAMS, (1,)),
    "constraints": (LISTS, ()),
    "force_words_ids": (LISTS, ()),
    "penalty_alpha": (
        "contrastive search re-ranks with hidden states; repetition_penalty and no_repeat_ngram_size are served",
        (0, 0.0),
    ),
    "dola_layers": ("DoLa contrasts hidden layers; repetition_penalty is served", ()),
    "guidance_scale": (
        "classifier-free guidance needs a second target forward at every token; a logits_processor of your own may "
        "make it",
        (1, 1.0),
    ),
    "prompt_lookup_num_tokens": ('pass draft_sources=("history",), which drafts from the prompt too', (0,)),
    "assistant_early_exit": (
        "pass assistant_model=LayerSkip(model, …), which drafts with some of the target's layers",
        (0,),
    ),
    "use_mtp": ('pass drafter="mtp", which drafts with the same heads, recursively', (False,)),
    "speculation_type": ("pass drafter=, which reads DFlash and EAGLE-3 checkpoints", ()),
    "is_assistant": ("the model is another generation's assistant", (False,)),
    "output_attentions": (AFTERWARDS, (False,)),
    "output_hidden_states": (AFTERWARDS, (False,)),
    "token_healing": ("heal the prompt first with model.heal_tokens(input_ids, tokenizer)", (False,)),
    "cache_implementation": (
        "a full-precision cache with graph slots is used, which quantised and offloaded ones are not; leave it out",
        ("static", "dynamic", "dynamic_full", "hybrid", "sliding_window"),
    ),
}
"""By field: why, and the values that change nothing."""
CONFIG_FIELDS = HONOURED | IRRELEVANT | REFUSED.keys()

# Every parameter of transformers' generate, and every keyword that it hands on, is in one of two.
SERVED_PARAMETERS = set(
    "inputs input_ids attention_mask generation_config logits_processor stopping_criteria prefix_allowed_tokens_fn "
    "assistant_model streamer tokenizer assistant_tokenizer custom_generate trust_remote_code kwargs".split()
)
REFUSED_PARAMETERS = {
    **dict.fromkeys(
        "synced_gpus negative_prompt_ids negative_prompt_attention_mask position_ids cache_position encoder_outputs "
        "head_mask labels".split(),
        "leave it out",
    ),
    **dict.fromkeys(
        ("cache", "past_key_values"),
        "pass the whole prompt, of which a patched model reads anew only what its last text did not begin with",
    ),
    "inputs_embeds": "pass input_ids",
}
"""By argument: the nearest thing that works."""


OF_DICTS = ("output_attentions", "output_hidden_states")
"""Fields of transformers' output object: without it they change nothing, and a checkpoint's config may ask for them."""
COUNTS = (
    "max_new_tokens max_length min_new_tokens min_length num_return_sequences prefill_chunk_size num_beams"
).split()


_said: set[tuple[str, ...]] = set()


def warn_once(about: tuple[str, ...], message: str, *values: object) -> None:
    """Log a warning, if it is the process's first ``about`` this."""
    if about not in _said:
        _said.add(about)
        logger.warning(message, *values)


def check_counts(options: dict[str, Any]) -> dict[str, int]:
    """Raise for a number of tokens or sequences that is not one; NumPy's, which overflow, become ints: return these."""
    changed = {}
    for name in COUNTS:
        value = options.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name}: expected an int, got {value!r}")
        if type(value) is not int:
            options[name] = changed[name] = int(value)
        if name == "prefill_chunk_size" and value < 1:
            raise ValueError(f"{name}: expected at least 1 token, got {value}; None reads the prompt in one piece")
    return changed


def check_generation_config(config: GenerationConfig) -> None:
    """Raise :class:`Unsupported` for an option that is set and is not served; report one that is unknown."""
    check_counts(vars(config))
    unread = () if config.return_dict_in_generate else OF_DICTS
    for name, value in vars(config).items():
        if name not in CONFIG_FIELDS and value is not None and not name.startswith("_"):
            # Checkpoints carry options of their own code, so an unknown one is no reason to refuse the model.
            unknown = "generation option %s=%r is not known to gsd_kernels and may have no effect"
            warn_once((name,), unknown, name, value)
        why, neutral = REFUSED.get(name, ("", (value,)))
        if value is not None and value not in neutral and name not in unread:
            raise Unsupported(f"{name}={value!r}: not supported by graph-speculative generation: {why}{OTHERWISE}")


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Raise :class:`Unsupported` for a ``generate`` argument that is set and is not served."""
    check_counts(kwargs)
    for name, value in kwargs.items():
        if name in REFUSED_PARAMETERS and value is not None and value is not False:
            cure = REFUSED_PARAMETERS[name]
            raise Unsupported(f"{name}: not supported by graph-speculative generation; {cure}{OTHERWISE}")
