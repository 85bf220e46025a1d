"""DFlash block drafters (arXiv 2602.06036) from the checkpoints that are published, drafting a lattice.

One forward a step: the root's embedding and as many mask tokens as the block is long see each other and the features of
the text, which are keys and values in every layer. It gives candidates for every later position at once: a lattice,
which is a graph by nature. What follows what within it, the history's candidates say, and the edges of a head where a
checkpoint has one. Kinds: DFlash itself, JetSpec's (arXiv 2606.18394: rows of the block see the earlier ones only),
DSpark, DFlash 2. Layouts: z-lab's (``dflash_config``), DeepSpec's (flat), that of speculators.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from .checkpoints import bad, flag, number, refuse
from .feature_drafter import FeatureDrafter
from .layouts import DFLASH, settings_of

MARKOV_HEADS = ("vanilla", "gated", "rnn")
"""Kinds of DSpark's head."""
CONFIDENCE = "confidence_head.proj."
NON_CAUSAL = "sliding_window_non_causal"


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
        self.gate_proj = nn.Linear(hidden_size + rank, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank) if kind == "rnn" else None

    def forward(self, logits: Tensor, hidden: Tensor, before: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Logits of edges [B, W, V], and the state after them.

        Args:
            logits: [B, W, V], of a position by itself.
            hidden: [B, W, D], what they were made of.
            before: int64 [B, W], the token before.
            state: [B, W, r], of the path to each so far; ``None``: they are one path, from a block's beginning on.
        """
        embedded = self.markov_w1(before)
        if self.gate_proj is not None:
            embedded = embedded * self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid()
        if self.joint_proj is not None:
            steps, outputs = [(embedded, hidden)], []
            if state is None:
                steps = list(zip(embedded.split(1, 1), hidden.split(1, 1), strict=True))
                state = hidden.new_zeros(steps[0][0].shape)
            for token, row in steps:
                gate, candidate, output = self.joint_proj(torch.cat([state, token, row], -1)).chunk(3, -1)
                gate = gate.sigmoid()
                state = gate * state + (1 - gate) * candidate.tanh()
                outputs.append(output.tanh())
            embedded = torch.cat(outputs, 1)
        return logits + self.markov_w2(embedded).to(logits.dtype), state


class Selector(nn.Module):
    """DFlash 2's head: of the best ``top_k`` tokens of a position, a score by the token before and the hidden state.

    logits(b | a) = logits(b) + ⟨A[a] ⊙ (P h), B[b]⟩ (z-lab's ``dflash/model.py``); the other tokens keep theirs.

    Args:
        vocab_size: of A and B [vocab_size, rank].
        rank: r.
        hidden_size: D, width of h; P [r, D].
        top_k: tokens of a position that are scored.
    """

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
        earlier = nn.functional.pad(hidden, (0, 0, self.taps - 1, 0)).unfold(1, self.taps, 1)  # [B, R, D, taps]
        weight = self.base_kernel[side] + delta[:, :, side].repeat_interleave(self.group, -1)  # [B, R, taps, D]
        return (weight * earlier.flip(-1).mT).sum(2)


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
        config: as of :func:`~gsd_kernels_hf.sources.layouts.settings_of`.

    Attributes:
        block_size: rows of the forward, the root's included.
        sample_from_anchor: whether the root's row drafts, too; else candidates after it are those of the first mask.
        causal_head: whether rows of all layers see the earlier ones of the block only (JetSpec).
        non_causal: whether rows of a layer with a sliding window see the later ones of the block.
        markov_head: DSpark's, of rank ``markov_rank``; ``None``: there is none.
        recurrent: whether that has a state, so that a node's whole path counts.
        confidence_head: DSpark's, which says how sure it is; likewise.
        candidate_selector: DFlash 2's, likewise.
    """

    name = "dflash"

    def __init__(self, config: Mapping[str, Any]) -> None:
        said = settings_of(config, DFLASH)
        tensors = said["tensors"]
        if said["hidden_layers"] is None:
            raise bad(f"its config has none of {', '.join(f'{one.inside}.{one.layers}'.strip('.') for one in DFLASH)}")
        second = "dflash2" in f"{config.get('speculators_model_type')}, {config.get('architectures')}".lower()
        count = partial(number, said, default=0)
        selected, taps = (count(name, least=int(second)) for name in ("selector_rank", "conv_kernel_size"))
        top_k, group = count("selector_top_k", least=min(selected, 1)), count("conv_group_size", least=min(taps, 1))
        super().__init__(
            {**said, "model_type": "qwen3"},
            own_head="lm_head.weight" in tensors,
            layer=partial(ConvolvedLayer, taps=taps, group=group) if taps else None,
        )
        size, vocab, drafted = self.sizes.hidden_size, self.sizes.vocab_size, self.draft_vocab_size
        self.mask_token_id = number(said, "mask_token_id", least=0)
        self.rows_ahead = self.block_size = number(said, "block_size", least=2)
        self.markov_rank = rank = count("markov_rank", least=0)
        self.causal_head, self.sample_from_anchor = (flag(said, name) for name in ("causal_head", "sample_from_anchor"))
        # DFlash 2's own code has it so; the others say it.
        self.non_causal = flag({NON_CAUSAL: bool(second or taps), **said}, NON_CAUSAL)
        self.num_drafted = self.block_size - (not self.sample_from_anchor)
        projector, kind = said.get("projector_type", "dflash"), said.get("markov_head_type") or MARKOV_HEADS[0]
        refuse(
            {
                f"projector_type={projector!r} in its config; only 'dflash' is served": projector != "dflash",
                f"markov_head_type={kind!r} in its config; served are {', '.join(MARKOV_HEADS)}": (
                    rank and kind not in MARKOV_HEADS
                ),
                f"conv_group_size={group} in its config does not divide hidden_size={size}": size % (group or 1),
                f"its draft vocabulary of {drafted} needs an output matrix of its own, lm_head.weight": (
                    drafted < vocab and self.lm_head is None
                ),
                "a DFlash 2 drafter with a draft vocabulary of its own; not served": drafted < vocab and selected,
            }
        )
        self.fc = nn.Linear(len(said["hidden_layers"]) * self.target_hidden_size, size, bias=False)
        self.hidden_norm = LlamaRMSNorm(size, self.sizes.rms_norm_eps)
        self.windows = [window and window + 1 for window in self.windows]  # counted from the root, by every row
        # A decoder's layers over rows that see each other, behind keys and values of features. Not where they are
        # convolved, or have windows: these are counted from the root, so that all rows see the same.
        self.plain = not taps and not any(self.windows)
        for layer, window in zip(self.layers, self.windows, strict=True):
            layer.self_attn.sliding_window = window
        self.recurrent = kind == "rnn" and rank > 0
        self.markov_head = MarkovHead(vocab, drafted, rank, size, kind) if rank else None
        self.candidate_selector = Selector(vocab, selected, size, top_k) if selected else None
        self.confidence_head = None
        if weight := tensors.get(CONFIDENCE + "weight"):
            read = size + rank * (weight == (1, size + rank))  # a row's output, and maybe the token before
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(read, 1, bias=CONFIDENCE + "bias" in tensors)})
        kinds = {"DFlash 2": selected or taps, "DSpark": rank, "JetSpec": self.causal_head}
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
        head = self.confidence_head["proj"]
        if head.in_features > hidden.shape[2]:
            hidden = torch.cat([hidden, self.markov_head.markov_w1(before)], -1)
        return head(hidden)

    def store(self, features: Tensor, positions: Tensor, cache: Any) -> None:
        """Store every layer's keys and values of features [B, n, D] at text positions int64 [B, n]."""
        turns = self.turns(features, positions)
        for index, layer in enumerate(self.layers):
            attention = layer.self_attn
            heads = (len(features), features.shape[1], -1, attention.head_dim)
            keys = attention.k_norm(attention.k_proj(features).view(heads)).transpose(1, 2)
            values = attention.v_proj(features).view(heads).transpose(1, 2)
            cache.update(apply_rotary_pos_emb(keys, keys, *turns)[1], values, index)
