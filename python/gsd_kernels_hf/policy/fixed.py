"""One shape for every step."""

from __future__ import annotations

from gsd_kernels import GraphConfig

from .base import Observation, Plan


class FixedPolicy:
    """``config`` in every step; ``None`` is plain decoding."""

    def __init__(self, config: GraphConfig | None) -> None:
        self.config = config

    def plan(self) -> Plan:
        return Plan(self.config)

    def observe(self, seen: Observation) -> None:
        """Nothing is learned."""

    def without_model(self, *, reuses: bool) -> FixedPolicy:
        """The shape's levels without those of a model; where it has no others, as many are looked up."""
        config = self.config
        if config is None or not reuses:
            return FixedPolicy(None)
        depth, width = config.history_depth, config.history_width
        if not depth:
            depth, width = config.depth, config.width
        path = min(int(config.max_path or 0), depth)
        return FixedPolicy(config.replace(depth=0, history_depth=depth, history_width=width, max_path=path))

    def end(self) -> None:
        """Nothing is kept."""

    def largest_shapes(self) -> list[GraphConfig]:
        return [] if self.config is None else [self.config]
