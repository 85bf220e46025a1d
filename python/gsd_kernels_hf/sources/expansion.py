"""Sources that forward a model: once a level over the frontier, or once a step for all later positions.

What they forward may have a vocabulary of its own. A draft model is one whose text is the target's, token by token: its
tokenizer is the target's, or one that shares most of its tokens, and ids are mapped both ways.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig
from gsd_kernels.ops.step import feed_chain

from ..model import properties
from ..model.runner import RowModel
from ..model.vocabulary import Translation
from ..packed.modules import device_of_weights, dtype_of, shape_of
from ..records import Candidates, Sampler, Verified
from .base import Level, OwnSource, Proposal, Text, rows_at

FIRST_WEIGHT = 0.1
"""Beside another source, before anything was learned; what is too large costs rows at once."""


class DraftVocabulary:
    """Draft tokens as the target's.

    Args:
        vocab_size: V, of the target.
        same: int64 [n], the drafter's token of each of the target's, −1 for none; ``None``: they have the same ids.
        drafted: tokens of the drafter's logits, where these have ids of their own.
    """

    def __init__(self, vocab_size: int, same: Tensor | None = None, drafted: int = 0) -> None:
        self.vocab_size, self.table, self.same = vocab_size, None, same
        if same is None:
            return
        same = pad(same, (0, vocab_size - len(same)), value=-1)  # output rows that are no token
        self.absent, self.same = same < 0, same.clamp(min=0)
        (there,) = torch.where(same >= 0)
        # Ids that ascend keep the order of ties, which go to the lowest one.
        if torch.equal(same[there], torch.arange(drafted, device=same.device)):
            self.table = pad(there.to(torch.int32), (0, 1), value=-1)  # [drafted + 1]; the last for "none"

    def ranked(self, sampler: Sampler, logits: Tensor, positions: Tensor, branch: int) -> Candidates:
        """The best of the target's tokens [B, W, branch] by logits [B, W, drafted] for int positions [B, W]."""
        if self.table is None or not sampler.greedy:  # noise and filters go by the target's ids
            return sampler.candidates(self.whole(logits), positions, branch)
        tokens, log_probs = sampler.candidates(logits, positions, branch)
        return self.table[tokens.long()], log_probs

    def whole(self, logits: Tensor) -> Tensor:
        """Logits over the target's vocabulary, −inf for what is not drafted: [..., drafted] → [..., V]."""
        if self.same is None:
            return logits[..., : self.vocab_size]
        return logits.index_select(-1, self.same).masked_fill_(self.absent, -torch.inf)


class Expansion(OwnSource):
    """A draft source with one forward a level over the frontier nodes; their keys and values lie behind the prefix.

    Attributes:
        head: output matrix of the model.
        vocabulary: of the model.
        translation: between the model's tokenizer and the target's; ``None``: they are the same.
        stem: of the prefix's positions, how many are rows of this step: 1 where level 0 forwards the root's row alone,
            rather than all tokens that the cache lacks.
    """

    translation: Translation | None = None
    stem = 0

    def start(self, text: Text) -> None:
        """Make the model's cache."""
        self.rows = self.row_model(text)
        self.head: Any = self.rows.model.get_output_embeddings()
        same = None if self.translation is None else self.translation.shared.same.to(self.rows.device)
        self.vocabulary = DraftVocabulary(text.target.vocab_size, same, self.rows.vocab_size)
        self.slot_depths: dict[GraphConfig, Tensor] = {}

    def row_model(self, text: Text) -> RowModel:
        """The model that is forwarded, with its cache."""
        raise NotImplementedError

    def root_logits(self, config: GraphConfig) -> Tensor:
        """Forward the tokens up to the root that the cache lacks; logits after it, float [B, 1, V]."""
        raise NotImplementedError

    def prefix(self) -> Tensor:
        """Positions of the cache before a level's nodes, the root's included: int32 [B]."""
        return self.state.out_len

    def prepare(self, config: GraphConfig) -> None:
        """Make the storage of a shape: the depth of the node in each slot, counted from the root's children."""
        if config.depth > 0 and config not in self.slot_depths:
            shape = (self.state.tokens.shape[0], config.draft_slots)
            self.slot_depths[config] = torch.zeros(shape, dtype=torch.int32, device=self.rows.device)

    def logits(self, level: Level) -> Tensor:
        """Forward the frontier, or all up to the root; logits after its nodes, float [B, W, V]."""
        if level.number == 0:
            return self.root_logits(level.config)
        rows = self.level_rows(level, self.prefix())
        return self.rows.rows(*rows, keep=level.config.width, shift=1, stem=self.stem)

    def level_rows(self, level: Level, prefix: Tensor) -> tuple[Any, ...]:
        """A level's frontier behind ``prefix`` [B] as arguments of :meth:`RowModel.rows`."""
        config, frontier = level.config, level.frontier
        behind = prefix, (level.number - 1) * config.width
        return frontier.token_ids, *behind, frontier.ancestor_mask, frontier.depths, self.slot_depths[config]

    def warm(self, level: Level, verified: Verified) -> Proposal | None:
        """The attention of a step's forwards behind what is stored, and candidates after as many nodes."""
        if level.config.depth == 0:
            return None
        self.launch(level)
        if self.text.draws is not None:
            return None
        return self.proposal(level, self.no_logits(level.frontier.token_ids.shape[1]))

    def launch(self, level: Level) -> None:
        """Launch the attention of a step's forwards."""
        stored, config = self.state.out_len - 1, level.config
        first = self.stem or config.chain_rows
        self.rows.launch(stored, first, first)
        if config.depth > 1:
            self.rows.launch(stored, config.width, config.draft_slots)

    def no_logits(self, count: int) -> Tensor:
        """Logits as after ``count`` nodes, [B, count, V], all 0."""
        shape = len(self.state.out_len), count, shape_of(self.head)[0]
        return torch.zeros(shape, dtype=dtype_of(self.head), device=device_of_weights(self.head))

    def propose(self, level: Level) -> Proposal | None:
        """Candidates of one forward over the frontier; ``None`` beyond ``depth`` levels."""
        return None if level.number >= level.config.depth else self.proposal(level, self.logits(level))

    def proposal(self, level: Level, logits: Tensor) -> Proposal:
        """Candidates by logits [B, W, V] of the frontier, on the text's device."""
        tokens, log_probs = self.candidates(level, logits)
        device = self.state.tokens.device
        rows = level.config.width if level.number else self.stem or level.config.chain_rows
        return Proposal(tokens.to(device, non_blocking=True), log_probs.to(device, non_blocking=True), rows=rows)

    def candidates(self, level: Level, logits: Tensor) -> Candidates:
        """The best after every frontier node by its logits [B, W, V], or what speculative sampling draws."""
        if self.text.draws is not None:
            return self.text.draws(level.number, self.vocabulary.whole(logits), level.positions.to(logits.device))
        return self.vocabulary.ranked(self.sampler, logits, level.positions, level.config.branch)


class TranslatedRows:
    """A draft's rows that read the target's ids; all else is the draft's own.

    Args:
        rows: of the draft.
        reads: int64 [n], what it reads for each of the target's tokens.
    """

    def __init__(self, rows: RowModel, reads: Tensor) -> None:
        self.own, self.reads = rows, reads.to(rows.device)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["own"], name)

    def of_draft(self, token_ids: Tensor) -> Tensor:
        """The draft's ids for target ids of any shape, in their dtype."""
        ids = self.reads[token_ids.to(self.reads.device).long().clamp(0, len(self.reads) - 1)]
        return ids.to(token_ids.device, token_ids.dtype)

    def read(self, input_ids: Tensor, *arguments: Any, **options: Any) -> None:
        """Read like :meth:`RowModel.read`."""
        self.own.read(self.of_draft(input_ids), *arguments, **options)

    def rows(self, token_ids: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Forward like :meth:`RowModel.rows`."""
        return self.own.rows(self.of_draft(token_ids), *arguments, **options)


class DraftModel(Expansion):
    """A draft model with a cache of its own.

    The cache stays exact: level 0 feeds the newly emitted tokens as a chain, rather than keep keys and values that
    were computed in another path's context.

    With other tokens it is TLI of arXiv 2502.05202, at every node of the graph: what the draft gives to tokens that the
    target does not have is left out, and the rest renormalised. In place of a token that it does not have the draft
    reads the longest of its own that the bytes end with.

    Args:
        model: the draft, which is not changed.
        translation: between its tokenizer and the target's; ``None``: they are the same.
        name: in statistics, and of its weight among the sources; several draft models need a name each.
    """

    reads_prompt = True

    def __init__(self, model: PreTrainedModel, translation: Translation | None = None, *, name: str = "model") -> None:
        self.model, self.forwards, self.name, self.max_length = model, (model,), name, properties.positions(model)
        self.translation, self.other_tokens = translation, translation is not None
        self.compiled_ahead = translation is None

    def __repr__(self) -> str:
        part = "" if self.translation is None else f", {self.translation.shared.part:.0%} of its tokens shared"
        return f"<DraftModel {self.name!r}: {type(self.model).__name__}{part}>"

    def check(self, target: PreTrainedModel) -> None:
        """Refuse models of two tokenizers that lack tokens of theirs."""
        if self.translation is not None:
            self.translation.check(target, self.model)

    def row_model(self, text: Text) -> RowModel:
        rows = text.rows_of(self.model)
        if self.translation is None:
            return rows
        return TranslatedRows(rows, self.translation.shared.reads)  # type: ignore[return-value]

    def start(self, text: Text) -> None:
        """Make the draft's cache, and count what is in it."""
        super().start(text)
        self.cached = torch.zeros_like(self.state.out_len)  # int32 [B]; tokens in its cache, padding included

    def attach(self, text: Text) -> None:
        super().attach(text)
        self.begin()

    def begin(self) -> None:
        """Begin a text, of which nothing is read yet."""
        self.unread = True  # a draft that does not pay reads no prompt
        self.cached.copy_(self.state.out_len - 1)

    def end(self) -> None:
        if not self.unread:  # else its cache holds what it held before
            self.rows.holds(self.state.tokens, self.cached)

    def prepare(self, config: GraphConfig) -> None:
        """Cache the prompt and what other shapes' steps emitted, until at most a step's tokens are new."""
        super().prepare(config)
        if config.depth == 0:
            return
        if self.unread:
            self.read_prompt()
            self.unread = False
        while int((self.state.out_len - self.cached).max()) > config.chain_rows:
            # Every root is left for level 0, whose logits follow it, but for one of a finished text that is there.
            self.feed(torch.maximum(self.state.out_len - 1, self.cached), config.chain_rows)

    def read_prompt(self) -> None:
        """Cache all of the prompt but its last token."""
        self.text.read_prompt(self.rows)

    def root_logits(self, config: GraphConfig) -> Tensor:
        return self.feed(self.state.out_len, config.chain_rows)

    def feed(self, end: Tensor, width: int, keep: int = 1) -> Tensor:
        """Cache up to ``width`` tokens before ``end`` [B] as a chain; logits after the last ones, [B, keep, V]."""
        chain = feed_chain(self.state.tokens, end, self.cached, width, backend=self.rows.backend)
        graph = chain.slots, chain.ancestor_mask, chain.depths, chain.node_depths
        logits = self.rows.rows(chain.token_ids, chain.kv_len, *graph, keep=keep)
        if self.rows.recurrent:
            count = self.cached - chain.kv_len
            place = torch.arange(width, dtype=torch.int32, device=count.device)
            # Of the keys and values, every one lies where it belongs.
            self.rows.cache.commit_states(
                torch.where(place < count[:, None], width - count[:, None] + place, -1), count
            )
        return logits


class NodeVectors(dict[GraphConfig, Tensor]):
    """One vector a node, which its children read: of every expanded node by shape, [B, N + 1, D]; last for padding."""

    def prepare(self, config: GraphConfig, like: Tensor, size: int) -> None:
        """Make the storage of a shape, for a batch as ``like`` has, [B, …], and vectors of this size."""
        if config.depth > 0 and config not in self:
            self[config] = like.new_zeros(len(like), config.node_capacity + 1, size)

    def of_parents(self, level: Level) -> Tensor:
        """The values of the primary parents of a level's frontier, [B, W, D]."""
        vectors, node = self[level.config], level.frontier.node_ids.long()
        parent = level.graph.parents.gather(1, node.clamp(min=0)).clamp(min=0).long()
        return rows_at(vectors, parent)

    def keep(self, level: Level, found: Tensor) -> None:
        """Keep those of a level's frontier, [B, W, D]."""
        vectors, node = self[level.config], level.frontier.node_ids.long()
        at = torch.where(node >= 0, node, vectors.shape[1] - 1).to(vectors.device)
        vectors[torch.arange(len(at), device=at.device)[:, None], at] = found  # a scatter of single numbers is slower


class Lattice(OwnSource):
    """A draft source that keeps what a forward says of later positions until the next step.

    Attributes:
        vocabulary: of the drafter.
        known: bool [B], whether there is something to go by.
        drafted: positions that there are candidates of.
        forwarded: rows of :meth:`step`.
    """

    vocabulary: DraftVocabulary
    known: Tensor
    drafted: int
    forwarded = 0

    @property
    def shares(self) -> tuple[float, ...]:  # type: ignore[override]
        """See :class:`DraftSource`; beyond the drafted positions there is nothing."""
        return (*[FIRST_WEIGHT] * self.drafted, 0.0)

    def levels(self, config: GraphConfig) -> int:
        """Levels of a shape that have candidates; where nothing is forwarded, the history is alone below."""
        return config.depth if self.forwards else self.drafted

    def step(self, level: Level, end: Tensor) -> None:
        """Forward, and keep what :meth:`at_depths` reads.

        end: int32 [B], positions of the text that the target has read; 0: no more than before, for warming up.
        """
        raise NotImplementedError

    def propose(self, level: Level) -> Proposal | None:
        """Candidates after nodes of each depth; the forward is at level 0. ``None`` beyond the last."""
        if level.number >= self.levels(level.config):
            return None
        if level.number:
            return self.at_depths(level)
        self.step(level, self.state.out_len - 1)
        return replace(self.at_depths(level), rows=self.forwarded)

    def warm(self, level: Level, verified: Verified) -> Proposal | None:
        """The launches of a step, and candidates of as many positions."""
        if self.levels(level.config) == 0:
            return None
        self.step(level, torch.zeros_like(self.state.out_len))
        return self.at_depths(level)

    def keep_positions(self, logits: Tensor, level: Level) -> None:
        """Keep the candidates of logits [B, n, draft vocabulary] of the next n positions."""
        first = level.first_pick[:, None]
        positions = first + torch.arange(logits.shape[1], dtype=torch.int32, device=first.device)
        known, behind = self.known[:, None, None], (0, 0, 0, 1)  # beyond the block there is nothing
        tokens, log_probs = self.ranked(logits, positions, level.config.branch)
        tokens, log_probs = torch.where(known, tokens, -1), torch.where(known, log_probs, -torch.inf)
        self.block = pad(tokens, behind, value=-1), pad(log_probs, behind, value=-torch.inf)

    def at_depths(self, level: Level) -> Proposal:
        """Candidates after the nodes of a frontier, by their depths."""
        tokens, log_probs = self.block
        place = level.frontier.depths.long().clamp(max=tokens.shape[1] - 1)  # [B, W]
        return Proposal(rows_at(tokens, place), rows_at(log_probs, place), place)

    def ranked(self, logits: Tensor, positions: Tensor, branch: int) -> Candidates:
        """The best tokens by logits [B, W, draft vocabulary] for positions int [B, W] of the text: [B, W, K]."""
        tokens, log_probs = self.vocabulary.ranked(self.sampler, logits, positions, branch)
        device = self.state.tokens.device
        return tokens.to(device), log_probs.to(device)
