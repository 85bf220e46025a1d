"""How a GPU's time is taken: events, rotating copies, captured graphs, kernels, compilations. The GPU is replaced."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gsd_kernels_bench.lib import cold, timing


class Queue:
    """A GPU that works behind a host which needs 20 µs a launch; both have a clock."""

    LAUNCH = 20e-6

    def __init__(self) -> None:
        self.host = self.device = 0.0

    def launch(self, seconds: float) -> None:
        self.host += self.LAUNCH
        self.device = max(self.device, self.host) + seconds

    def event(self, **_):
        return QueueEvent(self)


class QueueEvent:
    def __init__(self, queue: Queue) -> None:
        self.queue, self.at = queue, 0.0

    def record(self) -> None:
        self.at = max(self.queue.device, self.queue.host)

    def query(self) -> bool:
        return self.at <= self.queue.host

    def synchronize(self) -> None:
        self.queue.host = max(self.queue.host, self.at)

    def elapsed_time(self, end: QueueEvent) -> float:
        return 1e3 * (end.at - self.at)


@pytest.fixture
def queue(monkeypatch):
    queue = Queue()
    monkeypatch.setattr(torch.cuda, "Event", queue.event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queue.launch(cycles / 1.8e9))
    monkeypatch.setattr(timing, "flusher", lambda device: lambda: queue.launch(50e-6))
    for module in (timing, cold):
        monkeypatch.setattr(module, "replayable", lambda function, device: lambda: function())
    return queue


@pytest.mark.parametrize(("launches", "each"), [(1, 4e-6), (40, 3e-6), (2000, 1e-6)])
def test_no_time_of_the_host_lies_between_the_events(queue, launches, each):
    """On an idle GPU the first event comes before the host has launched anything."""
    call = lambda: [queue.launch(each) for _ in range(launches)]  # noqa: E731
    found = timing.time_call(call, torch.device("cuda"), seconds=0.0)
    assert found.median == pytest.approx(launches * each, rel=1e-6) and found.clock == "cuda graph"
    turns = cold.time_rotating([call] * 3, torch.device("cuda"), seconds=0.0)
    expected = launches * each
    if launches < 2000:  # 6,000 launches outlast the longest spin
        assert turns.median == pytest.approx(expected, rel=1e-6) and turns.clock == "rotating cuda graph"
    else:
        assert turns.median > 2 * expected and turns.clock == "rotating cuda graph, host included"


def test_a_call_that_waits_for_the_gpu_says_that_the_host_counts(queue):
    def call():
        queue.launch(4e-6)
        queue.host = max(queue.host, queue.device)

    found = timing.time_call(call, torch.device("cuda"), seconds=0.0)
    assert found.clock == "cuda graph, host included" and found.median > 4e-6


class Written(TorchDispatchMode):
    """Elements of the largest tensor that an operation writes."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.most = max([self.most, *(t.numel() for t in [found] if isinstance(t, torch.Tensor))])
        return found


def test_what_empties_the_cache_leaves_nothing_to_be_written_back(monkeypatch):
    properties = type("Properties", (), {"L2_cache_size": 4096})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    flush = timing.flusher(torch.device("cpu"))
    with Written() as written:
        flush()
    assert written.most == 1


@pytest.mark.parametrize(("device", "ways"), [("cpu", {"sum"}), ("cuda", {"sum", "product"})])
def test_a_floor_is_made_of_the_fastest_reading(monkeypatch, device, ways):
    """A sum reads some percent slower than cuBLAS, whose products the floor is for."""
    seconds = iter((0.02, 0.01))
    monkeypatch.setattr(timing, "time_call", lambda *_, **__: timing.Timing.of([next(seconds)], "wall"))
    own = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device, **how: own(*size, device="cpu", **how))
    found = timing.read_bandwidths(torch.device(device), quick=True)
    assert set(found) == {"read", *ways} and found["read"] == max(found[way] for way in ways)
