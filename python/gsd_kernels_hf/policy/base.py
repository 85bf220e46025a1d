"""What the decode loop asks of a policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from gsd_kernels import GraphConfig

from .acceptance import AcceptanceModel
from .row_selector import RowSelector

Profiles = Mapping[str, "tuple[np.ndarray, np.ndarray]"]
"""By pool: candidate probabilities after accepted nodes, and which were picked; [n, K] each."""


class Policy(Protocol):
    """Chooses the shape of every step of one generation.

    Attributes:
        acceptance: what is known of the sources, if the policy learns it: it wants profiles, and its calibration is
            written to the device before a step that drafts.
        row_selector: chooses which of a step's rows are forwarded, where the host may decide; ``None``: all.
    """

    acceptance: AcceptanceModel | None
    row_selector: RowSelector | None

    def shape(self) -> GraphConfig | None:
        """The shape of the next step; ``None`` is plain decoding."""

    def observe(
        self,
        profiles: Profiles,
        tokens: Sequence[int],
        *,
        rows: int,
        target_seconds: float = 0.0,
        other_seconds: float = 0.0,
    ) -> None:
        """After every step.

        Args:
            profiles: of a step that drafted; empty after a plain one.
            tokens: emitted by every sequence; 0 for one that was finished before.
            rows: that the target computed, of each sequence.
            target_seconds, other_seconds: of its forward, and of all else in the step; 0 where unknown.
        """

    def without_model(self, *, reuses: bool) -> Policy:
        """End, and what goes on where no source forwards a model any more; within the largest shapes.

        ``reuses``: whether a source proposes without a forward.
        """

    def end(self) -> None:
        """After the last step."""

    def largest_shapes(self) -> list[GraphConfig]:
        """What caches and buffers are sized for."""
