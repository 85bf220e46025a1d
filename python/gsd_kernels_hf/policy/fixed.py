"""One shape for all steps."""

from __future__ import annotations

from gsd_kernels import GraphConfig

from ..records import Verified


class Fixed:
    """The shape that the user chose; ``None`` is plain decoding."""

    def __init__(self, config: GraphConfig | None) -> None:
        self.config = config

    def largest_shapes(self) -> list[GraphConfig]:
        """What caches and buffers are sized for."""
        return [] if self.config is None else [self.config]

    def begin(self, session: object) -> None:
        """Nothing is needed."""

    def shape(self) -> GraphConfig | None:
        """The shape of the next step."""
        return self.config

    def observe(self, verified: Verified, tokens: list[int]) -> None:
        """Nothing is learned."""
