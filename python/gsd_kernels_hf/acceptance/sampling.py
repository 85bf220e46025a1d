"""transformers' logits processors, split into what runs fused on the device and what is called along the walk."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

FUSED = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # in the order they are fused


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
            if isinstance(warper, TemperatureLogitsWarper):
                plan.temperature = float(warper.temperature)
                if not 0.0 < plan.temperature < math.inf:
                    raise ValueError(f"temperature: expected a finite number above 0, got {plan.temperature}")
            elif isinstance(warper, TopKLogitsWarper):
                plan.top_k = int(warper.top_k)
            elif isinstance(warper, TopPLogitsWarper):
                plan.top_p = float(warper.top_p)
            elif isinstance(warper, MinPLogitsWarper):
                plan.min_p = float(warper.min_p)
        return plan

    @property
    def warper_arguments(self) -> dict[str, float]:
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}


def _fused_rank(processor: LogitsProcessor) -> int:
    """Place in the fused order; too large for a processor that is not fused."""
    plain = (
        type(processor) in FUSED
        and getattr(processor, "min_tokens_to_keep", 1) == 1
        and getattr(processor, "filter_value", float("-inf")) == float("-inf")
    )
    return FUSED.index(type(processor)) if plain else len(FUSED)


class RowProcessors:
    """Processors called once for every emitted token of a sequence, with that sequence's own padded history.

    A processor may depend on the batch row (a prefix function, per-row penalties) and on its calls so far. So every
    sequence has its own copy, and is called in its own row of a batch of the true size.
    """

    def __init__(self, processors: list[LogitsProcessor], batch: int) -> None:
        self.batch = batch
        self.copies = [[_for_row(p, 0, batch) for p in processors]]
        for row in range(1, batch):
            try:
                self.copies.append([_for_row(p, row, batch) for p in copy.deepcopy(processors)])
            except Exception as error:
                raise ValueError(
                    f"logits_processor: with a batch every sequence needs its own copy, and copying failed: {error}"
                ) from error

    def __call__(self, sequence: int, history: Tensor, scores: Tensor) -> Tensor:
        """history int64 [L], scores float32 [V] → processed scores [V]."""
        for processor in self.copies[sequence]:
            ids = history.expand(self.batch, -1)
            scores = processor(ids, scores.expand(self.batch, -1).clone())[sequence]
        return scores

    def __bool__(self) -> bool:
        return bool(self.copies[0])


def _for_row(processor: LogitsProcessor, row: int, batch: int) -> LogitsProcessor:
    """A prefix function is asked about its own row only: to other rows' histories it may have no answer."""
    if batch == 1 or type(processor) is not PrefixConstrainedLogitsProcessor:
        return processor
    allowed = processor._prefix_allowed_tokens_fn
    return PrefixConstrainedLogitsProcessor(lambda b, ids: allowed(b, ids) if b == row else [0], num_beams=1)


def draw_seed(seed: int | None) -> int:
    """The 64-bit seed; ``None`` draws one from torch's generator, so that ``set_seed`` reproduces."""
    if seed is None:
        return int(torch.randint(0, 2**63 - 1, ()).item())
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed: expected an int or None, got {seed!r}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed: expected a 64-bit integer, got {seed}")
    return seed - 2**64 if seed >= 2**63 else seed
