"""The data of one speculative step: the token graph, its unrolled rows, what was accepted.

Every tensor is allocated once and has a static shape; lengths live on the device. Batch comes first. ``B`` batch,
``N`` node capacity, ``K`` branch, ``W`` frontier width, ``R`` rows, ``C`` :data:`~gsd_kernels.config.MAX_CONTEXT`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from .config import MAX_CONTEXT, GraphConfig

WORD_BITS = 32


def num_words(bits: int) -> int:
    """32-bit words that hold ``bits`` mask bits."""
    return (bits + WORD_BITS - 1) // WORD_BITS


def pack_bits(mask: Tensor) -> Tensor:
    """bool [..., n] → int32 [..., ceil(n/32)]; bit j of word w is element 32·w + j."""
    n = mask.shape[-1]
    words = num_words(n)
    padded = torch.nn.functional.pad(mask, (0, words * WORD_BITS - n))
    weights = torch.ones((), dtype=torch.int64, device=mask.device) << torch.arange(WORD_BITS, device=mask.device)
    packed = (padded.unflatten(-1, (words, WORD_BITS)).to(torch.int64) * weights).sum(-1)  # [..., words], < 2**32
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def unpack_bits(words: Tensor, n: int) -> Tensor:
    """int32 [..., ceil(n/32)] → bool [..., n]; the inverse of :func:`pack_bits`."""
    shifts = torch.arange(WORD_BITS, device=words.device, dtype=torch.int32)
    bits = (words.unsqueeze(-1) >> shifts) & 1  # an arithmetic shift keeps every bit's value
    return bits.flatten(-2)[..., :n].to(torch.bool)


class Record:
    """A dataclass of tensors."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All storage, in field order; of a :class:`TokenGraph` that is the order of ``GRAPH`` (ops/table.py)."""
        return tuple(vars(self).values())


@dataclass
class TokenGraph(Record):
    """Drafted continuations of the root as a directed acyclic graph; edges run from smaller to larger node ids.

    Node 0, the root, is the last emitted token. A node has one primary parent, the edge that it was drafted on, and
    any number of incoming merge edges. Written by :func:`gsd_kernels.merge`, read by :func:`gsd_kernels.flatten`.
    """

    token_ids: Tensor  # int32 [B, N]
    parents: Tensor  # int32 [B, N]; primary parent, −1 for the root
    depths: Tensor  # int32 [B, N]; length of the primary path, 0 for the root
    scores: Tensor  # float32 [B, N]; sum of log-probabilities along the primary path
    contexts: Tensor  # int32 [B, N, C]; tokens before the node, nearest first, −1 where the text begins
    expanded: Tensor  # bool [B, N]; has been on a frontier
    ancestor_mask: Tensor  # int32 [B, N, words]; draft-cache slots on the primary path, own slot included
    edge_targets: Tensor  # int32 [B, N, K]; child in candidate order, −1 for none
    edge_log_probs: Tensor  # float32 [B, N, K]
    num_nodes: Tensor  # int32 [B]
    num_merges: Tensor  # int32 [B]; merge edges so far

    @classmethod
    def empty(cls, batch: int, config: GraphConfig, device: torch.device | str) -> TokenGraph:
        """Storage for graphs of ``config``'s budgets. Call :meth:`reset` before use."""
        n, k, words = config.node_capacity, config.branch, max(1, num_words(config.draft_slots))

        def new(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=new(batch, n),
            parents=new(batch, n),
            depths=new(batch, n),
            scores=new(batch, n, dtype=torch.float32),
            contexts=new(batch, n, MAX_CONTEXT),
            expanded=new(batch, n, dtype=torch.bool),
            ancestor_mask=new(batch, n, words),
            edge_targets=new(batch, n, k),
            edge_log_probs=new(batch, n, k, dtype=torch.float32),
            num_nodes=new(batch),
            num_merges=new(batch),
        )

    def reset(self, root_tokens: Tensor, emitted_tail: Tensor) -> None:
        """Make the graph the root alone, in place.

        Args:
            root_tokens: int [B], the last emitted token.
            emitted_tail: int [B, C], the tokens before it, nearest first, −1 where the text begins. Merge contexts run
                on into them.
        """
        self.token_ids.zero_()
        self.token_ids[:, 0] = root_tokens
        self.parents.fill_(-1)
        self.depths.zero_()
        self.scores.zero_()
        self.contexts.fill_(-1)
        self.contexts[:, 0] = emitted_tail
        self.expanded.zero_()
        self.ancestor_mask.zero_()
        self.edge_targets.fill_(-1)
        self.edge_log_probs.zero_()
        self.num_nodes.fill_(1)
        self.num_merges.zero_()

    @property
    def capacity(self) -> int:
        return self.token_ids.shape[1]

    @property
    def branch(self) -> int:
        return self.edge_targets.shape[2]

    def root_frontier(self) -> Tensor:
        """The first frontier: the root of every graph. int32 [B, 1]."""
        return torch.zeros_like(self.token_ids[:, :1])

    def clone(self) -> TokenGraph:
        return TokenGraph(*(t.clone() for t in self.tensors()))


@dataclass
class Frontier(Record):
    """The nodes that the next draft forward expands, with all that the forward needs. −1 ids pad to the width."""

    node_ids: Tensor  # int32 [B, W]
    token_ids: Tensor  # int32 [B, W]; 0 for padding
    depths: Tensor  # int32 [B, W]; primary depth, 1 for padding
    ancestor_mask: Tensor  # int32 [B, W, words]; own slot included; only the own slot for padding


@dataclass
class Rows(Record):
    """The graph unrolled: a tree whose row i is one path of the graph; row 0 is the root; parents come first."""

    token_ids: Tensor  # int32 [B, R]; 0 for padding
    parent_rows: Tensor  # int32 [B, R]; −1 for the root and for padding
    depths: Tensor  # int32 [B, R]; 0 for padding
    ancestor_mask: Tensor  # int32 [B, R, ceil(R/32)]; bit j: row j lies on the path, the row itself included
    node_ids: Tensor  # int32 [B, R]; −1 for padding
    scores: Tensor  # float32 [B, R]; sum of log-probabilities along this path, −inf for padding
    num_rows: Tensor  # int32 [B]

    def first(self, count: int) -> Rows:
        """The first ``count`` rows, which hold no other row's child."""
        if count == self.token_ids.shape[1]:
            return self
        kept = {f.name: getattr(self, f.name)[:, :count].contiguous() for f in fields(self) if f.name != "num_rows"}
        kept["ancestor_mask"] = kept["ancestor_mask"][..., : num_words(count)].contiguous()
        return Rows(**kept, num_rows=self.num_rows.clamp(max=count))


@dataclass
class Acceptance(Record):
    """The part that the target accepts: a path of rows from the root, and the token that it picked behind it."""

    accepted_rows: Tensor  # int32 [B, max_path + 1]; −1 padded
    num_accepted: Tensor  # int32 [B]; rows on the path, the root included; 0 for a finished sequence
    next_token: Tensor  # int32 [B]; the bonus token, which becomes the next root
