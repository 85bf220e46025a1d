"""How many rows a request gets: fewer with more requests, none beyond the root when the batch is full."""

from __future__ import annotations

from dataclasses import dataclass

FLEXIBLE = ("torch_native", "intel_amx", "flashinfer")
"""Attention backends of SGLang that take the number of rows from each step; others keep that of the start-up."""

CPU_ROWS, GPU_ROWS = 32, 256  # rows of a batch that cost little more than one: estimates, not measured with SGLang


@dataclass(frozen=True)
class RowPolicy:
    """Rows of each request in a step.

    Args:
        most: rows of a request at most, its root included: SGLang's ``--speculative-num-draft-tokens``.
        batch_rows: rows of all requests together that a step aims at.
        flexible: whether steps may have fewer rows than ``most`` at all.
        trims: whether rows that hold no token are left out too. Not where a graph was captured for ``most`` rows.
    """

    most: int
    batch_rows: int
    flexible: bool
    trims: bool

    def budget(self, requests: int) -> int:
        """Rows that each of ``requests`` requests may have; 1 is plain decoding."""
        if not self.flexible:
            return self.most
        return max(1, min(self.most, self.batch_rows // max(1, requests)))

    def used(self, budget: int, longest: int) -> int:
        """Rows of a step whose fullest request has ``longest`` rows that hold a token."""
        return max(1, min(budget, longest)) if self.trims else budget
