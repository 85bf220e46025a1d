"""Work of a GPU as CUDA graphs: captured one at a time on one stream a device, replayed in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


def is_gpu(device: torch.device) -> bool:
    """Whether work on ``device`` can be captured, and is timed by events."""
    return device.type == "cuda"


def wait(device: torch.device) -> None:
    """Wait for what this thread has queued on a GPU.

    Not for the whole device: that fails while another thread captures there, and spoils the capture.
    """
    if is_gpu(device):
        torch.cuda.current_stream(device).synchronize()


class CaptureLane:
    """What all graphs of one GPU share: a stream to capture on, a lock round captures, and the order of replays.

    PyTorch's own default is one stream for the process, of the GPU that was current when it was first needed. Two
    captures on one stream would end up in one graph, and a capture begins by waiting for the device, which fails while
    another stream of it is captured. Graphs captured on one stream share the workspace of cuBLAS, so replays on several
    streams (of threads with streams of their own) wait for each other on the GPU.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self._capturing, self._turn = threading.Lock(), threading.Lock()
        self._replayed = torch.cuda.Event()  # behind the last replay
        self._replayed_on: torch.cuda.Stream | None = None

    def capture(self, function: Callable[[], Any], pool: Any = None) -> tuple[Graph, Any]:
        """Record what ``function`` does on the GPU, without running it.

        Args:
            function: works in storage that outlives the graph, and never waits for the GPU.
            pool: memory to share with graphs that never run at the same time; ``None``: of its own.

        Returns:
            The graph, and what ``function`` returned, whose tensors every replay writes.

        Raises:
            RuntimeError: something in it cannot be captured.
        """
        here = torch.cuda.current_stream(self.device)
        # The stream again, because PyTorch leaves the thread on the captured one where a capture fails.
        with self._capturing, torch.cuda.device(self.device), torch.cuda.stream(here):
            graph = torch.cuda.CUDAGraph()
            # Other threads may use the GPU meanwhile.
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                result = function()
            return Graph(self, graph), result

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Queue a graph on the thread's current stream, behind the last one of this GPU."""
        stream = torch.cuda.current_stream(self.device)
        with self._turn:
            if self._replayed_on is not None and self._replayed_on != stream:
                stream.wait_event(self._replayed)
            graph.replay()
            self._replayed.record(stream)
            self._replayed_on = stream


@dataclass(frozen=True)
class Graph:
    """A captured graph of one GPU."""

    lane: CaptureLane
    graph: torch.cuda.CUDAGraph

    def __call__(self) -> None:
        """Replay it."""
        self.lane.replay(self.graph)

    @property
    def pool(self) -> Any:
        """Its memory, for graphs that never run at the same time."""
        return self.graph.pool()


_lanes: dict[torch.device, CaptureLane] = {}
_lock = threading.Lock()


def lane_of(device: torch.device) -> CaptureLane:
    """The lane of a GPU; made once."""
    with _lock:
        if device not in _lanes:
            _lanes[device] = CaptureLane(device)
        return _lanes[device]


def replayable(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``function`` as one CUDA graph, where it can be captured; itself on a CPU, or where it waits for the device."""
    if not is_gpu(device):
        return function
    function()  # compiles kernels and makes storage
    try:
        return lane_of(device).capture(function)[0]
    except RuntimeError:
        wait(device)
        return function
