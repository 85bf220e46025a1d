"""One call of ``generate``, validated once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from .. import validate
from ..acceptance.criteria import DRAWN
from ..acceptance.sampling import SamplingPlan, draw_seed
from ..model.prompt_inputs import PromptInputs, check_inputs
from ..parallel import honoured
from ..policy.base import Policy
from ..sources.base import DraftSource
from ..sources.matchers import holds_grammar
from .resolved import Sources

MOST_POSITIONS = 2**31 - 1
"""Of a text: lengths are int32."""


class Request:
    """A call of ``generate``, checked: what transformers adds to a screened one, see :mod:`.resolved`.

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
        self.kv_start = padding_of(input_ids, self.attention_mask)
        unread = validate.check_call(self.facts, model_kwargs)
        if self.options.reference_ids is not None:
            copies = generation_config.num_return_sequences or 1
            validate.check_reference(self.options.reference_ids, self.batch, self.facts.vocabulary, copies)
        samples = bool(generation_config.do_sample)
        self.plan = SamplingPlan.of(logits_processor, samples)
        self.eos_ids, room, self.timers, self.criteria = split_criteria(stopping_criteria, self.prompt_length)
        self.room = min(room, MOST_POSITIONS - self.prompt_length)
        self.pads_finished = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        self.inputs: PromptInputs | None = None
        if unread:
            self.inputs = PromptInputs.of(input_ids, model_kwargs, unread)
            check_inputs(self.facts, self.inputs, self.kv_start)
        given = self.options.seed if seed is None else seed
        # Behind all checks: where one sends the call to transformers, torch's generator is as it was.
        self.seed = draw_seed(given) if samples else 0
        self.given_seed = given if samples else None

    @property
    def reach(self) -> int:
        """Tokens of the longest prompt, without padding."""
        return self.prompt_length - int(self.kv_start.min())

    @property
    def as_dict(self) -> bool:
        """Return whether transformers' output object is returned rather than token ids."""
        return bool(self.generation_config.return_dict_in_generate)

    @property
    def keeps_scores(self) -> bool:
        """Return whether the output has processed scores [B, V] of every token."""
        return self.as_dict and bool(self.generation_config.output_scores)

    @property
    def keeps_logits(self) -> bool:
        """Return whether the output has logits [B, V] of every token."""
        return self.as_dict and bool(self.generation_config.output_logits)

    @property
    def per_token(self) -> bool:
        """Return whether something is called for every token on the host."""
        return bool(self.plan.processors or self.criteria or self.keeps_scores or self.keeps_logits)

    @property
    def lockstep(self) -> bool:
        """Return whether all sequences must be asked for together, token by token."""
        return not self.plan.row_wise

    @property
    def reads_padding(self) -> bool:
        """Return whether the target reads on in sequences that ended, for those who see its logits there."""
        return self.lockstep and self.pads_finished and self.batch > 1

    @property
    def draws_from_draft(self) -> bool:
        """Return whether the draft's own samples are verified, as speculative sampling does."""
        return self.options.criterion in DRAWN and self.plan.temperature > 0 and bool(self.options.named)

    @property
    def drafts_by_grammar(self) -> bool:
        """Return whether a grammar among the processors drafts: where it is named, or by default on a CPU."""
        options = self.options
        if not options.named or options.criterion in DRAWN or not holds_grammar(self.plan.processors):
            return False
        return "grammar" in options.named or (options.draft_sources is None and self.device.type == "cpu")

    def agreed(self) -> dict[str, object]:
        """Everything that the ranks of a tensor-parallel model must have been given alike, by name."""
        return {
            "model": self.model,
            "prompt": self.input_ids,
            "attention_mask": self.attention_mask,
            "seed": self.given_seed,
            **self.sources.agreed(),
            **honoured(self.generation_config),
        }


def padding_of(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Left padding of the sequences [B, P], int32 [B]."""
    if attention_mask is None:
        return torch.zeros(input_ids.shape[0], dtype=torch.int32, device="cpu")
    return (input_ids.shape[1] - attention_mask.long().sum(1)).to(torch.int32)


def split_criteria(
    criteria: Sequence[Callable[..., Any]], prompt_length: int
) -> tuple[set[int], int, list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Stopping criteria → (end-of-text ids, token budget, timers checked once a step, the others: once a token).

    Raises:
        ValueError: nothing bounds the length.
    """
    eos_ids: set[int] = set()
    budgets: list[int] = []
    timers: list[Callable[..., Any]] = []
    others: list[Callable[..., Any]] = []
    for criterion in criteria:
        if type(criterion) is EosTokenCriteria:
            eos_ids |= {int(t) for t in criterion.eos_token_id.tolist() if t >= 0}
        elif type(criterion) is MaxLengthCriteria:
            budgets.append(criterion.max_length - prompt_length)
        elif type(criterion) is MaxTimeCriteria:
            timers.append(criterion)
        else:
            others.append(criterion)
    if not budgets:
        raise ValueError("max_new_tokens: needed, nothing else bounds the text; also max_length")
    if min(budgets) < 1:
        raise ValueError(f"max_length: leaves no room after a prompt of {prompt_length} tokens; raise it")
    return eos_ids, min(budgets), timers, others


@dataclass(frozen=True)
class SessionKey:
    """Key of sessions that may serve a call: what storage and captured steps depend on, besides the models."""

    batch: int
    branch: int  # the most candidates after one node
    width: int  # the most tokens that one step emits
    slots: int  # cache positions beyond the committed prefix
    sources: tuple[str, ...]
    warpers: tuple[tuple[str, float], ...]
    eos_ids: tuple[int, ...]
    draws: bool  # whether the draft's own samples are verified
    padding: bool  # whether the target reads on in sequences that ended
    backend: str
    alone: bool  # whether no other rank must do the same at the same time
    axes: tuple[int, ...] | None  # of positions, behind prompts of more than text; None: of text

    @classmethod
    def of(cls, request: Request, policy: Policy, sources: Sequence[DraftSource], *, alone: bool) -> SessionKey:
        """The key of the sessions that may serve a call.

        Args:
            request: the call.
            policy: what chooses the shapes of its steps; its largest shapes size the storage.
            sources: in the order in which they are mixed.
            alone: whether no other rank must do the same at the same time.
        """
        shapes = policy.largest_shapes()
        return cls(
            batch=request.batch,
            branch=max((shape.branch for shape in shapes), default=1),
            width=max((shape.chain_rows for shape in shapes), default=1),
            slots=max((shape.cache_slots for shape in shapes), default=1),
            sources=tuple(source.name for source in sources),
            warpers=tuple(request.plan.warper_arguments.items()),
            eos_ids=tuple(sorted(request.eos_ids)),
            draws=request.draws_from_draft,
            padding=request.reads_padding,
            backend=request.options.backend,
            alone=alone,
            axes=None if request.inputs is None else request.inputs.axes,
        )
