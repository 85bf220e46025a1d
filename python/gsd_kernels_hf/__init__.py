"""Hugging Face bindings of gsd_kernels. Private: import what you need from :mod:`gsd_kernels`."""

from __future__ import annotations

from .decoding import GraphDecoder, GraphGenerateOutput, StepRecord
from .generation import generate, patch, unpatch
from .stats import GenerationStats

__all__ = ["GenerationStats", "GraphDecoder", "GraphGenerateOutput", "StepRecord", "generate", "patch", "unpatch"]
