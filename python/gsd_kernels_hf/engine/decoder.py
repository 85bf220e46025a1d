"""Graph-speculative decoding as transformers' ``custom_generate``, and the loop of one generation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .. import validate
from ..acceptance.rule import NothingToPick
from ..model import properties, replay
from ..model.cache import asking
from ..model.facts import looked, looking
from ..parallel import Ranks
from ..policy.automatic import automatic_policy
from ..policy.learning import FixedPolicy, Plan, Policy
from ..sources.base import DraftSource, reaches, remembers
from .capture import Launched, stepping
from .engine import Engines, Statistics, engines_of
from .known import learned_of
from .output import GraphGenerateOutput, Output
from .resolved import Options, Request, Sources, screen
from .session import Session, warm
from .stats import GenerationStats


class GraphDecoder(Options):
    """Graph-speculative decoding as transformers' ``custom_generate``.

    ``model.generate(**inputs, custom_generate=GraphDecoder(draft))`` and :func:`gsd_kernels.generate` are the same;
    the latter also takes ``streamer``, ``tokenizer`` and ``stop_strings``, which transformers keeps from callables.
    The arguments are :class:`~gsd_kernels_hf.engine.resolved.Options`.

    Attributes:
        stats: of the asking thread's last call; of any thread's where it made none.
        engines: what outlives a call; ``None``: see :func:`~gsd_kernels_hf.engine.engine.engines_of`.
        sources: of its one call, where that was checked before transformers saw it.
    """

    engines: Engines | None = None
    sources: Sources | None = None
    _last: GenerationStats | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._threads = threading.local()

    @property
    def stats(self) -> GenerationStats | None:
        """Counts of a call, see above."""
        return getattr(self._threads, "stats", self._last)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_threads", "_last", "engines")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _threads=threading.local())

    @torch.no_grad()
    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        seed: int | None = None,
        **model_kwargs: Any,
    ) -> Tensor | GraphGenerateOutput:
        """Called by transformers' ``generate`` with prepared inputs; returns what ``generate`` returns."""
        sources = self.sources
        with looking() if sources is None else nullcontext():
            if sources is None:
                facts = validate.check_model("model", properties.unwrap(model))
                sources = screen(self, facts, input_ids, model_kwargs.get("attention_mask"), generation_config)
            request = Request(
                sources, input_ids, logits_processor, stopping_criteria, generation_config, seed, model_kwargs
            )
            # Whatever outlives this call must not be an inference tensor, which no later call could update.
            with torch.inference_mode(False), torch.no_grad():
                try:
                    return self._decode(request)
                except validate.Unsupported as error:  # of a call that a callback made
                    error.begun = True
                    raise

    def _decode(self, request: Request) -> Tensor | GraphGenerateOutput:
        ranks = Ranks(request.models, request.device)
        request.seed = ranks.start(request.seed, request.agreed())
        engines, alone = self.engines or engines_of(request.model), ranks.alone
        engine = engines.of(request.sources)
        statistics = engine.statistics[request.plan.temperature > 0] if alone else Statistics()
        automatic = self.automatic and alone and not torch.are_deterministic_algorithms_enabled()
        given = request.sources.used(automatic=automatic, grammar=request.drafts_by_grammar)
        sources = statistics.retention.staying(given) if automatic else given
        sources = [source for source in sources if reaches(source, request.reach)]
        policy = self.policy(request, sources, statistics, automatic=automatic)
        session, current = engines.session(engine, request, policy, sources, alone=alone)
        if self.streamer is not None:
            self.streamer.put(request.input_ids.cpu())
        with ranks.explained(), asking(getattr(self.streamer, "ask", None)):  # a draft's prompt is read in a step
            memory = engines.memory if alone and self.reuse_history else None
            learns = alone and self.learned and any(map(remembers, sources))
            learned = learned_of(request.facts) if learns else None
            reuse = current and self.reuse_prefix
            with session.abandoned_on_error():
                session.begin(request, statistics.weights, reuse_prefix=reuse, memory=memory, learned=learned)
                if not (criterion := session.rule.criterion).lossless:
                    lossy = "criterion %r is lossy: the output is not the target's own (stats.lossless is False)"
                    validate.warn_once(lossy, criterion.name)
                out = Output(request, session)
                out.stats.left_out = [source.name for source in given if source not in sources]
                looked()
                try:
                    decode(session, policy, ranks, out)
                except NothingToPick as error:
                    if alone and (why := out.why_not_finite()) is not None:
                        raise ValueError(f"logits: NaN, since {why}; check the weights and their dtype") from error
                    raise
                result = out.result(policy)
        if alone:
            engines.release(engine, session, statistics, steps=out.stats.steps, automatic=automatic)
        self._threads.stats = self._last = out.stats
        return result

    def policy(
        self, request: Request, sources: Sequence[DraftSource], statistics: Statistics, *, automatic: bool
    ) -> Policy:
        """The policy that chooses the shapes of this call's steps."""
        if not automatic or not sources:
            return FixedPolicy(self.graph_config if sources else None)
        together = " together" if request.lockstep and request.batch > 1 else ""  # a step brings all the same
        return automatic_policy(
            statistics.experience,
            [request.model, *dict.fromkeys(module for source in sources for module in source.forwards)],
            [source.name for source in sources],
            reuses=not all(source.forwards for source in sources),
            about=f"{request.plan.temperature > 0} {self.criterion}{together}",
            chooses_rows=request.device.type == "cpu" and not request.draws_from_draft,
            backend=self.backend,
            settings=self.automatic_settings,
            batch=request.batch,
            prefix=request.prompt_length,
            reads_prompt=any(source.reads_prompt for source in sources),
        )


def decode(session: Session, policy: Policy, ranks: Ranks, out: Output) -> None:
    """Decode until every sequence is done: plan → step → emit → check → observe.

    On a GPU the next step may be planned and queued before a step is emitted, see :mod:`.capture`.

    Args:
        session: begun on the texts.
        policy: chooses the shape of every step.
        ranks: of a sharded target, or one process.
        out: gets the tokens; says when all is done.
    """
    step, flies = stepping(session, ranks), may_fly(session, out, alone=ranks.alone)
    queued: Launched | None = None  # that the host has not heard of
    try:
        while not out.finished:
            if queued is not None and not may_follow(session, out):
                _hear(queued, policy, ranks, out)
                queued = None
                continue
            session.reserve(out.longest + session.key.slots, session.most)
            if left := session.mixer.leave(out.reach):
                session.recapture()
                out.stats.left_out += left
                if not any(source.forwards for source in session.mixer.sources):
                    policy = policy.without_model(reuses=bool(session.mixer.lookups))
            between = cross(session, out.lengths, out.done)
            session.use(Plan(None) if between else policy.plan())
            warm(session, policy.largest_shapes())
            before, queued = queued, Launched(session, step, behind=queued, may_fly=flies)
            if before is not None:
                _hear(before, policy, ranks, out)
            if queued.sent is None and not out.finished:
                _hear(queued, policy, ranks, out, learns=not between)
                queued = None
    finally:
        if queued is not None and queued.sent is not None:  # in vain
            queued.sent[2].synchronize()
    policy.end()


def _hear(launched: Launched, policy: Policy, ranks: Ranks, out: Output, *, learns: bool = True) -> None:
    """Emit, check and observe a step. No closure: a frame in an error would keep it, and the caches with it."""
    launched.hear()
    out.emit(launched)
    out.finished = ranks.check(launched.verified, out.finished, timed=out.timed)
    if learns:
        policy.observe(launched.observed())


def may_fly(session: Session, out: Output, *, alone: bool) -> bool:
    """Say whether steps of this call may be queued before the host hears of the last one.

    Not where the host decides something between two steps: token by token, by a clock, an observer or other ranks, or
    where sequences that ended are read on.
    """
    decides = not session.rule.on_device or session.target.sides is not None or session.key.padding
    return replay.is_gpu(session.kv_len.device) and alone and not decides and out.observer is None and not out.timed


def may_follow(session: Session, out: Output) -> bool:
    """Say whether a step may be queued behind one that the host has not heard of, however many tokens that emits.

    There must be room and positions for both, and a sequence that may go on behind the first.
    """
    width = session.key.width
    reach, positions = out.reach + width, session.target.positions
    there = positions is None or reach + width <= positions
    fits = out.longest + width + session.key.slots <= session.capacity
    return there and fits and all(reaches(source, reach) for source in session.mixer.sources) and not out.ends


def cross(session: Session, lengths: Sequence[int], done: Sequence[bool]) -> bool:
    """Read texts anew that crossed the border between two sets of rotary frequencies since the last step.

    So does transformers, see :mod:`~gsd_kernels_hf.model.sides`.

    Args:
        session: begun on the texts.
        lengths: of the sequences, padding included.
        done: which of them ended.

    Returns:
        Whether the next step must be plain: its rows would lie on both sides.
    """
    sides = session.target.sides
    if sides is None or not sides.pending:
        return False
    longest, mask = max(lengths), session.request.attention_mask
    lengths = [longest] * len(lengths) if session.key.padding else lengths
    crossed = [length > sides.original for length in lengths]
    if any(long and column for long, column in zip(crossed, sides.columns, strict=True)):
        if mask is not None:
            mask = nn.functional.pad(mask, (0, longest - 1 - mask.shape[1]), value=1)
        with session.reading():
            session.target.cross(crossed, session.state.tokens[:, : longest - 1], mask)
    before = [n for n, long, end in zip(lengths, crossed, done, strict=True) if not long and not end]
    sides.pending = bool(before)
    return any(length + session.key.width > sides.original for length in before)
