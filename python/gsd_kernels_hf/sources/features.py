"""Drafts from the target's hidden states: from the one behind the root, or a feature of every position of the text.

Two ways. Recursion, of EAGLE-3, multi-token prediction and Gemma's assistants: a row reads a feature and the embedding
of the token after it. Drafted tokens have no feature of the target's, so the layers' own output stands in for it: one
vector a node, which travels along the drafted edges. Blocks, of P-EAGLE and DFlash: rows of masks behind the text say
all later tokens in one forward.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.decoder_rows import decoder_rows
from gsd_kernels.ops.feature_rows import FeatureWeights, cuda, feature_rows
from gsd_kernels.ops.packed.api import FLOATS
from gsd_kernels.ops.step import FedRows, feed_chain

from ..model import replay
from ..model.attention import AttentionKind, GraphInputs
from ..model.cache import GraphCache, grown
from ..model.facts import foreign_code
from ..model.fused import CLASSES, SILU, STATIC_ROPE, choice, error_of, missing
from ..model.hidden import LAST
from ..model.linear import CpuLinear, RowLinear
from ..model.runner import CachedText, decoder_weights, storage_of
from ..packed.modules import device_of_weights, dtype_of, shape_of
from ..records import Verified
from .base import Level, OwnSource, Prefilled, Proposal, Text, rows_at
from .checkpoints import check
from .expansion import FIRST_WEIGHT, DraftVocabulary, Expansion, Lattice, NodeVectors

HOMES = {kind.__module__ for kind in CLASSES}
"""The modules whose decoder layers and norms an operator computes."""
PLAIN = (nn.Linear, CpuLinear, RowLinear, nn.Embedding, *SILU)
READ_ROWS = 128
"""Of a prompt in one forward: as many as graph rows may be."""


class LastState(OwnSource):
    """A draft source that reads one hidden state a step.

    Attributes:
        hidden: [B, D], on the device of the target's output matrix, in its dtype.
        known: bool [B], whether there is one; not before the target has read a token.
    """

    hidden_layers = (LAST,)

    def start(self, text: Text) -> None:
        """Make room for a state of each sequence."""
        head, batch = text.target.stepping.get_output_embeddings(), len(self.state.out_len)
        self.hidden = torch.zeros(batch, shape_of(head)[1], dtype=dtype_of(head), device=device_of_weights(head))
        self.known = self.state.tokens.new_zeros(batch, dtype=torch.bool)

    def attach(self, text: Text) -> None:
        super().attach(text)
        self.known.zero_()

    def observe(self, seen: Verified | Prefilled) -> None:
        """Keep the hidden state that the next root follows: of the prompt's last position but one, or of a row."""
        if isinstance(seen, Prefilled):
            if LAST in seen.hidden:  # not of every piece
                self.hidden.copy_(seen.hidden[LAST][:, -1])
                self.known.copy_(self.state.kv_start < self.state.out_len - 1)
            return
        hidden = seen.hidden[LAST]
        last = rows_at(hidden, seen.last_rows()[:, None])[:, 0]
        running = seen.accepted.num_accepted > 0
        self.hidden.copy_(torch.where(running.to(hidden.device)[:, None], last, self.hidden))
        self.known.logical_or_(running)


class FeatureCache(CachedText):
    """The cache of a drafter's layers, and the feature of every position that the target has read.

    Features are kept because a drafter may lag behind the target, in steps of shapes without it; a position's takes as
    much memory as one hidden state.

    Args:
        model: the drafter. A forward of it needs its ``rows_ahead`` positions more than the target's rows do.
        text: being written.
    """

    def __init__(self, model: Any, text: Text) -> None:
        target = text.target
        cache = GraphCache(model.sizes, target.cache.capacity + model.rows_ahead, target.backend)
        super().__init__(model, cache, text.state.kv_start)
        self.kv_start = self.text_kv_start
        weight = next(model.parameters())
        self.backend, self.device = target.backend, weight.device
        self.sizes, self.kinds = model.sizes, tuple(map(AttentionKind, model.windows))
        # Of its operators: on a GPU "auto" never takes them; that rows come there is what was asked.
        self.operator = "cuda" if replay.is_gpu(self.device) else self.backend
        shape = len(text.state.tokens), target.cache.capacity, model.sizes.hidden_size
        self.features = weight.new_zeros(shape)  # [B, S, D]

    def grow(self, capacity: int) -> None:
        """See :meth:`CachedText.grow`."""
        super().grow(capacity + self.model.rows_ahead)
        self.features = grown(self.features, capacity)

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return super().nbytes + self.features.nbytes


class FeatureSource(OwnSource):
    """A draft source whose model reads the target's hidden states.

    Its cache has an entry for every position of the text that the target has read, but for left padding. Features come
    in while the target reads and verifies; entries are made of them when the drafter is next used.

    Attributes:
        head, embedding: the drafter's, or the target's.
        vocabulary: of the drafter.
        operator: the layers as one operator reads them; ``None``: they are modules.
        unknown: id and feature [D] that stand for a token behind the text, where rows of such are asked for.
    """

    unknown: tuple[int, Tensor]

    ahead = 0
    """How many tokens beyond its own position an entry reads."""

    def __init__(self, module: Any) -> None:
        self.module, self.forwards, self.name, self.drafted = module, (module,), module.name, module.num_drafted

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for."""
        check(self.module, target)
        self.module.check_block()
        self.hidden_layers = self.module.layers_of(target)

    def start(self, text: Text) -> None:
        """Make the cache."""
        module, target = self.module, text.target.stepping
        self.head = target.get_output_embeddings() if module.lm_head is None else module.lm_head
        self.embedding = target.get_input_embeddings() if module.embed_tokens is None else module.embed_tokens
        same, ids = None, module.target_ids()
        if module.d2t is not None:
            same = ids.new_full((module.sizes.vocab_size,), -1)
            same[ids] = torch.arange(len(ids), device=ids.device)
        self.vocabulary = DraftVocabulary(text.target.vocab_size, same, len(ids))
        self.rows = FeatureCache(module, text)
        text.keep(self.rows)
        self.rows.vocab_size = self.embedding.num_embeddings
        self.cached = torch.zeros_like(self.state.out_len)  # int32 [B]; where entries end, padding included

    def attach(self, text: Text) -> None:
        super().attach(text)
        # Parameters as they lie now: a cast replaces them.
        self.operator = operator_of(self.module, self.embedding, self.head, self.rows.backend)
        self.rows.ids_dtype = torch.int64 if self.operator is None else torch.int32
        prompt = self.state.tokens[:, : int(self.state.out_len[0])]
        reused = self.rows.common(prompt, self.state.kv_start) - self.ahead
        self.cached.copy_(self.state.kv_start.clamp(min=min(reused, prompt.shape[1] - 1 - self.ahead)))
        self.used = False

    def end(self) -> None:
        if self.used:  # else its cache holds what it held before
            self.rows.holds(self.state.tokens, self.cached + self.ahead)

    def observe(self, seen: Verified | Prefilled) -> None:
        """Keep the features of a piece of the prompt, or of the accepted rows."""
        if isinstance(seen, Prefilled):
            fused = self.fuse([seen.hidden[number] for number in self.hidden_layers])
            self.rows.features[:, seen.begin : seen.begin + fused.shape[1]] = fused
            return
        path, count = seen.accepted.accepted_rows, seen.accepted.num_accepted
        features = self.fuse([rows_at(seen.hidden[number], path.clamp(min=0).long()) for number in self.hidden_layers])
        # The target read the root at the first of them. What lies behind the accepted rows is written over when the
        # target has read so far, and not read before.
        at = (self.state.out_len - count - 1)[:, None].long() + torch.arange(path.shape[1], device=path.device)
        self.rows.features.scatter_(1, at[..., None].expand_as(features), features)

    def fuse(self, states: list[Tensor]) -> Tensor:
        """The feature of hidden states, on the drafter's device in its dtype."""
        like = self.rows.features
        return self.module.fuse([state.to(like.device, like.dtype) for state in states])

    def prepare(self, config: GraphConfig) -> None:
        """Make entries of the prompt and of what other shapes' steps emitted, until at most a step's are missing."""
        if config.depth == 0:
            return
        self.used = True  # feeds that are replayed do not say it
        end, width = self.state.out_len - 1, config.chain_rows
        while (missing := int((end - self.cached).max())) > width:
            free = self.rows.cache.capacity - int(self.cached.max())  # for a shorter text's rows of padding
            self.feed(end - 1, min(missing - 1, READ_ROWS, free), keep=0)

    def feed(self, end: Tensor, width: int, *, unknown: int = 0, keep: int) -> tuple[Tensor, Tensor]:
        """Make up to ``width`` entries before ``end`` [B]; vectors and logits of the last ``keep`` rows.

        With rows of ``unknown`` tokens behind them, which see all before them and stay no entries.
        """
        self.used = True  # it writes behind what a kept cache says that it holds
        ahead, end = self.ahead, torch.maximum(end, self.cached)  # a text that ended may have more entries
        to, rows = end + (ahead + unknown), width + unknown
        chain = feed_chain(self.state.tokens, to, self.cached.add_(ahead), rows, backend=self.rows.backend)
        self.cached.sub_(ahead + unknown)
        tokens, kv_len = chain.token_ids, chain.kv_len - ahead
        features = rows_at(self.rows.features, torch.minimum(kv_len[:, None] + chain.depths, end[:, None]).long())
        if unknown:
            tokens[:, width:], features[:, width:] = self.unknown
        graph = chain.slots, chain.ancestor_mask, chain.depths, chain.node_depths
        return self.forward(tokens, features, kv_len, *graph, keep=keep)

    def forward(
        self,
        tokens: Tensor,
        features: Tensor | None,
        kv_len: Tensor,
        slots: Tensor | int,
        ancestor_mask: Tensor,
        depths: Tensor,
        node_depths: Tensor,
        *,
        keep: int,
        shift: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Vectors that nodes hand on [B, keep, D] and logits [B, keep, V] of the last rows.

        Arguments as of :meth:`~gsd_kernels_hf.model.runner.RowModel.rows`; features [B, R, D] of the target, or vectors
        of drafted nodes' parents; ``None``: of rows that read their tokens alone.
        """
        rows = self.rows
        fed = rows.feed(tokens, kv_len, slots, depths, node_depths, shift)
        if self.operator is None:
            graph = ancestor_mask, kv_len, rows.text_kv_start, fed.depths, node_depths, rows.backend
            with rows.cache.writing(fed.places):
                return self.read(fed, features, GraphInputs(*graph, rows.kinds), keep)
        run: Any = decoder_rows if features is None else feature_rows
        read = (self.operator.decoder, fed.ids) if features is None else (self.operator, fed.ids, features)
        graph = fed.positions, fed.places, ancestor_mask, node_depths, kv_len, rows.text_kv_start
        storage = storage_of(rows.cache, self.operator.decoder, len(rows.features))
        logits, normed, state = run(*read, *graph, *storage, keep=keep, backend=rows.operator)
        return (normed if self.module.hands_on_normed else state).to(rows.features.dtype), logits

    def read(self, fed: FedRows, features: Any, inputs: GraphInputs, keep: int) -> tuple[Tensor, Tensor]:
        """The same by the modules."""
        hidden = self.module(self.embedded(fed.ids), features, fed.positions, inputs, self.rows.cache)
        inputs.check_complete()
        return self.module.outputs(hidden[:, hidden.shape[1] - keep :], self.head)  # type: ignore[no-any-return]

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings of ids [B, R] as :meth:`CachedText.feed` gives them, in the drafter's dtype."""
        return self.embedding(ids).to(self.rows.features.dtype)

    @property
    def known(self) -> Tensor:
        """Return bool [B]: whether the text has a position with a feature yet, and something to go by."""
        return self.state.out_len - 1 > self.state.kv_start


class Recursion(Expansion):
    """A draft source with one forward a level over the frontier, in which every node reads its parent's vector.

    Attributes:
        vectors: of every expanded node.
    """

    shares = (FIRST_WEIGHT,)
    vectors: NodeVectors

    def nodes(self, level: Level, vectors: Tensor | None) -> tuple[Tensor, Tensor]:
        """Forward a frontier, whose nodes read ``vectors`` [B, W, D]: theirs, and logits [B, W, V].

        ``None``: the frontier is the root.
        """
        raise NotImplementedError

    def logits(self, level: Level) -> Tensor:
        vectors, logits = self.nodes(level, self.vectors.of_parents(level) if level.number else None)
        self.vectors.keep(level, vectors)
        return logits


class Recursive(FeatureSource, Recursion):
    """The draft source of an Eagle3 or an Mtp."""

    ahead = 1

    def start(self, text: Text) -> None:
        super().start(text)
        self.slot_depths, self.vectors = {}, NodeVectors()

    def prepare(self, config: GraphConfig) -> None:
        """Make the storage of a shape, and let entries catch up."""
        Recursion.prepare(self, config)
        self.vectors.prepare(config, self.rows.features, self.module.sizes.hidden_size)
        FeatureSource.prepare(self, config)

    def nodes(self, level: Level, vectors: Tensor | None) -> tuple[Tensor, Tensor]:
        config, end = level.config, self.state.out_len - 1
        if vectors is None:
            vectors, logits = self.feed(end, config.chain_rows, keep=1)
            return vectors, torch.where(self.known[:, None, None], logits, 0.0)
        tokens, *rest = self.level_rows(level, end)  # the root's entry lies in the prefix
        return self.forward(tokens, vectors, *rest, keep=config.width, shift=1)


class Parallel(FeatureSource, Lattice):
    """The draft source of an Eagle3 with masks, P-EAGLE (arXiv 2602.01469): several tokens from one forward a step.

    Behind the text's last position come rows of mask tokens, with one learned feature for all of them. Each sees the
    text and the masks before it, and predicts the token of its own depth: the same below every path.
    """

    ahead = 1

    def start(self, text: Text) -> None:
        super().start(text)
        self.unknown = self.module.mask_token_id, self.module.mask_feature()

    def step(self, level: Level, end: Tensor) -> None:
        rows, masks = level.config.chain_rows, min(level.config.depth, self.drafted) - 1  # as many as are read
        self.forwarded = rows + masks
        _, logits = self.feed(end, rows, unknown=masks, keep=1 + masks)
        self.keep_positions(logits, level)


class DFlashDrafts(FeatureSource, Lattice):
    """The draft source of a :class:`DFlash`: candidates by depth, from one forward a step.

    They are the same below every path, or with edges below every token of a depth: a lattice in a graph that merges
    (``merge_context=0``), and a chain in the shape ``"chain"``.
    """

    def start(self, text: Text) -> None:
        """Make the storage of a session, and what the block's rows see in layers without a window and with one."""
        super().start(text)
        module, batch = self.module, len(self.cached)
        self.states = NodeVectors()  # of a recurrent head
        self.row = torch.arange(module.block_size, dtype=torch.int32, device=self.cached.device).expand(batch, -1)
        every = torch.ones(module.block_size, module.block_size, dtype=torch.bool, device=self.cached.device)
        earlier, whole = (pack_bits(sees).expand(batch, -1, -1).contiguous() for sees in (every.tril(), every))
        of_windows = whole if module.non_causal and not module.causal_head else earlier
        self.sees = earlier if module.causal_head else whole, of_windows

    def prepare(self, config: GraphConfig) -> None:
        """See :meth:`FeatureSource.prepare`; and room for a recurrent head's states, one a node."""
        self.states.prepare(config, self.rows.features, self.module.markov_rank)
        super().prepare(config)

    def read(self, fed: FedRows, features: Any, inputs: GraphInputs, keep: int) -> Any:
        """Store keys and values of features, or forward the block behind them."""
        if features is not None:
            return self.module.store(features, fed.positions, self.rows.cache)
        # Windows are counted from the root, so for attention all rows are where the root is.
        here = torch.zeros_like(self.row)
        graph = inputs.kv_len, inputs.kv_start, here, here, inputs.backend
        kinds = [GraphInputs(sees, *graph) for sees in self.sees]

        def attend(module: nn.Module, *given: Any) -> Any:
            return kinds[module.sliding_window is not None].attend(module, *given)

        seen = SimpleNamespace(attend=attend)
        hidden = self.module(self.embedded(fed.ids), None, fed.positions, seen, self.rows.cache)
        return self.module.norm(hidden), self.module.outputs(hidden[:, -self.drafted :], self.head)[1]

    def step(self, level: Level, end: Tensor) -> None:
        """Forward the block, and keep what candidates of its positions are made of until the next step."""
        self.forwarded = level.config.chain_rows + self.module.block_size
        self.feed(end, level.config.chain_rows, keep=0)
        states, logits = self.forward_block()
        if self.by_node:
            self.hidden, self.logits = states[:, -self.drafted :], logits
        else:
            self.keep_positions(logits, level)
        if self.module.recurrent:
            first: Any = 0.0
            if not self.module.sample_from_anchor:  # the root's row went before, with the same token
                token = self.known_tokens(self.state.root_tokens())[:, None]
                _, first = self.module.edges(logits[:, :1], states[:, :1], token)
            self.states.prepare(level.config, self.rows.features, self.module.markov_rank)  # it may only be warmed up
            self.states[level.config][:, :1] = first  # which the root's own takes the place of

    @property
    def confident(self) -> bool:
        """Return whether the confidence head has a say: its overlap of distributions is about tokens that are drawn."""
        return self.module.confidence_head is not None and not self.sampler.greedy

    @property
    def by_node(self) -> bool:
        """Candidates depend on more than the depth of a node."""
        return self.module.edges is not None or self.confident

    def known_tokens(self, tokens: Tensor) -> Tensor:
        """Ids that heads have a row for, int64, where they lie."""
        return tokens.long().to(self.logits.device).clamp(max=self.module.sizes.vocab_size - 1)

    def at_depths(self, level: Level) -> Proposal:
        """Candidates after the nodes of a frontier, by their depths and, with edges, their tokens."""
        if not self.by_node:
            return super().at_depths(level)
        place = level.frontier.depths.long().clamp(max=self.drafted)  # [B, W]
        at = place.clamp(max=self.drafted - 1).to(self.logits.device)
        hidden, logits = rows_at(self.hidden, at), rows_at(self.logits, at)
        before = self.known_tokens(level.frontier.token_ids)
        if self.module.edges is not None:
            state = self.states.of_parents(level) if self.module.recurrent else None
            logits, state = self.module.edges(logits, hidden, before, state)
            if self.module.recurrent:
                self.states.keep(level, state)  # a recurrent head's goes along the edges
        tokens, log_probs = self.ranked(logits, level.positions, level.config.branch)
        if self.confident:
            log_probs = log_probs + logsigmoid(self.module.confidence(hidden, before)).to(log_probs)
        there = (place < self.drafted)[..., None]
        return Proposal(torch.where(there, tokens, -1), torch.where(there, log_probs, -torch.inf), place)

    def forward_block(self) -> tuple[Tensor, Tensor]:
        """Forward the block behind all features: states [B, block_size, D], and logits of what it drafts [B, n, V]."""
        tokens = torch.full_like(self.row, self.module.mask_token_id)
        tokens[:, 0] = self.state.root_tokens()
        graph = self.cached, 0, self.sees[0], self.row, self.row
        states, logits = self.forward(tokens, None, *graph, keep=tokens.shape[1])
        return states, logits[:, -self.drafted :]


# The layers over rows as one operator, where that is possible: module by module a level of drafting is many small
# calls, which take longer than reading the weights. ``ops.feature_rows`` computes what the modules define, to rounding:
# it rounds less in between. Drafts need no proof: the target verifies them.


def operator_of(module: Any, embed: Any, head: Any, backend: str) -> FeatureWeights | None:
    """A drafter's parameters as they lie in it; ``None`` unless it can be one operator.

    That takes plain modules and tensors, all of one dtype, device and epsilon.

    Raises:
        ValueError: a variable of the environment says what there is not.
    """
    norm, device, dtype = module.norm, module.norm.weight.device, module.norm.weight.dtype
    if missing(device, backend) or any(map(foreign_code, (module, embed, head))) or not module.plain:
        return None
    leaves = [part for part in (head, *module.modules()) if not any(part.children())]
    computed = (  # parts first, since configs of others lack what is read
        type(embed) is nn.Embedding
        and embed.max_norm is None
        and all(type(layer).__module__ in HOMES for layer in module.layers)
        and all(type(part) in PLAIN or type(part).__module__ in HOMES for part in leaves)
        and {part.variance_epsilon for part in leaves if hasattr(part, "variance_epsilon")} == {norm.variance_epsilon}
        and head.bias is None
        and getattr(module.rotary.func, "rope_type", "default") in STATIC_ROPE
        and dtype in FLOATS
        and all(
            type(weight) is nn.Parameter and weight.is_contiguous() and (weight.device, weight.dtype) == (device, dtype)
            for weight in (embed.weight, head.weight, *module.parameters())
        )
    )
    if not computed:
        return None
    rotary, kinds = module.rotary.func.to(device), map(AttentionKind, module.windows)
    layers = module.layers, kinds, norm, head, rotary.inv_freq.float(), float(rotary.attention_scaling)
    weights = FeatureWeights(decoder_weights(embed, *layers), **module.first_parameters())
    if replay.is_gpu(device) and (error_of(cuda.check, weights) or choice(weights.decoder).why):
        return None
    return weights
