"""A step's report to the host: one tensor, read once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..model import replay
from ..records import DecodeState, report_sizes


class HostReport(NamedTuple):
    """A step in the host's memory.

    Attributes:
        done: of every sequence.
        tokens: that each emitted.
        counted: nodes, merges and accepted merges so far, of a step that another one followed unheard.
    """

    done: Sequence[bool]
    tokens: Sequence[list[int]]
    counted: list[int] | None = None

    @property
    def counts(self) -> list[int]:
        """Tokens that every sequence gained."""
        return [len(tokens) for tokens in self.tokens]


@dataclass(frozen=True)
class ReportOnItsWay:
    """A step on its way to the host.

    Attributes:
        report: the step.
        whole, counts: in the host's memory, once ``event`` is over.
        event: behind the step and the copies.
    """

    report: StepReport
    whole: Tensor
    counts: Tensor
    event: torch.cuda.Event

    def read(self) -> HostReport:
        """Wait for the step, and for nothing behind it."""
        self.event.synchronize()
        return self.report.heard(self.whole)._replace(counted=self.counts.tolist())


@dataclass(frozen=True)
class StepReport:
    """A step on the device, for the host.

    Attributes:
        whole: int32 [n]: ``DecodeState.report``.
        batch, width: sequences, and places for emitted tokens.
    """

    whole: Tensor
    batch: int
    width: int

    @classmethod
    def of(cls, state: DecodeState) -> StepReport:
        """The report of a state, in its own storage."""
        return cls(state.report, *state.emitted.shape)

    def read(self) -> HostReport:
        """Wait for the step, and bring it to the host in one copy."""
        return self.heard(self.whole.cpu())

    def send(self, counts: Tensor) -> ReportOnItsWay:
        """Queue its copy to the host behind the step, before the next one writes the same storage.

        ``counts``: of the session, int64 [n], as they are behind the step.
        """
        copies = [replay.send(tensor) for tensor in (self.whole, counts)]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.whole.device))
        return ReportOnItsWay(self, copies[0], copies[1], event)

    def heard(self, whole: Tensor) -> HostReport:
        """The step out of ``whole``, as it is in the host's memory."""
        sizes = report_sizes(self.batch, self.width)
        numbers = iter(whole.tolist())  # one call, where a tensor for each part would be ten
        flags, counts, emitted = (list(islice(numbers, part)) for part in sizes)
        done = [bool(flags[i // 4] >> i % 4 * 8 & 255) for i in range(self.batch)]
        tokens = [emitted[i * self.width : i * self.width + count] for i, count in enumerate(counts)]
        return HostReport(done, tokens)
