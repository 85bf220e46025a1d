"""How a GPU's time is taken: events, rotating copies, captured graphs, kernels, compilations. The GPU is replaced."""

from __future__ import annotations

import time

import pytest
import torch

from gsd_kernels_bench.gpu import graphs
from gsd_kernels_bench.lib import cold, compilations, timing

CPU = torch.device("cpu")


def test_copies_outgrow_the_cache(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("P", (), {"L2_cache_size": 50 << 20}))
    cuda = torch.device("cuda")
    assert [cold.copies_for(size << 20, cuda) for size in (1, 10, 100, 400)] == [64, 15, 2, 2]
    calls = []
    found = cold.time_rotating([lambda n=n: calls.append(n) for n in range(3)], CPU, seconds=0.0)
    assert calls == [0, 1, 2] * (len(calls) // 3) and found.samples >= 5 and found.clock == "rotating wall"
    assert found.median > 0


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


class FakeGraph:
    """Stands for ``torch.cuda.CUDAGraph``."""

    def __init__(self, keep_graph=False):
        self.kept, self.replayed = keep_graph, 0

    def capture_begin(self, pool=None, capture_error_mode="global"):
        self.pool_given = pool

    def capture_end(self):
        pass

    def instantiate(self):
        self.instantiated = True

    def raw_cuda_graph(self):
        assert self.kept, "its nodes are gone"
        return 7

    def replay(self):
        assert self.instantiated
        self.replayed += 1


def test_captured_graphs_are_counted_and_one_replay_is_profiled(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    nodes = iter([3, 9])
    monkeypatch.setattr(graphs, "count_nodes", lambda graph: next(nodes))
    with graphs.watched() as watch:
        small, large = (torch.cuda.CUDAGraph() for _ in range(2))
        for graph in (small, large):
            graph.capture_begin(pool=None, capture_error_mode="thread_local")
            graph.capture_end()
        watch.wants_profile = True
        for _ in range(2 * graphs.SETTLED):
            large.replay()
            small.replay()
    assert torch.cuda.CUDAGraph is FakeGraph
    assert [graph.nodes for graph in watch.graphs] == [3, 9]
    assert [graph.replays for graph in watch.graphs] == [small.replayed, large.replayed] == [6, 6], "none twice"
    assert watch.profiled["nodes"] == 9
    assert all(graph.capture_seconds > 0 for graph in watch.graphs)


def test_replays_are_timed_by_the_device(monkeypatch):
    ticks = iter(range(100))

    class Event:
        def record(self):
            self.at = next(ticks) ** 2

        def synchronize(self):
            self.done = True

        def elapsed_time(self, end):
            assert end.done
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    graph, replayed = graphs.Captured(0.1, 3), []
    for _ in range(3):
        graph.time(lambda: replayed.append(1))
    assert graph.as_dict() == {"capture_seconds": 0.1, "nodes": 3, "replays": 0, "replay_seconds": 5e-3}
    assert len(replayed) == 3 and graphs.Captured(0.1, 3).as_dict()["replay_seconds"] is None


def test_nodes_are_asked_of_the_driver(monkeypatch):
    class Driver:
        status = 0

        def cuGraphGetNodes(self, graph, nodes, number):
            assert graph.value == 7 and nodes is None
            number._obj.value = 1305
            return self.status

    monkeypatch.setattr(graphs.ctypes, "CDLL", lambda name: Driver())
    assert graphs.count_nodes(7) == 1305
    Driver.status = 1
    assert graphs.count_nodes(7) is None


def test_kernels_by_time():
    x = torch.randn(64, 64)
    table = graphs.kernel_table(lambda: [x @ x for _ in range(3)])
    assert table["clock"] == "host" and len(table["top"]) <= graphs.TOP
    assert [row for row in table["top"] if row[0] == "aten::mm" and row[1] == 3]
    assert [row[2] for row in table["top"]] == sorted((row[2] for row in table["top"]), reverse=True)


@pytest.mark.slow
def test_compilations_are_counted(tmp_path, monkeypatch):
    from triton import knobs

    from gsd_kernels_cli.kernel_report import compile_launches, shipped_cases

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    before = knobs.compilation.listener
    case = next(case for case in shipped_cases() if case.op == "commit_kv")
    with compilations.compilations() as found:
        begin = time.perf_counter()
        compile_launches(case.launch, 86)  # no other test compiles for it in this process
        seconds = time.perf_counter() - begin
    assert knobs.compilation.listener is before
    made = compilations.summary(found)
    assert made["compiled"] >= 1 and 0 < made["compile_seconds"] <= seconds
    assert "commit" in made["kernels"][0][0] and begin < found[0].at < begin + seconds
