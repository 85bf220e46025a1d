"""A small decoder's forward over graph rows as one operator."""

from .api import DecoderWeights, decoder_rows

__all__ = ["DecoderWeights", "decoder_rows"]
