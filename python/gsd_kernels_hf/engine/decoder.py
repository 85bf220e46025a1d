"""The decode loop: draft → merge → flatten → attend → verify → commit."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

import gsd_kernels
from gsd_kernels import Acceptance, GraphConfig, NgramTable, Rows, TokenGraph, flatten, verify
from gsd_kernels.config import MAX_BRANCH, resolve_graph_config

from .. import validate
from ..acceptance.criteria import (
    ExactMatch,
    Typical,
    check_chain,
    criterion_of,
    resolve_criterion,
    shape_for,
    warn_lossy,
)
from ..acceptance.sampling import SamplingPlan, draw_seed
from ..acceptance.tokenwise import Walk, check_pick
from ..model import properties
from ..model.attention import switched
from ..model.fused import draft_rows
from ..model.runner import RowModel
from ..parallel import Agreement, honoured
from ..policy.base import Policy
from ..policy.fixed import FixedPolicy
from ..policy.pairs import automatic_policy
from ..sources.drafting import Calibration, DecodeState, Drafter, HeadDraft, ModelDraft, Place
from ..sources.heads import DraftHeads
from ..sources.history import TRUST, WORTH, History
from ..sources.layer_skip import LayerSkip, SkippedDraft, SkippedRows
from ..sources.weights import Mixture, Worth
from .capture import CapturedStep, can_capture
from .stats import Clock, GenerationStats

logger = logging.getLogger("gsd_kernels")
HEAD_SHARE = 0.2  # of the heads beside a draft model, before anything was seen
SOURCES = ("model", "layer_skip", "heads", "history")


@dataclass
class GraphGenerateOutput(GenerateDecoderOnlyOutput):
    """transformers' output with :class:`~gsd_kernels_hf.stats.GenerationStats`; beyond a row's end scores are 0."""

    stats: GenerationStats | None = None


@dataclass
class StepRecord:
    """One step, for drawing and statistics. Valid until the next step."""

    graph: TokenGraph | None
    rows: Rows
    accepted: Acceptance
    picked: Tensor | None  # int32 [B, R]; what the criterion says after each row


class Session:
    """The device state of one ``generate`` call and the step over it. Nothing in :meth:`step` waits for the device."""

    def __init__(
        self,
        target: RowModel,
        drafter: Drafter | None,
        state: DecodeState,
        plan: SamplingPlan,
        criterion: ExactMatch,
        eos_ids: Tensor,  # int32 [E]
        clock: Clock,
        backend: str,
        *,
        trims: bool = False,
    ) -> None:
        self.target, self.drafter, self.state, self.plan = target, drafter, state, plan
        self.criterion = criterion
        self.trims = trims  # forward only rows that hold a token; else shapes are static and nothing waits
        self.config: GraphConfig | None = None
        self.eos_ids, self.clock, self.backend = eos_ids, clock, backend
        batch, device = state.tokens.shape[0], state.tokens.device
        self.kv_len = state.out_len - 1  # the root is not in the target's cache yet
        self.counts = torch.zeros(3, dtype=torch.int64, device=device)  # nodes, merges, accepted merges
        self.lone_root = Rows(
            token_ids=torch.zeros(batch, 1, dtype=torch.int32, device=device),
            parent_rows=torch.full((batch, 1), -1, dtype=torch.int32, device=device),
            depths=torch.zeros(batch, 1, dtype=torch.int32, device=device),
            ancestor_mask=torch.ones(batch, 1, 1, dtype=torch.int32, device=device),
            node_ids=torch.zeros(batch, 1, dtype=torch.int32, device=device),
            scores=torch.zeros(batch, 1, device=device),
            num_rows=torch.ones(batch, dtype=torch.int32, device=device),
        )

    @property
    def drafted_rows(self) -> int:
        """Rows that a draft model computes in a step."""
        if self.config is None or self.drafter is None or self.drafter.model is None or self.config.depth == 0:
            return 0
        return self.drafter.model.num_rows(self.config)

    @property
    def max_path(self) -> int:
        return int(self.config.max_path or 0) if self.config is not None else 0

    def use(self, config: GraphConfig | None) -> None:
        """Take ``config`` for the next steps; ``None`` is plain decoding."""
        if config is not None and self.config != config and self.drafter is not None:
            self.drafter.prepare(config)
        self.config = config

    def step(self) -> StepRecord:
        """One whole step on the device."""
        graph, rows = self.draft()
        logits = self.attend(rows)
        picked = self.criterion.picks(rows, logits, self.positions(rows))
        accepted = verify(
            rows,
            picked,
            eos_ids=self.eos_ids,
            remaining=self.state.remaining,
            done=self.state.done,
            max_path=self.max_path,
            backend=self.backend,
        )
        self.commit(graph, rows, accepted)
        return StepRecord(graph, rows, accepted, picked)

    def draft(self) -> tuple[TokenGraph | None, Rows]:
        """draft + merge × depth, then flatten. Without a source the root is the only row: plain decoding."""
        with self.clock.part("draft"):
            if self.drafter is None or self.config is None:
                self.lone_root.token_ids.copy_(self.state.root_tokens()[:, None])
                return None, self.lone_root
            graph = self.drafter.draft(self.config)
            rows = flatten(graph, self.config.max_rows, self.max_path, backend=self.backend)
            return graph, rows.first(int(rows.num_rows.max())) if self.trims else rows

    def attend(self, rows: Rows) -> Tensor:
        """The target's logits at every row, [B, R, V]."""
        count = rows.token_ids.shape[1]
        with self.clock.part("target"):
            logits = self.target.rows(
                rows.token_ids,
                self.kv_len,
                torch.arange(count, device=self.kv_len.device),
                rows.ancestor_mask,
                rows.depths,
                rows.depths,
                keep=count,
            )
        logits = logits.to(self.kv_len.device)
        if self.config is not None and self.drafter is not None and self.drafter.history is not None:
            with self.clock.part("draft"):
                self.drafter.history.remember(rows, self.state.emitted_tail(), logits)
        return logits

    def positions(self, rows: Rows) -> Tensor:
        """Index of the token picked after each row, padding excluded: int32 [B, R]."""
        return (self.kv_len - self.state.kv_start)[:, None] + rows.depths + 1

    def commit(self, graph: TokenGraph | None, rows: Rows, accepted: Acceptance) -> None:
        """Keep the accepted rows' keys and values and append the emitted tokens."""
        state = self.state
        self.target.cache.commit(accepted.accepted_rows, accepted.num_accepted, self.kv_len, backend=self.backend)
        count = accepted.num_accepted
        after = torch.nn.functional.pad(accepted.accepted_rows[:, 1:], (0, 1), value=-1)  # [B, P]
        drafted = rows.token_ids.gather(1, after.clamp(min=0).long())
        place = torch.arange(after.shape[1], device=after.device)
        emitted = torch.where(place == count[:, None] - 1, accepted.next_token[:, None], drafted)
        new = place < count[:, None]
        state.emitted[:, : after.shape[1]] = torch.where(new, emitted, 0)
        state.num_emitted.copy_(count)
        at = (state.out_len[:, None] + place).long()
        state.tokens.scatter_(1, at, torch.where(new, emitted.long(), state.tokens.gather(1, at)))
        state.out_len.add_(count)
        state.remaining.sub_(count)
        ended = (accepted.next_token[:, None] == self.eos_ids).any(1) | (state.remaining <= 0)
        state.done.logical_or_(ended & (count > 0))
        if self.drafter is not None and self.drafter.heads is not None:
            self.drafter.heads.remember(accepted)
        if graph is not None:
            self.drafter.learn(self.config, rows, accepted, state.emitted)
            path = accepted.accepted_rows[:, 1:]
            node = rows.node_ids.gather(1, path.clamp(min=0).long())
            came_from = rows.node_ids.gather(1, accepted.accepted_rows[:, :-1].clamp(min=0).long())
            primary = graph.parents.gather(1, node.clamp(min=0).long())
            merged = ((path >= 0) & (primary != came_from)).sum()
            self.counts += torch.stack([graph.num_nodes.sum(), graph.num_merges.sum(), merged])

    def profile(self, record: StepRecord) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """What the sources thought of each accepted node's candidates, and which the target picked: [n, K] each.

        Under ``"all"`` all sources of the levels that a draft model expands, under ``"free"`` those that cost no
        forward. Waits for the device.
        """
        path = record.accepted.accepted_rows
        node = record.rows.node_ids.gather(1, path.clamp(min=0).long())
        picked = self.state.emitted[:, : path.shape[1], None]
        found = {}
        for name, (node_ids, tokens, log_probs) in self.drafter.said(self.config).items():
            place = Place.of(node_ids, node, path >= 0)
            hits = (place.take(tokens) == picked)[place.found]
            found[name] = (place.take(log_probs)[place.found].exp().cpu().numpy(), hits.cpu().numpy())
        return found


class Learned:
    """What earlier calls learned of a target and its draft sources; calls that overlap in time share it."""

    def __init__(self, heads: int, device: torch.device) -> None:
        self.policies: dict[Any, Any] = {}  # of automatic policies
        self.heads = Mixture([HEAD_SHARE] * heads + [0.0], device)
        self.history = Mixture(TRUST, device)
        self.worth = Worth(WORTH, MAX_BRANCH, device)


_learned: weakref.WeakKeyDictionary[PreTrainedModel, dict[tuple[Any, ...], Learned]]
_learned = weakref.WeakKeyDictionary()


def check_sources(
    sources: Sequence[str] | None, draft: PreTrainedModel | LayerSkip | None, heads: DraftHeads | None
) -> tuple[str, ...]:
    """The sources to use; by default all that there are.

    Raises:
        ValueError: an unknown one, one that is not there, or one that is there and not used.
    """
    there = {
        "model": draft is not None and not isinstance(draft, LayerSkip),
        "layer_skip": isinstance(draft, LayerSkip),
        "heads": heads is not None,
    }
    if sources is None:
        given = tuple(source for source, present in there.items() if present)
        return (*given, "history") if given else ()
    if isinstance(sources, str) or not all(s in SOURCES for s in sources) or not sources:
        raise ValueError(f"draft_sources: expected a tuple of {', '.join(SOURCES)}, got {sources!r}")
    needs = {
        "model": "assistant_model, a draft of the same tokenizer",
        "layer_skip": "assistant_model=LayerSkip(model, …)",
        "heads": "draft_heads",
    }
    for source, needed in needs.items():
        if source in sources and not there[source]:
            raise ValueError(f'draft_sources: "{source}" needs {needed}')
        if there[source] and source not in sources:
            given = needed.partition(",")[0].partition("=")[0]
            raise ValueError(f'draft_sources: leave out {given}, or name "{source}"')
    return tuple(sources)


class GraphDecoder:
    """Graph-speculative decoding as transformers' ``custom_generate``.

    ``model.generate(**inputs, custom_generate=GraphDecoder(draft))`` and :func:`gsd_kernels.generate` are the same;
    the latter also takes ``streamer``, ``tokenizer`` and ``stop_strings``, which transformers keeps from callables.

    Args:
        assistant_model: the draft, or a :class:`~gsd_kernels.LayerSkip` of the target; ``None`` is plain decoding with
            the same sampler, unless there is another source.
        graph_config: a :class:`~gsd_kernels.GraphConfig`, a preset's name, or ``"auto"`` (the default): the shape of
            every step is chosen by what steps took and what was accepted, see :mod:`gsd_kernels_hf.policy.auto`.
            Clocks differ between the ranks of a tensor-parallel model, where ``"auto"`` is the preset ``"graph"``.
        seed: of the sampling noise; ``None`` draws one from torch's generator.
        backend: of all ops, see :mod:`gsd_kernels.backends`.
        draft_sources: ``"model"`` (the draft), ``"layer_skip"``, ``"heads"``, ``"history"`` (what the target said
            before, and the prompt). ``None``: all that are given and the history, the latter beside a model only
            where ``graph_config`` has levels for it, as ``"auto"`` has; nothing given is plain decoding.
            ``("history",)`` speculates without a draft model.
        draft_heads: :class:`~gsd_kernels.DraftHeads` that were trained for the target.
        reference_ids: int64 [length] or [batch, length], a text that the output may repeat, for the history.
        criterion: which drafted tokens are accepted, see :mod:`gsd_kernels_hf.acceptance.criteria`.
        streamer: gets every emitted token (batch 1).
        observer: called with every :class:`StepRecord`.
    """

    def __init__(
        self,
        assistant_model: PreTrainedModel | LayerSkip | None = None,
        graph_config: GraphConfig | str | None = None,
        *,
        seed: int | None = None,
        backend: str = "auto",
        draft_sources: tuple[str, ...] | None = None,
        draft_heads: DraftHeads | None = None,
        reference_ids: Tensor | None = None,
        criterion: str | Typical = "exact",
        streamer: BaseStreamer | None = None,
        observer: Callable[[StepRecord], None] | None = None,
    ) -> None:
        self.criterion = resolve_criterion(criterion)
        graph_config = shape_for(self.criterion, graph_config)
        self.skip = assistant_model if isinstance(assistant_model, LayerSkip) else None
        self.assistant_model = properties.unwrap(assistant_model) if self.skip is None else self.skip.view
        if self.assistant_model is not None:
            validate.check_model("assistant_model", self.assistant_model)
        if draft_heads is not None and not isinstance(draft_heads, DraftHeads):
            raise TypeError(f"draft_heads: expected DraftHeads, got {type(draft_heads).__name__}; use from_pretrained")
        self.draft_heads = draft_heads
        self.asked = draft_sources is not None
        self.draft_sources = check_sources(draft_sources, self.skip or self.assistant_model, draft_heads)
        self.automatic = graph_config in (None, "auto") and bool(self.draft_sources)
        self.graph_config = GraphConfig() if graph_config == "auto" else resolve_graph_config(graph_config)
        self.reference_ids = reference_ids
        check_chain(self.criterion, self.graph_config, draft_sources, draft_heads, reference_ids)
        validate.check_backend(backend)
        self.seed, self.backend, self.streamer, self.observer = seed, backend, streamer, observer
        self.stats: GenerationStats | None = None

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
        model = properties.unwrap(model)
        draft = self.assistant_model
        attention_mask = model_kwargs.get("attention_mask")
        prompt = input_ids.shape[1]
        self._check(model, input_ids, attention_mask, generation_config, model_kwargs)
        plan = SamplingPlan.of(logits_processor, bool(generation_config.do_sample))
        seed_value = draw_seed(self.seed if seed is None else seed) if generation_config.do_sample else 0
        eos_ids, room, timers, criteria = split_criteria(stopping_criteria, prompt)
        for name, m in (("target", model), ("draft", draft)):
            if m is not None:
                validate.check_length(m, name, prompt + room)

        device = properties.device_of(model)
        agreement = Agreement.of(model, draft, device)
        if agreement is not None:
            if self.automatic:
                logger.info('graph_config: "auto" is "graph" for a tensor-parallel model')
            seed_value = agreement.start(
                seed_value,
                model=model,
                assistant_model=draft,
                prompt=input_ids,
                attention_mask=attention_mask,
                seed=(self.seed if seed is None else seed) if generation_config.do_sample else None,
                graph_config=self.graph_config,
                draft_sources=self.draft_sources if self.asked else None,
                draft_heads=self.draft_heads,
                reference_ids=self.reference_ids,
                criterion=self.criterion,
                backend=self.backend,
                versions=(gsd_kernels.__version__, torch.__version__, transformers.__version__),
                **honoured(generation_config),
            )
        learned = self._learned(model, device, sampled=plan.temperature > 0, shared=agreement is None)
        automatic = self.automatic and agreement is None and not torch.are_deterministic_algorithms_enabled()
        sources = self._sources(automatic)
        policy = self._policy(model, sources, learned, plan, input_ids.shape, automatic)
        if self.reference_ids is not None:
            validate.check_reference(self.reference_ids, input_ids.shape[0], properties.vocabulary(model))
            if "history" not in sources:
                raise ValueError(
                    "reference_ids: the history reads them, and is not among the draft sources; name it in "
                    "draft_sources, or pass a graph_config with reuse_depth above 0"
                )
        shapes = policy.largest_shapes() or [self.graph_config]
        chain_rows = max(shape.chain_rows for shape in shapes) if sources else 1
        clock = Clock(device)
        state = self._initial_state(input_ids, attention_mask, generation_config, room, chain_rows, seed_value, device)
        capacity = prompt + room + (max(shape.cache_slots for shape in shapes) if sources else 1)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        models = (model,) if draft is None else (model, draft)
        with switched(*models), nullcontext() if agreement is None else agreement.explained():
            row_models = [RowModel(model, capacity, state.kv_start, self.backend)]
            if self.skip is not None:
                row_models.append(SkippedRows(self.skip, row_models[0]))
            elif draft is not None:
                row_models.append(draft_rows(draft, capacity, state.kv_start, self.backend))

            def prefill(rows: RowModel) -> None:
                mask = None if attention_mask is None else attention_mask[:, :-1]
                with clock.part("prefill"):
                    rows.prefill(input_ids[:, :-1], mask, generation_config.prefill_chunk_size)

            prefill(row_models[0])
            branch = max(shape.branch for shape in shapes)
            drafter = self._drafter(sources, row_models, state, plan, branch, prefill, learned)
            criterion = criterion_of(self.criterion, drafter, state, plan, self.backend)
            warn_lossy(criterion)
            session = Session(
                row_models[0],
                drafter,
                state,
                plan,
                criterion,
                torch.tensor(sorted(eos_ids), dtype=torch.int32, device=device),
                clock,
                self.backend,
                # Ranks that differ must find out by their hashes, not by messages of different sizes.
                trims=device.type == "cpu" and agreement is None,
            )
            if policy.acceptance is not None:
                session.drafter.calibration = Calibration(branch, device)
            as_dict = bool(generation_config.return_dict_in_generate)
            keep_scores = as_dict and bool(generation_config.output_scores)
            keep_logits = as_dict and bool(generation_config.output_logits)
            walk = None
            if plan.processors or criteria or keep_scores or keep_logits:
                walk = Walk(
                    session,
                    criteria,
                    pads_finished=any(hasattr(c, "eos_token_id") for c in stopping_criteria),
                    keep_scores=keep_scores,
                    keep_logits=keep_logits,
                )
            stats = self._loop(session, walk, timers, policy, agreement)
            stats.cache_bytes = sum(
                cache.nbytes for cache in {id(rows.cache): rows.cache for rows in row_models}.values()
            )
        stats.seconds = clock.finish()
        self.stats = stats
        if self.streamer is not None:
            self.streamer.end()

        length = walk.final_length if walk is not None else int(state.out_len.max())
        unfinished = state.out_len[~state.done]
        if len(unfinished):  # out of time: no text is padded before its end
            length = min(length, int(unfinished.min()))
        sequences = state.tokens[:, :length].to(input_ids.device)
        if not as_dict:
            return sequences
        return GraphGenerateOutput(
            sequences=sequences,
            scores=walk.stacked(walk.scores, length - prompt) if walk is not None and keep_scores else None,
            logits=walk.stacked(walk.logits, length - prompt) if walk is not None and keep_logits else None,
            stats=stats,
        )

    def _loop(
        self,
        session: Session,
        walk: Walk | None,
        timers: Sequence[Callable[..., Any]],
        policy: Policy,
        agreement: Agreement | None,
    ) -> GenerationStats:
        state = session.state
        criterion = session.criterion
        stats = GenerationStats(
            sequences=state.tokens.shape[0],
            backend=self.backend,
            criterion=criterion.name,
            lossless=criterion.lossless,
        )
        captures = walk is None and agreement is None and can_capture(session)
        step = CapturedStep(session) if captures else session.step
        finished = False
        while not finished:
            session.use(policy.shape())
            if policy.acceptance is not None and session.config is not None:
                policy.acceptance.write(session.drafter.calibration)
            begin = time.perf_counter()
            if walk is None:
                record = step()
            else:
                graph, rows = session.draft()
                accepted = walk(rows, session.attend(rows))
                session.commit(graph, rows, accepted)
                walk.settle()
                record = StepRecord(graph, rows, accepted, None)
            stats.count_step(record.rows.token_ids.shape[1], session.drafted_rows, plain=record.graph is None)
            if self.observer is not None:
                self.observer(record)
            counts, finished = self._emit(session, stats)  # the step's one host read
            finished = finished or any(bool(torch.as_tensor(t(state.tokens, None)).any()) for t in timers)
            if agreement is not None:
                finished = agreement.settle(record, state, finished, timed=bool(timers))
            target_seconds = session.clock.last("target")
            policy.observe(
                session.profile(record) if policy.acceptance is not None and record.graph is not None else {},
                counts,
                rows=record.rows.token_ids.shape[1],
                target_seconds=target_seconds,
                other_seconds=time.perf_counter() - begin - target_seconds if target_seconds > 0 else 0.0,
            )
        policy.end()
        stats.drafted_nodes, stats.merges, stats.accepted_merges = session.counts.tolist()
        return stats

    def _emit(self, session: Session, stats: GenerationStats) -> tuple[list[int], bool]:
        """Hand the step's tokens to the streamer. Tokens a sequence, and whether every sequence is done."""
        state = session.state
        packed = torch.cat([state.done[:, None].int(), state.num_emitted[:, None], state.emitted], 1).tolist()
        for _, count, *tokens in packed:
            stats.count_accepted(count)
            for token in tokens[:count]:
                check_pick(token)
            if self.streamer is not None:
                for token in tokens[:count]:
                    self.streamer.put(torch.tensor([token]))
        return [count for _, count, *_ in packed], all(done for done, *_ in packed)

    def _learned(self, model: PreTrainedModel, device: torch.device, *, sampled: bool, shared: bool) -> Learned:
        """What is known of these sources; nothing yet where ranks must not differ by what they did before."""
        heads = 0 if self.draft_heads is None else self.draft_heads.num_heads
        if not shared:
            return Learned(heads, device)
        sources = tuple(None if source is None else id(source) for source in (self.assistant_model, self.draft_heads))
        key = (*sources, sampled, self.criterion, device)
        known = _learned.setdefault(model, {})
        if key not in known:
            known.setdefault(key, Learned(heads, device))
        return known[key]

    def _policy(
        self,
        model: PreTrainedModel,
        sources: tuple[str, ...],
        learned: Learned,
        plan: SamplingPlan,
        prompts: torch.Size,
        automatic: bool,
    ) -> Policy:
        """What chooses the shape of every step."""
        if not automatic:
            return FixedPolicy(self.graph_config if sources else None)
        return automatic_policy(
            learned.policies,
            model,
            self.skip or self.assistant_model,
            sources=sources,
            about=f"{plan.temperature > 0} {self.criterion}",
            batch=prompts[0],
            prefix=prompts[1],
            backend=self.backend,
        )

    def _sources(self, automatic: bool) -> tuple[str, ...]:
        """The sources to use: unless it is asked for, a fixed shape without levels of its own has no history."""
        if not self.asked and self.assistant_model is not None and not automatic and not self.graph_config.reuse_depth:
            return tuple(s for s in self.draft_sources if s != "history")
        return self.draft_sources

    def _drafter(
        self,
        sources: tuple[str, ...],
        row_models: list[RowModel],
        state: DecodeState,
        plan: SamplingPlan,
        branch: int,
        prefill: Callable[[RowModel], None],
        learned: Learned,
    ) -> Drafter | None:
        if not sources:
            return None
        target, warpers = row_models[0], plan.warper_arguments
        model = heads = history = None
        if "model" in sources:
            model = ModelDraft(row_models[1], state, target.vocab_size, warpers, prefill)
        elif "layer_skip" in sources:
            model = SkippedDraft(row_models[1], state, target.vocab_size, warpers)
        if self.draft_heads is not None:
            heads = HeadDraft(self.draft_heads, target, state, warpers, learned.heads)
        if "history" in sources:
            table = NgramTable.empty(state.tokens.shape[0], branch, state.tokens.device)
            mixture, worth = learned.history, learned.worth
            history = History(table, state.seed, state.sequence_ids, warpers, mixture, worth, self.backend)
            if self.reference_ids is not None:
                reference = self.reference_ids.to(state.tokens.device, torch.int64)
                history.read(reference.expand(state.tokens.shape[0], -1), torch.zeros_like(state.kv_start))
        return Drafter(state, self.backend, model=model, heads=heads, history=history)

    def check_sources_of(self, model: PreTrainedModel) -> None:
        """Raise unless the sources can draft for ``model``."""
        if self.skip is not None and self.skip.model is not model:
            raise ValueError("assistant_model: a LayerSkip of another model; make one of the model that generates")
        if self.assistant_model is not None:
            validate.check_pair(model, self.assistant_model)
        if self.draft_heads is not None:
            self.draft_heads.check_target(model)
            mine, theirs = self.draft_heads.weight.device, model.get_output_embeddings().weight.device
            if mine != theirs:
                raise ValueError(f"draft_heads: on {mine}, and the target's output matrix on {theirs}; move them there")

    def _check(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        validate.check_model("model", model)
        self.check_sources_of(model)
        validate.check_generation_config(generation_config)
        cache = model_kwargs.get("past_key_values")
        if cache is not None and cache.get_seq_length() > 0:
            raise ValueError("past_key_values: continuing a filled cache is not supported; pass the whole prompt")
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("inputs_embeds: not supported; pass input_ids")
        validate.check_prompt(input_ids, attention_mask, properties.vocabulary(model))
        if self.streamer is not None and input_ids.shape[0] > 1:
            raise ValueError(f"streamer: streams one sequence, got a batch of {input_ids.shape[0]}")

    def _initial_state(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        generation_config: GenerationConfig,
        room: int,
        chain_rows: int,
        seed: int,
        device: torch.device,
    ) -> DecodeState:
        batch, prompt = input_ids.shape
        width = chain_rows
        pad = generation_config._pad_token_tensor
        tokens = torch.full(
            (batch, prompt + room + width), 0 if pad is None else int(pad), dtype=torch.int64, device=device
        )
        tokens[:, :prompt] = input_ids.to(device)

        def per_sequence(value: int) -> Tensor:
            return torch.full((batch,), value, dtype=torch.int32, device=device)

        kv_start = per_sequence(0)
        if attention_mask is not None:
            kv_start = (prompt - attention_mask.to(device).long().sum(1)).to(torch.int32)
        return DecodeState(
            tokens=tokens,
            out_len=per_sequence(prompt),
            kv_start=kv_start,
            remaining=per_sequence(room),
            done=torch.zeros(batch, dtype=torch.bool, device=device),
            emitted=torch.zeros(batch, width, dtype=torch.int32, device=device),
            num_emitted=per_sequence(0),
            seed=torch.tensor(seed, dtype=torch.int64, device=device),
            sequence_ids=torch.arange(batch, dtype=torch.int32, device=device),
        )


def split_criteria(
    criteria: StoppingCriteriaList, prompt_length: int
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
        raise ValueError("max_new_tokens: needed, since the cache is allocated before generation; also max_length")
    if min(budgets) < 1:
        raise ValueError(f"max_length: leaves no room after a prompt of {prompt_length} tokens; raise it")
    return eos_ids, min(budgets), timers, others
