"""Training of drafters that are used level by level: the training-time test (EAGLE-3, arXiv 2503.01840, section 3.2).

Drafted tokens have no feature of the target's, so a drafter meets its own output in their place. In training it does so
too: it is unrolled some levels deep at every position of a text, each level reading the one before.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from .drafter import DrafterTraining
from .streams import mean_of

DEPTH = 5
"""Levels, by default."""

LEVEL_WEIGHT = 0.8
"""Weight of a level's loss, to the power of its number: deeper tokens are reached less often (as SpecForge has it)."""


class Unrolled:
    """Attention of all places of a text at once, level by level: the ``graph=`` argument of decoder layers.

    At level k a place stands for the token k places on. It sees the text up to itself, as level 0 read it, and itself
    at the levels before: what a path of drafted tokens sees.
    """

    def __init__(self) -> None:
        self.levels: dict[int, list[tuple[Tensor, Tensor]]] = defaultdict(list)  # by layer

    def attend(
        self,
        module: Any,
        query: Tensor,  # [B, Hq, T, D] of the next level
        key: Tensor,  # [B, Hkv, T, D]
        value: Tensor,
        attention_mask: Any,
        scaling: float | None,
        options: dict[str, Any],
    ) -> Tensor:
        """See :class:`~gsd_kernels_hf.model.attention.Attends`; a window is of the text and the levels.

        Raises:
            ValueError: the layer has a soft cap or sinks.
        """
        for name, what in (("softcap", "a soft cap"), ("s_aux", "sinks")):
            if options.get(name) is not None:
                raise ValueError(
                    f"kind: mtp trains a decoder layer of the target, and the attention of its {type(module).__name__} "
                    f"has {what}, which training does not know; train another kind"
                )
        scaling, window = query.shape[-1] ** -0.5 if scaling is None else scaling, options.get("sliding_window")
        group = query.shape[1] // key.shape[1]
        levels = self.levels[getattr(module, "layer_idx", 0)]
        levels.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
        (text_keys, text_values), *path = levels
        scores = query @ text_keys.transpose(-1, -2)  # [B, Hq, T, T]
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
        if window is not None:
            seen = seen.triu(1 + len(path) - window)
            path = path[-window:]
        scores = scores.masked_fill(~seen, -torch.inf)
        own = [(query * keys).sum(-1, keepdim=True).to(scores.dtype) for keys, _ in path]
        scores = torch.cat([scores, *own], -1) * scaling
        weights = scores.float().softmax(-1).to(scores.dtype) if scores.dtype == torch.bfloat16 else scores.softmax(-1)
        text, *shares = weights.split([query.shape[2], *[1] * len(path)], -1)
        out = text @ text_values
        for weight, (_, values) in zip(shares, path, strict=True):
            out = out + weight * values
        return out


class UnrolledTraining(DrafterTraining):
    """A drafter that learns from its target level by level, each from the output of the one before."""

    def levels(self, windows: Tensor, states: list[Tensor]) -> list[Tensor]:
        """Logits [B, places, draft vocabulary] of each level; at level k place t guesses token t + k + 2.

        Args:
            windows: int64 [B, N].
            states: the hidden states [B, N, D] that are fused.
        """
        places = windows.shape[1] - 1 - self.guesses
        rows, found = Unrolled(), []
        at = torch.arange(places, device=windows.device).expand(len(windows), -1)
        with self.options.autocast():
            vectors = self.module.fuse([state[:, :places] for state in states])
            for level in range(self.guesses):
                tokens = windows[:, level + 1 : level + 1 + places]
                hidden = self.module(self.embedded(tokens), vectors, at + level, rows)
                vectors, logits = self.outputs(hidden)
                found.append(logits.to(self.options.weights))
        return found

    def outputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of the module's outputs what the next level reads [B, places, D], and logits."""
        raise NotImplementedError

    def loss(self, windows: Tensor, counted: Tensor | None = None) -> Tensor:
        """Sum over levels k of 0.8^k times the mean of :meth:`DrafterTraining.divergence` over places that count."""
        states, log_target = self.read(windows)
        total, labels = log_target.new_zeros(()), self.labels(log_target)
        for level, logits in enumerate(self.levels(windows, states)):
            there = (slice(None), slice(level + 1, level + 1 + logits.shape[1]))
            loss = self.divergence(logits, labels.at(there), windows[:, 1:][there])
            total = total + LEVEL_WEIGHT**level * mean_of(loss, None if counted is None else counted[:, 1:][there])
        return total

    def guessed(self, windows: Tensor, first: int, places: int) -> Tensor:
        """See :meth:`DrafterTraining.guessed`; levels read the window's tokens, which are right where it counts."""
        states, _ = self.read(windows)
        guesses = [logits[:, first : first + places].argmax(-1) for logits in self.levels(windows, states)]
        picked = torch.stack(guesses, -1)
        return picked if self.ids is None else self.ids[picked]
