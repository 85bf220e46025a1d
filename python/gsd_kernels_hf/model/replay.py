"""Work of a GPU as CUDA graphs: captured one at a time on one stream a device, replayed in turn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("gsd_kernels")


class CaptureError(RuntimeError):
    """Work could not be captured. Its text and ``__cause__`` are what went wrong first, which later errors hide."""


class DeviceLostError(RuntimeError):
    """A GPU failed for good: whatever is asked of it from here on fails too. ``__cause__`` is what came first."""


def is_gpu(device: torch.device) -> bool:
    """Return whether work on ``device`` can be captured, and is timed by events."""
    return device.type == "cuda"


def wait(device: torch.device) -> None:
    """Wait for what this thread has queued on a GPU.

    Not for the whole device: that fails while another thread captures there, and spoils the capture.
    """
    if is_gpu(device):
        torch.cuda.current_stream(device).synchronize()


def send(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, which is there when what this thread has queued so far is done."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def lost(device: torch.device) -> str | None:
    """The answer of a GPU to everything since it failed for good (an illegal address, say), or ``None``.

    CUDA reports such an error with whatever is called next, and PyTorch not always as another type.
    """
    try:
        wait(device)
    except RuntimeError as error:
        return one_line(error)
    return None


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def hold(memory: Tensor) -> None:
    """Keep memory that is about to be freed until what this thread has queued so far is done with it.

    Freed memory goes back to the stream that it was made on, where it may be written while a copy on another reads it.
    """
    if is_gpu(memory.device):
        memory.record_stream(torch.cuda.current_stream(memory.device))


class CaptureLane:
    """The share of all graphs of one GPU: a stream to capture on, a lock round captures, and the order of replays.

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

    def capture(self, function: Callable[[], Any], pool: Any = None) -> tuple[Callable[[], None], Any, Any]:
        """Record what ``function`` does on the GPU, without running it.

        Args:
            function: works in storage that outlives the graph, and never waits for the GPU.
            pool: memory to share with graphs that never run at the same time; ``None``: of its own.

        Returns:
            What replays the graph, its memory, and what ``function`` returned, whose tensors every replay writes.

        Raises:
            CaptureError: something in it cannot be captured.
            DeviceLostError: the GPU failed for good.
        """
        first: list[Exception] = []
        try:
            here = torch.cuda.current_stream(self.device)
            # The stream again, because PyTorch leaves the thread on the captured one where a capture fails.
            with self._capturing, torch.cuda.device(self.device), torch.cuda.stream(here):
                graph = torch.cuda.CUDAGraph()
                # Other threads may use the GPU meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                    try:
                        result = function()
                    except Exception as error:  # ending a capture that broke off raises another error in its place
                        first.append(error)
                        raise
                return partial(self.replay, graph), graph.pool(), result
        except RuntimeError as error:
            cause = first[0] if first else error
        if not isinstance(cause, RuntimeError):  # a mistake of the function, captured or not
            raise cause
        if lost(self.device) is not None:
            raise DeviceLostError(f"the GPU is unusable after an error: {one_line(cause)}") from cause
        raise CaptureError(one_line(cause)) from cause

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Queue a graph on the thread's current stream, behind the last one of this GPU."""
        stream = torch.cuda.current_stream(self.device)
        with self._turn:
            if self._replayed_on not in (None, stream):
                stream.wait_event(self._replayed)
            graph.replay()
            self._replayed.record(stream)
            self._replayed_on = stream


_lanes: dict[torch.device, CaptureLane] = {}
_lock = threading.Lock()


def lane_of(device: torch.device) -> CaptureLane:
    """The lane of a GPU; made once."""
    with _lock:
        if device not in _lanes:
            _lanes[device] = CaptureLane(device)
        return _lanes[device]


def captured(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``function`` as one CUDA graph, whose results are the same tensors every time; itself on a CPU.

    Raises:
        CaptureError: it cannot be captured.
        DeviceLostError: the GPU failed for good.
    """
    if not is_gpu(device):
        return function
    function()  # compiles kernels and makes storage
    replay, _, results = lane_of(device).capture(function)

    def call() -> Any:
        replay()
        return results

    return call


def replayable(function: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    """``function`` :func:`captured`, or itself where it cannot be, with the cause in the log."""
    try:
        return captured(function, device)
    except CaptureError as error:
        logger.warning("measured as it is, since it could not be captured: %s", error)
        return function
