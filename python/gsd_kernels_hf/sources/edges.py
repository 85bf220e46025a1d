"""Scores of what follows a token at a position of a block: edges, by which a lattice is more than its positions.

Drafters that predict all positions of a block at once know nothing of each other's choices. A head beside them scores
a token by its depth and the token before it, so every node of a graph that merges equal tokens of a depth gets exactly
what the head says, whatever path led there. DSpark's is a bias on all logits, DFlash 2's reorders the best few.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer


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

    @property
    def recurrent(self) -> bool:
        """Return whether it has a state."""
        return self.joint_proj is not None

    def begin(self, hidden: Tensor) -> Tensor:
        """The state before a block [B, 1, r], of any of its rows [B, 1, D]."""
        return hidden.new_zeros(len(hidden), 1, self.markov_w2.in_features)

    def forward(self, logits: Tensor, hidden: Tensor, before: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        """Logits of edges [B, W, V], and the state after them.

        Args:
            logits: [B, W, V], of a position by itself.
            hidden: [B, W, D], what they were made of.
            before: int64 [B, W], the token before.
            state: [B, W, r], of the path so far; ``None`` of a head without one.
        """
        embedded = self.markov_w1(before)
        if self.gate_proj is not None:
            embedded = embedded * self.gate_proj(torch.cat([hidden, embedded], -1)).sigmoid()
        if self.joint_proj is not None:
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
    state, found = edges.begin(hidden), []
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

    def forward(self, logits: Tensor, hidden: Tensor, before: Tensor) -> tuple[Tensor, None]:
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

    def before(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve rows [B, R, D] to what the part reads, beside it the δ for :meth:`after` [B, R, taps, groups]."""
        delta = self.kernel_projection(hidden).unflatten(-1, (2, self.taps, -1))
        return self.convolved(hidden, delta[:, :, 0], self.base_kernel[0]), delta[:, :, 1]

    def after(self, hidden: Tensor, delta: Tensor) -> Tensor:
        """The part's output [B, R, D], convolved."""
        return self.convolved(hidden, delta, self.base_kernel[1])

    def convolved(self, hidden: Tensor, delta: Tensor, base: Tensor) -> Tensor:
        """[B, R, D] with δ [B, R, taps, groups] and base [taps, D] → [B, R, D]."""
        found = torch.zeros_like(hidden)
        for tap in range(self.taps):
            shifted = nn.functional.pad(hidden, (0, 0, tap, 0))[:, : hidden.shape[1]]
            weight = base[tap] + delta[:, :, tap].repeat_interleave(self.group, -1)
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
        read, delta = self.attention_conv.before(self.input_layernorm(hidden))
        hidden = hidden + self.attention_conv.after(self.self_attn(read, **options)[0], delta)
        read, delta = self.mlp_conv.before(self.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.after(self.mlp(read), delta)
