"""A call's options, declared once for every door, and the call of ``generate``, checked once.

Options are resolved for their target, and what is not served is refused (:func:`screen`) before transformers looks at
the call; a :class:`Request` is what came, with what transformers adds.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer

from gsd_kernels import GraphConfig
from gsd_kernels.backends import Backend
from gsd_kernels.config import AUTO, PLAIN, GraphName, resolve_graph_config
from gsd_kernels.names import did_you_mean, fields_named

from .. import validate
from ..acceptance.criteria import DRAWN, CriterionName, Typical, check_chain, resolve_criterion, shape_for
from ..acceptance.sampling import SamplingPlan, draw_seed
from ..model import properties
from ..model.facts import Facts
from ..model.prompt_inputs import PromptInputs, check_inputs
from ..policy.learning import Policy
from ..policy.settings import Automatic
from ..records import Verified
from ..sources import border
from ..sources.base import DraftSource, OwnSource, remembers
from ..sources.drafts import check_probabilities, draft_source, translations_of
from ..sources.expansion import Expansion
from ..sources.grammar import Grammar, holds_grammar
from ..sources.heads import DraftHeads, Heads
from ..sources.history import History
from ..sources.layer_skip import LayerSkip
from ..sources.layouts import GEMMA4
from ..sources.load import DRAFTERS, Drafter, loaded, source_of
from ..validate import CONFIG_FIELDS, DRAFT_LENGTHS, HONOURED, REFUSED_PARAMETERS, SERVED_PARAMETERS, warn_once

SourceName = Literal["model", "layer_skip", "drafter", "heads", "history", "grammar"]
"""What ``draft_sources`` may name."""

NAMES: tuple[SourceName, ...] = get_args(SourceName)

NEEDS = {
    "model": "assistant_model, a draft model",
    "layer_skip": "assistant_model=LayerSkip(model, …)",
    "drafter": 'drafter, a folder, a hub id, "mtp" or a loaded one',
    "heads": "draft_heads",
}


@fields_named("unknown option")
@dataclass(eq=False, repr=False)
class Options:
    """Options of graph-speculative decoding, checked when they are made.

    What they name is loaded, and what drafts is made, once a call: :class:`~gsd_kernels_hf.engine.resolved.Sources`.

    Args:
        assistant_model: the draft, or a :class:`~gsd_kernels.LayerSkip` of the target; or a list of drafts, whose
            candidates are mixed by learned weights. ``None``: the history and other sources draft.
        graph_config: ``"auto"`` (the default: the shape of every step follows what steps cost and what has been
            accepted, see :mod:`gsd_kernels_hf.policy`) or :class:`~gsd_kernels.Automatic` with settings, ``"chain"``,
            ``"tree"``, ``"graph"``, a :class:`~gsd_kernels.GraphConfig`, or ``"plain"``: no speculation, by the same
            code. Clocks differ between the ranks of a tensor-parallel model, where ``"auto"`` is ``"graph"``.
        tokenizer: of the target; for ``stop_strings``, and for a draft of another tokenizer.
        assistant_tokenizer: of the draft, where it is another than the target's; of several drafts one for all of them,
            or a list of one for each, ``None`` for the target's own.
        seed: 64-bit seed of the sampling noise; ``None`` draws one from torch's generator.
        backend: of all ops, see :mod:`gsd_kernels.backends`.
        draft_sources: of ``"model"`` (the draft), ``"layer_skip"``, ``"drafter"``, ``"heads"``, ``"history"`` (the
            prompt, and what the target picked and nearly picked before), ``"grammar"`` (what a grammar among the logits
            processors forces), and :class:`~gsd_kernels.DraftSource` objects. ``None``: all that are given and the
            history, the latter beside a model only where ``graph_config`` has levels for it, as ``"auto"`` has, and on
            a CPU the grammar where a call has one of xgrammar or llguidance. Nothing given is the history alone.
        draft_heads: :class:`~gsd_kernels.DraftHeads` that were trained for the target, or their folder or hub id.
        drafter: a drafter that was trained for the target, from a checkpoint: its folder or hub id, whose config says
            which kind it is, or a loaded one (:class:`~gsd_kernels.Eagle3`, :class:`~gsd_kernels.DFlash`,
            :class:`~gsd_kernels.DraftHeads`, :class:`~gsd_kernels.Mtp`, :class:`~gsd_kernels.Gemma4Assistant`).
            ``"mtp"``: the multi-token-prediction heads in the target's own checkpoint. A place is loaded once for a
            target, as long as its files stay the same.
        reference_ids: int64 [length] for all sequences or [batch, length], a text that the output may repeat: the file
            to edit, a retrieved document. The history starts with it; it changes the speed, never the output.
        criterion: which drafted tokens are accepted when sampling. ``"exact"``: those that the model itself draws.
            ``"speculative"``: by the ratio of both models' probabilities; still an exact sample, but another one with
            another draft, and from a chain only. ``"block"``: as exact, but the chain is judged as a
            whole, which accepts more. ``"typical"`` or :class:`~gsd_kernels.Typical`: what is likely enough under the
            model, which changes the output. Greedy output is the same with each.
        reuse_prefix: whether keys and values of the last text may serve as the beginning of this one, where both begin
            alike, as the turns of a chat do; in what :func:`gsd_kernels.patch` keeps only.
        reuse_history: whether the history begins with what earlier calls' histories held, and leaves them its own;
            bounded, in what :func:`gsd_kernels.patch` keeps only. One caller's texts then speed up another's, which
            somebody may time.
        learned: whether the history drafts with what :func:`gsd_kernels.learn` left of the model in the cache folder,
            where it did. Needs the compiled ops of the target's device.
        streamer: gets the prompt [batch, length], then the batch's tokens position by position, [batch] each, as from
            transformers; its own text streamers take one sequence only. A method ``ask()``, where it has one, is called
            while the prompt is read, between pieces and layers: what it raises ends the call.
        observer: called with the :class:`~gsd_kernels_hf.records.Verified` of every step.

    Attributes:
        drafts: draft models, unwrapped, or the :class:`~gsd_kernels.LayerSkip`.
        translations: what is between the target's tokens and those of each draft; ``None``: they are the same.
        named: names of the sources in use; empty for plain decoding.
        automatic: whether a policy may choose the shapes.
        automatic_settings: of that policy.

    Raises:
        TypeError, ValueError: an option that cannot be served.
    """

    assistant_model: PreTrainedModel | LayerSkip | Sequence[PreTrainedModel] | None = None
    graph_config: GraphConfig | Automatic | GraphName | None = None
    _: KW_ONLY
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | Sequence[PreTrainedTokenizerBase | None] | None = None
    seed: int | None = None
    backend: Backend = "auto"
    draft_sources: Sequence[SourceName | DraftSource] | None = None
    draft_heads: DraftHeads | str | os.PathLike[str] | None = None
    drafter: Drafter | str | os.PathLike[str] | None = None
    reference_ids: Tensor | None = None
    criterion: CriterionName | Typical = "exact"
    reuse_prefix: bool = True
    reuse_history: bool = True
    learned: bool = True
    streamer: BaseStreamer | None = None
    observer: Callable[[Verified], None] | None = None

    def __post_init__(self) -> None:
        self.criterion = resolve_criterion(self.criterion)
        self.automatic_settings = Automatic()
        if isinstance(self.graph_config, Automatic):
            self.automatic_settings, self.graph_config = self.graph_config, AUTO
        shape = shape_for(self.criterion, self.graph_config)
        if shape != AUTO and self.automatic_settings != Automatic():
            raise ValueError(
                f'graph_config: criterion="{self.criterion}" needs a chain, whose length settings of Automatic do not '
                'choose; pass graph_config="chain" or GraphConfig.preset("chain", depth=…), or use criterion="exact"'
            )
        self.drafts = drafts_in(self.assistant_model)
        models = [draft for draft in self.drafts if not isinstance(draft, DraftSource)]
        self.translations = translations_of(self.tokenizer, self.assistant_tokenizer, models)
        if self.draft_heads is not None and not isinstance(self.draft_heads, (DraftHeads, str, os.PathLike)):
            got = type(self.draft_heads).__name__
            raise TypeError(f"draft_heads: expected DraftHeads, their folder or hub id, got {got}")
        if self.drafter is not None and not isinstance(self.drafter, (str, os.PathLike, *DRAFTERS)):
            kinds, got = ", ".join(kind.__name__ for kind in DRAFTERS), type(self.drafter).__name__
            one = "; of drafters one is taken" if isinstance(self.drafter, (list, tuple)) else ""
            raise TypeError(f'drafter: expected a folder, a hub id, "mtp", or one of {kinds}, got {got}{one}')
        if isinstance(self.reference_ids, Tensor) and not self.reference_ids.numel():
            self.reference_ids = None  # of any dtype and shape: the tokens of an empty text
        self.named = () if shape == PLAIN else self._names()
        self.automatic = shape in (None, AUTO) and bool(self.named)
        self.graph_config = GraphConfig() if shape in (AUTO, PLAIN) else resolve_graph_config(shape)
        others = {
            "draft_heads": self.draft_heads,
            "drafter": self.drafter,
            "reference_ids": self.reference_ids,
            "assistant_model": self.drafts[1:] or None,
        }
        check_chain(self.criterion, self.graph_config, self.draft_sources, others)
        if self.criterion in DRAWN:
            check_probabilities(self.translations, self.criterion)
        validate.check_backend(self.backend)
        if self.seed is not None:
            draw_seed(self.seed)
        validate.check_listeners(self.streamer, self.observer)

    def __repr__(self) -> str:
        """Shape and sources, in one line."""
        shape = AUTO if self.automatic else repr(self.graph_config) if self.named else PLAIN
        return (
            f"<{type(self).__name__}: {shape}, sources {', '.join(self.named) or 'none'}, criterion {self.criterion}>"
        )

    def _names(self) -> tuple[str, ...]:
        """Names of the sources in use; by default all that are given, and the history."""
        there = {draft.name if isinstance(draft, DraftSource) else "model" for draft in self.drafts}
        there |= {name for name, one in (("drafter", self.drafter), ("heads", self.draft_heads)) if one is not None}
        sources = self.draft_sources
        if sources is None:
            given = tuple(name for name in NEEDS if name in there)
            # The rule of speculative sampling is about a model's own draws: without a model there is none.
            return () if self.criterion in DRAWN and not given else (*given, "history")
        expected = (
            f"draft_sources: expected a tuple of {', '.join(NAMES)} or DraftSource objects, got {sources!r}; leave it "
            "out to take all that are given, and the history"
        )
        if not isinstance(sources, (tuple, list, str)):
            raise TypeError(expected)
        strange = [s for s in sources if not isinstance(s, DraftSource) and s not in NAMES]
        if not sources or sources in ("none", PLAIN) or "none" in strange:
            raise ValueError(f'{expected}; for decoding without any source pass graph_config="plain"')
        if isinstance(sources, str) or strange:
            near = "" if isinstance(sources, str) else did_you_mean(str(strange[0]), NAMES)
            raise ValueError(expected + near)
        for source in sources:
            if isinstance(source, DraftSource):
                border.check_source(source, NAMES)
        names = tuple(s.name if isinstance(s, DraftSource) else s for s in sources)
        if len(set(names)) < len(names):
            raise ValueError(f"draft_sources: {', '.join(names)} have a name twice; give each source a name of its own")
        for name, needed in NEEDS.items():
            if name in names and name not in there:
                raise ValueError(f'draft_sources: "{name}" needs {needed}')
            if name in there and name not in names:
                given = needed.partition(",")[0].partition("=")[0]
                raise ValueError(
                    f'draft_sources: leave out {given}, or name "{name}"; {given}=False leaves a patched model\'s out'
                )
        return names


def drafts_in(given: object) -> tuple[PreTrainedModel | Expansion, ...]:
    """The draft models of ``assistant_model``, unwrapped.

    Raises:
        TypeError, ValueError: not models, a model twice, or an empty list.
    """
    if given is None:
        return ()
    if not isinstance(given, (list, tuple)):
        given = [given]
    elif not given:
        raise ValueError("assistant_model: expected draft models, got an empty list; leave it out for none")
    if len(given) > 1 and any(isinstance(draft, Expansion) or draft is None for draft in given):
        raise TypeError("assistant_model: expected a list of models; a LayerSkip is given alone")
    drafts = []
    for one in given:
        if isinstance(one, (str, os.PathLike)):
            raise TypeError(
                f"assistant_model: expected a model, got the path {os.fspath(one)!r}; load it, as by "
                "AutoModelForCausalLM.from_pretrained, or pass drafter= for the folder of a drafter"
            )
        draft = one if isinstance(one, Expansion) else properties.unwrap(one)
        if type(draft).__name__ == GEMMA4:
            raise validate.Unsupported(
                f"assistant_model: a {GEMMA4} has no keys and values of its own; pass drafter= its folder, or "
                "gsd_kernels.Gemma4Assistant(model)"
            )
        if not isinstance(draft, Expansion):
            validate.check_model("assistant_model", draft)
        drafts.append(draft)
    if len({id(draft) for draft in drafts}) < len(drafts):
        raise ValueError("assistant_model: the same draft model twice; give each once")
    return tuple(drafts)


OPTIONS = tuple(field.name for field in fields(Options))

NEAR_RATIO = 0.75  # of difflib's ratio; transformers refuses what is further away from every name

NO_HISTORY = (
    "reference_ids: the history reads them, and is not among the draft sources; name it in draft_sources, or pass a "
    "graph_config with history_depth above 0"
)


class Sources:
    """The draft sources of a call, made and checked once, and what they are made of.

    A drafter and heads that were named by their places are loaded, once.

    Args:
        options: as given.
        target: or its facts.

    Attributes:
        facts: of the target.
        drafter: loaded, where ``options`` name a place.
        heads: loaded likewise.
        own: the user's own sources.
        every: all that a policy may use, in the order in which they are mixed.
        models: that these forward, besides the target, by the name that an error calls them.

    Raises:
        TypeError, ValueError: no drafter that can be served, a source that cannot draft for the target,
            ``reference_ids`` without a history that reads them.
    """

    def __init__(self, options: Options, target: PreTrainedModel | Facts) -> None:
        self.options, self.facts = options, Facts.of(target)
        target, drafter, heads = self.facts.model, options.drafter, options.draft_heads
        if isinstance(drafter, (str, os.PathLike)):
            drafter = loaded(drafter, target)
        if isinstance(heads, (str, os.PathLike)):
            heads = loaded(heads, target, "draft_heads")
        if isinstance(drafter, DraftHeads) and heads is not None:
            raise ValueError("drafter: these are heads, and draft_heads has others; give one of the two")
        self.drafter: Drafter | None = drafter
        self.heads: DraftHeads | None = heads
        self.own = [source for source in options.draft_sources or () if isinstance(source, DraftSource)]
        self.every = self._made() if options.named else []
        for source in self.every:
            if isinstance(source, OwnSource):
                source.check(target)
            border.check_hidden_layers(source, target)
        self.models: dict[str, PreTrainedModel] = {}
        for source in self.every:
            # Language models of transformers: an encoder has no output matrix.
            models = [m for m in source.forwards if isinstance(m, PreTrainedModel)]
            models = [m for m in models if m.get_output_embeddings() is not None]
            name = "assistant_model" if source.name in NAMES else f"draft_sources: {source.name}"
            if border.is_own(source) and any(model is draft for model in models for draft in options.drafts[1:]):
                name = source.name.replace("model", "assistant_model", 1)
            for number, model in enumerate(models, 1):
                called = name if number == 1 else f"{name} {number}"
                self.models[called] = model
                if not source.other_tokens:
                    validate.check_pair(target, model, called)

    def _made(self) -> list[DraftSource]:
        """The sources by name, then those of one's own, then the history."""
        options = self.options
        sources: list[DraftSource] = []
        if "model" in options.named:
            for i, (model, between) in enumerate(zip(options.drafts, options.translations, strict=True), 1):
                sources.append(draft_source(model, "model" if i == 1 else f"model {i}", between))
        if "layer_skip" in options.named:
            sources += options.drafts  # a source as it is given
        if "drafter" in options.named:
            sources.append(source_of(self.drafter))
        if "heads" in options.named:
            sources.append(Heads(self.heads))
        sources += self.own
        if "history" in options.named:
            sources.append(History())
        elif options.reference_ids is not None:
            raise ValueError(NO_HISTORY)
        return sources

    def used(self, *, automatic: bool, grammar: bool) -> list[DraftSource]:
        """The sources of the call's steps.

        Args:
            automatic: whether a policy chooses the shapes. A fixed shape without levels of its own has a history only
                where it was asked for.
            grammar: whether the call's grammar drafts as well.

        Raises:
            ValueError: ``reference_ids`` without a history that reads them.
        """
        options = self.options
        if automatic or options.draft_sources is not None or not options.drafts or options.graph_config.history_depth:
            sources = list(self.every)
        elif self.every and options.reference_ids is not None:
            raise ValueError(NO_HISTORY)
        else:
            sources = [source for source in self.every if not remembers(source)]
        return sources + [Grammar()] * grammar

    @cached_property
    def parts(self) -> list[Any]:
        """The objects whose identity tells sets of sources apart."""
        options = self.options
        given = [*options.drafts, self.heads, self.drafter, *self.own]
        for between in options.translations:
            given += [] if between is None else [between.tokenizer, between.assistant_tokenizer]
        return [part for part in given if part is not None]


def check_names(given: Iterable[str], model: PreTrainedModel) -> None:
    """Raise for an argument of ``generate`` that nobody knows and that is nearly an option's or transformers' own.

    What is near nothing is left to transformers, which knows what the model's code takes.

    Raises:
        TypeError: it names the nearest.
    """
    known = {*OPTIONS, *CONFIG_FIELDS, *SERVED_PARAMETERS, *REFUSED_PARAMETERS}
    strange = [name for name in given if name not in known]
    for function in (model.forward, model.prepare_inputs_for_generation) if strange else ():
        known |= inspect.signature(function).parameters.keys()
    for name in strange:
        if name not in known and get_close_matches(name, known, n=1, cutoff=NEAR_RATIO):
            raise TypeError(f"generate: unknown argument {name!r}{did_you_mean(name, known)}")


def report_draft_lengths(given: Mapping[str, Any], config: GenerationConfig | None, model: PreTrainedModel) -> None:
    """Say once that a setting of :data:`DRAFT_LENGTHS` has no effect, wherever it was set."""
    places = given, {} if config is None else vars(config), vars(model.generation_config)
    for name in DRAFT_LENGTHS:
        value = next((place[name] for place in places if place.get(name) is not None), None)
        if value is not None:
            warn_once(
                '%s=%s has no effect: graph_config says how much is drafted, as in graph_config="auto" or '
                'GraphConfig.preset("chain", depth=5)',
                name,
                repr(value),
            )


def screen(
    options: Options,
    facts: Facts,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    generation_config: GenerationConfig,
) -> Sources:
    """Raise for a call that cannot be served, once: before transformers looks at it where that is possible.

    Args:
        options: of speculation.
        facts: of the target, which is checked.
        input_ids: the prompt [B, P]; ``None``: transformers begins with the token that texts begin with.
        attention_mask: [B, P], 0 for padding; ``None`` where there is none.
        generation_config: transformers' options, the model's own included.

    Returns:
        What the call drafts with, and the facts of its target.

    Raises:
        TypeError, ValueError: the reason and the cure.
    """
    sources = Sources(options, facts)
    validate.check_paths(options.graph_config, (facts.model, *sources.models.values()))
    if input_ids is not None:
        validate.check_prompt(input_ids, attention_mask, facts.vocabulary)
    validate.check_generation_config(generation_config)
    return sources


MOST_POSITIONS = 2**31 - 1
"""Of a text: lengths are int32."""


class Request:
    """A call of ``generate``, checked: what transformers adds to a screened one, see :func:`screen`.

    Args:
        sources: what it drafts with, and the facts of its target.
        input_ids: int64 [B, P], left-padded.
        logits_processor, stopping_criteria, generation_config: of transformers.
        seed: of the call; ``None``: that of the options.
        model_kwargs: what else the model is called with.

    Attributes:
        attention_mask: int64 [B, P], 0 for padding; ``None`` where there is none.
        inputs: what the prompt has beside text; ``None``: nothing.
        plan: processors and fused warpers.
        seed: of the sampling noise; 0 where nothing is random.
        given_seed: the user's; ``None`` where none was given or nothing is random.
        eos_ids: end-of-text tokens.
        room: tokens that may be emitted.
        timers: stopping criteria that depend on a clock, asked once a step.
        criteria: all other stopping criteria, asked once a token.
        pads_finished: whether a sequence that ended is padded while others go on.
        options: of speculation, as given.
        facts: all that is known of the target.
        model: the target, unwrapped.
        models: it and the models of all sources, by the name that an error calls them.
        device: where the target takes its input.
        batch: B, sequences.
        prompt_length: P, tokens of the prompt, padding included.
        kv_start: left padding of every sequence, int32 [B].
        reach: tokens of the longest prompt, without padding.
        as_dict: whether transformers' output object is returned rather than token ids.
        keeps_scores, keeps_logits: whether it has processed scores, logits [B, V] of every token.
        per_token: whether something is called for every token on the host.
        lockstep: whether all sequences must be asked for together, token by token.
        reads_padding: whether the target reads on in sequences that ended, for those who see its logits there.
        draws_from_draft: whether the draft's own samples are verified, as speculative sampling does.
        drafts_by_grammar: whether a grammar among the processors drafts: where it is named, or by default on a CPU.

    Raises:
        TypeError, ValueError: something cannot be served; nothing was changed.
    """

    def __init__(
        self,
        sources: Sources,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None,
        model_kwargs: Mapping[str, Any],
    ) -> None:
        self.sources, self.options, self.facts = sources, sources.options, sources.facts
        self.input_ids, self.generation_config = input_ids, generation_config
        self.model: PreTrainedModel = self.facts.model
        self.models: dict[str, PreTrainedModel] = {"model": self.model, **sources.models}
        self.device = self.facts.device
        self.batch, self.prompt_length = input_ids.shape
        self.attention_mask: Tensor | None = model_kwargs.get("attention_mask")
        validate.check_padding(self.attention_mask, inferred=True)  # the caller's own was screened
        self.kv_start = torch.zeros(self.batch, dtype=torch.int32, device="cpu")
        if self.attention_mask is not None:
            self.kv_start = (self.prompt_length - self.attention_mask.long().sum(1)).to(torch.int32)
        unread = validate.check_call(self.facts, model_kwargs)
        if self.options.reference_ids is not None:
            copies = generation_config.num_return_sequences or 1
            validate.check_reference(self.options.reference_ids, self.batch, self.facts.vocabulary, copies)
        samples = bool(generation_config.do_sample)
        self.plan = SamplingPlan.of(logits_processor, samples)
        stops: list[Any] = [*stopping_criteria]
        kinds = EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
        ends, lengths, self.timers = ([stop for stop in stops if type(stop) is kind] for kind in kinds)
        self.criteria = [stop for stop in stops if type(stop) not in kinds]
        self.eos_ids = {int(t) for stop in ends for t in stop.eos_token_id.tolist() if t >= 0}
        if not lengths:
            raise ValueError("max_new_tokens: needed, nothing else bounds the text; also max_length")
        self.room = min(MOST_POSITIONS, *(stop.max_length for stop in lengths)) - self.prompt_length
        if self.room < 1:
            raise ValueError(f"max_length: leaves no room after a prompt of {self.prompt_length} tokens; raise it")
        self.pads_finished = any(hasattr(stop, "eos_token_id") for stop in stops)
        self.inputs: PromptInputs | None = None
        if unread:
            self.inputs = PromptInputs.of(input_ids, model_kwargs, unread)
            check_inputs(self.facts, self.inputs, self.kv_start)
        config, options = generation_config, self.options
        self.reach = self.prompt_length - int(self.kv_start.min())
        self.as_dict = bool(config.return_dict_in_generate)
        self.keeps_scores = self.as_dict and bool(config.output_scores)
        self.keeps_logits = self.as_dict and bool(config.output_logits)
        self.per_token = bool(self.plan.processors or self.criteria or self.keeps_scores or self.keeps_logits)
        self.lockstep = not self.plan.row_wise
        self.reads_padding = self.lockstep and self.pads_finished and self.batch > 1
        drawn = options.criterion in DRAWN
        self.draws_from_draft = drawn and self.plan.temperature > 0 and bool(options.named)
        by_default = options.draft_sources is None and self.device.type == "cpu"
        wanted = bool(options.named) and not drawn and ("grammar" in options.named or by_default)
        self.drafts_by_grammar = wanted and holds_grammar(self.plan.processors)
        given = options.seed if seed is None else seed
        # Behind all checks: where one sends the call to transformers, torch's generator is as it was.
        self.seed = draw_seed(given) if samples else 0
        self.given_seed = given if samples else None

    def agreed(self) -> dict[str, object]:
        """Everything that the ranks of a tensor-parallel model must have been given alike, by name."""
        options = self.options
        read = tuple(None if between is None else between.shared.reads for between in options.translations)
        # The same names on every rank, however many drafts each was given.
        drafts = tuple(d.forwards[0] if isinstance(d, DraftSource) else d for d in options.drafts) or (None,)
        names = ("graph_config", "draft_sources", "reference_ids", "criterion", "backend")
        return {
            "model": self.model,
            "prompt": self.input_ids,
            "attention_mask": self.attention_mask,
            "seed": self.given_seed,
            "assistant_model": drafts,
            **{name: getattr(options, name) for name in names},
            "draft_heads": self.sources.heads,
            "drafter": self.sources.drafter,
            "assistant_tokenizer": read if any(r is not None for r in read) else (),
            **{name: value for name, value in vars(self.generation_config).items() if name in HONOURED},
        }


class SessionKey(SimpleNamespace):
    """Key of sessions that may serve a call: what storage and captured steps depend on, besides the models.

    Args:
        request: the call.
        policy: what chooses the shapes of its steps; its largest shapes size the storage.
        sources: in the order in which they are mixed.
        alone: whether no other rank must do the same at the same time.

    Attributes:
        branch: the most candidates after one node.
        width: the most tokens that one step emits.
        slots: cache positions beyond the committed prefix.
        draws: whether the draft's own samples are verified.
        padding: whether the target reads on in sequences that ended.
        axes: of positions, behind prompts of more than text; ``None``: of text.
    """

    def __init__(self, request: Request, policy: Policy, sources: Sequence[DraftSource], *, alone: bool) -> None:
        shapes = policy.largest_shapes()
        self.batch = request.batch
        self.branch = max((shape.branch for shape in shapes), default=1)
        self.width = max((shape.chain_rows for shape in shapes), default=1)
        self.slots = max((shape.cache_slots for shape in shapes), default=1)
        self.sources = tuple(source.name for source in sources)
        self.warpers = tuple(request.plan.warper_arguments.items())
        self.eos_ids = tuple(sorted(request.eos_ids))
        self.draws, self.padding = request.draws_from_draft, request.reads_padding
        self.backend, self.alone = request.options.backend, alone
        self.axes = None if request.inputs is None else request.inputs.axes
