"""The front door: ``generate``, ``patch`` and ``unpatch``."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

from gsd_kernels import GraphConfig

from . import validate
from .acceptance.criteria import Typical
from .acceptance.sampling import draw_seed
from .engine.decoder import GraphDecoder, GraphGenerateOutput, StepRecord
from .engine.stats import GenerationStats
from .model import properties
from .model.attention import switch, unswitch
from .sources.heads import DraftHeads
from .sources.layer_skip import LayerSkip

_PATCH = "_gsd_patch"


def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    assistant_model: PreTrainedModel | LayerSkip | None = None,
    graph_config: GraphConfig | str | None = None,
    seed: int | None = None,
    backend: str = "auto",
    draft_sources: tuple[str, ...] | None = None,
    draft_heads: DraftHeads | None = None,
    reference_ids: Tensor | None = None,
    criterion: str | Typical = "exact",
    generation_config: GenerationConfig | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    observer: Callable[[StepRecord], None] | None = None,
    **kwargs: Any,
) -> Tensor | GraphGenerateOutput:
    """``model.generate`` by graph-structured speculative decoding: the same output, sooner.

    Greedy output is token for token what the model alone gives; sampled output is an exact sample, the same for the
    same ``seed`` with any draft, any ``graph_config``, or none.

    Args:
        model: a LLaMA-family transformers model (compiled and PEFT-wrapped ones are unwrapped).
        inputs: prompt ids int64 [batch, length], also as ``input_ids=``; left-padded with ``attention_mask=``.
        assistant_model: the draft, of the same tokenizer, or a :class:`~gsd_kernels.LayerSkip` of the model. ``None``:
            plain decoding with the same sampler, unless there is another source.
        graph_config: ``"auto"`` (the default; learned while decoding), ``"chain"``, ``"tree"``,
            ``"graph"`` or a :class:`~gsd_kernels.GraphConfig`.
        seed: 64-bit seed of the sampling noise; ``None`` draws one from torch's generator.
        backend: see :mod:`gsd_kernels.backends`.
        draft_sources: of ``"model"``, ``"layer_skip"``, ``"heads"`` and ``"history"``, see :class:`GraphDecoder`.
        draft_heads: :class:`~gsd_kernels.DraftHeads` of the target, a source beside or instead of the draft.
        reference_ids: a text that the output may repeat: the file to edit, a retrieved document; int64 [length] for all
            sequences or [batch, length]. The history starts with it; it changes the speed, never the output.
        criterion: which drafted tokens are accepted when sampling. ``"exact"``: those that the model itself draws.
            ``"speculative"``: by the ratio of both models' probabilities; still an exact sample, but another one with
            another draft, and from a chain only. ``"typical"`` or :class:`~gsd_kernels.Typical`: what is likely enough
            under the model, which changes the output. Greedy output is the same with each.
        generation_config, stopping_criteria, streamer, tokenizer: as in transformers; ``tokenizer`` serves
            ``stop_strings``. With a batch every sequence's processors are called with its own history.
        assistant_tokenizer: only compared with ``tokenizer``.
        observer: called with the record of every step.
        **kwargs: every other argument of transformers' ``generate``.

    Returns:
        int64 [batch, length], or with ``return_dict_in_generate`` a ``GenerateDecoderOnlyOutput`` with ``stats``.

    Raises:
        TypeError, ValueError: something cannot be served; the message names it and the cure, and nothing was changed.
    """
    model = properties.unwrap(model)
    validate.check_model("model", model)
    validate.check_arguments(kwargs)
    decoder = GraphDecoder(
        assistant_model,
        graph_config,
        seed=seed,
        backend=backend,
        draft_sources=draft_sources,
        draft_heads=draft_heads,
        reference_ids=reference_ids,
        criterion=criterion,
        streamer=streamer,
        observer=observer,
    )
    if seed is not None:
        draw_seed(seed)
    if decoder.assistant_model is not None:
        validate.check_pair(model, decoder.assistant_model, tokenizer, assistant_tokenizer)
    prompt = kwargs.get("input_ids") if inputs is None else inputs
    if prompt is not None:  # before transformers looks at it: it drops a mask of ones, whatever its shape
        validate.check_prompt(prompt, kwargs.get("attention_mask"), properties.vocabulary(model))
    merged, _ = model._prepare_generation_config(generation_config, **_without_prompt(kwargs))
    validate.check_generation_config(merged)
    if merged.stop_strings is not None:
        # transformers hands no tokenizer to a custom decoding function, so its criterion is made here.
        if tokenizer is None:
            raise ValueError("stop_strings: need the tokenizer; pass tokenizer=")
        own = StopStringCriteria(stop_strings=merged.stop_strings, tokenizer=tokenizer)
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), own])
        kwargs["stop_strings"] = None
    output = type(model).generate(
        model,
        inputs,
        generation_config=generation_config,
        stopping_criteria=stopping_criteria,
        custom_generate=decoder,
        **kwargs,
    )
    handle = getattr(model, _PATCH, None)
    if handle is not None and decoder.stats is not None:
        handle.stats = decoder.stats
    return output


def _without_prompt(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if not isinstance(v, Tensor)}


class Patch(threading.local):
    """What :func:`patch` returns. ``stats`` is the last call's, of the asking thread."""

    def __init__(self, model: PreTrainedModel, switched: list[PreTrainedModel]) -> None:
        self.model = model
        self.switched = switched
        self.stats: GenerationStats | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or pickled model is not patched


class _Accelerated:
    """The patched model's own ``generate``."""

    def __init__(self, model: PreTrainedModel, defaults: dict[str, Any]) -> None:
        self.model, self.defaults = model, defaults
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Tensor | GraphGenerateOutput:
        if kwargs.get("custom_generate") is not None:
            return type(self.model).generate(self.model, inputs, *args, **kwargs)
        if args:
            kwargs["generation_config"] = args[0]
        if len(args) > 1:
            raise TypeError("generate: pass everything after inputs and generation_config by keyword")
        kwargs.pop("custom_generate", None)
        given = {k: v for k, v in kwargs.items() if k not in self.defaults or v is not None}
        return generate(self.model, inputs, **{**self.defaults, **given})

    def __reduce__(self) -> tuple[Any, ...]:
        return _transformers_generate, (self.model,)  # a copied or pickled model has transformers' own


def _transformers_generate(model: PreTrainedModel) -> types.MethodType:
    return types.MethodType(type(model).generate, model)


def patch(
    model: PreTrainedModel,
    *,
    assistant_model: PreTrainedModel | LayerSkip | None = None,
    graph_config: GraphConfig | str | None = None,
    backend: str = "auto",
    draft_heads: DraftHeads | None = None,
    criterion: str | Typical = "exact",
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
) -> Patch:
    """Make ``model``'s own ``generate`` graph-speculative, until :func:`unpatch`.

    Pipelines, PEFT-wrapped models and servers that call ``model.generate`` get it too; it also takes ``seed=``,
    ``graph_config=``, ``backend=``, ``criterion=`` and another ``assistant_model=`` for one call.

    Args:
        model, assistant_model, graph_config, backend, draft_heads, criterion, tokenizer, assistant_tokenizer: as in
            :func:`generate`.

    Returns:
        A handle whose ``stats`` are the last call's :class:`~gsd_kernels_hf.stats.GenerationStats`.

    Raises:
        TypeError, ValueError: the pair cannot be served (nothing was changed), or ``model`` is patched already.
    """
    inner = properties.unwrap(model)
    validate.check_model("model", inner)
    skip = assistant_model if isinstance(assistant_model, LayerSkip) else None
    draft = properties.unwrap(assistant_model) if skip is None else None
    if draft is not None:
        validate.check_model("assistant_model", draft)
        validate.check_pair(inner, draft, tokenizer, assistant_tokenizer)
    if getattr(inner, _PATCH, None) is not None:
        raise ValueError("model: already patched; unpatch(model) first")
    # Raises here rather than at the first call.
    decoder = GraphDecoder(skip or draft, graph_config, backend=backend, draft_heads=draft_heads, criterion=criterion)
    decoder.check_sources_of(inner)
    models = [inner] if draft is None else [inner, draft]
    for done, m in enumerate(models):
        try:
            switch(m)
        except Exception:
            for earlier in models[:done]:
                unswitch(earlier)
            raise
    defaults = {
        "assistant_model": skip or draft,
        "graph_config": graph_config,
        "backend": backend,
        "draft_heads": draft_heads,
        "criterion": criterion,
        "tokenizer": tokenizer,
    }

    handle = Patch(inner, models)
    inner.__dict__[_PATCH] = handle
    inner.__dict__["generate"] = _Accelerated(inner, defaults)
    return handle


def unpatch(model: PreTrainedModel) -> None:
    """Undo :func:`patch`: transformers' own ``generate`` and the attention the models had before.

    Raises:
        ValueError: ``model`` is not patched.
    """
    inner = properties.unwrap(model)
    if not isinstance(inner, torch.nn.Module) or inner.__dict__.get(_PATCH) is None:
        raise ValueError("model: not patched")
    for m in inner.__dict__[_PATCH].switched:
        unswitch(m)
    del inner.__dict__[_PATCH]
    del inner.__dict__["generate"]
