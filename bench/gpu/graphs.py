"""CUDA graphs that are made while something runs: seconds of capturing, nodes, replays, and one replay by kernel.

And the kernels that Triton compiles meanwhile.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

TOP = 20  # kernels of a profile
SETTLED = 3  # replays of a graph before the one that is profiled


@dataclass
class Captured:
    """One captured graph; ``events``: before and after every replay."""

    capture_seconds: float
    nodes: int | None
    replays: int = 0
    events: list[tuple[Any, Any]] = field(default_factory=list, repr=False)

    def time(self, replay: Callable[[], None]) -> None:
        """Replay between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        replay()
        end.record()
        self.events.append((begin, end))

    def as_dict(self) -> dict[str, Any]:
        """Its numbers; ``replay_seconds``: of the device, the median of the replays so far."""
        seconds = [begin.elapsed_time(end) / 1e3 for begin, end in self.events if end.synchronize() is None]
        numbers = {name: value for name, value in vars(self).items() if name != "events"}
        return numbers | {"replay_seconds": statistics.median(seconds) if seconds else None}


@dataclass
class Watch:
    """The graphs that were captured, and a profile of the one with most nodes, taken once it has settled."""

    graphs: list[Captured] = field(default_factory=list)
    wants_profile: bool = False
    profiled: dict[str, Any] | None = None

    def replay(self, graph: Captured, replay: Callable[[], None]) -> None:
        """Replay, and profile that where it is due."""
        graph.replays += 1
        due = self.wants_profile and self.profiled is None and graph.replays > SETTLED
        if due and (graph.nodes or 0) >= max(other.nodes or 0 for other in self.graphs if other.replays):
            self.profiled, _ = kernel_table(replay)
            self.profiled["nodes"] = graph.nodes
        else:
            replay()


def kernel_table(call: Callable[[], None]) -> tuple[dict[str, Any], list[tuple[str, float]]]:
    """The kernels of one call with the most device time: [name, launches, seconds], and all of them together.

    Beside the table all launches, in their order: name and seconds.
    """
    on_gpu = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        call()
        if on_gpu:
            torch.cuda.synchronize()
    attribute = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    kept, ordered = (
        [e for e in events if not on_gpu or e.device_type == DeviceType.CUDA]
        for events in (profiler.key_averages(), profiler.events())
    )
    rows = [[e.key, e.count, getattr(e, attribute) / 1e6] for e in kept]
    rows = sorted((row for row in rows if row[2] > 0), key=lambda row: -row[2])
    total = {"launches": sum(row[1] for row in rows), "seconds": sum(row[2] for row in rows), "kinds": len(rows)}
    ordered.sort(key=lambda e: e.time_range.start)
    launches = [(e.name, getattr(e, attribute) / 1e6) for e in ordered]
    return {**total, "clock": "device" if on_gpu else "host", "top": rows[:TOP]}, launches


def count_nodes(graph: int) -> int | None:
    """Number of nodes of a captured ``cudaGraph_t``, asked of the driver; ``None`` where it does not answer."""
    number = ctypes.c_size_t()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    status = driver.cuGraphGetNodes(ctypes.c_void_p(graph), None, ctypes.byref(number))
    return number.value if status == 0 else None


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch all graphs that are captured inside, whoever captures them through ``torch.cuda.CUDAGraph``: on a GPU."""
    watch, real = Watch(), torch.cuda.CUDAGraph
    if not torch.cuda.is_available():
        yield watch
        return
    kernel_table(lambda: None)  # the profiler sees kernels of graphs that were captured after its first use only

    class Watched(real):  # type: ignore[misc, valid-type]
        def __init__(self, keep_graph: bool = False) -> None:
            super().__init__(True)  # else its nodes are gone after capturing

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            self.begin = time.perf_counter()
            super().capture_begin(*args, **kwargs)

        def capture_end(self) -> None:
            super().capture_end()
            self.instantiate()
            watch.graphs.append(Captured(time.perf_counter() - self.begin, count_nodes(self.raw_cuda_graph())))
            self.found = watch.graphs[-1]

        def replay(self) -> None:
            watch.replay(self.found, lambda: self.found.time(super(Watched, self).replay))

    with patch.object(torch.cuda, "CUDAGraph", Watched):
        yield watch


Compilation = tuple[str, float, bool]
"""One kernel that was made ready: its name, the seconds that took, and whether it was read from the cache on disk."""


@contextmanager
def compilations() -> Iterator[list[Compilation]]:
    """A list that grows by every kernel that Triton compiles inside; it stays empty without Triton."""
    compiled: list[Compilation] = []
    try:
        from triton import knobs
    except ImportError:
        yield compiled
        return

    def listener(*, src: Any, metadata: dict[str, Any], metadata_group: Any, times: Any, cache_hit: bool) -> None:
        compiled.append((str(metadata.get("name") or src), times.total / 1e6, cache_hit))

    with patch.object(knobs.compilation, "listener", listener):
        yield compiled


def summary(found: list[Compilation]) -> dict[str, Any]:
    """Counts and seconds, and the kernels that were compiled with the seconds of each."""
    made = sorted(((kernel, seconds) for kernel, seconds, cached in found if not cached), key=lambda of: -of[1])
    return {
        "compiled": len(made),
        "compile_seconds": sum(seconds for _, seconds in made),
        "read_from_cache": len(found) - len(made),
        "cache_seconds": sum(seconds for _, seconds, cached in found if cached),
        "kernels": [[kernel, round(seconds, 3)] for kernel, seconds in made],
    }
