"""One call of ``generate``, checked once: before transformers looks at it, and what that adds.

Options are resolved for their target, what is not served is refused (:func:`screen`); a :class:`Request` is what came.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from gsd_kernels.names import did_you_mean

from .. import validate
from ..acceptance.criteria import DRAWN
from ..acceptance.sampling import SamplingPlan, draw_seed
from ..model.facts import Facts
from ..model.prompt_inputs import PromptInputs, check_inputs
from ..policy.learning import Policy
from ..sources import border
from ..sources.base import DraftSource, OwnSource, remembers
from ..sources.drafts import draft_source
from ..sources.grammar import Grammar, holds_grammar
from ..sources.heads import DraftHeads, Heads
from ..sources.history import History
from ..sources.load import Drafter, loaded, source_of
from ..validate import CONFIG_FIELDS, DRAFT_LENGTHS, HONOURED, REFUSED_PARAMETERS, SERVED_PARAMETERS, warn_once
from .options import NAMES, Options

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
