"""Checks of models: those that can verify graph rows or draft them, and those that belong together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers
from transformers import PretrainedConfig, PreTrainedModel

from gsd_kernels import BACKENDS
from gsd_kernels.names import did_you_mean
from gsd_kernels.ops.state_rows import BLOCK

from ..model.facts import Facts, fact
from ..model.fused import check_rows
from ..model.modes import Unsupported
from ..model.probe import served
from ..model.properties import text_config, vocabulary
from ..model.recurrent import mixers
from ..model.sides import rope_types
from ..packed.adapters import threshold_of
from ..packed.modules import Packed

SERVED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
RECURRENT_LAYERS = {"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding", "moe", "mlp"}
"""Layer types beside those, where modules keep a state in transformers' cache; a proof says whether they are served."""
MAX_VOCABULARY_PADDING = 1024


def check_backend(backend: object) -> None:
    """Raise unless ``backend`` is the name of one; whether it can run here, every op says for itself."""
    if backend not in BACKENDS:
        near = did_you_mean(backend, BACKENDS)
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}{near}")


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
    ):
        if found:
            raise Unsupported(f"{name}: {why}")
    if mesh is not None:
        check_heads(name, model.config, (mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else mesh).size())
    check_weights(name, facts)
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


def check_weights(name: str, facts: Facts) -> None:
    """Raise where the weights hold no values, or a target's products mix a forward's rows.

    bitsandbytes' int8 takes columns with an activation above ``llm_int8_threshold`` out of the product of all rows, so
    a drafted row may change the result of another. No forward of a few tokens shows that: it takes an outlier.
    """
    threshold = max((threshold_of(module) for _, module in facts.modules), default=0.0) if name == "model" else 0.0
    if threshold > 0:
        raise Unsupported(
            f"{name}: int8 of bitsandbytes with llm_int8_threshold={threshold}, by which the rows of a forward depend "
            "on each other; load it with BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or set "
            "state.threshold = 0.0 in its Linear8bitLt modules"
        )
    embedding: Any = facts.model.get_input_embeddings()
    if not isinstance(embedding, Packed) and embedding.weight.is_meta and not hasattr(embedding, "_hf_hook"):
        raise ValueError(f"{name}: its weights are on the meta device, which holds no values; load them first")


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
        ids = [_as_set(getattr(m.config.get_text_config(decoder=True), token, None)) for m in (target, draft)]
        if ids[0] and ids[1] and not ids[0] & ids[1]:
            raise Unsupported(
                f"{name}: {token} {sorted(ids[0])} (target) and {sorted(ids[1])} (draft) mean different "
                f"tokenizers; {cure}"
            )


def check_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> None:
    """Raise unless the tokenizers of target and draft, where both are given, are one."""
    if tokenizer is None or assistant_tokenizer is None:
        return
    if tokenizer.get_vocab() != assistant_tokenizer.get_vocab():
        raise Unsupported("assistant_tokenizer: its vocabulary differs from the tokenizer's; give a draft of the same")


def _as_set(value: Any) -> set[int]:
    if value is None:
        return set()
    return set(value) if isinstance(value, (list, tuple)) else {int(value)}
