"""Growing the token graph from all sources, and learning their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from gsd_kernels import Frontier, GraphConfig, TokenGraph, merge, mix_candidates
from gsd_kernels.ops.learn import Asked
from gsd_kernels.ops.step import start_graph

from ..model import replay
from ..records import Candidates, DecodeState, Verified
from .base import DraftSource, Level, OwnSource, Prefilled, Proposal, Text, reaches
from .border import Border, is_own
from .ledger import SourceWeights, Tally


@dataclass
class MixedLevel:
    """Proposals of all sources at one level, or of one source at several, side by side."""

    node_ids: Tensor  # int32 [B, W]
    candidates: Candidates | None = None  # of all sources together
    asked: dict[str, Asked] = field(default_factory=dict)  # by source: what it proposed, and the mixture before it
    rows: int = 0  # that sources forwarded


@dataclass
class Storage:
    """Storage of a shape, made at its first use."""

    graph: TokenGraph
    root: Frontier  # the first one, of the graph's own storage
    levels: list[MixedLevel] = field(default_factory=list)  # of the last step


class Mixer:
    """Fold over the sources level by level; it uses of them what :class:`DraftSource` declares.

    Sources that forward a model expand the first ``depth`` levels; where others are there, ``history_depth`` more
    levels need no forward. At every level P = (1 − w) · P(sources so far) + w · P(next source), with learned w [B, W].

    Attributes:
        every: the sources.
        sources: those in use.
        weights: of each source, by name; updated in place.
        tally: what each brought to this text.

    Args:
        sources: in the order in which they are mixed.
        state: of the text.
        backend: of the ops.
        vocab_size: of the target.
    """

    def __init__(self, sources: Sequence[DraftSource], state: DecodeState, backend: str, *, vocab_size: int) -> None:
        self.every, self.state, self.backend = tuple(sources), state, backend
        device = state.tokens.device
        self.weights = {source.name: SourceWeights(source.shares, device) for source in sources}
        self.border = Border(vocab_size)
        self.log_reliability = {
            source.name: torch.tensor(source.reliability, dtype=torch.float32, device=device).log()  # [n]
            for source in sources
            if source.reliability is not None
        }
        self.tally = Tally([source.name for source in sources], counts=not replay.is_gpu(device))
        self._take(self.every)
        self.shapes: dict[GraphConfig, Storage] = {}
        self.current: Storage | None = None

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
            self._take([source for source in self.sources if reaches(source, length)])
        return left

    def restart(self, text: Text, weights: Mapping[str, SourceWeights]) -> None:
        """Start all sources on a batch of texts.

        Args:
            text: the session.
            weights: statistics of earlier calls, by name; a source that is not among them keeps its own.
        """
        self.tally.restart()
        self._take(self.every)
        self.attached: list[DraftSource] = []
        for source in self.sources:
            if source.name in weights:
                self.weights[source.name].copy_(weights[source.name])
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
        return 0 if self.current is None else sum(level.rows for level in self.current.levels)

    def draft(self, config: GraphConfig, *, trims: bool = False) -> TokenGraph:
        """Grow a step's graph: draft and merge, once a level.

        Args:
            config: its shape, which :meth:`prepare` was called with.
            trims: leave out the levels after the last that found a node to expand; waits for the device.

        Returns:
            The shape's own graph, which its next step writes again.
        """
        assert self.current is not None, "prepare(config) comes first"
        state, graph, levels = self.state, self.current.graph, []
        first_pick = start_graph(graph, state.tokens, state.out_len, state.kv_start, backend=self.backend)
        frontier = self.current.root
        for number in range(config.depth + (config.history_depth if self.lookups else 0)):
            level = Level(number, config, graph, frontier, first_pick)
            rest = self.propose_rest(level)
            if rest is not None:
                levels.append(rest)
                break
            drafted = self.propose(level)
            levels.append(drafted)
            tokens, log_probs = drafted.candidates
            # The width is the next level's, which is the history's behind the last that a model expands.
            frontier = merge(
                graph,
                frontier.node_ids,
                tokens,
                log_probs,
                level=number,
                width=config.width if number + 1 < config.depth else config.history_width,
                config=config,
                backend=self.backend,
            )
            if trims and int(frontier.node_ids[:, 0].max()) < 0:  # the best of each sequence comes first
                break
        self.current.levels = levels
        return graph

    def propose(self, level: Level) -> MixedLevel:
        """The candidates of all sources after every frontier node."""
        drafted, found = MixedLevel(level.frontier.node_ids), None
        for source in self.sources:
            proposal = self.tally.timed(source.name, self.border.ask, source, level)
            if proposal is None:
                continue
            drafted.rows += proposal.rows
            proposal = fitted(proposal, level)
            # With the mixture before it: a source's weight learns from what it would add to that.
            asked = Asked(drafted.node_ids, *proposal.candidates, proposal.index, *(found or (None, None)))
            drafted.asked[source.name] = asked
            if found is None:
                found = self.alone(source.name, asked)
            else:
                table = self.weights[source.name].mixture.weights
                found = mix_candidates(*found, *proposal.candidates, table, index=asked.index, backend=self.backend)
        drafted.candidates = nothing(level) if found is None else found
        return drafted

    def propose_rest(self, level: Level) -> MixedLevel | None:
        """This level and all behind it, merged, where one source alone is asked there and does them at once."""
        source = self.grower if level.number >= level.config.depth else None
        if source is None:
            return None
        asked = self.tally.timed(source.name, source.propose_rest, level)
        return MixedLevel(asked.node_ids, (asked.tokens, asked.log_probs), {source.name: asked})

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
            self.tally.timed(source.name, source.observe, verified)
        if verified.graph is None or self.current is None:
            return
        for name, asked in self.asked().items():
            self.weights[name].learn(asked, verified.nodes, verified.tokens, self.backend)

    def asked(self) -> dict[str, list[Asked]]:
        """The sources' proposals in the last step, level by level, by name in the order in which they are mixed."""
        found: dict[str, list[Asked]] = {source.name: [] for source in self.sources}
        for drafted in [] if self.current is None else self.current.levels:
            for name, asked in drafted.asked.items():
                if name in found:  # not left out since
                    found[name].append(asked)
        return found


def fitted(proposal: Proposal, level: Level) -> Proposal:
    """The proposal with as many candidates as the graph's branch."""
    tokens, log_probs, index = proposal.tokens, proposal.log_probs, proposal.index
    short = level.graph.branch - tokens.shape[2]
    typed = tokens.dtype is torch.int32 and log_probs.dtype is torch.float32
    if not short and typed and (index is None or index.dtype is torch.int32):
        return proposal
    if short:
        tokens, log_probs = pad(tokens, (0, short), value=-1), pad(log_probs, (0, short), value=-torch.inf)
    return Proposal(tokens.to(torch.int32), log_probs.float(), None if index is None else index.to(torch.int32))


def nothing(level: Level) -> Candidates:
    """No candidate after any frontier node."""
    batch, width = level.frontier.node_ids.shape
    tokens = torch.full((batch, width, level.graph.branch), -1, dtype=torch.int32, device=level.positions.device)
    return tokens, torch.full_like(tokens, -torch.inf, dtype=torch.float32)
