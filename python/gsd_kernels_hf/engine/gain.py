"""An estimate of a plain step's time, where a call took none: by the costs that its policy learned."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from gsd_kernels.config import PLAIN

from .stats import GenerationStats


@runtime_checkable
class LearnsCosts(Protocol):
    """A policy that goes by costs, as the automatic ones do.

    Attributes:
        experience: has ``costs``, of all steps of the pair on this machine.
    """

    experience: Any


def estimate_plain_step(stats: GenerationStats, policy: object, cached: float) -> None:
    """Note what a plain step takes behind ``cached`` tokens (of all sequences), if the policy has timed any step."""
    if not isinstance(policy, LearnsCosts) or not policy.experience.costs.steps:
        return
    costs, batch = policy.experience.costs, stats.sequences
    target = costs.target_seconds(np.array([float(batch)]), cached)[0]
    stats.plain_seconds = float(target + costs.other_seconds(batch)[costs.index[PLAIN]])
    stats.plain_from = f"the costs learned from {costs.steps:,} steps of this pair"
