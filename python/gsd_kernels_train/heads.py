"""Train heads that let a target draft for itself: what ``gsd-kernels train-heads`` does.

The target is frozen (Medusa-1, arXiv 2401.10774, section 2.2.1); its own distributions serve as labels at no cost,
since its hidden states are at hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels_hf.sources.heads import DraftHeads

from .job import TrainingOptions, check_output_matrix, load_target, output_logits, run
from .unrolled import UnrolledTraining


class HeadTraining(UnrolledTraining):
    """Heads that learn from their target: levels that all read its last hidden state, and none the one before.

    Raises:
        ValueError: blocks too short for so many heads, or a target that changes its logits after its output matrix.
    """

    kind = "heads"

    def __init__(self, options: TrainingOptions, target: PreTrainedModel, num_heads: int, num_layers: int) -> None:
        super().__init__(options, target, {"heads": num_heads, "layers": num_layers})
        self.guesses = num_heads
        self.module = DraftHeads.for_model(target, num_heads, num_layers=num_layers).to(options.weights)
        if options.length <= num_heads:
            raise ValueError(f"length: expected more than the {num_heads} heads, got {options.length}")
        check_output_matrix("draft heads", options, target)

    @torch.no_grad()
    def read(self, windows: Tensor) -> tuple[list[Tensor], Tensor]:
        """The last hidden state [B, N, D], which the output matrix reads, and the target's log-probabilities."""
        with self.options.autocast():
            hidden = self.target.base_model(windows, use_cache=False).last_hidden_state
        return [hidden], output_logits(self.options, self.target, hidden).log_softmax(-1)

    def levels(self, windows: Tensor, states: list[Tensor]) -> list[Tensor]:
        """See :meth:`UnrolledTraining.levels`: a level is a head."""
        places = windows.shape[1] - 1 - self.guesses
        read = self.module.states(states[0][:, :places].flatten(0, 1))  # [rows, heads, D]
        heads = (output_logits(self.options, self.target, read[:, k]) for k in range(self.guesses))
        return [logits.unflatten(0, (len(windows), places)) for logits in heads]

    def save(self, folder: Path) -> None:
        self.module.to(self.dtype).save_pretrained(folder)
        self.module.to(self.options.weights)


def train_heads(num_heads: int, num_layers: int, options: TrainingOptions) -> dict[str, Any]:
    """Train heads by ``options``; the report that ``training.json`` holds.

    Raises:
        ValueError: options, text or a target that cannot be used, by name.
        OSError: a file or checkpoint cannot be read.
        RuntimeError: the loss is not finite, or the minutes were over before one step was done.
    """
    clock = options.clock()
    target, tokenizer = load_target(options)
    return run(options, target, tokenizer, HeadTraining(options, target, num_heads, num_layers), clock)
