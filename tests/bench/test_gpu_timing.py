"""How a GPU's time is taken: events, rotating copies, captured graphs, kernels, compilations. The GPU is replaced."""

from __future__ import annotations

import pytest
import torch

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
