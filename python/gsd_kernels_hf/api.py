"""The front door: ``generate``, ``patch`` and ``unpatch``."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, StoppingCriteriaList

from . import validate
from .engine.decoder import GraphDecoder
from .engine.engine import Engines, engines_of
from .engine.known import learned_of
from .engine.output import GraphGenerateOutput
from .engine.resolved import OPTIONS, Options, Sources, check_names, report_draft_lengths, screen
from .engine.stats import GenerationStats
from .engine.stop_strings import StopStrings
from .locks import forkable_lock
from .model import properties
from .model.facts import looking
from .packed.modules import copied_bytes, forget_copies
from .sources.base import DraftSource
from .sources.feature_drafter import Mtp, mention_heads
from .sources.load import lasting
from .sources.memory import HistoryMemory

logger = logging.getLogger("gsd_kernels")

_PATCH = "_gsd_patch"
_PATCHED = (_PATCH, "generate", "__reduce_ex__")  # what a patch puts on a model
_lock = forkable_lock()
_OURS = {*OPTIONS} - {"assistant_model", "streamer", "tokenizer", "assistant_tokenizer"}  # those are transformers' too
_WITHOUT = ("assistant_model", "draft_heads", "drafter")  # False leaves the patch's out
_Function = TypeVar("_Function", bound=Callable[..., Any])
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def _takes_options(function: _Function) -> _Function:
    """Show :class:`Options`, which the function takes by keyword, in its signature."""
    own = inspect.signature(function)
    options = inspect.signature(Options).parameters.values()
    *parameters, rest = own.parameters.values()  # which are the options alone, or kwargs as well
    parameters += [p.replace(kind=p.KEYWORD_ONLY) for p in options]
    parameters += [rest] if rest.name == "kwargs" else []
    function.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def _typed_as(
    options: Callable[_Given, object],
) -> Callable[[Callable[..., _Result]], Callable[Concatenate[PreTrainedModel, _Given], _Result]]:
    """Tell type checkers that a function takes a model and, by keyword, what ``options`` takes."""
    return lambda function: function


@_takes_options
@looking()
def generate(
    model: PreTrainedModel,
    inputs: Tensor | None = None,
    *,
    generation_config: GenerationConfig | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    **kwargs: Any,
) -> Tensor | GraphGenerateOutput:
    """``model.generate`` by graph-structured speculative decoding: the same output, sooner.

    Greedy output is token for token what the model alone gives; sampled output is an exact sample, the same for the
    same ``seed`` with any draft, any ``graph_config``, or none.

    Args:
        model: a LLaMA-family transformers model (compiled and PEFT-wrapped ones are unwrapped).
        inputs: prompt ids int64 [batch, length], also as ``input_ids=``; left-padded with ``attention_mask=``.
        generation_config, stopping_criteria: as in transformers.
        **kwargs: the options of :class:`~gsd_kernels_hf.engine.resolved.Options`, and every other argument of
            transformers' ``generate``. ``logits_processor`` are called as transformers calls them: once a position, in
            order, with ``input_ids`` int64 [batch, length so far] and scores float32 [batch, vocabulary] of the whole
            batch, finished sequences padded. None is copied.

    Returns:
        int64 [batch, length], or with ``return_dict_in_generate`` a ``GenerateDecoderOnlyOutput`` with ``stats``.

    Raises:
        TypeError, ValueError: something cannot be served; the message names it and the cure, and nothing was changed.
    """
    model = properties.unwrap(model)
    facts = validate.check_model("model", model)
    options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
    check_names(tuple(kwargs), model)
    validate.check_arguments(kwargs)
    settings = {k: v for k, v in kwargs.items() if not isinstance(v, Tensor)}  # without the prompt
    report_draft_lengths(settings, generation_config, model)
    decoder = GraphDecoder(**options)
    prompt = kwargs.get("input_ids") if inputs is None else inputs
    merged, _ = model._prepare_generation_config(generation_config, **settings)
    if counts := validate.check_counts(vars(merged)):
        generation_config = copy.copy(generation_config or model.generation_config)
        vars(generation_config).update(counts)
    # Before transformers looks at them: it drops a mask of ones, whatever its shape.
    sources = screen(decoder, facts, prompt, kwargs.get("attention_mask"), merged)
    if merged.stop_strings is not None:
        # transformers hands no tokenizer to a custom decoding function, so its criterion is made here.
        if decoder.tokenizer is None:
            raise ValueError("stop_strings: need the tokenizer; pass tokenizer=")
        own = StopStrings(decoder.tokenizer, merged.stop_strings)
        stopping_criteria = StoppingCriteriaList([*(stopping_criteria or []), own])
        kwargs["stop_strings"] = None
    handle, learner = handle_of(model), None
    if handle is not None:
        decoder.engines, learner = handle.engines, handle.engines.learner
    decoder.sources = sources
    try:
        with nullcontext() if learner is None else learner.call(sources, prompt, kwargs.get("attention_mask")):
            output = type(model).generate(
                model,
                inputs,
                generation_config=generation_config,
                stopping_criteria=stopping_criteria,
                custom_generate=decoder,
                **kwargs,
            )
    finally:
        decoder.sources = None  # which has the decoder as its options: no cycle holds the model
    if handle is not None and decoder.stats is not None:
        handle.stats = decoder.stats
    return output


def handle_of(model: PreTrainedModel) -> Patch | None:
    """Return the handle that :func:`patch` returned for a model; ``None`` where it is not patched."""
    return vars(model).get(_PATCH)


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of transformers' ``generate`` behind ``inputs``, those that came by position named."""
    given = inspect.signature(GenerationMixin.generate).bind(None, None, *args, **kwargs).arguments
    named = given.pop("kwargs", {})
    return {**named, **dict(list(given.items())[2:])}


def with_defaults(defaults: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a call over those that hold for all calls: ``None`` is none given, ``False`` leaves a draft out."""
    given = {k: v for k, v in kwargs.items() if k != "custom_generate" and (k not in defaults or v is not None)}
    merged = {**defaults, **given}
    return {**merged, **{name: None for name in _WITHOUT if merged.get(name) is False}}


def theirs(kwargs: dict[str, Any], reason: str, cause: BaseException | None) -> dict[str, Any]:
    """A call's arguments for transformers, which serves it for this ``reason``; ``cause``: the model's error, if any.

    Raises:
        ValueError: one of them is this package's own.
    """
    kept, ours = {}, []
    for name, value in kwargs.items():
        own = name in ("assistant_model", "assistant_tokenizer") and isinstance(value, (list, tuple, DraftSource))
        if name in _WITHOUT and value is False:
            continue  # the patch's is left out in any case
        if name not in _OURS and not own:
            kept[name] = value
        elif value is not None:
            ours.append(name)
    if ours:
        raise ValueError(
            f"{ours[0]}: this call goes to transformers' own generate, which does not take it; leave it out, or change "
            f"what sends the call there: {reason}"
        ) from cause
    return kept


class Patch(threading.local):
    """The handle that :func:`patch` returns; it keeps caches, captured steps and what was learned for later calls.

    ``with patch(model) as handle:`` unpatches at the end, also on an exception, unless that was done inside.

    Attributes:
        stats: of the last call of the asking thread.
            Where transformers' own ``generate`` served it, ``stats.why`` says why.
        engines: what is kept, see docs/how-it-works.md; :meth:`clear` returns it.
        history: what is remembered of earlier calls' texts; it can be saved and loaded.
        before: the ``generate`` that somebody else had set on the model; :func:`unpatch` puts it back.
        options: that :func:`patch` was called with.
    """

    def __init__(
        self, model: PreTrainedModel, engines: Engines, before: Callable[..., Any] | None, options: dict[str, Any]
    ) -> None:
        self.model, self.engines, self.before, self.options = model, engines, before, options
        self.stats: GenerationStats | None = None
        self.handed_over = False  # whether this thread is in transformers' own generate
        self.entered = False  # whether this thread is in a ``with`` block of it

    @property
    def history(self) -> HistoryMemory:
        """See above."""
        assert self.engines.memory is not None
        return self.engines.memory

    def clear(self) -> None:
        """Forget what was learned, and return the memory of caches, captured steps and copies of packed weights."""
        self.engines.clear()
        forget_copies(self.model)

    @property
    def patched(self) -> bool:
        """Return whether the model has this patch still, whatever was set over its ``generate`` since."""
        return handle_of(self.model) is self

    def __enter__(self) -> Patch:
        if self.entered:
            raise ValueError("patch: this handle's with block is entered already; it ends once, at its outermost end")
        if not self.patched:
            raise ValueError("patch: this handle's model was unpatched; patch it anew: with gsd_kernels.patch(model):")
        self.entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.entered = False
        with _lock:
            if self.patched:
                _restore(self.model)

    def __repr__(self) -> str:
        """Say what is kept, in one line."""
        kind = type(self.model).__name__
        if not self.patched:
            return f"<Patch of {kind}: unpatched>"
        count = len(self.engines.sessions)
        texts = f"{count} text{'s' * (count != 1)}"
        memory = f", history of {len(self.history):,} contexts"
        copied = copied_bytes(self.model)
        memory += f", {copied / 2**20:,.1f} MiB of packed weights in an order of their own" if copied else ""
        return f"<Patch of {kind}: {texts} kept in {self.engines.cache_bytes / 2**20:,.1f} MiB of caches{memory}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or pickled model is not patched


class _Accelerated:
    """The patched model's own ``generate``: this package's, or transformers' for modes that only that serves.

    Attributes:
        calls: the logger that gets a line a call, at level INFO.
    """

    calls = logging.getLogger("gsd_kernels.calls")

    def __init__(self, model: PreTrainedModel, handle: Patch, defaults: dict[str, Any]) -> None:
        self.model, self.handle, self.defaults = model, handle, defaults
        functools.update_wrapper(self, type(model).generate)

    def __call__(self, inputs: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        if not self.handle.patched:  # what was set over it is still there
            undone = self.handle.before or functools.partial(type(self.model).generate, self.model)
            return undone(inputs, *args, **kwargs)
        kwargs = by_name(args, kwargs)
        decoding = kwargs.get("custom_generate")
        # As another generation's assistant the model gives a few tokens at a time, from that one's cache.
        assists = getattr(kwargs.get("generation_config"), "is_assistant", False)
        if self.handle.handed_over or assists or isinstance(decoding, GraphDecoder):
            return type(self.model).generate(self.model, inputs, **kwargs)
        if decoding is not None:
            what = repr(decoding) if isinstance(decoding, str) else "a function"
            return self._hand_over(inputs, kwargs, f"custom_generate: {what} decodes in a way of its own")
        try:
            output = generate(self.model, inputs, **with_defaults(self.defaults, kwargs))
            self.calls.info("generate: %r", self.handle.stats)
            return output
        except validate.Unsupported as error:
            if error.begun:
                raise
            reason, cause = error.reason, error.__cause__
        return self._hand_over(inputs, theirs(kwargs, reason, cause), reason)

    def _hand_over(self, inputs: Tensor | None, kwargs: dict[str, Any], reason: str) -> Any:
        """Have transformers serve a call with its own arguments as they came, and nothing of the patch."""
        logger.warning("transformers' own generate serves this call: %s", reason)
        start, self.handle.handed_over = time.perf_counter(), True
        try:
            output = type(self.model).generate(self.model, inputs, **kwargs)
        finally:
            self.handle.handed_over = False
        total = time.perf_counter() - start
        self.handle.stats = stats = GenerationStats(why=reason)
        stats.seconds |= {"other": total, "total": total}
        return output

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model has transformers' own, also where this package is not installed.
        return getattr, (self.model, "generate")

    def reduce_model(self, protocol: Any) -> Any:
        """The model's ``__reduce_ex__``: what copies and pickles of it are made of, which is nothing of the patch."""
        made = type(self.model).__reduce_ex__(self.model, protocol)
        if not isinstance(made, tuple) or len(made) < 3 or not isinstance(made[2], dict):
            return made
        return *made[:2], _without(self.handle, made[2]), *made[3:]


@_typed_as(Options)
@_takes_options
def patch(model: PreTrainedModel, **options: Any) -> Patch:
    """Make ``model``'s own ``generate`` graph-speculative, until :func:`unpatch` or the end of ``with patch(model):``.

    Pipelines, PEFT-wrapped models and servers that call ``model.generate`` get it too. What is given here holds for
    all calls; a call may give any option anew, and ``assistant_model=False``, ``draft_heads=False`` or
    ``drafter=False`` to go without the patch's. Without any, the history drafts: what the prompt and the target's own
    output repeat. ``graph_config="plain"`` decodes plainly. Caches and captured steps are kept between calls, and a
    prompt that begins as the last text did, like the next turn of a chat, is read from there on only.

    A mode that this package does not serve (beams, contrastive search, a cache of the caller's own) goes to
    transformers' own ``generate``, with one line in the log.

    Args:
        model: as in :func:`generate`.
        **options: of :class:`~gsd_kernels_hf.engine.resolved.Options`.

    Returns:
        A handle whose ``stats`` are the last call's :class:`~gsd_kernels_hf.engine.stats.GenerationStats`; the one that
        is there where ``model`` was patched with the same options.

    Raises:
        TypeError, ValueError: the pair cannot be served, or ``model`` is patched with others; nothing was changed.
    """
    inner = properties.unwrap(model)
    validate.check_model("model", inner)
    sources = Sources(Options(**options), inner)
    # Places stay places: every call asks whether their files, or the model's device, are others than they were.
    places: dict[str, Any] = {name: lasting(options[name]) for name in ("drafter", "draft_heads") if name in options}
    if sources.every and not isinstance(sources.drafter, Mtp):
        mention_heads(inner)
    if "history" in sources.options.named and sources.options.learned:
        learned_of(sources.facts)  # says what it found
    engines = Engines(HistoryMemory(properties.vocabulary(inner)))
    handle = Patch(inner, engines, vars(inner).get("generate"), options)
    accelerated = _Accelerated(inner, handle, {**options, **places})
    with _lock:  # of two threads one finds the other's
        there = handle_of(inner)
        if there is not None:
            with suppress(RuntimeError):  # of tensors, which cannot be compared as a whole, but are if they are one
                if there.options == options:  # a notebook's cell, run again
                    return there
            raise ValueError("model: already patched with other options; give these to a call, or unpatch(model) first")
        vars(inner).update(zip(_PATCHED, (handle, accelerated, accelerated.reduce_model), strict=True))
    engines_of(inner).let_go()  # captured steps that calls outside a patch left
    return handle


def unpatch(model: PreTrainedModel) -> None:
    """Undo :func:`patch`: the model has the ``generate`` again that it had before, most often transformers' own.

    Raises:
        ValueError: ``model`` is not patched.
    """
    inner = properties.unwrap(model)
    with _lock:
        if not isinstance(inner, torch.nn.Module) or handle_of(inner) is None:
            raise ValueError(
                "model: not patched, as a copy of a patched model is not, so there is nothing to undo; patch(model) "
                "comes before unpatch(model)"
            )
        _restore(inner)


def _restore(model: PreTrainedModel) -> None:
    """Take the patch off a model that has one, under the lock."""
    variables = vars(model)
    handle: Patch = variables[_PATCH]
    kept = _without(handle, variables)
    for name in _PATCHED:
        variables.pop(name, None)
    variables.update({name: kept[name] for name in _PATCHED if name in kept})
    handle.clear()


def _without(handle: Patch, variables: dict[str, Any]) -> dict[str, Any]:
    """A patched model's variables without the patch: what others set since stays, else what was there before."""

    def ours(value: Any) -> bool:
        accelerated = getattr(value, "__self__", value)
        return isinstance(accelerated, _Accelerated) and accelerated.handle is handle

    kept = {name: value for name, value in variables.items() if name != _PATCH and not ours(value)}
    if handle.before is not None:
        kept.setdefault("generate", handle.before)
    return kept
