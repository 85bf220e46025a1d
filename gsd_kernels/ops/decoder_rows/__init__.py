"""A decoder's forward over graph rows as one operator."""

from .api import decoder_rows
from .weights import DecoderWeights, LayerWeights

__all__ = ["DecoderWeights", "LayerWeights", "decoder_rows"]
