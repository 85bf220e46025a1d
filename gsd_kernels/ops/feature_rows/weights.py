"""The parameters that feature_rows reads."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..decoder_rows import DecoderWeights


@dataclass(frozen=True)
class FeatureWeights:
    """The parameters of an EAGLE-3 drafter, as they lie in the model; nothing is copied.

    Attributes:
        decoder: whose first layer has q, k and v of [outputs, 2 · hidden], for embedding and feature.
        feature_norm: [hidden], of the features.
        normed_residual: whether the residual begins as the normed feature; else as the feature.
    """

    decoder: DecoderWeights
    feature_norm: Tensor
    normed_residual: bool
