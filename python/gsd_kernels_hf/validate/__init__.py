"""All refusals: what cannot be served is named, with the cure, before anything is changed.

First the options and arguments of transformers' ``generate``: honoured, without meaning here, or refused. Then the
prompt and the other tokens of a call, the model's inputs, and the models themselves: those that can verify graph rows
or draft them, and those that belong together.
"""

from __future__ import annotations

import logging
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import Cache, GenerationConfig, PretrainedConfig, PreTrainedModel

from gsd_kernels import BACKENDS
from gsd_kernels.names import did_you_mean
from gsd_kernels.ops.state_rows import BLOCK

from ..model.facts import Facts, fact
from ..model.fused import check_rows
from ..model.modes import LEAVE_OUT, OTHERWISE, Unsupported, named
from ..model.probe import served
from ..model.properties import CACHES, text_config, vocabulary
from ..model.recurrent import mixers
from ..model.sides import rope_types
from ..packed.adapters.bitsandbytes import threshold_of
from ..packed.modules import Packed

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
DRAFT_LENGTHS = (
    "num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind "
    "target_lookbehind assistant_ensemble_weight max_matching_ngram_size"
).split()
"""Settings of transformers' own assisted generation, which decide how much it drafts; they have no effect here."""
IRRELEVANT = set(
    # bookkeeping, compilation, other caches, options of beam search and of transformers' own assisted modes
    "_commit_hash _from_model_config transformers_version compile_config disable_compile "
    "continuous_batching_config decoder_start_token_id max_cache_len low_memory cache_config "
    "diversity_penalty early_stopping length_penalty "
    # the text is the same with a cache and without
    "use_cache".split()
).union(DRAFT_LENGTHS)
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
        CACHES,
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


# transformers' own: a warning, with values that it keeps, if it is the process's first of these.
warn_once = logger.warning_once  # type: ignore[attr-defined]


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
            unknown = "generation option %s=%s is not known to gsd_kernels and may have no effect"
            warn_once(unknown, name, repr(value))
        why, neutral = REFUSED.get(name, ("", (value,)))
        if value is not None and value not in neutral and name not in unread:
            raise Unsupported(f"{name}={value!r}: not supported by graph-speculative generation: {why}{OTHERWISE}")


def check_arguments(kwargs: dict[str, Any]) -> None:
    """Raise :class:`Unsupported` for a ``generate`` argument that is set and is not served."""
    check_counts(kwargs)
    for name, value in kwargs.items():
        if name in REFUSED_PARAMETERS and value is not None and value is not False:
            raise Unsupported(
                f"{name}: not supported by graph-speculative generation; {REFUSED_PARAMETERS[name]}{OTHERWISE}"
            )


def check_reference(reference_ids: Any, batch: int, vocab_size: int, copies: int = 1) -> None:
    """Raise unless these are known tokens, [length] or [batch, length], or one text for all ``copies`` of a prompt."""
    if not isinstance(reference_ids, Tensor) or reference_ids.dtype not in (torch.int32, torch.int64):
        got = str(getattr(reference_ids, "dtype", type(reference_ids).__name__)).removeprefix("torch.")
        raise TypeError(f"reference_ids: expected a tensor of int64 token ids, got {got}; tokenize the text first")
    counts = sorted({1, batch // copies, batch})  # of texts
    if reference_ids.dim() not in (1, 2) or (reference_ids.dim() == 2 and reference_ids.shape[0] not in counts):
        shapes = ", ".join(f"[{count}, length]" for count in counts)
        raise ValueError(f"reference_ids: expected [length] or {shapes}, got shape {list(reference_ids.shape)}")
    check_values("reference_ids", reference_ids)
    if reference_ids.numel() and not 0 <= int(reference_ids.min()) <= int(reference_ids.max()) < vocab_size:
        raise ValueError(f"reference_ids: expected ids 0 … {vocab_size - 1}")


def check_values(name: str, tensor: Tensor) -> None:
    """Raise for a tensor without values."""
    if tensor.is_meta:
        raise ValueError(f"{name}: on the meta device, which holds no values; make it on the model's device")


def check_prompt(input_ids: Tensor, attention_mask: Tensor | None, vocab_size: int) -> None:
    """Raise unless every sequence is a left-padded, non-empty prompt of known tokens."""
    for name, value in (("input_ids", input_ids), ("attention_mask", attention_mask)):
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}")
        check_values(name, value)
    if input_ids.dim() != 2 or input_ids.numel() == 0:
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
    wrong = attention_mask[(attention_mask != 0) & (attention_mask != 1)]
    if wrong.numel():
        raise ValueError(f"attention_mask: expected 0 (padding) and 1 (a token), got {wrong[0].item()}")
    check_padding(attention_mask)


def check_padding(attention_mask: Tensor | None, *, inferred: bool = False) -> None:
    """Raise unless a mask [B, P] of zeros and ones has no zero behind a one, and a token in every sequence.

    ``inferred``: nobody gave it; transformers takes every ``pad_token_id`` of a prompt for padding.
    """
    if attention_mask is None:
        return
    mask = attention_mask == 1
    cure = ", as transformers infers it from pad_token_id in input_ids; pass attention_mask=" if inferred else ""
    if not bool(mask[:, -1].all()):
        raise Unsupported(
            "attention_mask: a prompt is right-padded or empty; decoder-only generation needs padding_side='left'"
            + cure
        )
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise Unsupported("attention_mask: a prompt has a hole; only left padding is supported" + cure)


# How transformers feeds a model while it generates, which the decode loop does itself.
FEEDING = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation", "_prefill", "_sample")
COUNTED = (*CACHES, "cache_position", "logits_to_keep")
"""What the decode loop says in any case; anything else may be an input of a prompt."""
WHY_UNREAD = {
    **dict.fromkeys(CACHES, "a cache of its own is used, and continuing one is not supported; pass the whole prompt"),
    "position_ids": "positions are counted from the first token that is not padding, and these differ",
}


def check_call(facts: Facts, model_kwargs: Mapping[str, Any]) -> tuple[str, ...]:
    """Raise for what this call would have the model read, and graph-speculative generation does not.

    Args:
        facts: of the target.
        model_kwargs: the model inputs beside ``input_ids``, as transformers' ``generate`` prepared them.

    Returns:
        Names of inputs that the forward of a prompt reads, and text has none of.

    Raises:
        Unsupported: a model input that is not used, adapters that need more than their layers, a model that feeds
            itself in its own way, or weights that are not there.
    """
    check_feeding(facts.model)
    check_adapters(facts)
    modalities = getattr(facts.model, "input_modalities", "text")
    text_alone = {"text"}.issuperset([modalities] if isinstance(modalities, str) else modalities)
    mask = model_kwargs.get("attention_mask")
    unread = sorted(name for name, value in model_kwargs.items() if not _is_read(name, value, mask))
    for name in unread:
        if name in COUNTED or text_alone:
            why = WHY_UNREAD.get(name, "a model input that graph-speculative generation does not read")
            raise Unsupported(f"{name}: {why}; {LEAVE_OUT}")
    return tuple(unread)


def _is_read(name: str, value: Any, mask: Tensor | None) -> bool:
    """Return whether ignoring the model input changes nothing: it is used, empty, or what decoding says anyway."""
    if value is None or name in ("attention_mask", "use_cache", *OF_DICTS):  # the last were screened
        return True
    if name in ("position_ids", "cache_position"):
        return isinstance(value, Tensor) and _is_counted(value, mask if name == "position_ids" else None)
    if name in CACHES:  # transformers has made one
        return isinstance(value, Cache) and not value.get_seq_length() and not hasattr(value, "_is_user_defined")
    if name == "mm_token_type_ids":  # 0 is a token of text
        return isinstance(value, Tensor) and not bool(value.any())
    if name == "logits_to_keep":
        return isinstance(value, int) and value == 1
    return isinstance(value, (dict, list, tuple)) and not value


def _is_counted(positions: Tensor, mask: Tensor | None) -> bool:
    """Return whether positions [..., P] are 0, 1, 2, … from each sequence's first token on; padding may have any."""
    if mask is None:
        counted = torch.arange(positions.shape[-1], device=positions.device)
    elif positions.shape[-1:] != mask.shape[-1:] or positions.dim() < 2 or positions.shape[-2] not in (1, len(mask)):
        return False
    else:
        counted = mask.to(positions.device).long().cumsum(-1) - 1
    return bool(((positions == counted) | (counted < 0)).all())


def check_feeding(model: PreTrainedModel) -> None:
    """Raise where the model's inputs are prepared by code that transformers would call and the decode loop does not.

    Families of transformers override some of it for image inputs and for caches of their own, which are refused
    elsewhere; anything else, of a subclass, of a checkpoint's code or set on the instance, may do what it likes.
    """
    for name in FEEDING:
        method = getattr(model, name, None)
        if method is None:
            continue
        module = str(getattr(method, "__module__", ""))
        if getattr(method, "__self__", None) is model and module.startswith("transformers."):
            continue
        owner = type(getattr(method, "__self__", model)).__name__
        cure = (
            "PEFT prompt learning puts virtual tokens before the text, which is not supported"
            if owner.startswith("Peft")
            else "use transformers' own"
        )
        raise Unsupported(
            f"model: {owner} has its own {name}, which graph-speculative generation does not call; {cure}"
        )


def check_adapters(facts: Facts) -> None:
    """Raise for activated LoRA: where its weights act depends on the text, which PEFT tells its layers every call."""
    configs = getattr(facts.model, "peft_config", None) or {}
    activated = {name for name, config in configs.items() if getattr(config, "alora_invocation_tokens", None)}
    if not activated:
        return
    for _, module in facts.modules:
        if getattr(module, "disable_adapters", False):
            continue
        used = activated & set(getattr(module, "lora_variant", ())) & set(getattr(module, "active_adapters", ()))
        if used:
            raise Unsupported(
                f"model: adapter {min(used)!r} is an activated LoRA (alora_invocation_tokens), which is not "
                "supported; disable it" + OTHERWISE
            )


def check_listeners(streamer: Any, observer: Any) -> None:
    """Raise unless these can be told of tokens and of steps."""
    if streamer is not None and (
        isinstance(streamer, type) or not all(callable(getattr(streamer, name, None)) for name in ("put", "end"))
    ):
        raise TypeError(f"streamer: expected an object with put(tokens) and end(), got {named(streamer)}")
    if observer is not None and not callable(observer):
        raise TypeError(f"observer: expected a function of a gsd_kernels.Verified, got {named(observer)}")


SERVED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT_LAYERS = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "moe", "mlp"}
"""Layer types beside those, where modules keep a state in transformers' cache; a proof says whether they are served."""
MAX_VOCABULARY_PADDING = 1024


def check_backend(backend: object) -> None:
    """Raise unless ``backend`` is the name of one; whether it can run here, every op says for itself."""
    if backend not in BACKENDS:
        raise ValueError(
            f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}{did_you_mean(backend, BACKENDS)}"
        )


def check_model(name: str, model: Any) -> Facts:
    """Raise unless graph rows can be verified in (or drafted by) ``model``; return what is known of it.

    What the config does not say, one forward of a few tokens shows; see :mod:`gsd_kernels_hf.model.probe`.

    Raises:
        TypeError, ValueError: no model of transformers, or one without weights.
        Unsupported: one that this package does not serve.
    """
    if not isinstance(model, PreTrainedModel) or not callable(getattr(model, "generate", None)):
        raise TypeError(f"{name}: expected a transformers causal language model, got {type(model).__name__}")
    facts = Facts.of(model)
    check_served(facts, name)
    return facts


@fact
def check_served(facts: Facts, name: str) -> None:
    """Raise unless graph rows can be verified in, or drafted by, the model that is the argument ``name``.

    Raises:
        ValueError: it has no weights.
        Unsupported: this package does not serve it.
    """
    model, kind = facts.model, type(facts.model).__name__
    config, mesh, recurrent = text_config(model), getattr(model, "_device_mesh", None), mixers.mixers_of(facts)
    threshold = max((threshold_of(module) for _, module in facts.modules), default=0.0)
    types = set(getattr(config, "layer_types", None) or ())
    unserved = sorted(types - SERVED_LAYERS - (RECURRENT_LAYERS if recurrent else set()))
    elsewhere = ", whose states are not in transformers' cache" if RECURRENT_LAYERS.intersection(unserved[:1]) else ""
    for found, why in (
        (model.config.is_encoder_decoder, f"{kind} is an encoder-decoder; only decoder-only models are supported"),
        (
            recurrent and mesh is not None,
            f"{kind} keeps a recurrent state and is sharded among ranks; not supported",
        ),
        ("dynamic" in rope_types(config), "rope type 'dynamic' changes with the length; not supported"),
        (
            not mixers.READABLE and (recurrent or types & RECURRENT_LAYERS),
            f"{kind} keeps a recurrent state, which is served with transformers {mixers.FIRST} or newer; "
            f"{transformers.__version__} is installed",
        ),
        (unserved, f"{kind} has layers of type {', '.join(map(repr, unserved[:1]))}{elsewhere}; not supported"),
        (
            not model._supports_logits_to_keep(),
            f"{kind} has a forward that does not take logits_to_keep; not supported",
        ),
        (
            model.training and getattr(model, "is_gradient_checkpointing", False),
            f"{kind} is in training mode with gradient checkpointing, which keeps no keys and values; "
            "call model.eval() first",
        ),
        (
            # Columns with an activation above it are taken out of the product of all rows, so that a drafted row may
            # change the result of another. No forward of a few tokens shows that: it takes an outlier.
            name == "model" and threshold > 0,
            f"int8 of bitsandbytes with llm_int8_threshold={threshold}, by which the rows of a forward depend on each "
            "other; load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or set "
            "state.threshold = 0.0 in its Linear8bitLt modules",
        ),
    ):
        if found:
            raise Unsupported(f"{name}: {why}")
    if mesh is not None:
        check_heads(name, model.config, (mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh).size())
    embedding: Any = model.get_input_embeddings()
    if not isinstance(embedding, Packed) and embedding.weight.is_meta and not hasattr(embedding, "_hf_hook"):
        raise ValueError(f"{name}: its weights are on the meta device, which holds no values; load them first")
    served(facts, name)
    if name == "model":  # a draft costs speed at most
        check_rows(facts, name)


def check_paths(shape: object, models: Iterable[PreTrainedModel]) -> None:
    """Raise where the paths of a shape are longer than what recurrent layers keep between two states."""
    deepest = getattr(shape, "max_path", None) or 0
    for model in models if deepest > BLOCK else ():
        if mixers.mixers_of(model):
            raise Unsupported(
                f"graph_config: max_path={deepest}, and {type(model).__name__} keeps a recurrent state, behind which a "
                f"path has at most {BLOCK} rows; give max_path={BLOCK}"
            )


def check_heads(name: str, config: PretrainedConfig, ranks: int) -> None:
    """Raise unless the attention heads of a model divide among ``ranks``; ``name`` is what the error calls it."""
    text = config.get_text_config(decoder=True)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, field, None)
        if heads is not None and heads % ranks:
            raise ValueError(f"{name}: {field}={heads} does not divide among {ranks} tensor-parallel ranks")


BOTH = "pass both, tokenizer= the target's and assistant_tokenizer= the draft's, and tokens are mapped"
"""What serves a pair of different tokenizers."""


def check_pair(
    target: PreTrainedModel, draft: PreTrainedModel, name: str = "assistant_model", cure: str = BOTH
) -> None:
    """Raise unless draft and target read the same tokens; a few padded vocabulary entries may differ.

    ``name`` is what the error calls the draft, ``cure`` what it advises.
    """
    sizes = vocabulary(target), vocabulary(draft)
    if abs(sizes[0] - sizes[1]) > MAX_VOCABULARY_PADDING:
        raise Unsupported(
            f"{name}: vocabulary sizes {sizes[0]} (target) and {sizes[1]} (draft) mean different tokenizers; {cure}"
        )
    for token in ("bos_token_id", "eos_token_id"):
        given = [getattr(text_config(model), token, None) for model in (target, draft)]
        ids = [{*value} if isinstance(value, (list, tuple)) else {value} - {None} for value in given]
        if ids[0] and ids[1] and not ids[0] & ids[1]:
            raise Unsupported(
                f"{name}: {token} {sorted(ids[0])} (target) and {sorted(ids[1])} (draft) mean different "
                f"tokenizers; {cure}"
            )
