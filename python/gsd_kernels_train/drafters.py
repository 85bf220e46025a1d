"""Train drafters that read a target's hidden states: what ``gsd-kernels train-drafter`` does.

The result is written in the layout that others publish and serve, and read back by
:func:`gsd_kernels_hf.sources.load.load_drafter`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gsd_kernels_hf.model.properties import vocabulary

from .dflash import DFlashTraining
from .drafter import DrafterOptions, DrafterTraining
from .eagle3 import Eagle3Training
from .job import TrainingOptions, load_target, run
from .mtp import MtpTraining
from .text import TrainingText, read_text

LARGEST_DRAFT_VOCABULARY = 32000
"""Default draft vocabulary of EAGLE-3 at most, as published ones have it."""


def frequent_tokens(tokens: np.ndarray, vocabulary_size: int, count: int) -> Tensor:
    """The ``count`` most frequent ids in ascending order, int64; of equally frequent ones the lower."""
    counts = np.bincount(tokens, minlength=vocabulary_size)[:vocabulary_size]
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int64))


def trainee_of(
    options: TrainingOptions,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DrafterOptions,
    text: TrainingText,
) -> DrafterTraining:
    """The training of a kind."""
    if drafter.kind == "mtp":
        return MtpTraining(options, target, drafter)
    if drafter.kind != "eagle3":
        return DFlashTraining(options, target, drafter, tokenizer)
    size = vocabulary(target)
    count = min(size, LARGEST_DRAFT_VOCABULARY) if drafter.draft_vocabulary is None else drafter.draft_vocabulary
    if count > size:
        raise ValueError(f"draft_vocabulary: expected at most the target's {size} tokens, got {count}")
    learned = text.training.tokens if text.training.counted is None else text.training.tokens[text.training.counted]
    return Eagle3Training(options, target, drafter, frequent_tokens(learned, size, count))


def train_drafter(drafter: DrafterOptions, options: TrainingOptions) -> dict[str, Any]:
    """Train a drafter by ``options``; the report that ``training.json`` holds.

    Raises:
        ValueError: options, text or a target that cannot be used, by name.
        OSError: a file or checkpoint cannot be read.
        RuntimeError: the loss is not finite, or the minutes were over before one step was done.
    """
    clock = options.clock()
    target, tokenizer = load_target(options)
    text = read_text(options, tokenizer, clock)
    return run(options, target, tokenizer, trainee_of(options, target, tokenizer, drafter, text), clock, text)
