"""Train heads that let a target draft for itself: what ``gsd-kernels train-heads`` does.

The target is frozen (Medusa-1, arXiv 2401.10774, section 2.2.1); its own distributions serve as labels at no cost,
since its hidden states are at hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from gsd_kernels_hf.sources.heads import DraftHeads

from .job import TrainingOptions, check_output_matrix, load_target, output_logits, run, stored_dtype
from .lessons import HEAD_WEIGHT
from .measure import Guessing
from .streams import mean_of


class HeadTraining(Guessing):
    """Heads that learn from their target.

    Raises:
        ValueError: blocks too short for so many heads, or a target that changes its logits after its output matrix.
    """

    kind = "heads"

    def __init__(
        self, options: TrainingOptions, target: PreTrainedModel, num_heads: int, num_layers: int, dtype: torch.dtype
    ) -> None:
        self.options, self.target, self.dtype, self.device = options, target, dtype, options.device
        self.guesses = num_heads
        self.module = DraftHeads.for_model(target, num_heads, num_layers=num_layers).to(options.weights)
        if options.length <= num_heads:
            raise ValueError(f"length: expected more than the {num_heads} heads, got {options.length}")
        self.identity = {"heads": num_heads, "layers": num_layers}
        check_output_matrix("draft heads", options, target)

    def hidden(self, tokens: Tensor) -> Tensor:
        """int64 [B, N] → [B, N, D], what the output matrix reads."""
        with torch.no_grad(), self.options.autocast():
            return self.target.base_model(tokens, use_cache=False).last_hidden_state

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] → [..., V] by the target's own output matrix."""
        return output_logits(self.options, self.target, states)

    def loss(self, windows: Tensor, counted: Tensor | None = None) -> Tensor:
        """Sum over heads k of 0.8^k times the mean over positions t whose token t + k + 2 counts of

        ``token_level`` · KL(target ‖ head) + (1 − ``token_level``) · −log head(token t + k + 2),

        the target's distribution being that for the same token, which it has from position t + k + 1.
        """
        heads, weight = self.module.num_heads, self.options.token_level
        places = windows.shape[1] - 1 - heads
        hidden = self.hidden(windows)  # [B, length + 1, D]
        states = self.module.states(hidden[:, :places].flatten(0, 1))  # [rows, heads, D]
        log_target = None
        if weight > 0:
            with torch.no_grad():
                log_target = self.logits(hidden).log_softmax(-1)  # [B, length + 1, V]
        total = states.new_zeros(())
        for k in range(heads):
            log_head = self.logits(states[:, k]).log_softmax(-1)  # [rows, V]
            loss = log_head.new_zeros(len(log_head))
            there = slice(k + 2, k + 2 + places)
            if log_target is not None:
                same = log_target[:, k + 1 : k + 1 + places].flatten(0, 1)
                loss = loss + weight * F.kl_div(log_head, same, reduction="none", log_target=True).sum(-1)
            if weight < 1:
                loss = loss + (1 - weight) * F.nll_loss(log_head, windows[:, there].flatten(), reduction="none")
            total = total + HEAD_WEIGHT**k * mean_of(loss, None if counted is None else counted[:, there].flatten())
        return total

    def guessed(self, windows: Tensor, first: int, places: int) -> Tensor:
        """See :meth:`Guessing.guessed`: one guess a head."""
        hidden = self.hidden(windows)[:, first : first + places]
        return self.logits(self.module.states(hidden.flatten(0, 1))).argmax(-1).view(*hidden.shape[:2], -1)

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
    dtype = stored_dtype(options.target)
    return run(options, target, tokenizer, HeadTraining(options, target, num_heads, num_layers, dtype), clock)
