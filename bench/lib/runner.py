"""Runs the kernel cases: every contestant of every entry, found equal to the op's reference before it is timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.table import Op as TableOp

from .environment import environment
from .report import Report, Row
from .shapes import default_shapes, shape_named
from .timing import copy_bandwidth, time_call


@dataclass(frozen=True)
class Settings:
    """Points to measure. Empty sequences mean the case's own choice; ``None`` for backends and peers means all."""

    device: torch.device
    dtype: torch.dtype
    shapes: Sequence[str] = ()
    rows: Sequence[int] = ()
    prefixes: Sequence[int] = ()
    backends: Sequence[str] | None = None
    peers: Sequence[str] | None = None
    quick: bool = False
    seconds: float = 0.5  # for each measurement

    def shape_names(self) -> Sequence[str]:
        return self.shapes or default_shapes(self.device.type, self.quick)

    def pick(self, given: Sequence[int], quick: Sequence[int], cpu: Sequence[int], gpu: Sequence[int]) -> Sequence[int]:
        """The grid: what was given, else the default for this kind of run."""
        return given or (quick if self.quick else gpu if self.device.type == "cuda" else cpu)

    def wants_peer(self, name: str) -> bool:
        return self.peers is None or name in self.peers


@dataclass
class Op:
    """One operation at one point of a case's grid.

    Attributes:
        op: of the table; its implementations are the backends, the reference among them.
        call: the op with a backend: what it computed, a tensor or several.
        checked: the same on copies, where ``call`` works in place; or the part of it that can be compared.
        right: what it should compute; by default what the reference does.
        tolerance: by how much floats may differ; of other numbers none may.
        refused: why a backend does not take these tensors, if so.
        peers: others who do the same.
        shape, parameters: of the point.
        bytes_moved: the least that has to be read and written.
        operation: what is done; by default the op's name.
    """

    op: TableOp
    call: Callable[[str], Any]
    checked: Callable[[str], Any] | None = None
    right: Any = None
    tolerance: float = 0.0
    refused: Callable[[str], str | None] = lambda backend: None
    peers: Sequence[Contestant] = ()
    shape: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    bytes_moved: int = 0
    operation: str = ""

    def __post_init__(self) -> None:
        if self.right is None:  # before any other backend: ops may write into one storage
            self.right = [tensor.clone() for tensor in _tensors((self.checked or self.call)("reference"))]
        self.operation = self.operation or self.op.name

    def contestants(self, settings: Settings) -> Iterator[Contestant]:
        """Our backends, each with the reason why it cannot run here, and those peers that are wanted.

        Raises:
            ValueError: a backend that the op does not have.
        """
        known = self.op.implementations
        for name in known if settings.backends is None else settings.backends:
            if name not in known:
                raise ValueError(f"--backend: {name!r} is none of {', '.join(known)}")
            missing = unavailable_reason(name, settings.device) or self.refused(name)
            check = None if missing or self.checked is None else partial(self.checked, name)
            yield Contestant(name, None if missing else partial(self.call, name), missing, check=check)
        yield from (peer for peer in self.peers if settings.wants_peer(peer.name))

    def error(self, output: Any) -> float:
        """How far an output is from the right one: the largest difference of floats, of other numbers the places."""
        return sum(_difference(a, b) for a, b in zip(_tensors(output), _tensors(self.right), strict=True))

    def check(self, backend: str) -> None:
        """Nothing that is wrong is timed.

        Raises:
            RuntimeError: a backend's result is not the reference's.
        """
        wrong = self.error((self.checked or self.call)(backend))
        if not wrong <= self.tolerance:
            raise RuntimeError(f"{self.op.name} differs from its reference by {wrong:.3g}")


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).abs().max() if a.is_floating_point() else (a != b).sum())


def _tensors(output: Any) -> Sequence[Tensor]:
    return [output] if isinstance(output, Tensor) else output


@dataclass
class Contestant:
    """One way of doing an op's work.

    Attributes:
        name: the backend, or the peer's name.
        call: does the work once; ``None`` where it is missing.
        missing: why.
        peer: whether it is someone else's.
        setup_seconds: what had to be compiled or planned first.
        check: the same on copies, to be compared, where ``call`` works in place.
        alike: whether it computes what ours do.
    """

    name: str
    call: Callable[[], Any] | None = None
    missing: str | None = None
    peer: bool = False
    setup_seconds: float | None = None
    check: Callable[[], Any] | None = None
    alike: bool = True


@dataclass
class _Pace:
    """One line on stderr for every measurement, and no more than one a second."""

    last: float = field(default=0.0)

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now - self.last > 1.0:
            self.last = now
            print(text, file=sys.stderr, flush=True)


@torch.no_grad()
def run(case: ModuleType, settings: Settings) -> Report:
    """Measure a case: a module with ``NAME`` and ``entries(settings)``."""
    for name in settings.shapes:
        shape_named(name)
    pace = _Pace()
    report = Report(
        case=case.NAME,
        environment=environment(settings.device),
        copy_bandwidth=copy_bandwidth(settings.device, quick=settings.quick),
        dtype=str(settings.dtype).removeprefix("torch."),
        quick=settings.quick,
    )
    for op in case.entries(settings):
        for contestant in op.contestants(settings):
            where = [op.shape, *(f"{key} {value}" for key, value in op.parameters.items())]
            pace(f"{case.NAME}: {op.operation}: {', '.join(where)}: {contestant.name}")
            report.rows.append(measure(op, contestant, settings, report.copy_bandwidth))
    return report


def measure(op: Op, contestant: Contestant, settings: Settings, bandwidth: float) -> Row:
    """Time a contestant whose result is right; ``bandwidth`` of copying is what its bytes are held against.

    Raises:
        RuntimeError: one of ours is wrong. Whatever fails of a peer is why it is missing, but for a GPU that is lost.
    """
    row = Row(
        operation=op.operation,
        shape=op.shape,
        parameters=op.parameters,
        contestant=contestant.name,
        peer=contestant.peer,
        setup_seconds=contestant.setup_seconds,
        missing=contestant.missing,
    )
    if contestant.call is None:
        return row
    try:
        begin = time.perf_counter()
        output = contestant.call()
        if contestant.setup_seconds is not None:
            if settings.device.type == "cuda":
                torch.cuda.synchronize(settings.device)
            row.setup_seconds = contestant.setup_seconds + time.perf_counter() - begin
        if contestant.alike:
            row.max_error = op.error(output if contestant.check is None else contestant.check())
            if not row.max_error <= op.tolerance:
                raise RuntimeError(f"wrong result: error {row.max_error:.3g}, allowed {op.tolerance:.3g}")
        timing = time_call(contestant.call, settings.device, seconds=settings.seconds)
    except Exception as error:
        if not contestant.peer or isinstance(error, torch.AcceleratorError):
            raise
        row.missing = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        return row
    row.median, row.p20, row.p80 = timing.median, timing.p20, timing.p80
    row.samples, row.clock = timing.samples, timing.clock
    row.bytes_moved = op.bytes_moved
    row.bandwidth_fraction = op.bytes_moved / timing.median / bandwidth
    return row
