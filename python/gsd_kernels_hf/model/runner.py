"""One model and its cache: the prompt, then graph rows, through its modules or as one operator.

A draft of a few million parameters spends most of a forward in calling modules; a target on a CPU reads its weights at
a fraction of the memory's speed, and its rounding depends on how many rows there are; on a GPU the modules of a layer
are 40 launches. Through :func:`gsd_kernels.ops.decoder_rows` weights are read once as they lie in the model, and a row
has the same bits alone and among others: in any dtype plain decoding and speculation with any draft give the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from gsd_kernels.environment import forcing
from gsd_kernels.graph import num_words, pack_bits
from gsd_kernels.ops.decoder_rows import DecoderWeights, LayerWeights, decoder_rows
from gsd_kernels.ops.step import FedRows, feed_rows

from ..packed.modules import dtype_of, matrix_of, shape_of
from . import replay
from .attention import AttentionKind, GraphInputs, switched_configs
from .cache import GraphCache, ask
from .facts import Facts
from .hidden import LAST, kept, listening
from .linear import CpuLinear, RowLinear, own_bits, plain, with_cpu_linears
from .probe import WHOLE_TOKENS, least_piece, served, temperatures_of
from .properties import storing, text_config
from .recurrent.mixers import RowTree, mixers_of, with_mixers
from .sides import Sides, longropes_of

Listener = Callable[[Mapping[int, Tensor], int], None]
"""Takes the hidden states of a piece of the prompt, [B, n, D] by layer, and the position of its first token."""


def pieces(begin: int, end: int, most: int | None, least: int) -> Iterator[tuple[int, int]]:
    """Begin and end of pieces of at most ``most`` tokens, ``None``: all; of ``least`` or more behind the first."""
    size = max(most or WHOLE_TOKENS, least)
    while begin < end:
        border = begin + size
        if end - border < least:
            border = end
        yield begin, border
        begin = border


class CachedText:
    """A cache, and which tokens it holds of the last text.

    Args:
        model: whose keys and values they are, or its facts.
        cache: of keys and values.
        kv_start: int32 [B], left padding of every sequence of the text being written.

    Attributes:
        device, backend, vocab_size: of the model whose rows :meth:`feed` makes, and of its operators.
        kv_start: as above, on that device.
        sizes, kinds: of its layers, and of their attention calls.
        ids_dtype: of what it reads: int64 by modules, int32 as one operator.
        ahead: int64 [*axes, B, 1], how far its positions are ahead of those of tokens; ``None``: they are these.
    """

    ids_dtype = torch.int64
    ahead: Tensor | None = None
    device: torch.device
    backend: str
    vocab_size: int
    kv_start: Tensor
    sizes: PretrainedConfig
    kinds: tuple[AttentionKind, ...]

    def __init__(self, model: Any, cache: GraphCache, kv_start: Tensor) -> None:
        facts = Facts.of(model)
        self.model, self.cache = facts.model, cache
        self.recurrent = bool(mixers_of(facts))  # whether layers keep a state, which knows one position alone
        self.text_kv_start = kv_start
        self.stored: tuple[Tensor, Tensor] | None = None  # tokens [B, n] and padding [B] of the last text, on the CPU

    def holds(self, tokens: Tensor, lengths: Tensor) -> None:
        """After a text: its first ``lengths`` tokens [B] are in the cache; tokens int64 [B, S], left-padded."""
        shared = int(lengths.min())
        # Copies: the storage is used again for the next text.
        self.stored = tuple(t.to("cpu", copy=True) for t in (tokens[:, :shared], self.text_kv_start))
        if self.recurrent and int(lengths.max()) > shared:
            self.stored = None  # states are those of texts' ends

    def grow(self, capacity: int) -> None:
        """Make room for ``capacity`` positions; what is stored stays, at other addresses."""
        self.cache.grow(capacity)

    @property
    def nbytes(self) -> int:
        """Bytes allocated so far."""
        return self.cache.nbytes

    def forget(self) -> None:
        """Take nothing in the cache for the beginning of the next prompt."""
        self.stored = None

    def changed(self) -> bool:
        """The model was changed in place: use nothing that was computed with it, or made of its weights.

        Returns:
            Whether tensors that captured steps read lie elsewhere now.
        """
        self.forget()
        return False

    def common(self, input_ids: Tensor, kv_start: Tensor) -> int:
        """Positions of a prompt [B, P] that are in the cache: of the same tokens behind the same padding [B]."""
        if self.stored is None:
            return 0
        tokens, padding = self.stored
        if not torch.equal(padding, kv_start.cpu()):
            return 0
        both = min(tokens.shape[1], input_ids.shape[1])
        same = (tokens[:, :both] == input_ids[:, :both].cpu()).all(0)  # [n]
        common = int(same.long().cumprod(0).sum())
        return 0 if self.recurrent and common < tokens.shape[1] else common

    def feed(
        self,
        token_ids: Tensor,
        kv_len: Tensor,
        slots: Tensor | int,
        depths: Tensor,
        node_depths: Tensor,
        shift: int,
    ) -> FedRows:
        """Rows as the model reads them, on its device; arguments as of :meth:`RowModel.rows`."""
        to, given = self.device, isinstance(slots, Tensor)
        fed = feed_rows(
            token_ids.to(to, torch.int32),
            depths.to(to),
            kv_len.to(to),
            self.kv_start,
            vocab=self.vocab_size,
            slots=slots.to(to, torch.int32).expand_as(token_ids) if given else None,
            first_slot=0 if given else slots,
            shift=shift,
            node_depths=None if given or node_depths is depths else node_depths,
            dtype=self.ids_dtype,
            backend=self.backend,
        )
        self.after = fed.after
        return fed if self.ahead is None else fed._replace(positions=fed.positions + self.ahead)

    def launch(self, kv_len: Tensor, count: int, nodes: int) -> None:
        """Launch once what a forward of ``count`` rows that see ``nodes`` slots compiles at its first use.

        For each geometry of layers keys are written behind the prefix, ``kv_len`` int32 [B], and for each kind of call
        attended to. Layers that have stored nothing yet are passed over. An operator was compiled ahead.
        """
        if self.ids_dtype is torch.int32:
            return
        begun = [layer for layer in self.cache.layers if layer.is_initialized]
        queries = self.sizes.num_attention_heads
        group = queries // (getattr(self.sizes, "num_key_value_heads", None) or queries)
        capped = {"softcap": getattr(self.sizes, "attn_logit_softcapping", None)}
        places = kv_len[:, None].long() + torch.arange(count, device=kv_len.device)
        for layer in {(layer.keys.shape, layer.values.shape): layer for layer in begun}.values():
            batch, heads, _, size = layer.keys.shape
            stored = layer.keys, layer.values
            with self.cache.writing(places):
                layer.update(*(t.new_zeros(batch, count, t.shape[1], t.shape[3]).transpose(1, 2) for t in stored))
            lengths, starts = kv_len.to(layer.device), self.kv_start.to(layer.device)
            zeros = lengths.new_zeros
            graph = zeros(batch, count, num_words(nodes)), lengths, starts, zeros(batch, count), zeros(batch, nodes)
            query = layer.keys.new_zeros(batch, count, group * heads, size).transpose(1, 2)
            for kind in dict.fromkeys(self.kinds):
                sinks = None if kind.sinks is None else layer.keys.new_zeros(group * heads, dtype=kind.sinks)
                inputs = GraphInputs(*graph, self.backend, (kind,))
                inputs.attend(None, query, *stored, None, None, {"s_aux": sinks, **capped})


class RowModel(CachedText):
    """A causal language model that takes rows of a graph.

    Args:
        model: target or draft, or its facts.
        capacity: cache positions.
        kv_start: int32 [B], left padding of every sequence.
        backend: of the attention, cache write and commit ops.
        hidden_layers: whose hidden states are kept, see :mod:`gsd_kernels_hf.model.hidden`.
        cache: to read and write; ``None``: a new one.
        block: tokens between two states of recurrent layers, which then keep a window of the text; 0: by depth.
        sides: of the texts' rotary embedding, where another model's are shared.

    Attributes:
        least: tokens of a prompt's piece behind its beginning, see :func:`pieces`; above 1 no prefix is used again.
        prompt_rows: of a prompt at a time, all sequences together; ``None``: as many as come.
        hidden: of the rows of the last forward, [B, R, D] by layer.
        sides: of the texts' rotary embedding, ``None`` where it has no two, see :mod:`.sides`.
    """

    prompt_rows: int | None = None

    def __init__(
        self,
        model: PreTrainedModel | Facts,
        capacity: int,
        kv_start: Tensor,
        backend: str,
        hidden_layers: tuple[int, ...] = (),
        *,
        cache: GraphCache | None = None,
        block: int = 0,
        sides: Sides | None = None,
    ) -> None:
        facts = Facts.of(model)
        report = served(facts)
        if cache is None:
            cache = GraphCache(facts.model.config, capacity, backend, stacked=report.stacked)
        super().__init__(facts, cache, kv_start)
        self.configs = facts.configs  # switched for every forward by itself, and as they were in between
        self.storing = storing(facts.model, cache)
        self.sizes, self.kinds = text_config(facts.model), report.kinds
        self.positions = report.positions  # of a table that has an end
        cache.by_length |= temperatures_of(facts).keys()
        self.backend, self.block, self.least = backend, block, least_piece(facts)
        self.device = facts.device
        self.vocab_size = facts.vocabulary
        self.kv_start = kv_start.to(self.device)
        self.sides = sides or (Sides(facts, len(kv_start)) if longropes_of(facts) else None)
        # Any 4D mask reaches the attention function untouched and keeps the model from building one.
        self.no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        self.hidden_layers = hidden_layers
        self.hidden: Mapping[int, Tensor] = {}
        self.reused = 0  # positions of the current prompt that were there
        self.why_modules: str | None = None  # what keeps the rows from being one operator
        none = torch.zeros(len(kv_start), 0, dtype=torch.int64, device=self.device)
        self.tree = RowTree(none, none)  # of the rows since the text, for layers that keep a state
        self.after: Tensor  # int32 [B, R]; of the last rows, index in the text of the token after each

    @cached_property
    def stepping(self) -> PreTrainedModel:
        """The same model and weights, with linear layers for few rows and recurrent layers for rows of graphs."""
        model = with_cpu_linears(self.model, self.backend, RowLinear if self.block else CpuLinear)
        if self.recurrent:
            model = with_mixers(model, partial(self.cache.form_of, block=self.block))
        return model if self.sides is None else self.sides.view(model)

    def watch(self) -> None:
        """Let logits be NaN where keys or values are not finite, as transformers' are.

        But for a sharded model: a rank knows of its own heads, and ranks must not go different ways.
        """
        if getattr(self.model, "_device_mesh", None) is None:
            self.cache.marks = torch.zeros(len(self.kv_start), dtype=torch.float32, device=self.device)

    def sharing_cache(self, view: PreTrainedModel) -> RowModel:
        """``view``, this model without some blocks, in this model's own cache."""
        _ = self.stepping  # all of the cache's forms, before a prompt is read
        given = view, self.cache.capacity, self.kv_start, self.backend
        rows = RowModel(*given, cache=self.cache, block=self.block, sides=self.sides)
        rows.ahead = self.ahead
        return rows

    def prefill(self, input_ids: Tensor, attention_mask: Tensor | None, chunk: int | None) -> None:
        """Cache the prompt [B, P] in chunks of ``chunk`` tokens, with the attention that the model had before.

        What the cache holds of its beginning is not read again, see :meth:`holds`.
        """
        self.restart(input_ids, chunk)
        self.read(input_ids, attention_mask, chunk)

    def restart(self, input_ids: Tensor, chunk: int | None = None) -> None:
        """Begin a text with this prompt [B, P], without its last token: ``reused`` positions need not be read."""
        self.hidden = {}
        self.kv_start.copy_(self.text_kv_start)
        alike = self.sides is None or self.sides.begin(input_ids.shape[1] + 1, self.text_kv_start, chunk)
        self.reused = self.common(input_ids, self.text_kv_start) if alike and self.least == 1 else 0
        if LAST in self.hidden_layers:  # nothing keeps it, so the last position is read in any case
            before = max(0, min(self.reused, input_ids.shape[1] - 1))
            self.reused = 0 if self.recurrent and before < self.reused else before
        self.cache.restart(self.reused)
        self.stored = None

    def read(
        self, input_ids: Tensor, attention_mask: Tensor | None, chunk: int | None, listener: Listener | None = None
    ) -> None:
        """Cache the prompt [B, P] from ``reused`` on; ``listener`` gets the hidden states of every chunk."""
        (batch, length), mask = input_ids.shape, None if attention_mask is None else attention_mask.to(self.device)
        ids = input_ids.to(self.device)
        if self.positions is not None:
            self.check_length("input_ids", length - int(self.kv_start.min()))
        if self.prompt_rows is not None:
            chunk = min(chunk or self.prompt_rows, max(1, self.prompt_rows // batch))
        for begin, end in pieces(self.reused, length, chunk, self.least):
            ask()
            hidden = self.read_piece(ids[:, begin:end], mask, begin, last=end == length)
            self.cache.advance(end)
            if listener is not None:
                listener(hidden, begin)

    def read_piece(self, ids: Tensor, mask: Tensor | None, begin: int, *, last: bool) -> Mapping[int, Tensor]:
        """Cache a piece of the prompt, ids [B, n] from position ``begin`` on: its hidden states.

        mask: of the whole prompt [B, P]. ``last``: whether the prompt ends with it.
        """
        end = begin + ids.shape[1]
        if mask is None:
            positions = torch.arange(end, device=self.device).expand(len(ids), -1)  # [B, end]
        else:
            mask = mask[:, :end]
            positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        self.cache.padding = None if mask is None else mask[:, begin:]
        with switched_configs(self.configs), listening(self.stepping, self.hidden_layers) as hidden:
            self.stepping(
                # Beyond this model's vocabulary, where another one is padded further, ids read as token 0.
                input_ids=torch.where(ids < self.vocab_size, ids, 0),
                attention_mask=mask,
                position_ids=positions[:, begin:],
                **self.storing,
                logits_to_keep=kept(1, end - begin, self.hidden_layers, self.model),
            )
        return hidden

    def cross(self, crossed: Sequence[bool], input_ids: Tensor, attention_mask: Tensor | None) -> None:
        """Read the texts [B, n] anew, those that ``crossed`` to the long side of their rotary embedding on that one."""
        assert self.sides is not None
        self.sides.cross(crossed, self.text_kv_start)
        self.reused = 0
        self.cache.restart(0)
        self.read(input_ids, attention_mask, None)

    def rows(
        self,
        token_ids: Tensor,  # int [B, R]
        kv_len: Tensor,  # int32 [B]
        slots: Tensor | int,  # int [B, R] or [R]; cache position minus kv_len; an int: of the first row
        ancestor_mask: Tensor,  # int32 [B, R, ceil(N/32)]
        depths: Tensor,  # int32 [B, R]; text position minus kv_len, plus shift
        node_depths: Tensor,  # int32 [B, N]
        keep: int,
        shift: int = 0,
        stem: int = 0,
    ) -> Tensor:
        """Forward graph rows; logits of the last ``keep`` rows, [B, keep, V].

        Where ``slots`` is an int and ``node_depths`` not ``depths`` itself, those of the rows' slots are written.
        ``stem``: of the ``kv_len`` positions that all rows see, how many are rows since the last commit.
        """
        fed = self.feed(token_ids, kv_len, slots, depths, node_depths, shift)
        mask, lengths, nodes = (t.to(self.device) for t in (ancestor_mask, kv_len, node_depths))
        tree = None
        if self.recurrent:
            self.cache.begin_rows()
            own, first = None, 0
            if isinstance(slots, Tensor):
                own = slots.to(self.device, torch.int64).expand(token_ids.shape)
            else:
                first = stem + slots  # rows that were forwarded before, which these may follow
            self.tree = tree = self.tree.followed(first, mask, token_ids.shape[1], own, stem)
            # No path that can be accepted is longer; sequences that ended may have rows that are.
            tree = tree.shallow(self.block) if self.block else tree
        return self.forward(fed, mask, lengths, nodes, keep, tree)

    def forward(
        self,
        fed: FedRows,  # [B, R] each
        ancestor_mask: Tensor,  # int32 [B, R, ceil(N/32)]
        kv_len: Tensor,  # int32 [B]
        node_depths: Tensor,  # int32 [B, N]
        keep: int,
        tree: RowTree | None,
    ) -> Tensor:
        """Forward rows as they were fed, all on the model's device; logits of the last ``keep``, [B, keep, V]."""
        graph, exactly = (ancestor_mask, kv_len, self.kv_start, fed.depths, node_depths), self.block > 0
        inputs = GraphInputs(*graph, self.backend, self.kinds, row_invariant=exactly)
        with (
            switched_configs(self.configs),
            self.cache.writing(fed.places, tree),
            own_bits(exactly),
            listening(self.stepping, self.hidden_layers) as hidden,
        ):
            output = self.stepping(
                input_ids=fed.ids,
                attention_mask=self.no_mask,
                # A row behind the table's end is never accepted, see check_length.
                position_ids=fed.positions if self.positions is None else fed.positions.clamp(max=self.positions - 1),
                **self.storing,
                logits_to_keep=keep,
                graph=inputs,
            )
        inputs.check_complete()
        self.hidden = {layer: plain(states) for layer, states in hidden.items()}  # [B, R, D]
        return self.cache.marked(plain(output.logits)[:, -keep:])

    def check_length(self, name: str, tokens: int) -> None:
        """Raise where the model has no position for one of ``tokens`` tokens of a text.

        Raises:
            ValueError: its table of positions ends before; ``name`` is the argument that made the text so long.
        """
        if self.positions is not None and tokens > self.positions:
            raise ValueError(
                f"{name}: {type(self.model).__name__} has a table of {self.positions} positions, and {tokens} tokens "
                "of a text would have to be read; make it shorter"
            )

    def no_logits(self, count: int) -> Tensor:
        """Logits as of ``count`` rows, [B, count, V], all 0."""
        dtype = dtype_of(self.model.get_output_embeddings())
        return torch.zeros(len(self.kv_start), count, self.vocab_size, dtype=dtype, device=self.device)


PROMPT_ROWS = 512
"""Of a prompt at a time, all sequences together: what they need stays in a CPU's cache. A GPU's proof says it."""


def layers_of(model: Any) -> list[Any]:
    """The layers that a forward runs: no more than the config says."""
    return list(model.model.layers)[: model.config.num_hidden_layers]


def layer_weights(layer: Any, kind: AttentionKind) -> LayerWeights:
    """The parameters of a LLaMA-like layer; ``kind``: what its attention does."""
    a, m = layer.self_attn, layer.mlp
    projections = {
        "q": a.q_proj,
        "k": a.k_proj,
        "v": a.v_proj,
        "o": a.o_proj,
        "gate": m.gate_proj,
        "up": m.up_proj,
        "down": m.down_proj,
    }
    parts = {f"{name}_bias": part.bias for name, part in projections.items() if part.bias is not None}
    norms = {name: getattr(a, name, None) for name in ("q_norm", "k_norm")}
    parts |= {name: norm.weight for name, norm in norms.items() if norm is not None}
    parts |= {"input_norm": layer.input_layernorm.weight, "second_norm": layer.post_attention_layernorm.weight}
    return LayerWeights(
        **{name: matrix_of(part) for name, part in projections.items()},
        **{name: vector.detach() for name, vector in parts.items()},
        window=kind.window or 0,
    )


def weights_of(model: PreTrainedModel, kinds: Sequence[AttentionKind]) -> DecoderWeights:
    """The parameters as they lie in the model; ``kinds``: what each attention call was seen to do.

    Some classes ignore the window of their configuration.
    """
    decoder: Any = model.model
    modules = decoder.embed_tokens, layers_of(model), kinds, decoder.norm, model.lm_head
    return decoder_weights(*modules, decoder.rotary_emb.inv_freq.float(), float(decoder.rotary_emb.attention_scaling))


def decoder_weights(
    embed: Any, layers: Any, kinds: Sequence[AttentionKind], norm: Any, head: Any, inv_freq: Tensor, scale: float
) -> DecoderWeights:
    """The parameters of modules, with the frequencies of the rotation and what cosines and sines are multiplied with.

    Args:
        embed, layers, norm, head: embedding, LLaMA-like layers, norm behind them, output layer.
        kinds: what the attention of each layer does.
        inv_freq: float32 [head_dim / 2].
        scale: see above.
    """
    return DecoderWeights(
        embedding=matrix_of(embed),
        layers=[layer_weights(*at) for at in zip(layers, kinds, strict=True)],
        final_norm=norm.weight.detach(),
        head=matrix_of(head),
        inv_freq=inv_freq,
        rope_scale=scale,
        heads=shape_of(layers[0].self_attn.q_proj)[0] // (2 * inv_freq.numel()),
        eps=norm.variance_epsilon,
    )


def storage_of(cache: GraphCache, weights: DecoderWeights, batch: int) -> tuple[list[Tensor], list[Tensor]]:
    """Keys and values of every layer that the weights are of, allocated in their dtype if nothing was read."""
    layers, head_dim = cache.layers[: len(weights.layers)], 2 * weights.inv_freq.numel()
    shape = (batch, weights.layers[0].k.shape[0] // head_dim, 0, head_dim)
    for layer in layers:
        if not layer.is_initialized:
            layer.lazy_initialization(weights.final_norm.new_empty(shape, dtype=weights.dtype))
    return [layer.keys for layer in layers], [layer.values for layer in layers]


class FusedRows(RowModel):
    """A :class:`RowModel` whose rows, of graphs and of prompts, are one operator.

    Args:
        given: as of :class:`RowModel`, those that come by place.
    """

    ids_dtype = torch.int32
    prompt_rows = PROMPT_ROWS

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.weights = weights_of(self.model, self.kinds)
        self.states = [layer for layer in self.hidden_layers if layer != LAST]
        # On a GPU "auto" never takes it; that rows come here is what the switch says.
        self.operator = "cuda" if replay.is_gpu(self.device) else self.backend
        self.settings: dict[str, str] = {}  # what the operator does otherwise than the environment says

    def changed(self) -> bool:
        """See :meth:`RowModel.changed`; matrices that a library keeps in an order of its own are read anew."""
        super().changed()
        before, self.weights = self.weights, weights_of(self.model, self.kinds)
        if before.inv_freq.data_ptr() != self.weights.inv_freq.data_ptr():  # a copy, that captured steps read
            self.weights = replace(self.weights, inv_freq=before.inv_freq.copy_(self.weights.inv_freq))
        return before.places != self.weights.places

    def read_piece(self, ids: Tensor, mask: Tensor | None, begin: int, *, last: bool) -> Mapping[int, Tensor]:
        """Read as :meth:`RowModel.read_piece` does. Padding is where ``kv_start`` says."""
        batch, count = ids.shape
        kv_len = torch.full_like(self.kv_start, begin)  # [B]
        depths = torch.arange(count, dtype=torch.int32, device=self.device).repeat(batch, 1)  # [B, R]
        fed = self.feed(ids, kv_len, 0, depths, depths, 0)
        pads = fed.positions < 0  # [B, R]; they see themselves alone, and nobody sees them
        seen = torch.ones_like(pads)[:, None].repeat(1, count, 1).tril() & ~pads[:, None]  # [B, R, R]
        seen.diagonal(0, 1, 2).fill_(True)
        self.cache.padding, fed = ~pads, fed._replace(positions=fed.positions.clamp(min=0))
        self.forward(fed, pack_bits(seen), kv_len, depths, int(last and LAST in self.hidden_layers), end=begin + count)
        return self.hidden

    def forward(
        self,
        fed: FedRows,
        ancestor_mask: Tensor,  # int32 [B, R, words]
        kv_len: Tensor,  # int32 [B]
        node_depths: Tensor,  # int32 [B, N]
        keep: int,
        tree: RowTree | None = None,
        *,
        end: int | None = None,
    ) -> Tensor:
        """Forward rows as they were fed; see :meth:`RowModel.forward`.

        end: of the positions of the cache that any row reads or writes.
        """
        keys, values = storage_of(self.cache, self.weights, len(fed.ids))  # [B, Hkv, capacity, D] a layer
        on_gpu = self.operator == "cuda"
        if on_gpu and end is not None:
            # Of what lies behind, it would have memory for attention's partial sums, and blocks without work.
            keys, values = ([cache[:, :, :end] for cache in caches] for caches in (keys, values))
        with forcing(self.settings), self.cache.writing(fed.places):
            places, spoiled = self.cache.rows_on(self.device, fed.ids.shape)  # [B, R]
            logits, hidden, read_by = decoder_rows(
                self.weights,
                fed.ids,
                fed.positions,
                places,
                ancestor_mask,
                node_depths.to(torch.int32),
                kv_len,
                self.kv_start,
                keys,
                values,
                keep=keep,
                states=self.states,
                spoiled=spoiled,
                backend=self.operator,
            )
        dtype = self.weights.dtype
        self.hidden = {LAST: hidden.to(dtype)} if LAST in self.hidden_layers and keep else {}
        self.hidden |= zip(self.states, read_by.to(dtype), strict=True)  # [B, R, D] each
        return logits.to(dtype) if on_gpu else self.cache.marked(logits.to(dtype))  # there the operator marks them
