"""The choice of sources for the next generation: of those that forward a model, the ones that brought enough lately.

Decided at the borders of generations, by counts alone: the sources of a session and of its captured steps are fixed,
and a source that comes back begins its text as in any other session. What is proposed changes the speed, never the
output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .base import DraftSource
from .weights import SourceWeights

MIN_SHARE = 0.2
"""Of the picked tokens of the best source that forwards a model, at least, to be kept."""

MIN_PICKS = 64.0
"""Tokens picked by the target that a source is judged by, at least."""

FIRST_WAIT_STEPS = 256
"""Until a source is tried again; each time in a row twice as many."""

MAX_WAIT_STEPS = 4096
"""The most."""


class Retention:
    """A record of the sources that are left out for now, and for how long: exponential backoff, source by source."""

    def __init__(self) -> None:
        self.wait: dict[str, int] = {}  # steps left until a source is tried again, by name
        self.next_wait: dict[str, int] = {}  # of sources that were left out: steps, the next time

    def staying(self, sources: Sequence[DraftSource]) -> list[DraftSource]:
        """The ``sources`` that the next generation takes; of those that forward a model, one at least."""
        staying = [source for source in sources if source.name not in self.wait]
        # Calls that overlap may have left out one source each.
        return staying if any(source.forwards for source in staying) else list(sources)

    def observe(self, sources: Sequence[DraftSource], weights: Mapping[str, SourceWeights], steps: int) -> None:
        """Learn from a generation (waits for the device).

        Args:
            sources: that it took, in the order in which they were mixed.
            weights: what is known of them since, by name; of one that is left out it is forgotten, in place.
            steps: number of steps that it took.
        """
        self.wait = {name: left - steps for name, left in self.wait.copy().items() if left > steps}
        expensive = [source for source in sources if source.forwards]
        if len(expensive) < 2:
            return
        shares, judged = shares_of(sources, weights)
        best = max(shares[source.name] for source in expensive)
        for name in (source.name for source in expensive if source.name in judged):
            if shares[name] >= MIN_SHARE * best:
                self.next_wait.pop(name, None)
                continue
            self.wait[name] = wait = self.next_wait.get(name, FIRST_WAIT_STEPS)
            self.next_wait[name] = min(2 * wait, MAX_WAIT_STEPS)
            # Else it could not show that it has become better. The others' weights are relative to the first source.
            for forgotten in [source.name for source in expensive] if name == sources[0].name else [name]:
                weights[forgotten].forget()


def shares_of(
    sources: Sequence[DraftSource], weights: Mapping[str, SourceWeights]
) -> tuple[dict[str, float], set[str]]:
    """Each source's share of the picked tokens, and the names of those with at least :data:`MIN_PICKS` of evidence.

    P = (1 − w) · P(sources before it) + w · P(this one), so a source's share is its w times 1 − w of all after it.
    """
    shares: dict[str, float] = {}
    judged: set[str] = set()
    rest = 1.0
    for source in reversed(sources[1:]):
        picked, share = weights[source.name].learned()
        shares[source.name] = rest * share
        rest *= 1.0 - share
        if picked >= MIN_PICKS:
            judged.add(source.name)
    shares[sources[0].name] = rest  # the others' weights are relative to it
    if any(source.forwards and source.name in judged for source in sources[1:]):
        judged.add(sources[0].name)
    return shares, judged
