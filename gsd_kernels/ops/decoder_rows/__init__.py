"""A decoder's forward over graph rows as one operator."""

from .api import DecoderWeights, LayerWeights, decoder_rows

__all__ = ["DecoderWeights", "LayerWeights", "decoder_rows"]
