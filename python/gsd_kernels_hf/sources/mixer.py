"""Growing the token graph from all sources, and the ledger of these, by what the target picked.

Weights beside others, counts, and who is left out. Weights lie on the device and are updated in place; nothing there
waits for it, so that a step can be captured. They sink back to their priors by what was observed since, see
:func:`gsd_kernels.ops.learn.learn_source`. Counts are of steps in the host's memory. Which sources the next generation
takes is decided at the borders of generations, by the weights alone: the sources of a session and of its captured steps
are fixed, and a source that comes back begins its text as in any other session. All of it changes the speed, never the
output.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from gsd_kernels import Frontier, GraphConfig, TokenGraph, merge, mix_candidates
from gsd_kernels.ops.learn import Asked, Mixture, learn_source
from gsd_kernels.ops.step import start_graph

from ..model import replay
from ..records import Candidates, DecodeState, Verified
from .base import DraftSource, Level, OwnSource, Prefilled, Proposal, Text, reaches
from .border import ask, is_own

PRIOR_COUNT = 8.0  # observations that the starting values of weights count for
MEMORY_COUNT = 400.0  # observations after which an older one counts 1/e
MIN_SHARE = 0.2  # of the picked tokens of the best source that forwards a model, at least, to be kept
MIN_PICKS = 64.0  # tokens picked by the target that a source is judged by, at least
WAIT_STEPS = 1024  # until a source that was left out is tried again


T = TypeVar("T")


@dataclass
class SourceStats:
    """The counts of one draft source.

    Attributes:
        proposed: drafted tokens that the target verified. One that several sources proposed counts for the first of
            them, in the order in which they are mixed.
        accepted: those of them that were accepted.
        seconds: of proposing and learning, a part of ``seconds["draft"]``, whose rest is merging and unrolling.

    All are ``None`` on a GPU, where counting would slow down every step.
    """

    proposed: int | None = None
    accepted: int | None = None
    seconds: float | None = None

    def __str__(self) -> str:
        if self.proposed is None or self.accepted is None or self.seconds is None:
            return "not counted on a GPU"
        share = f" ({self.accepted / self.proposed:.0%})" if self.proposed else ""
        return f"{self.accepted:,} of {self.proposed:,} tokens accepted{share}, {self.seconds:.3f} s"


def mixture_of(start: Tensor) -> Mixture:
    """The weights w in P = (1 − w) · P(sources before it) + w · P(this one) of one source, by ``Proposal.index``.

    Args:
        start: float32 [n], the prior; where it is 0 it stays 0.
    """
    return Mixture(start, PRIOR_COUNT * start, torch.full_like(start, PRIOR_COUNT), start.clone())


def replace_weights(mine: Mixture, theirs: Mixture) -> None:
    """Copy the tables of ``theirs`` into ``mine``."""
    for table, other in zip(mine, theirs, strict=True):
        table.copy_(other)


def learned(mixture: Mixture) -> tuple[float, float]:
    """Picked tokens by which the weights were learned, and which share of them was this source's.

    Without the prior, which an unseen source has of it; (0, 0) where nothing was seen. Waits for the device.
    """
    start, shares, counts, _ = (table.tolist() for table in mixture)
    picked = sum(counts) - PRIOR_COUNT * len(counts)
    mine = sum(shares) - PRIOR_COUNT * sum(start)
    return (picked, min(1.0, max(0.0, mine / picked))) if picked > 0 else (0.0, 0.0)


class Retention:
    """A record of the sources that are left out for now, and for how long."""

    def __init__(self) -> None:
        self.wait: dict[str, int] = {}  # steps left until a source is tried again, by name

    def staying(self, sources: Sequence[DraftSource]) -> list[DraftSource]:
        """The ``sources`` that the next generation takes; of those that forward a model, one at least."""
        staying = [source for source in sources if source.name not in self.wait]
        # Calls that overlap may have left out one source each.
        return staying if any(source.forwards for source in staying) else list(sources)

    def observe(self, sources: Sequence[DraftSource], weights: Mapping[str, Mixture], steps: int) -> None:
        """Learn from a generation (waits for the device).

        Args:
            sources: that it took, in the order in which they were mixed.
            weights: what is known of them since, by name; of one that is left out it is forgotten, in place.
            steps: number of steps that it took.
        """
        self.wait = {name: left - steps for name, left in self.wait.copy().items() if left > steps}
        expensive = [source for source in sources if source.forwards]
        if len(expensive) < 2:
            return
        # P = (1 − w) · P(sources before it) + w · P(this one): a source's share is its w times 1 − w of all after it.
        first, shares, picks, rest = sources[0].name, {}, {}, 1.0
        for name in (source.name for source in reversed(sources[1:])):
            picks[name], share = learned(weights[name])
            shares[name], rest = rest * share, rest * (1.0 - share)
        # The others' weights are relative to the first source.
        names = [source.name for source in expensive]
        shares[first], picks[first] = rest, max(picks[name] for name in names if name != first)
        best = max(shares[name] for name in names)
        for name in names:
            if picks[name] >= MIN_PICKS and shares[name] < MIN_SHARE * best:
                self.wait[name] = WAIT_STEPS
                for forgotten in names if name == first else [name]:  # else it could not show that it became better
                    replace_weights(weights[forgotten], mixture_of(weights[forgotten].start))


@dataclass
class Storage:
    """Storage of a shape, made at its first use."""

    graph: TokenGraph
    root: Frontier  # the first one, of the graph's own storage
    # Of the last step, level by level or several at once: by source what it proposed, and the mixture before it.
    levels: list[dict[str, Asked]] = field(default_factory=list)
    rows: int = 0  # that sources forwarded in it


class Mixer:
    """Fold over the sources level by level; it uses of them what :class:`DraftSource` declares.

    Sources that forward a model expand the first ``depth`` levels; where others are there, ``history_depth`` more
    levels need no forward. At every level P = (1 − w) · P(sources so far) + w · P(next source), with learned w [B, W].

    Attributes:
        every: the sources.
        sources: those in use.
        weights: of each source, by name; updated in place.
        brought: counts of each to this text, by name, of steps in the host's memory; on a GPU they would cost launches
            in every step.

    Args:
        sources: in the order in which they are mixed.
        state: of the text.
        backend: of the ops.
        vocab_size: of the target.
    """

    def __init__(self, sources: Sequence[DraftSource], state: DecodeState, backend: str, *, vocab_size: int) -> None:
        self.every, self.state, self.backend = tuple(sources), state, backend
        device = state.tokens.device
        self.weights = {
            source.name: mixture_of(torch.tensor(source.shares, dtype=torch.float32, device=device))  # [n]
            for source in sources
        }
        self.vocab_size, self.checked = vocab_size, set[str]()  # names of sources whose first proposal was looked at
        self.log_reliability = {
            source.name: torch.tensor(source.reliability, dtype=torch.float32, device=device).log()  # [n]
            for source in sources
            if source.reliability is not None
        }
        self._begin()
        self.shapes: dict[GraphConfig, Storage] = {}
        self.current: Storage | None = None

    def _begin(self) -> None:
        """Take all sources, which have brought nothing to the text yet."""
        none = () if replay.is_gpu(self.state.tokens.device) else (0, 0, 0.0)
        self.brought = {source.name: SourceStats(*none) for source in self.every}
        self._take(self.every)

    def _take(self, sources: Sequence[DraftSource]) -> None:
        self.sources = tuple(sources)
        self.lookups = [source for source in self.sources if not source.forwards]

    @property
    def grower(self) -> OwnSource | None:
        """The one source that needs no forward, if it proposes for all levels at once."""
        only = self.lookups[0] if len(self.lookups) == 1 else None
        return only if isinstance(only, OwnSource) and only.at_once and is_own(only) else None

    def leave(self, length: int) -> list[str]:
        """Leave out, until the next text, sources that do not reach behind ``length`` tokens; their names."""
        left = [source.name for source in self.sources if not reaches(source, length)]
        if left:
            self._take([source for source in self.sources if source.name not in left])
        return left

    def restart(self, text: Text, weights: Mapping[str, Mixture]) -> None:
        """Start all sources on a batch of texts.

        Args:
            text: the session.
            weights: statistics of earlier calls, by name; a source that is not among them keeps its own.
        """
        self._begin()
        self.attached: list[DraftSource] = []
        for source in self.sources:
            if source.name in weights:
                replace_weights(self.weights[source.name], weights[source.name])
            source.attach(text)
            self.attached.append(source)

    def read(self, hidden: Mapping[int, Tensor], begin: int) -> None:
        """Hand the hidden states of a piece of the prompt, [B, n, D] by layer, to the sources that declared any."""
        for source in self.sources:
            if source.hidden_layers:
                source.observe(Prefilled(hidden, begin))

    def grow(self) -> None:
        """Let sources make room for a longer text."""
        for source in self.every:
            if isinstance(source, OwnSource):
                source.grow()

    def prepare(self, config: GraphConfig) -> None:
        """Get ready for steps of ``config``: make its storage, let sources catch up. May wait for the device."""
        if config not in self.shapes:
            graph = TokenGraph.empty(self.state.tokens.shape[0], config, self.state.tokens.device)
            first = graph.token_ids[:, :1], graph.depths[:, :1], graph.ancestor_mask
            self.shapes[config] = Storage(graph, Frontier(graph.root_frontier(), *first))
        self.current = self.shapes[config]
        for source in self.sources:
            if isinstance(source, OwnSource):
                source.prepare(config)

    @property
    def drafted_rows(self) -> int:
        """Rows that the sources forwarded in the last step."""
        return 0 if self.current is None else self.current.rows

    def draft(self, config: GraphConfig, *, trims: bool = False) -> TokenGraph:
        """Grow a step's graph: draft and merge, once a level.

        Args:
            config: its shape, which :meth:`prepare` was called with.
            trims: leave out the levels after the last that found a node to expand; waits for the device.

        Returns:
            The shape's own graph, which its next step writes again.
        """
        assert self.current is not None, "prepare(config) comes first"
        state, graph = self.state, self.current.graph
        self.current.levels, self.current.rows = [], 0
        first_pick = start_graph(graph, state.tokens, state.out_len, state.kv_start, backend=self.backend)
        frontier = self.current.root
        for number in range(config.depth + (config.history_depth if self.lookups else 0)):
            level = Level(number, config, graph, frontier, first_pick)
            source = self.grower if number >= config.depth else None
            if source is not None:  # it does this level and all behind it at once, merged
                self.current.levels.append({source.name: self._timed(source, source.propose_rest, level)})
                break
            candidates = self.propose(level, self.current)
            # The width is the next level's, which is the history's behind the last that a model expands.
            frontier = merge(
                graph,
                frontier.node_ids,
                *candidates,
                level=number,
                width=config.width if number + 1 < config.depth else config.history_width,
                config=config,
                backend=self.backend,
            )
            if trims and int(frontier.node_ids[:, 0].max()) < 0:  # the best of each sequence comes first
                break
        return graph

    def propose(self, level: Level, noted: Storage) -> Candidates:
        """The candidates of all sources after every frontier node; what each proposed is ``noted``."""
        found, asked = None, dict[str, Asked]()
        noted.levels.append(asked)
        for source in self.sources:
            proposal = self._timed(source, ask, source, level, self.vocab_size, self.checked)
            if proposal is None:
                continue
            noted.rows += proposal.rows
            proposal = fitted(proposal, level)
            # With the mixture before it: a source's weight learns from what it would add to that.
            own = Asked(level.frontier.node_ids, *proposal.candidates, proposal.index, *(found or (None, None)))
            asked[source.name] = own
            if found is None:
                found = self.alone(source.name, own)
            else:
                table = self.weights[source.name].weights
                found = mix_candidates(*found, *proposal.candidates, table, index=own.index, backend=self.backend)
        return nothing(level) if found is None else found

    def alone(self, name: str, asked: Asked) -> Candidates:
        """Candidates of a source that is not mixed with others, corrected by its reliability."""
        table = self.log_reliability.get(name)
        if table is None:
            return asked.tokens, asked.log_probs
        index = torch.zeros_like(asked.node_ids) if asked.index is None else asked.index
        ratio = table[index.clamp(0, len(table) - 1)]  # [B, W]
        return asked.tokens, (asked.log_probs + ratio[..., None]).clamp(max=0.0)

    def observe(self, verified: Verified) -> None:
        """Let every source learn from a step, and update its weights by the probability it gave the emitted tokens."""
        for source in self.sources:
            self._timed(source, source.observe, verified)
        nodes, picked, counts = verified.nodes, verified.tokens, {"prior_count": PRIOR_COUNT, "memory": MEMORY_COUNT}
        for name, asked in self.asked().items() if verified.graph is not None else ():
            if mixed := [level for level in asked if level.first_tokens is not None]:
                learn_source(mixed, nodes, picked, self.weights[name], **counts, backend=self.backend)

    def _timed(self, source: DraftSource, work: Callable[..., T], *arguments: Any) -> T:
        """Do a source's work and count its seconds."""
        begin = time.perf_counter()
        done = work(*arguments)
        if (brought := self.brought[source.name]).seconds is not None:
            brought.seconds += time.perf_counter() - begin
        return done

    def count(self, verified: Verified) -> None:
        """Count a step that drafted, after it, since the step itself waits for nothing.

        A drafted token counts for the first source, in the order in which they are mixed, that proposed it after its
        parent. So what a later source brings is what it adds to those before it, and the sums are those of all rows.
        """
        asked = {name: levels for name, levels in self.asked().items() if levels}
        if replay.is_gpu(self.state.tokens.device) or not asked or verified.graph is None:
            return
        paths, lengths = verified.accepted.accepted_rows.tolist(), verified.accepted.num_accepted.tolist()
        for sequence, (rows, accepted) in enumerate(zip(verified.rows.num_rows.tolist(), lengths, strict=True)):
            if not accepted:
                continue  # a finished sequence verifies nothing
            left, path = set(range(1, rows)), set(paths[sequence][1:accepted])
            for name, levels in asked.items():
                mine = left
                if name != list(asked)[-1]:
                    parts = verified.rows.token_ids, verified.rows.parent_rows, verified.rows.node_ids
                    tokens, parents, nodes = (part[sequence].tolist() for part in parts)
                    proposed = {  # nodes of the sequence, each with a token that was proposed after it
                        (node, token)
                        for level in levels
                        for node, after in zip(
                            level.node_ids[sequence].tolist(), level.tokens[sequence].tolist(), strict=True
                        )
                        for token in after
                    }
                    mine = {row for row in left if (nodes[parents[row]], tokens[row]) in proposed}
                left, brought = left - mine, self.brought[name]
                brought.proposed = (brought.proposed or 0) + len(mine)
                brought.accepted = (brought.accepted or 0) + len(mine & path)

    def asked(self) -> dict[str, list[Asked]]:
        """The sources' proposals in the last step, level by level, by name in the order in which they are mixed."""
        found: dict[str, list[Asked]] = {source.name: [] for source in self.sources}
        for level in [] if self.current is None else self.current.levels:
            for name, asked in level.items():
                if name in found:  # not left out since
                    found[name].append(asked)
        return found


def fitted(proposal: Proposal, level: Level) -> Proposal:
    """The proposal with as many candidates as the graph's branch."""
    tokens, log_probs, index = proposal.tokens, proposal.log_probs, proposal.index
    if short := level.graph.branch - tokens.shape[2]:
        tokens, log_probs = pad(tokens, (0, short), value=-1), pad(log_probs, (0, short), value=-torch.inf)
    return Proposal(tokens.to(torch.int32), log_probs.float(), None if index is None else index.to(torch.int32))


def nothing(level: Level) -> Candidates:
    """No candidate after any frontier node."""
    nodes = level.frontier.node_ids
    tokens = nodes.new_full((*nodes.shape, level.graph.branch), -1)
    return tokens, torch.full_like(tokens, -torch.inf, dtype=torch.float32)
