"""Drafts from the target's hidden states: from the one behind the root, or a feature of every position of the text.

Two ways. Recursion, of EAGLE-3, multi-token prediction and Gemma's assistants: a row reads a feature and the embedding
of the token after it. Drafted tokens have no feature of the target's, so the layers' own output stands in for it: one
vector a node, which travels along the drafted edges. Blocks, of P-EAGLE and DFlash: rows of masks behind the text say
all later tokens in one forward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig
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
from . import checkpoints
from .base import Level, OwnSource, Prefilled, Text, rows_at
from .expansion import FIRST_WEIGHT, DraftVocabulary, Expansion, Lattice, NodeVectors, shares_of

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
        model: the drafter.
        text: being written.
        extra: cache positions that a forward of the drafter needs, more than the target's rows do.
    """

    def __init__(self, model: Any, text: Text, extra: int) -> None:
        target, self.extra = text.target, extra
        cache = GraphCache(model.sizes, target.cache.capacity + extra, target.backend)
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
        super().grow(capacity + self.extra)
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

    operator: FeatureWeights | None = None

    ahead = 0
    """How many tokens beyond its own position an entry reads."""

    extra_slots = 0
    """Cache positions that a forward needs, more than the target's rows do."""

    def __init__(self, module: Any) -> None:
        self.module, self.forwards, self.name = module, (module,), module.name

    def check(self, target: PreTrainedModel) -> None:
        """Refuse a target that the drafter was not made for."""
        checkpoints.check(self.module, target)
        self.module.check_block()
        self.hidden_layers = self.module.layers_of(target)

    def start(self, text: Text) -> None:
        """Make the cache."""
        module, target = self.module, text.target.stepping
        self.head = target.get_output_embeddings() if module.lm_head is None else module.lm_head
        self.embedding = target.get_input_embeddings() if module.embed_tokens is None else module.embed_tokens
        ids = None if module.d2t is None else module.target_ids()
        self.vocabulary = DraftVocabulary(ids, module.sizes.vocab_size, text.target.vocab_size)
        self.rows = FeatureCache(module, text, self.extra_slots)
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
        states = [rows_at(seen.hidden[number], path.clamp(min=0).long()) for number in self.hidden_layers]
        place = torch.arange(path.shape[1], device=path.device)
        at = (self.state.out_len - count - 1)[:, None].long() + place  # the target read the root there
        features = torch.where((place < count[:, None])[..., None], self.fuse(states), rows_at(self.rows.features, at))
        self.rows.features.scatter_(1, at[..., None].expand_as(features), features)

    def fuse(self, states: list[Tensor]) -> Tensor:
        """The feature of hidden states, on the drafter's device in its dtype."""
        like = self.rows.features
        return self.module.fuse([state.to(like.device, like.dtype) for state in states])

    def prepare(self, config: GraphConfig) -> None:
        """Make entries of the prompt and of what other shapes' steps emitted, until at most a step's are missing."""
        if config.depth == 0:
            return
        self.used = True
        end, width = self.state.out_len - 1, config.chain_rows
        while (missing := int((end - self.cached).max())) > width:
            free = self.rows.cache.capacity - int(self.cached.max())  # for a shorter text's rows of padding
            self.feed(end - 1, min(missing - 1, READ_ROWS, free), keep=0)

    def feed(self, end: Tensor, width: int, *, unknown: int = 0, keep: int) -> tuple[Tensor, Tensor]:
        """Make up to ``width`` entries before ``end`` [B]; vectors and logits of the last ``keep`` rows.

        With rows of ``unknown`` tokens behind them, which see all before them and stay no entries.
        """
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
        found: tuple[Tensor, Tensor] = self.module.outputs(hidden[:, hidden.shape[1] - keep :], self.head)
        return found

    def embedded(self, ids: Tensor) -> Tensor:
        """Embeddings of ids [B, R] as :meth:`CachedText.feed` gives them, in the drafter's dtype."""
        return self.embedding(ids).to(self.rows.features.dtype)

    def known(self, logits: Tensor) -> Tensor:
        """Logits [B, n, V], all 0 where the text has no position with a feature yet, and nothing to go by."""
        return torch.where((self.state.out_len - 1 > self.state.kv_start)[:, None, None], logits, 0.0)


class Recursion(Expansion):
    """A draft source with one forward a level over the frontier, in which every node reads its parent's vector.

    Attributes:
        head: the drafter's output matrix, or the target's.
        vectors: of every expanded node.
    """

    shares = (FIRST_WEIGHT,)
    head: Any
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

    def no_logits(self, count: int) -> Tensor:
        shape = (len(self.state.out_len), count, self.vocabulary.columns)
        return torch.zeros(shape, dtype=dtype_of(self.head), device=device_of_weights(self.head))


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
            return vectors, self.known(logits)
        tokens, *rest = self.level_rows(level, end)  # the root's entry lies in the prefix
        return self.forward(tokens, vectors, *rest, keep=config.width, shift=1)


class Ahead(FeatureSource, Lattice):
    """A draft source that forwards rows behind the text in a step, for candidates of several positions at once.

    Args:
        module: the drafter.
        rows: that lie behind the entries of a step.
        drafted: positions that there are candidates of.
    """

    def __init__(self, module: Any, rows: int, drafted: int) -> None:
        super().__init__(module)
        self.extra_slots, self.drafted, self.shares = rows, drafted, shares_of(drafted)

    def rows_ahead(self, config: GraphConfig) -> int:
        """Rows behind the entries in a step of a shape."""
        return self.extra_slots

    def num_rows(self, config: GraphConfig) -> int:
        return config.chain_rows + self.rows_ahead(config)

    def step(self, level: Level, *, emitted: bool = True) -> None:
        self.used = True  # it writes behind what a kept cache says that it holds
        self.look_ahead(level, self.state.out_len - 1 if emitted else self.cached)  # there no entry is missing

    def look_ahead(self, level: Level, end: Tensor) -> None:
        """Make entries before ``end`` [B], forward rows behind them, and keep what these say."""
        raise NotImplementedError


class Parallel(Ahead):
    """The draft source of an Eagle3 with masks, P-EAGLE (arXiv 2602.01469): several tokens from one forward a step.

    Behind the text's last position come rows of mask tokens, with one learned feature for all of them. Each sees the
    text and the masks before it, and predicts the token of its own depth: the same below every path.
    """

    ahead = 1

    def __init__(self, module: Any) -> None:
        super().__init__(module, module.config.num_parallel - 1, module.config.num_parallel)

    def start(self, text: Text) -> None:
        super().start(text)
        self.unknown = self.module.config.mask_token_id, self.module.mask_feature()

    def rows_ahead(self, config: GraphConfig) -> int:
        """Masks; a shape's depth is as many as are read."""
        return min(config.depth - 1, self.extra_slots)

    def look_ahead(self, level: Level, end: Tensor) -> None:
        masks = self.rows_ahead(level.config)
        _, logits = self.feed(end, level.config.chain_rows, unknown=masks, keep=1 + masks)
        self.keep_positions(self.known(logits), level)


# The layers over rows as one operator, where that is possible: module by module a level of drafting is many small
# calls, which take longer than reading the weights. ``ops.feature_rows`` computes what the modules define, to rounding:
# it rounds less in between. Drafts need no proof: the target verifies them.


def operator_of(module: Any, embed: Any, head: Any, backend: str) -> FeatureWeights | None:
    """A drafter's parameters as they lie in it; ``None`` unless it can be one operator.

    That takes plain modules and tensors, all of one dtype, device and epsilon.

    Raises:
        ValueError: a variable of the environment says what there is not.
    """
    norm, sizes = module.norm, module.sizes
    device, dtype = norm.weight.device, norm.weight.dtype
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
        and (sizes.rope_parameters or {}).get("rope_type", "default") in STATIC_ROPE
        and dtype in FLOATS
        and all(
            type(weight) is nn.Parameter and weight.is_contiguous() and (weight.device, weight.dtype) == (device, dtype)
            for weight in (embed.weight, head.weight, *module.parameters())
        )
    )
    if not computed:
        return None
    layers = module.layers, map(AttentionKind, module.windows), norm, head
    weights = FeatureWeights(
        decoder_weights(embed, *layers, *module.rotary.frequencies(device)), **module.first_parameters()
    )
    if replay.is_gpu(device) and (error_of(cuda.check, weights) or choice(weights.decoder).why):
        return None
    return weights
