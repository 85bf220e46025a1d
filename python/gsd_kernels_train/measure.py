"""How good guesses are before and after a training, and whether anything was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels_hf.progress import tracked

from .text import HeldOut

MEASURED_WINDOWS = 8


class Trainee:
    """A module in training.

    Attributes:
        kind: ``draft``, ``heads``, ``eagle3``, …
        module: what is trained.
        identity: what decides the result beside :class:`~gsd_kernels_train.job.TrainingOptions`, as JSON values.
        device: where the module lies.
    """

    kind: str
    module: nn.Module
    identity: dict[str, Any]
    device: torch.device

    def loss(self, windows: Tensor, counted: Tensor | None = None) -> Tensor:
        """Mean loss of int64 [windows, length + 1] on the device, of the guesses for tokens that count (bool alike)."""
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        """Write the result."""
        raise NotImplementedError

    @torch.no_grad()
    def measure(self, held_out: HeldOut) -> dict[str, Any]:
        """Measure on held-out text and on the target's own greedy continuations of it; JSON values by name."""
        self.module.eval()
        read, own = [], []
        with tracked("measuring", len(held_out.windows) + len(held_out.picks), "windows") as update:
            for part in held_out.windows.to(self.device).split(MEASURED_WINDOWS):
                read.append(self.of_text(part).cpu())
                update(len(read) * MEASURED_WINDOWS)
            for part in held_out.picks.to(self.device).split(MEASURED_WINDOWS):
                own.append(self.right(part, held_out.prefix - 1).cpu())
                update(len(held_out.windows) + len(own) * MEASURED_WINDOWS)
        return self.measures(torch.cat(read), torch.cat(own), held_out)

    def of_text(self, windows: Tensor) -> Tensor:
        """The measures of windows [B, N] of held-out text: [B, places, measures]."""
        raise NotImplementedError

    def right(self, windows: Tensor, first: int) -> Tensor:
        """Tell whether guesses are right: bool [B, places, …] of windows [B, N], from place ``first`` on."""
        raise NotImplementedError

    def measures(self, read: Tensor, own: Tensor, held_out: HeldOut) -> dict[str, Any]:
        """Sum up what :meth:`of_text` says of the text, and :meth:`right` of the target's own text."""
        raise NotImplementedError


class Guessing(Trainee):
    """A training of what guesses tokens after the next one.

    Attributes:
        guesses: tokens that one use of it guesses.
    """

    guesses: int

    def measures(self, read: Tensor, own: Tensor, held_out: HeldOut) -> dict[str, Any]:
        """Sum up first guesses.

        Returns:
            accuracy: by guess, how often it is the token of the text, where that counts. continuation_accuracy: the
            same where the target wrote the text (``None`` where it ended at once). accepted: guesses that a step of
            decoding those would accept.
        """
        depth = self.guesses
        lengths = (held_out.picked.sum(1) - depth).clamp(min=0)  # own: [texts, places, depth]
        counted = torch.arange(own.shape[1], device=lengths.device) < lengths[:, None]
        said = torch.ones_like(read)  # [windows, places, depth]
        if held_out.counted is not None:
            said = held_out.counted[:, 2:].unfold(1, depth, 1)[:, : read.shape[1]]
        return {
            "accuracy": [read[..., k][said[..., k]].double().mean().item() for k in range(depth)],
            "continuation_accuracy": own[counted].double().mean(0).tolist() if counted.any() else [None] * depth,
            "accepted": accepted_per_step(own, lengths),
        }

    def of_text(self, windows: Tensor) -> Tensor:
        return self.right(windows, 0)

    def right(self, windows: Tensor, first: int) -> Tensor:
        """Tell whether guesses are right: bool [B, places, guesses] of windows [B, N], from place ``first`` on.

        The guess for token i + 2 + k, made once the target has read token i, given that those before it were right.
        """
        places = windows.shape[1] - 1 - self.guesses - first
        if places < 1:
            return torch.zeros(len(windows), 0, self.guesses, dtype=torch.bool, device=windows.device)
        return self.guessed(windows, first, places) == windows[:, first + 2 :].unfold(1, self.guesses, 1)

    def guessed(self, windows: Tensor, first: int, places: int) -> Tensor:
        """First guesses from each of ``places`` places: target ids [B, places, guesses]."""
        raise NotImplementedError


def accepted_per_step(right: Tensor, lengths: Tensor) -> float | None:
    """Drafted tokens that greedy decoding of these texts accepts in a step, on average.

    Args:
        right: bool [texts, places, depth]; [:, i, k] whether the guess for token i + 1 + k, made when token i was
            the newest, is the target's.
        lengths: int [texts], places of each text that count.

    Returns:
        Between 0 and depth; ``None`` if no text has a place.
    """
    runs = right.long().cumprod(-1).sum(-1)
    accepted = steps = 0
    for row, length in zip(runs.tolist(), lengths.tolist(), strict=True):
        place = 0
        while place < length:
            accepted += row[place]
            steps += 1
            place += row[place] + 1
    return accepted / steps if steps else None


def is_better(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether some measures are better than before (a divergence lower, others higher), no more worse."""

    def values(measures: dict[str, Any]) -> list[float | None]:
        numbers: list[float | None] = []
        for name, value in measures.items():
            sign = -1 if name == "divergence" else 1
            numbers += [None if v is None else sign * v for v in (value if isinstance(value, list) else [value])]
        return numbers

    pairs = [
        (earlier, now)
        for earlier, now in zip(values(before), values(after), strict=True)
        if earlier is not None and now is not None
    ]
    better, worse = (sum(sign * (now - earlier) > 0 for earlier, now in pairs) for sign in (1, -1))
    return better > 0 and better >= worse
