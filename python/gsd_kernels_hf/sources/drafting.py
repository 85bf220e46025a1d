"""Draft sources: what proposes the continuations of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gsd_kernels import Acceptance, Frontier, GraphConfig, Rows, TokenGraph, draft_candidates, merge, mix_candidates
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.graph import pack_bits

from ..model.runner import RowModel
from .heads import DraftHeads
from .history import History
from .weights import Mixture

NO_NODE = -2  # neither a node nor a frontier's padding
Candidates = tuple[Tensor, Tensor]
"""Tokens int32 and log-probabilities float32 [B, W, K], best first; −1 and −inf for none."""
Draw = Callable[[int, Tensor, Tensor], Candidates]
"""(level, draft logits [B, W, V], positions [B, W]) → candidates."""


@dataclass
class DecodeState:
    """Where every sequence stands; static shapes, on the target's device. The last token is the next root."""

    tokens: Tensor  # int64 [B, S]; padded prompt, then emitted tokens
    out_len: Tensor  # int32 [B]; tokens so far, left padding included
    kv_start: Tensor  # int32 [B]; left padding
    remaining: Tensor  # int32 [B]; tokens that may still be emitted
    done: Tensor  # bool [B]
    emitted: Tensor  # int32 [B, E]; what the last step emitted, first token first
    num_emitted: Tensor  # int32 [B]
    seed: Tensor  # int64 []
    sequence_ids: Tensor  # int32 [B]; row in the batch, which keys the noise

    def root_tokens(self) -> Tensor:
        return self.tokens.gather(1, self.out_len[:, None].long() - 1).squeeze(1)

    def emitted_tail(self) -> Tensor:
        """The tokens before the root, nearest first, −1 where the text begins: int32 [B, C]."""
        place = self.out_len[:, None].long() - 2 - torch.arange(MAX_CONTEXT, device=self.tokens.device)
        tail = self.tokens.gather(1, place.clamp(min=0))
        return torch.where(place >= self.kv_start[:, None], tail, -1).to(torch.int32)


@dataclass
class Level:
    """What the sources said of one level's nodes, and what became of it."""

    node_ids: Tensor  # int32 [B, W]
    drafted: Candidates  # of all sources together, before calibration
    mixed: dict[str, tuple[Tensor, Candidates, Candidates]] = field(
        default_factory=dict
    )  # source → index, first, other
    remembered: tuple[Tensor, Candidates] | None = None  # matched context [B, W] and what the history alone said


@dataclass
class DraftShape:
    """The static storage of one :class:`~gsd_kernels.GraphConfig`."""

    graph: TokenGraph
    slot_depths: Tensor  # int32 [B, draft_slots]; depth, counted from the root's children, of the node in each slot
    levels: list[Level] = field(default_factory=list)  # of the last step


class Calibration:
    """Draft log-probabilities → how often such a candidate really was the target's pick.

    A table of log-ratios by rank and draft probability, on the device. It changes what is worth a row, never what is
    accepted.
    """

    EDGES = (0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)  # between bins of draft probability

    def __init__(self, branch: int, device: torch.device) -> None:
        self.edges = torch.tensor(self.EDGES, device=device)
        self.log_ratio = torch.zeros(branch, len(self.EDGES) + 1, device=device)

    def __call__(self, log_probs: Tensor) -> Tensor:
        """float32 [B, W, K], best candidate first → calibrated, at most 0."""
        bins = torch.bucketize(log_probs.exp(), self.edges)  # [B, W, K]
        rank = torch.arange(log_probs.shape[2], device=log_probs.device)
        return (log_probs + self.log_ratio[rank, bins]).clamp(max=0.0)


class Drafter:
    """Grows the token graph from its sources.

    A draft model, or the target without some layers, expands the first ``depth`` levels, ``reuse_depth`` more cost
    nothing. At every level the prediction heads' candidates and the history's are mixed in.
    """

    def __init__(
        self,
        state: DecodeState,
        backend: str,
        *,
        model: ModelDraft | None = None,
        heads: HeadDraft | None = None,
        history: History | None = None,
    ) -> None:
        self.state, self.backend = state, backend
        self.model, self.heads, self.history = model, heads, history
        self.shapes: dict[GraphConfig, DraftShape] = {}
        self.calibration: Calibration | None = None
        self.unread = True  # the history reads the text so far when it is first needed

    def shape(self, config: GraphConfig) -> DraftShape:
        """Storage for ``config``, made at its first use."""
        if config not in self.shapes:
            batch, device = self.state.tokens.shape[0], self.state.tokens.device
            slot_depths = torch.zeros(batch, config.draft_slots, dtype=torch.int32, device=device)
            self.shapes[config] = DraftShape(TokenGraph.empty(batch, config, device), slot_depths)
        return self.shapes[config]

    def prepare(self, config: GraphConfig) -> None:
        """Before the first step of ``config``: read what was emitted without this drafter (waits for the device)."""
        if self.model is not None and config.depth > 0:
            self.model.catch_up(self.state, config.chain_rows)
        if self.history is not None and self.unread:
            self.history.read(self.state.tokens[:, : int(self.state.out_len.min())], self.state.kv_start)
            self.unread = False

    def draft(self, config: GraphConfig) -> TokenGraph:
        """draft + merge, once a level."""
        shape, state = self.shape(config), self.state
        graph = shape.graph
        graph.reset(state.root_tokens(), state.emitted_tail())
        shape.levels = []
        first_pick = state.out_len - state.kv_start  # [B]; index of the token after the root
        if self.heads is not None:
            self.heads.look_ahead(first_pick, config.branch)
        frontier = Frontier(graph.root_frontier(), graph.token_ids[:, :1], graph.depths[:, :1], graph.ancestor_mask)
        for number in range(config.depth + (0 if self.heads is None and self.history is None else config.reuse_depth)):
            level = self.ask(config, number, shape, frontier, first_pick[:, None] + frontier.depths)
            shape.levels.append(level)
            tokens, log_probs = level.drafted
            if self.calibration is not None and self.drafts(config, number):
                log_probs = self.calibration(log_probs)
            frontier = merge(
                graph,
                frontier.node_ids,
                tokens,
                log_probs,
                level=number,
                width=config.width if number + 1 < config.depth else config.reuse_width,
                merge_context=config.merge_context,
                log_sibling_ratio=config.log_sibling_ratio,
                log_min_prob=config.log_min_prob,
                backend=self.backend,
            )
        return graph

    def drafts(self, config: GraphConfig, number: int) -> bool:
        """Whether a model expands this level."""
        return self.model is not None and number < config.depth

    def ask(self, config: GraphConfig, number: int, shape: DraftShape, frontier: Frontier, positions: Tensor) -> Level:
        """The candidates of all sources after every frontier node. positions int32 [B, W]: index of the token after."""
        mixed: dict[str, tuple[Tensor, Candidates, Candidates]] = {}
        remembered = None
        found: Candidates | None = None
        if self.model is not None and self.drafts(config, number):
            found = self.model.candidates(self.state, config, number, frontier, positions, shape.slot_depths)
        if self.heads is not None:
            ahead, place = self.heads.candidates(frontier.depths)
            if found is not None:
                mixed["heads"] = (place, found, ahead)
                found = mix_candidates(*found, *ahead, self.heads.mixture.of(place), backend=self.backend)
            else:
                found = ahead
        if self.history is not None:
            known, matched = self.history.candidates(shape.graph, frontier.node_ids, positions)
            remembered = (matched, known)
            if found is not None:
                mixed["history"] = (matched, found, known)
                found = mix_candidates(*found, *known, self.history.mixture.of(matched), backend=self.backend)
            else:
                found = known[0], self.history.worth(known[1], matched)
        return Level(frontier.node_ids, found, mixed, remembered)

    def learn(self, config: GraphConfig, rows: Rows, accepted: Acceptance, emitted: Tensor) -> None:
        """After verification: which source had given the emitted tokens, int32 [B, E], how much probability."""
        levels = self.shapes[config].levels
        if self.heads is None and self.history is None:
            return
        path = accepted.accepted_rows  # [B, P]; the token emitted after each row is known
        node = rows.node_ids.gather(1, path.clamp(min=0).long())
        picked = emitted[:, : path.shape[1], None]  # [B, P, 1]
        for source, mixture in self.mixtures().items():
            told = [(level.node_ids, *level.mixed[source]) for level in levels if source in level.mixed]
            if not told:
                continue
            place = Place.of([node_ids for node_ids, *_ in told], node, path >= 0)
            first, other = (
                place.take([t[which][0] for t in told]).eq(picked) * place.take([t[which][1] for t in told]).exp()
                for which in (2, 3)
            )  # [B, P, K]
            mixture.learn(place.take([t[1] for t in told]), first.sum(-1), other.sum(-1), place.found)
        if self.history is not None:
            told = [(level.node_ids, *level.remembered) for level in levels if level.remembered is not None]
            place = Place.of([node_ids for node_ids, *_ in told], node, path >= 0)
            tokens, log_probs = (place.take([t[2][which] for t in told]) for which in (0, 1))
            matched = place.take([t[1] for t in told])
            self.history.worth.learn(log_probs, matched, tokens == picked, place.found)

    def said(self, config: GraphConfig) -> dict[str, tuple[list[Tensor], list[Tensor], list[Tensor]]]:
        """Of the last step's levels: node ids, tokens and log-probabilities, as lists.

        ``"all"``: of the levels that a model expands, before calibration; ``"free"``: without that model's part.
        """
        found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {"all": [], "free": []}
        for number, level in enumerate(self.shapes[config].levels):
            if not self.drafts(config, number):
                found["free"].append((level.node_ids, *level.drafted))
                continue
            found["all"].append((level.node_ids, *level.drafted))
            if level.remembered is not None:
                matched, (tokens, log_probs) = level.remembered
                found["free"].append((level.node_ids, tokens, self.history.worth(log_probs, matched)))
            elif "heads" in level.mixed:
                found["free"].append((level.node_ids, *level.mixed["heads"][2]))
        return {name: tuple(map(list, zip(*told, strict=True))) for name, told in found.items() if told}

    def mixtures(self) -> dict[str, Mixture]:
        """The learned mixtures by source."""
        sources = {"heads": self.heads, "history": self.history}
        return {name: source.mixture for name, source in sources.items() if source is not None}


@dataclass(frozen=True)
class Place:
    """Where nodes were expanded: an index into the levels' entries, side by side."""

    index: Tensor  # int64 [B, P]
    found: Tensor  # bool [B, P]

    @classmethod
    def of(cls, node_ids: list[Tensor], node: Tensor, real: Tensor) -> Place:
        """Of ``node``, int32 [B, P], among the levels' expanded nodes, int32 [B, W] each."""
        same = torch.cat(node_ids, 1)[:, None, :] == torch.where(real, node, NO_NODE)[:, :, None]  # [B, P, E]
        return cls(same.int().argmax(-1), same.any(-1))

    def take(self, entries: list[Tensor]) -> Tensor:
        """Of [B, W] or [B, W, K] of every level what belongs to the nodes: [B, P] or [B, P, K]."""
        whole = torch.cat(entries, 1)
        if whole.dim() == 2:
            return whole.gather(1, self.index)
        return whole.gather(1, self.index[..., None].expand(-1, -1, whole.shape[2]))


class ModelDraft:
    """A small model of the same tokenizer, which expands the frontier level by level.

    Its cache stays exact: level 0 feeds the newly emitted tokens as a chain, rather than keep keys and values that
    were computed in another path's context.
    """

    def __init__(
        self,
        rows: RowModel,
        state: DecodeState,
        vocab_size: int,
        warpers: dict[str, float],
        prefill: Callable[[RowModel], None] | None = None,
    ) -> None:
        self.rows, self.warpers = rows, warpers
        self.prefill = prefill  # at first use: a draft that does not pay reads nothing
        self.draw: Draw | None = None  # in place of the best candidates, see criteria.SpeculativeSampling
        self.vocab_size = min(vocab_size, rows.vocab_size)
        self.seed = state.seed.to(rows.device)
        self.sequence_ids = state.sequence_ids.to(rows.device)
        self.cached = state.out_len - 1  # int32 [B]; tokens in the draft's cache, left padding included

    def candidates(
        self,
        state: DecodeState,
        config: GraphConfig,
        level: int,
        frontier: Frontier,
        positions: Tensor,  # int32 [B, W]; index of the token after each node
        slot_depths: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """One draft forward: tokens and log-probabilities [B, W, K] after every frontier node."""
        if level == 0:
            logits = self.feed(state, state.out_len, config.chain_rows)  # [B, 1, V]
        else:
            first = (level - 1) * config.width
            slots = first + torch.arange(config.width, device=state.tokens.device)
            slot_depths[:, first : first + config.width] = frontier.depths - 1
            logits = self.rows.rows(
                frontier.token_ids,
                state.out_len,  # the root lies in the prefix
                slots,
                frontier.ancestor_mask,
                frontier.depths - 1,
                slot_depths,
                keep=config.width,
            )
        logits, positions = logits[..., : self.vocab_size], positions.to(logits.device, torch.int32)
        if self.draw is not None:
            tokens, log_probs = self.draw(level, logits, positions)
        else:
            tokens, log_probs = draft_candidates(
                logits,
                positions,
                branch=config.branch,
                seed=self.seed,
                sequence_ids=self.sequence_ids,
                backend=self.rows.backend,
                **self.warpers,
            )
        device = state.tokens.device
        return tokens.to(device, non_blocking=True), log_probs.to(device, non_blocking=True)

    def num_rows(self, config: GraphConfig) -> int:
        """Rows that a step computes, padding included."""
        return config.draft_rows

    def catch_up(self, state: DecodeState, width: int) -> None:
        """Cache the prompt and what plain steps emitted, until at most ``width`` tokens are new (a host read)."""
        if self.prefill is not None:
            self.prefill(self.rows)
            self.prefill = None
        while int((state.out_len - self.cached).max()) > width:
            self.feed(state, state.out_len - 1, width)  # every root is left for level 0, whose logits follow it

    def feed(self, state: DecodeState, end: Tensor, width: int) -> Tensor:
        """Cache up to ``width`` tokens before ``end`` [B] as a chain; logits after the last, [B, 1, V].

        The chain is right-aligned, so that its end is the last row; padding rows write above it.
        """
        count = (end - self.cached).clamp(max=width)  # [B]
        row = torch.arange(width, device=state.tokens.device)
        link = row - (width - count[:, None])  # [B, E]; place in the chain, negative for padding
        real = link >= 0
        tokens = state.tokens.gather(1, (self.cached[:, None] + link.clamp(min=0)).long())
        slots = torch.where(real, link, count[:, None] + row)
        before = row <= torch.where(real, link, -1)[:, :, None]  # [B, E, E]
        mask = pack_bits(before | (row == slots[:, :, None]))
        logits = self.rows.rows(
            torch.where(real, tokens, 0),
            self.cached,
            slots,
            mask,
            link.clamp(min=0).to(torch.int32),
            row.to(torch.int32).expand_as(slots),
            keep=1,
        )
        self.cached.add_(count)
        return logits


class HeadDraft:
    """Prediction heads on the target's last hidden state: candidates by depth, the same below every path.

    Blockwise parallel decoding (arXiv 1811.03115), Medusa (arXiv 2401.10774). Nothing is known in the first step.
    """

    def __init__(
        self, heads: DraftHeads, target: RowModel, state: DecodeState, warpers: dict[str, float], mixture: Mixture
    ) -> None:
        self.heads, self.target, self.state, self.warpers, self.mixture = heads, target, state, warpers, mixture
        target.keeps_hidden = True
        batch, weight = state.tokens.shape[0], target.model.get_output_embeddings().weight
        self.hidden = torch.zeros(batch, heads.hidden_size, dtype=weight.dtype, device=weight.device)  # before the root
        self.known = torch.zeros(batch, dtype=torch.bool, device=state.tokens.device)
        self.ahead: Candidates | None = None  # [B, H + 1, K]; the last entry is empty

    def remember(self, accepted: Acceptance) -> None:
        """Keep the hidden state of the row whose pick is the next root."""
        assert self.target.hidden is not None
        count = accepted.num_accepted
        last = accepted.accepted_rows.gather(1, (count[:, None].long() - 1).clamp(min=0)).clamp(min=0)  # [B, 1]
        found = self.target.hidden
        at = last.to(found.device).long()[..., None].expand(-1, -1, found.shape[2])
        running = (count > 0).to(found.device)[:, None]
        self.hidden.copy_(torch.where(running, found.gather(1, at)[:, 0], self.hidden))
        self.known.logical_or_(count > 0)

    def look_ahead(self, first_pick: Tensor, branch: int) -> None:
        """At the start of a step: the heads' candidates. first_pick int32 [B]: index of the token after the root."""
        device = first_pick.device
        logits = self.heads(self.hidden, self.target.stepping.get_output_embeddings())  # [B, H, V]
        place = torch.arange(self.heads.num_heads, dtype=torch.int32, device=device)
        tokens, log_probs = draft_candidates(
            logits,
            (first_pick[:, None] + place).to(logits.device, torch.int32),
            branch=branch,
            seed=self.state.seed.to(logits.device),
            sequence_ids=self.state.sequence_ids.to(logits.device),
            backend=self.target.backend,
            **self.warpers,
        )
        known = self.known[:, None, None]
        tokens = torch.where(known, tokens.to(device), -1)
        log_probs = torch.where(known, log_probs.to(device), -torch.inf)
        pad = (0, 0, 0, 1)
        self.ahead = (
            torch.nn.functional.pad(tokens, pad, value=-1),
            torch.nn.functional.pad(log_probs, pad, value=-torch.inf),
        )

    def candidates(self, depths: Tensor) -> tuple[Candidates, Tensor]:
        """After nodes of these depths, int32 [B, W]: candidates [B, W, K], and which head spoke, int64 [B, W]."""
        assert self.ahead is not None
        place = depths.long().clamp(max=self.heads.num_heads)  # beyond the last head: nothing
        at = place[..., None].expand(-1, -1, self.ahead[0].shape[2])
        return (self.ahead[0].gather(1, at), self.ahead[1].gather(1, at)), place
