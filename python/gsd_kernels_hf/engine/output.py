"""Output of a generation: tokens to the streamer, counts to the statistics, and what ``generate`` returns."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from gsd_kernels.config import PLAIN

from ..acceptance.rule import OnHost, check_pick
from ..model import properties
from ..model.hidden import not_finite_for
from ..policy.learning import LearningPolicy, Policy
from ..policy.shapes import shape_name
from .capture import Launched
from .resolved import Request
from .session import Session
from .stats import GenerationStats

logger = logging.getLogger("gsd_kernels")

ENOUGH_PLAIN_STEPS = 4
"""Of a call, from which its statistics say what a plain step takes."""


@dataclass
class GraphGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output with :class:`~gsd_kernels_hf.engine.stats.GenerationStats`.

    Beyond a row's end scores are 0, but where a processor of one's own was shown the whole batch.
    ``cache`` (``past_key_values`` before transformers 5.24) is ``None``: the cache holds graph slots.
    """

    stats: GenerationStats | None = None


class Output:
    """Output of one generation.

    Args:
        request: the call.
        session: that writes its texts.

    Attributes:
        finished: whether every sequence is done, or the time is over.
        lengths: tokens of every sequence so far, padding and what is taken back included.
        done: which sequences ended.
        timed: whether that may depend on a clock.
        stats: counts so far.
    """

    def __init__(self, request: Request, session: Session) -> None:
        self.request, self.session = request, session
        self.streamer: Any = request.options.streamer
        self.observer, self.pad = request.options.observer, session.state.pad
        self.texts: list[list[int]] = [[] for _ in range(request.batch)]  # for the streamer
        self.streamed = 0  # positions handed over to it
        self.plain_seconds: list[float] = []  # of every plain step
        self.counted: list[int] | None = None  # nodes and merges, where another step may have been queued since
        self.finished, self.timed = False, bool(request.timers)
        self.lengths = [request.prompt_length] * request.batch
        self.done = [False] * request.batch
        self.pads = request.kv_start.tolist()
        self.positions = properties.positions(request.model)
        criterion = session.rule.criterion
        self.stats = GenerationStats(
            sequences=request.batch,
            backend=request.options.backend,
            criterion=criterion.name,
            lossless=criterion.lossless,
            why_modules=session.target.why_modules,
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, at least."""
        return max(self.lengths)

    @property
    def reach(self) -> int:
        """Tokens of the longest sequence, at least, without padding."""
        return max(length - pad for length, pad in zip(self.lengths, self.pads, strict=True))

    @property
    def ends(self) -> bool:
        """True where every sequence ends with its next token at the latest."""
        request = self.request
        most = request.prompt_length + request.room - 1
        return all(done or length >= most for length, done in zip(self.lengths, self.done, strict=True))

    def emit(self, launched: Launched) -> None:
        """Hand the tokens of a step that the host has heard of to the streamer.

        Raises:
            ValueError: the target's logits held NaN, or its table of positions ends before the text.
        """
        session, state, verified, stats = self.session, self.session.state, launched.verified, self.stats
        plain = launched.shape is None
        shape = PLAIN if launched.shape is None else shape_name(launched.shape)
        stats.steps += 1
        stats.plain_steps += plain
        stats.shapes[shape] = stats.shapes.get(shape, 0) + 1
        stats.target_rows += stats.sequences * verified.rows.token_ids.shape[1]
        stats.draft_rows += stats.sequences * launched.drafted_rows
        self.counted = launched.counted
        if self.observer is not None:
            self.observer(verified)
        if plain:
            self.plain_seconds.append(launched.seconds)
        session.mixer.count(verified)
        for sequence, tokens in enumerate(launched.tokens):
            count = len(tokens)
            self.lengths[sequence] += count
            if count:
                stats.accepted += [0] * (count + 1 - len(stats.accepted))
                stats.accepted[count] += 1
                stats.new_tokens += count
                stats.sequence_steps += 1
            for token in tokens:
                check_pick(token)
        self.done = launched.done
        # The last token of a text that goes on is read next.
        texts = zip(self.lengths, self.pads, launched.done, strict=True)
        session.target.check_length("max_new_tokens", max(length - pad - done for length, pad, done in texts))
        if self.streamer is not None:
            self._stream(launched.tokens)
        self.finished = all(self.done)
        verdicts = (timer(state.tokens, None) for timer in self.request.timers)
        self.finished |= any(bool(torch.as_tensor(v, dtype=torch.bool, device="cpu").any()) for v in verdicts)
        if self.positions is not None and self.longest > self.positions and not self.finished:
            # Once, as transformers does.
            logger.warning(
                "the text goes on beyond the %d positions that the model was made for (max_position_embeddings)",
                self.positions,
            )
            self.positions = None

    def _stream(self, emitted: Sequence[Sequence[int]]) -> None:
        """Hand over what is complete: for every position the whole batch, int64 [B]; a sequence that ended is padded.

        Sequences advance at different speeds here, so what faster ones emit is held back until the slowest gets there.
        """
        rule, prompt = self.session.rule, self.request.prompt_length
        for text, tokens in zip(self.texts, emitted, strict=True):
            text += tokens
        if isinstance(rule, OnHost) and not rule.together:  # which may take some back
            for text, length in zip(self.texts, rule.lengths, strict=True):
                del text[length - prompt :]
        growing = [len(text) for text, ended in zip(self.texts, self.done, strict=True) if not ended]
        known = min(growing) if growing else max(map(len, self.texts))
        for at in range(self.streamed, known):
            tokens = [text[at] if at < len(text) else self.pad for text in self.texts]
            self.streamer.put(torch.tensor(tokens, dtype=torch.int64, device="cpu"))
        self.streamed = max(self.streamed, known)

    def why_not_finite(self) -> str | None:
        """Name what of the target is not finite for the texts so far; ``None``: nothing that was found."""
        rule, state = self.session.rule, self.session.state
        on_host = isinstance(rule, OnHost)
        texts, lengths = (rule.history, rule.lengths) if on_host else (state.tokens, state.out_len.tolist())
        for text, padding, length in zip(texts, self.pads, lengths, strict=True):
            ids = text[padding:length]
            if reason := not_finite_for(self.session.target.model, ids[ids >= 0]):
                return reason
        return None

    def result(self, policy: Policy) -> Tensor | GraphGenerateOutput:
        """The return value of ``generate``: int64 [batch, length], or transformers' output with the statistics.

        ``policy``: of the call, whose costs say what a plain step takes where too few were plain.
        """
        session, state, request = self.session, self.session.state, self.request
        stats = self.stats
        stats.drafted_nodes, stats.merges, stats.accepted_merges = self.counted or session.counts.tolist()
        stats.cache_bytes, stats.seconds = session.cache_bytes, session.clock.finish()
        if len(self.plain_seconds) >= ENOUGH_PLAIN_STEPS:
            stats.plain_seconds = statistics.median(self.plain_seconds)
            stats.plain_from = f"the {len(self.plain_seconds)} plain steps of this call"
        elif isinstance(policy, LearningPolicy) and (costs := policy.experience.costs).steps:
            cached = stats.sequences * (request.prompt_length + self.longest) / 2  # tokens, all sequences together
            target = costs.target_seconds(np.array([float(stats.sequences)]), cached)[0]
            stats.plain_seconds = float(target + costs.other_seconds()[0])
            stats.plain_from = f"the costs learned from {costs.steps:,} steps of this pair"
        stats.sources = session.mixer.brought
        if self.streamer is not None:
            self.streamer.end()
        rule = session.rule
        tokens, length = state.tokens, int(state.out_len.max())
        if isinstance(rule, OnHost):
            tokens, length = rule.history, max(rule.lengths)
            stats.new_tokens -= rule.taken_back
        unfinished = state.out_len[~state.done]
        if len(unfinished):  # out of time: no text is padded before its end
            length = min(length, int(unfinished.min()))
        sequences = tokens[:, :length].to(request.input_ids.device, copy=True)  # the storage is used again
        if not request.as_dict:
            return sequences
        steps = length - request.prompt_length
        kept = rule.kept(steps) if isinstance(rule, OnHost) else {}
        return GraphGenerateOutput(sequences=sequences, **kept, stats=stats)
