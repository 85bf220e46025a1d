"""The parameters that feature_rows reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..decoder_rows import DecoderWeights


@dataclass(frozen=True)
class Projection:
    """The matrix that makes one vector of an embedding and a feature."""

    matrix: Tensor  # [hidden, 2 · hidden]
    token_norm: Tensor  # [hidden], of the embeddings
    bias: Tensor | None = None  # [hidden]
    feature_first: bool = False  # whether it reads the feature before the embedding


@dataclass(frozen=True)
class FeatureWeights:
    """The parameters of a drafter that reads features, as they lie in the model; nothing is copied.

    Attributes:
        decoder: its layers; with a norm and no projection the first one has q, k and v of [outputs, 2 · hidden], for
            embedding and feature.
        feature_norm: [hidden], of the features; ``None``: layers store keys and values of the features as they are, and
            rows come through ``decoder_rows``, as in a block drafter (DFlash, arXiv 2602.06036).
        normed_residual: without a projection, whether the residual begins as the normed feature; else as the feature.
        projection: of embedding and feature to what the first layer reads, as multi-token prediction has it; ``None``:
            the first layer reads both, as EAGLE-3's does.
    """

    decoder: DecoderWeights
    feature_norm: Tensor | None
    normed_residual: bool = False
    projection: Projection | None = None

    @property
    def token_norm(self) -> Tensor:
        """[hidden], of the embeddings."""
        return self.decoder.layers[0].input_norm if self.projection is None else self.projection.token_norm

    @cached_property
    def first(self) -> tuple[Tensor, bool, list[Tensor], bool]:
        """Of the operator's arguments those of embedding and feature."""
        p, nothing = self.projection, self.decoder.final_norm.new_empty(0)
        norm = nothing if self.feature_norm is None else self.feature_norm
        if p is None:
            return norm, self.normed_residual, [], False
        return norm, False, [p.matrix, p.token_norm, nothing if p.bias is None else p.bias], p.feature_first
