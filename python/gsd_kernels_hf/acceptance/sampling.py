"""transformers' logits processors, split into what runs fused on the device and what is called along the walk."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

FUSED = {
    TemperatureLogitsWarper: ("temperature", float),
    TopKLogitsWarper: ("top_k", int),
    TopPLogitsWarper: ("top_p", float),
    MinPLogitsWarper: ("min_p", float),
}
"""Warpers in the order in which they are fused, by the name and type of what they warp by."""

# transformers' own that keep nothing from call to call and look at no other sequence; PLACED have something of every
# sequence, by its place in the batch.
ROW_WISE = (
    "EpsilonLogitsWarper EtaLogitsWarper ExponentialDecayLengthPenalty ForcedBOSTokenLogitsProcessor "
    "ForcedEOSTokenLogitsProcessor InfNanRemoveLogitsProcessor LogitNormalization MinLengthLogitsProcessor "
    "MinNewTokensLengthLogitsProcessor MinPLogitsWarper NoBadWordsLogitsProcessor NoRepeatNGramLogitsProcessor "
    "RepetitionPenaltyLogitsProcessor SequenceBiasLogitsProcessor SuppressTokensAtBeginLogitsProcessor "
    "SuppressTokensLogitsProcessor TemperatureLogitsWarper TopHLogitsWarper TopKLogitsWarper TopPLogitsWarper "
    "TypicalLogitsWarper WatermarkLogitsProcessor"
).split()
PLACED = ("EncoderNoRepeatNGramLogitsProcessor", "EncoderRepetitionPenaltyLogitsProcessor")


@dataclass
class SamplingPlan:
    """Temperature 0 is greedy. ``processors`` come first, then the fused warpers."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    processors: list[LogitsProcessor] = field(default_factory=list)
    warpers: LogitsProcessorList = field(default_factory=LogitsProcessorList)  # the fused ones, to report scores

    @classmethod
    def of(cls, processors: LogitsProcessorList, do_sample: bool) -> SamplingPlan:
        """Fuse the longest tail of known warpers in the known order; everything before it stays as it is.

        Raises:
            ValueError: classifier-free guidance, which needs a second target forward at every token; a temperature
                that is no finite number above 0.
        """
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                raise ValueError("guidance_scale: not supported, since every token needs a second target forward")
        split = len(processors)
        if not do_sample:
            return cls(processors=list(processors))
        rank = len(FUSED)
        while split > 0 and _fused_rank(processors[split - 1]) < rank:
            split -= 1
            rank = _fused_rank(processors[split])
        plan = cls(1.0, processors=list(processors[:split]), warpers=LogitsProcessorList(processors[split:]))
        for warper in plan.warpers:
            name, kind = FUSED[type(warper)]
            setattr(plan, name, kind(getattr(warper, name)))
        if not 0.0 < plan.temperature < math.inf:
            raise ValueError(f"temperature: expected a finite number above 0, got {plan.temperature}")
        plan.temperature *= bool(np.float32(plan.temperature))  # in which it is applied; 0 is greedy
        return plan

    @property
    def row_wise(self) -> bool:
        """Return whether the processors can be asked for one sequence at a time, with the same result.

        Those of :data:`ROW_WISE` and :data:`PLACED` can, by the exact class and as it was shipped.
        """
        known = {getattr(logits_process, name, None) for name in (*ROW_WISE, *PLACED)}
        kinds = set(map(type, self.processors))
        return kinds <= known and all(kind.__call__.__module__ == logits_process.__name__ for kind in kinds)

    @property
    def warper_arguments(self) -> dict[str, float]:
        return {name: getattr(self, name) for name, _ in FUSED.values()}


def processed(processor: LogitsProcessor, group: list[int], batch: int, history: Tensor, scores: Tensor) -> Tensor:
    """The scores [n, V] of a group of a batch's sequences, all or one, with their texts [n, L], after a processor."""
    by_row = isinstance(getattr(processor, "prompt_ignore_length", None), Tensor)  # by the length of its padding
    if len(group) < batch and (by_row or type(processor).__name__ in PLACED):
        (b,) = group
        return processor(history.expand(batch, -1), scores.expand(batch, -1))[b : b + 1]
    return processor(history, scores)


def _fused_rank(processor: LogitsProcessor) -> int:
    """Place in the fused order; too large for a processor that is not fused."""
    plain = (
        type(processor) in FUSED
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "filter_value", -math.inf) == -math.inf
    )
    return list(FUSED).index(type(processor)) if plain else len(FUSED)


def draw_seed(seed: int | None) -> int:
    """The 64-bit seed; ``None`` draws one from torch's generator, so that ``set_seed`` reproduces."""
    if seed is None:
        return int(torch.randint(0, 2**63 - 1, (), device="cpu").item())
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int or None, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: expected a 64-bit integer, got {seed}")
    return seed - 2**64 if seed >= 2**63 else seed
