"""Records that the ops of this folder return."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

NO_NODE = -2
"""The node of a row that was not accepted; −1 is a frontier's padding."""


class FedRows(NamedTuple):
    """Rows as a model reads them."""

    ids: Tensor  # int64 or int32 [B, R]; 0 for tokens that are not in its vocabulary
    places: Tensor  # the same dtype; positions in the cache
    positions: Tensor  # the same dtype; positions in the text, padding excluded
    depths: Tensor  # int32 [B, R]; text position minus kv_len
    after: Tensor  # int32 [B, R]; index in the text of the token after each row


class Chain(NamedTuple):
    """The tokens that a cache lacks, as E rows; right-aligned, so that the last token is the last row."""

    kv_len: Tensor  # int32 [B]; positions of the cache before them
    token_ids: Tensor  # int32 [B, E]; 0 for padding
    slots: Tensor  # int32 [B, E]; cache position minus kv_len; padding rows write above the chain
    depths: Tensor  # int32 [B, E]
    ancestor_mask: Tensor  # int32 [B, E, ceil(E/32)]
    node_depths: Tensor  # int32 [B, E]; of the slots
