"""Which sources a generation goes without: those that forward a model and brought little of what was accepted.

Decided at the borders of generations, by counts alone: the sources of a session and of its captured steps are fixed,
and a source that comes back begins its text as in any other session. What is proposed changes the speed, never the
output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..sources.base import DraftSource
from ..sources.weights import SourceWeights

LITTLE = 0.2  # of what the best source brings that forwards a model
EVIDENCE = 64.0  # picks of the target that a source is judged by, at least
PATIENCE, MOST_PATIENCE = 256, 4096  # steps until a source is tried again


class Leaving:
    """Which sources are left out for now, and for how long."""

    def __init__(self) -> None:
        self.wait: dict[str, int] = {}  # steps that a source is still left out, by name
        self.patience: dict[str, int] = {}  # that the next leave lasts, of sources that were left out

    def staying(self, sources: Sequence[DraftSource]) -> list[DraftSource]:
        """Those of ``sources`` that the next generation takes; of those that forward a model, one at least."""
        found = [source for source in sources if source.name not in self.wait]
        # Calls that overlap may have left out one source each.
        return found if any(source.forwards for source in found) else list(sources)

    def observe(self, sources: Sequence[DraftSource], weights: Mapping[str, SourceWeights], steps: int) -> None:
        """Learn from a generation (waits for the device).

        Args:
            sources: that it took, in the order in which they were mixed.
            weights: what is known of them since, by name; of one that is left out it is forgotten, in place.
            steps: that it took.
        """
        self.wait = {name: left - steps for name, left in self.wait.items() if left > steps}
        dear = [source for source in sources if source.forwards]
        if len(dear) < 2:
            return
        brought, judged = shares_of(sources, weights)
        best = max(brought[source.name] for source in dear)
        for name in (source.name for source in dear if source.name in judged):
            if brought[name] >= LITTLE * best:
                self.patience.pop(name, None)
                continue
            self.wait[name] = patience = self.patience.get(name, PATIENCE)
            self.patience[name] = min(2 * patience, MOST_PATIENCE)
            # It could not show else that it has become better. The others are weighed against the first.
            for forgotten in [source.name for source in dear] if name == sources[0].name else [name]:
                weights[forgotten].forget()


def shares_of(
    sources: Sequence[DraftSource], weights: Mapping[str, SourceWeights]
) -> tuple[dict[str, float], set[str]]:
    """What each source brought of the picked tokens, and of which there is evidence enough.

    P = (1 − w) · P(sources before it) + w · P(this one), so a source brought its w times 1 − w of all after it.
    """
    brought: dict[str, float] = {}
    judged: set[str] = set()
    rest = 1.0
    for source in reversed(sources[1:]):
        picked, share = weights[source.name].learned()
        brought[source.name] = rest * share
        rest *= 1.0 - share
        if picked >= EVIDENCE:
            judged.add(source.name)
    brought[sources[0].name] = rest  # all others are weighed against it
    if any(source.forwards and source.name in judged for source in sources[1:]):
        judged.add(sources[0].name)
    return brought, judged
