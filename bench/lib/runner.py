"""Runs the kernel cases: every contestant of every entry, found equal to the op's reference before it is timed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.table import Op as TableOp

from .environment import environment
from .report import SCHEMA, Columns, Missing, lacking, reason, table
from .shapes import CPU_SHAPES, GPU_SHAPES, QUICK_SHAPES, shape_named
from .timing import copy_bandwidth, time_call

T = TypeVar("T")


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
        return self.pick(self.shapes, QUICK_SHAPES, CPU_SHAPES, GPU_SHAPES)

    def pick(self, given: Sequence[T], quick: Sequence[T], cpu: Sequence[T], gpu: Sequence[T]) -> Sequence[T]:
        """The grid: what was given, else the default for this kind of run."""
        return given or (quick if self.quick else gpu if self.device.type == "cuda" else cpu)


Peer = Callable[[], Callable[[], Any]]
"""Makes ready, by compiling or planning, what does an op's work once; raises :class:`Missing` where it cannot."""


def ready(call: Callable[[], Any]) -> Peer:
    """A peer that has nothing to prepare."""
    return lambda: call


@dataclass
class Row:
    """One contestant at one point; times in seconds, ``None`` where it is missing."""

    operation: str
    shape: str
    parameters: dict[str, Any]
    contestant: str
    peer: bool = False
    median: float | None = None
    p20: float | None = None
    p80: float | None = None
    samples: int = 0
    clock: str | None = None
    bytes_moved: int | None = None
    bandwidth_fraction: float | None = None  # of the copy bandwidth measured in the same run
    max_error: float | None = None
    setup_seconds: float | None = None
    missing: str | None = None


@dataclass
class Report:
    """One run of one kernel case."""

    case: str
    environment: dict[str, Any]
    copy_bandwidth: float
    dtype: str
    quick: bool
    rows: list[Row] = field(default_factory=list)
    schema: int = SCHEMA

    def table(self) -> str:
        """A Markdown table of all measurements."""
        return table(self.measured(), OF_A_CASE)

    def measured(self) -> list[Row]:
        return [row for row in self.rows if row.median is not None]

    def missing(self) -> dict[str, str]:
        """Contestants without a single measurement, and why."""
        present = {row.contestant for row in self.measured()}
        return {row.contestant: row.missing for row in self.rows if row.contestant not in present and row.missing}


def micros(seconds: float) -> str:
    """Seconds as µs, ms or s with three digits."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"


def point(of: Row | Op) -> str:
    """Shape and parameters."""
    return ", ".join([of.shape, *(f"{name} {value}" for name, value in of.parameters.items())])


OF_A_CASE: Columns = {
    "": lambda row: f"{row.operation}, {point(row)}",
    "by": lambda row: row.contestant,
    "median": lambda row: micros(row.median),
    "p20–p80": lambda row: f"{micros(row.p20)}–{micros(row.p80)}",
    "of copy bandwidth": lambda row: f"{row.bandwidth_fraction:.2f}",
}


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
        peers: others who do the same, by name.
        alike: whether they compute what ours do, so that it can be compared.
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
    peers: Mapping[str, Peer] = field(default_factory=dict)
    alike: bool = True
    shape: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    bytes_moved: int = 0
    operation: str = ""

    def __post_init__(self) -> None:
        if self.right is None:  # before any other backend: ops may write into one storage
            self.right = [tensor.clone() for tensor in _tensors((self.checked or self.call)("reference"))]
        self.operation = self.operation or self.op.name

    def contestants(self, settings: Settings) -> Iterator[tuple[str, bool, Peer]]:
        """Our backends and the peers that are wanted: the name, whether it is a peer, and how it is made ready.

        Raises:
            ValueError: a backend that the op does not have.
        """
        known = self.op.implementations
        for name in known if settings.backends is None else settings.backends:
            if name not in known:
                raise ValueError(f"--backend: {name!r} is none of {', '.join(known)}")
            missing = unavailable_reason(name, settings.device) or self.refused(name)
            yield name, False, ready(partial(self.call, name)) if missing is None else lacking(missing)
        wanted = self.peers if settings.peers is None else settings.peers
        yield from ((name, True, peer) for name, peer in self.peers.items() if name in wanted)

    def check(self, output: Any) -> float:
        """How far an output is from the right one: the largest difference of floats, of other numbers the places.

        Raises:
            RuntimeError: too far; nothing that is wrong is timed.
        """
        wrong = 0.0
        for a, b in zip(_tensors(output), _tensors(self.right), strict=True):
            wrong += float((a.float() - b.float()).abs().max() if a.is_floating_point() else (a != b).sum())
        if not wrong <= self.tolerance:
            raise RuntimeError(f"{self.op.name}: wrong result: error {wrong:.3g}, allowed {self.tolerance:.3g}")
        return wrong


def _tensors(output: Any) -> Sequence[Tensor]:
    return [output] if isinstance(output, Tensor) else output


@torch.no_grad()
def run(name: str, case: Callable[[Settings], Iterable[Op]], settings: Settings) -> Report:
    """Measure a case by its name: what it gives for the settings."""
    for shape in settings.shapes:
        shape_named(shape)
    report = Report(
        case=name,
        environment=environment(settings.device),
        copy_bandwidth=copy_bandwidth(settings.device, quick=settings.quick),
        dtype=str(settings.dtype).removeprefix("torch."),
        quick=settings.quick,
    )
    for op in case(settings):
        for contestant in op.contestants(settings):
            print(f"{name}: {op.operation}: {point(op)}: {contestant[0]}", file=sys.stderr, flush=True)
            report.rows.append(measure(op, *contestant, settings, report.copy_bandwidth))
    return report


def measure(op: Op, name: str, peer: bool, make: Peer, settings: Settings, bandwidth: float) -> Row:
    """Time a backend, or a peer, whose result is right; ``bandwidth`` of copying is what its bytes are held against.

    Raises:
        RuntimeError: one of ours is wrong. Whatever fails of a peer is why it is missing, but for a GPU that is lost.
    """
    row = Row(op.operation, op.shape, op.parameters, name, peer)
    try:
        begin = time.perf_counter()
        call = make()
        output = call()
        if peer:
            if settings.device.type == "cuda":
                torch.cuda.synchronize(settings.device)
            row.setup_seconds = time.perf_counter() - begin
        elif op.checked is not None:
            output = op.checked(name)
        if op.alike or not peer:
            row.max_error = op.check(output)
        timing = time_call(call, settings.device, seconds=settings.seconds)
    except Exception as error:
        if isinstance(error, torch.AcceleratorError) or not (peer or isinstance(error, Missing)):
            raise
        row.missing = reason(error)
    else:
        vars(row).update(vars(timing), bytes_moved=op.bytes_moved)
        row.bandwidth_fraction = op.bytes_moved / timing.median / bandwidth
    return row
