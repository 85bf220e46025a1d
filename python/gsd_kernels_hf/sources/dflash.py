"""DFlash block drafters (arXiv 2602.06036) from the checkpoints that are published, drafting a lattice.

One forward a step: the root's embedding and as many mask tokens as the block is long see each other and the features of
the text, which are keys and values in every layer. It gives candidates for every later position at once: a lattice,
which is a graph by nature. What follows what within it, the history's candidates say, and the edges of a head where a
checkpoint has one. Kinds: DFlash itself, JetSpec's (arXiv 2606.18394: rows of the block see the earlier ones only),
DSpark, DFlash 2. Layouts: z-lab's (``dflash_config``), DeepSpec's (flat), that of speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from gsd_kernels import GraphConfig
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.step import FedRows

from ..model.attention import GraphInputs
from . import checkpoints
from .base import Level, Proposal, Text, rows_at
from .checkpoints import bad
from .expansion import NodeVectors
from .feature_drafter import FeatureConfig, FeatureDrafter, Shapes
from .features import Ahead
from .layouts import DFLASH, settings_of

MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""Kinds of DSpark's head."""


@dataclass(frozen=True)
class DFlashConfig(FeatureConfig):
    """The settings in a DFlash checkpoint's config.

    Attributes:
        block_size: rows of the forward, the root's included.
        markov_head_type: of DSpark's head, one of :data:`MARKOV_HEADS`.
        confidence, confidence_bias: numbers that DSpark's confidence head reads, and whether it has a bias; 0: none.
        sliding_window_non_causal: whether rows of a layer with a sliding window see the later ones of the block.
        sample_from_anchor: whether the root's row drafts, too; else candidates after it are those of the first mask.
        causal_head: whether rows of all layers see the earlier ones of the block only (JetSpec).
        markov_rank: of DSpark's head; 0: none.
        selector_rank, selector_top_k: of DFlash 2's head; 0: none.
        conv_kernel_size, conv_group_size: of DFlash 2's convolutions, rows that one reads and channels that share a
            weight; 0: none.
    """

    block_size: int
    markov_head_type: str
    confidence: int
    confidence_bias: bool
    sliding_window_non_causal: bool
    sample_from_anchor: bool
    causal_head: bool
    markov_rank: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any], tensors: Shapes) -> DFlashConfig:
        """Read a ``config.json``, beside which there are tensors of these shapes.

        Raises:
            BadCheckpoint: a setting is missing, impossible, or not served.
        """
        said, fused = settings_of(config, DFLASH)
        if fused is None:
            raise bad(f"its config has none of {', '.join(f'{one.inside}.{one.layers}'.strip('.') for one in DFLASH)}")
        second = config.get("speculators_model_type") == "dflash2" or any(
            str(name).startswith("DFlash2") for name in config.get("architectures") or ()
        )
        if second or said.get("conv_kernel_size"):  # DFlash 2's own code has it so; the others say it
            said = {"sliding_window_non_causal": True, **said}
        confidence = tensors.get(CONFIDENCE + "weight")
        read = cls.read(
            {**said, "model_type": "qwen3"},
            tensors,
            hidden_layers=fused,
            own_head="lm_head.weight" in tensors,
            mask_token_id=checkpoints.number(said, "mask_token_id", least=0),
            block_size=checkpoints.number(said, "block_size", least=2),
            markov_head_type=said.get("markov_head_type") or MARKOV_HEADS[0],
            confidence=confidence[-1] if confidence else 0,
            confidence_bias=CONFIDENCE + "bias" in tensors,
        )
        size, rank = read.layers.hidden_size, read.markov_rank
        for names in EDGES:
            if vars(read)[names[0]] or (second and names != EDGES[0]):
                for name in names:
                    checkpoints.number(vars(read), name)
        served = [(1, width) for width in sorted({size, size + rank})]  # a row's output, and maybe the token before
        reduced = read.draft_vocab_size < read.layers.vocab_size
        projector, kind, group = said.get("projector_type", "dflash"), read.markov_head_type, read.conv_group_size
        checkpoints.refuse(
            {
                f"projector_type={projector!r} in its config; only 'dflash' is served": projector != "dflash",
                f"markov_head_type={kind!r} in its config; served are {', '.join(MARKOV_HEADS)}": (
                    rank and kind not in MARKOV_HEADS
                ),
                f"conv_group_size={group} in its config does not divide hidden_size={size}": size % (group or 1),
                f"{CONFIDENCE}weight is {list(confidence or ())}, and its config means "
                f"{' or '.join(str([*one]) for one in served)}": confidence not in (None, *served),
                f"its draft vocabulary of {read.draft_vocab_size} needs an output matrix of its own, lm_head.weight": (
                    reduced and not read.own_head
                ),
                "a DFlash 2 drafter with a draft vocabulary of its own; not served": reduced and read.selector_rank,
            }
        )
        return read

    @property
    def num_drafted(self) -> int:
        """Later positions that a block has candidates for."""
        return self.block_size - (not self.sample_from_anchor)


EDGES = (("markov_rank",), ("selector_rank", "selector_top_k"), ("conv_kernel_size", "conv_group_size"))
"""Settings of DSpark's head, DFlash 2's and its convolutions; without the first there is none."""

CONFIDENCE = "confidence_head.proj."


# Edges, by which a lattice is more than its positions. Rows of a block know nothing of each other's choices. A head
# beside them scores a token by its depth and the token before it, so every node of a graph that merges equal tokens of
# a depth gets exactly what the head says, whatever path led there. DSpark's is a bias on all logits, DFlash 2's
# reorders the best few.


class MarkovHead(nn.Module):
    """DSpark's head: a bias of low rank by the token before (DeepSpec, ``deepspec/modeling/dspark/markov_head.py``).

    logits(b | a) = logits(b) + W2 · e with e = W1[a]. With a gate e = W1[a] ⊙ σ(G [h, W1[a]] + g). Of type ``rnn`` it
    is by all tokens of a path: [g, c, o] = J [s, W1[a], h] + j; s′ = σ(g) ⊙ s + (1 − σ(g)) ⊙ tanh(c); e = tanh(o). The
    state s, zero before the block, goes along the path: a node that paths share has that of its primary parent.

    Args:
        vocab_size: of the tokens before.
        draft_vocab_size: of the logits.
        rank: r, of W1 [vocab_size, r], W2 [draft_vocab_size, r] and s; G [r, D + r], J [3r, 2r + D].
        hidden_size: D, width of h.
        kind: ``vanilla``, ``gated`` or ``rnn``.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int, hidden_size: int, kind: str) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        self.recurrent = kind == "rnn"  # whether it has a state
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank) if self.recurrent else None

    def forward(self, logits: Tensor, hidden: Tensor, before: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Logits of edges [B, W, V], and the state after them.

        Args:
            logits: [B, W, V], of a position by itself.
            hidden: [B, W, D], what they were made of.
            before: int64 [B, W], the token before.
            state: [B, W, r], of the path so far; ``None`` before a block, and of a head without one.
        """
        embedded = self.markov_w1(before)
        if self.gate_proj is not None:
            embedded = embedded * self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid()
        if self.joint_proj is not None:
            state = hidden.new_zeros(embedded.shape) if state is None else state
            gate, candidate, output = self.joint_proj(torch.cat([state, embedded, hidden], -1)).chunk(3, -1)
            gate, embedded = gate.sigmoid(), output.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        return logits + self.markov_w2(embedded).to(logits.dtype), state


def along(edges: Any, logits: Tensor, hidden: Tensor, before: Tensor) -> Tensor:
    """Score logits [B, n, V] along one path by a head, as in training.

    Args:
        edges: :class:`MarkovHead` or :class:`Selector`.
        logits, hidden: as of :meth:`MarkovHead.forward`, of the next n positions.
        before: int64 [B, n], the token before each.
    """
    if not edges.recurrent:
        scored: Tensor = edges(logits, hidden, before)[0]
        return scored
    state, found = None, []
    for at in range(logits.shape[1]):
        scored, state = edges(logits[:, at, None], hidden[:, at, None], before[:, at, None], state)
        found.append(scored)
    return torch.cat(found, 1)


class Selector(nn.Module):
    """DFlash 2's head: of the best ``top_k`` tokens of a position, a score by the token before and the hidden state.

    logits(b | a) = logits(b) + ⟨A[a] ⊙ (P h), B[b]⟩ (z-lab's ``dflash/model.py``); the other tokens keep theirs.

    Args:
        vocab_size: of A and B [vocab_size, rank].
        rank: r.
        hidden_size: D, width of h; P [r, D].
        top_k: tokens of a position that are scored.
    """

    recurrent = False

    def __init__(self, vocab_size: int, rank: int, hidden_size: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden_size, rank, bias=False)

    def forward(self, logits: Tensor, hidden: Tensor, before: Tensor, _: None = None) -> tuple[Tensor, None]:
        """See :meth:`MarkovHead.forward`."""
        own, tokens = logits.topk(min(self.top_k, logits.shape[-1]), -1)  # [B, W, top_k]
        context = self.predecessor_codebook[before] * self.hidden_projection(hidden)  # [B, W, r]
        scores = torch.einsum("bwr,bwkr->bwk", context, self.successor_codebook[tokens])
        return logits.scatter(-1, tokens, own + scores.to(own.dtype)), None


class DynamicConvolution(nn.Module):
    """DFlash 2's causal convolutions over a block, before and after a part of a layer, with weights by row.

    out_t = Σ_tap (base[tap] + δ_t[tap, group]) ⊙ x_{t − tap}, zero before the block; δ of a row comes from what the
    part reads there.

    Args:
        size: D, channels.
        taps: rows that a row reads, itself included.
        group: channels that share a δ.
    """

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.taps, self.group = taps, group
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))  # before, after
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def forward(self, part: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """The part of rows [B, R, D], convolved on both sides of it."""
        delta = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, -1))  # [B, R, 2, taps, groups]
        return self.convolved(part(self.convolved(hidden, delta, 0)), delta, 1)

    def convolved(self, hidden: Tensor, delta: Tensor, side: int) -> Tensor:
        """Convolve [B, R, D] before the part, side 0, or after it, side 1."""
        found = torch.zeros_like(hidden)
        for tap in range(self.taps):
            shifted = nn.functional.pad(hidden, (0, 0, tap, 0))[:, : hidden.shape[1]]
            weight = self.base_kernel[side, tap] + delta[:, :, side, tap].repeat_interleave(self.group, -1)
            found = found + weight * shifted
        return found


class ConvolvedLayer(Qwen3DecoderLayer):
    """A decoder layer of DFlash 2: convolutions around attention and feed-forward part."""

    def __init__(self, config: PretrainedConfig, layer: int, taps: int, group: int) -> None:
        super().__init__(config, layer)
        self.attention_conv = DynamicConvolution(config.hidden_size, taps, group)
        self.mlp_conv = DynamicConvolution(config.hidden_size, taps, group)

    def forward(self, hidden: Tensor, **options: Any) -> Tensor:
        """The rows of one block [B, R, D] → [B, R, D]."""
        attention = lambda rows: self.self_attn(rows, **options)[0]  # noqa: E731
        hidden = hidden + self.attention_conv(attention, self.input_layernorm(hidden))
        return hidden + self.mlp_conv(self.mlp, self.post_attention_layernorm(hidden))


class DFlash(FeatureDrafter):
    """A DFlash drafter: ``gsd_kernels.patch(model, drafter=DFlash.from_pretrained(folder_or_id, model))``.

    Args:
        config: see :class:`DFlashConfig`.
    """

    name = "dflash"
    read_config = DFlashConfig.of

    def __init__(self, config: DFlashConfig) -> None:
        sizes, taps, group = config.layers, config.conv_kernel_size, config.conv_group_size
        super().__init__(config, partial(ConvolvedLayer, taps=taps, group=group) if taps else None)
        size, eps = sizes.hidden_size, sizes.rms_norm_eps
        self.fc = nn.Linear(len(config.hidden_layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, eps)
        self.windows = [window and window + 1 for window in self.windows]  # counted from the root, by every row
        # A decoder's layers over rows that see each other, behind keys and values of features. Not where they are
        # convolved, or have windows: these are counted from the root, so that all rows see the same.
        self.plain = not taps and not any(self.windows)
        for layer, window in zip(self.layers, self.windows, strict=True):
            layer.self_attn.sliding_window = window
        vocab, drafted, rank = sizes.vocab_size, config.draft_vocab_size, config.markov_rank
        self.markov_head = MarkovHead(vocab, drafted, rank, size, config.markov_head_type) if rank else None
        read, bias = config.confidence, config.confidence_bias
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(read, 1, bias=bias)}) if read else None
        rank = config.selector_rank
        self.candidate_selector = Selector(vocab, rank, size, config.selector_top_k) if rank else None
        kinds = {"DFlash 2": rank or taps, "DSpark": config.markov_rank, "JetSpec": config.causal_head}
        self.kind = next((kind for kind, whether in kinds.items() if whether), "DFlash")

    @property
    def edges(self) -> MarkovHead | Selector | None:
        """The head that scores a token by the one before, or by all before it, if there is one."""
        return self.candidate_selector if self.markov_head is None else self.markov_head

    def fuse(self, hidden: list[Tensor]) -> Tensor:
        """The feature of the target's hidden states, [B, n, Dt] each: [B, n, D]."""
        return self.hidden_norm(self.fc(torch.cat(hidden, -1)))

    def first_parameters(self) -> dict[str, None]:
        """Of the operator's weights those before the layers: none, since they store keys and values of features."""
        return {"feature_norm": None}

    def confidence(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Logits of DSpark's confidence head [B, W, 1], of rows' outputs [B, W, D] after tokens int64 [B, W].

        They say how much of its draft's distribution the target shares, Σ min(p, q), after a token. Where tokens are
        drawn, a candidate stands with so much probability for what the target may pick; the rest is not the drafter's
        to say. So a path's probability is what its authors call survival, times that of its tokens. Of the likeliest
        token, which greedy decoding picks, they say nothing.
        """
        markov = self.markov_head
        if markov is not None and self.config.confidence > hidden.shape[2]:
            hidden = torch.cat([hidden, markov.markov_w1(before)], -1)
        return self.confidence_head["proj"](hidden)

    def store(self, features: Tensor, positions: Tensor, cache: Any) -> None:
        """Store every layer's keys and values of features [B, n, D] at text positions int64 [B, n]."""
        turns = self.rotary(features, positions)
        for number, layer in enumerate(self.layers):
            attention = layer.self_attn
            heads = (len(features), features.shape[1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(features).view(heads)).transpose(1, 2)
            values = attention.v_proj(features).view(heads).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, *turns)[1], values, number)


class DFlashDrafts(Ahead):
    """The draft source of a :class:`DFlash`: candidates by depth, from one forward a step.

    They are the same below every path, or with edges below every token of a depth: a lattice in a graph that merges
    (``merge_context=0``), and a chain in the shape ``"chain"``.
    """

    def __init__(self, module: DFlash) -> None:
        super().__init__(module, module.config.block_size, module.config.num_drafted)

    def start(self, text: Text) -> None:
        """Make the storage of a session, and what the block's rows see."""
        super().start(text)
        config, device, batch = self.module.config, self.cached.device, len(self.cached)
        size = config.block_size
        self.recurrent = getattr(self.module.edges, "recurrent", False)  # whether a node's whole path counts
        self.states = NodeVectors()
        self.row = torch.arange(size, dtype=torch.int32, device=device).expand(batch, -1)
        every = torch.ones(size, size, dtype=torch.bool, device=device)
        earlier, whole = (pack_bits(sees).expand(batch, -1, -1).contiguous() for sees in (every.tril(), every))
        self.sees_all = earlier if config.causal_head else whole
        self.sees_window = self.sees_all if config.sliding_window_non_causal else earlier

    def prepare(self, config: GraphConfig) -> None:
        """See :meth:`FeatureSource.prepare`; and room for a recurrent head's states, one a node."""
        self.prepare_states(config)
        super().prepare(config)

    def prepare_states(self, config: GraphConfig) -> None:
        """Make room for the states of a shape's nodes."""
        if self.recurrent:
            self.states.prepare(config, self.rows.features, self.module.config.markov_rank)

    def read(self, fed: FedRows, features: Any, inputs: GraphInputs, keep: int) -> Any:
        """Store keys and values of features, or forward the block behind them."""
        if features is not None:
            return self.module.store(features, fed.positions, self.rows.cache)
        # Windows are counted from the root, so for attention all rows are where the root is.
        here = torch.zeros_like(self.row)
        graph = inputs.kv_len, inputs.kv_start, here, here, inputs.backend
        whole, windowed = (GraphInputs(sees, *graph) for sees in (self.sees_all, self.sees_window))

        def attend(module: nn.Module, *given: Any) -> Tensor:
            return (whole if module.sliding_window is None else windowed).attend(module, *given)

        seen = SimpleNamespace(attend=attend)
        hidden = self.module(self.embedded(fed.ids), None, fed.positions, seen, self.rows.cache)
        states = self.module.norm(hidden)
        return states, self.head(states[:, -self.drafted :].to(self.head.weight.dtype))

    def look_ahead(self, level: Level, end: Tensor) -> None:
        """Forward the block, and keep what candidates of its positions are made of until the next step."""
        self.feed(end, level.config.chain_rows, keep=0)
        states, logits = self.forward_block()
        if self.by_node:
            self.hidden, self.logits = states[:, -self.drafted :], logits
        else:
            self.keep_positions(logits, level)
        if self.recurrent:
            first: Any = 0.0
            if not self.module.config.sample_from_anchor:  # the root's row went before, with the same token
                token = self.known_tokens(self.state.root_tokens())[:, None]
                _, first = self.module.edges(logits[:, :1], states[:, :1], token)
            self.prepare_states(level.config)  # a shape may only be warmed up
            self.states.by_shape[level.config][:, :1] = first  # which the root's own takes the place of

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
        return tokens.long().to(self.logits.device).clamp(max=self.module.config.layers.vocab_size - 1)

    def at_depths(self, level: Level) -> Proposal:
        """Candidates after the nodes of a frontier, by their depths and, with edges, their tokens."""
        if not self.by_node:
            return super().at_depths(level)
        place = level.frontier.depths.long().clamp(max=self.drafted)  # [B, W]
        at = place.clamp(max=self.drafted - 1).to(self.logits.device)
        hidden, logits = rows_at(self.hidden, at), rows_at(self.logits, at)
        before = self.known_tokens(level.frontier.token_ids)
        if self.module.edges is not None:
            state = self.states.of_parents(level) if self.recurrent else None
            logits, state = self.module.edges(logits, hidden, before, state)
            if self.recurrent:
                self.states.keep(level, state)  # a recurrent head's goes along the edges
        tokens, log_probs = self.ranked(logits, level.positions, level.config.branch)
        if self.confident:
            log_probs = log_probs + logsigmoid(self.module.confidence(hidden, before)).to(log_probs)
        there = (place < self.drafted)[..., None]
        return Proposal(torch.where(there, tokens, -1), torch.where(there, log_probs, -torch.inf), place)

    def forward_block(self) -> tuple[Tensor, Tensor]:
        """Forward the block behind all features: states [B, block_size, D], and logits of what it drafts [B, n, V]."""
        tokens = torch.full_like(self.row, self.module.config.mask_token_id)
        tokens[:, 0] = self.state.root_tokens()
        graph = self.cached, 0, self.sees_all, self.row, self.row
        states, logits = self.forward(tokens, None, *graph, keep=tokens.shape[1])
        return states, logits[:, -self.drafted :]
