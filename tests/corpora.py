"""Small corpora on disk for tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from gsd_kernels_cli.corpus import build_corpus


def corpus_of(folder: Path, *texts: Tensor | list[int]) -> Path:
    """An index of token sequences, at ``folder``."""
    build_corpus(folder, [text.flatten().numpy() if isinstance(text, Tensor) else text for text in texts])
    return folder


def random_text(length: int, vocab: int = 97, seed: int = 0) -> Tensor:
    return torch.randint(3, vocab, (length,), generator=torch.Generator().manual_seed(seed))
