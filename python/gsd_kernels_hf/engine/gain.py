"""An estimate of a plain step's time, where a call took none: by the costs that its policy learned."""

from __future__ import annotations

import numpy as np

from gsd_kernels.config import PLAIN

from .stats import GenerationStats


def estimate_plain_step(stats: GenerationStats, policy: object, cached: float) -> None:
    """Note what a plain step takes behind ``cached`` tokens (of all sequences), if the policy has timed any step."""
    experience = getattr(policy, "experience", None)  # of a policy that goes by costs, as the automatic ones do
    if experience is None or not experience.costs.steps:
        return
    costs, batch = experience.costs, stats.sequences
    target = costs.target_seconds(np.array([float(batch)]), cached)[0]
    stats.plain_seconds = float(target + costs.other_seconds(batch)[costs.index[PLAIN]])
    stats.plain_from = f"the costs learned from {costs.steps:,} steps of this pair"
