"""CUDA streams, events and graphs on a machine without a GPU.

A graph records the operations of its capture and undoes them, as a capture computes nothing; a replay runs them again
on the same tensors. So whatever a captured step took from the host stays what it was at capture, as on a GPU.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gsd_kernels.ops.dag_attention.api import ATTENTION
from gsd_kernels_hf.engine import session
from gsd_kernels_hf.model import replay

WAITING = (
    *("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero", "aten::lift_fresh"),
    *("aten::masked_select", "aten::_unique", "aten::unique_", "aten::bincount", "aten::repeat_interleave.Tensor"),
)
CPU = torch.device("cpu")


def tensors_of(values: Any) -> list[Tensor]:
    """Tensors in the lists, tuples and dictionaries that operators take and return, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        return []
    return [tensor for value in values for tensor in tensors_of(value)]


def written(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes in place."""
    found: list[Tensor] = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_of(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def waits(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator waits for the device; where a mask is an index, it counts what the mask selects."""
    if function.name().startswith(("aten::index", "aten::_index_put", "aten::_unsafe_index")) and len(args) > 1:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_of(args[1]))
    return function.name().startswith(WAITING)


class Recorder(TorchDispatchMode):
    """Records operations, refuses those that wait for the device or bring data from the host, and can undo them.

    Attributes:
        calls: the operations that compute, and of every tensor that they return itself, or ``None`` where it shares an
            argument's storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor | None]]] = []
        self.made: set[int] = set()  # storage that is the graph's own
        self.before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(function, args):
            raise RuntimeError(f"operation not permitted when stream is capturing: {function.name()}")
        for tensor in written(function, args, kwargs):
            storage = tensor.untyped_storage()
            if storage._cdata not in self.made:
                self.before.setdefault(storage._cdata, (storage, storage.clone()))
        result = function(*args, **kwargs)
        given = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
        returned = tensors_of(result)
        self.made |= {t.untyped_storage()._cdata for t in returned} - given
        if not function.is_view:
            own = [None if t.untyped_storage()._cdata in given else t for t in returned]
            self.calls.append((function, args, kwargs, own))
        return result

    def undo(self) -> None:
        for storage, content in self.before.values():
            storage.copy_(content)

    def run(self) -> None:
        """Run everything again, its results in the same tensors."""
        for function, args, kwargs, own in self.calls:
            for old, new in zip(own, tensors_of(function(*args, **kwargs)), strict=True):
                if old is not None:
                    old.copy_(new)


class FakeStream:
    def __init__(self, device: Any = CPU, cuda: FakeCuda | None = None) -> None:
        self.device, self.cuda = torch.device(device), cuda

    def wait_event(self, event: FakeEvent) -> None:
        self.cuda.log.append(("wait", self, event.recorded_on))

    def synchronize(self) -> None:
        if self in self.cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        if self.cuda.lost:
            raise RuntimeError(self.cuda.lost)
        self.cuda.counts["waits"] += 1


class FakeEvent:
    """Its time is a number of this process's clock. One that is timed is recorded once: it may not have been read."""

    def __init__(self, cuda: FakeCuda, enable_timing: bool = False) -> None:
        self.cuda, self.timing = cuda, enable_timing
        self.recorded_on: FakeStream | None = None
        self.at: float | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        stream = self.cuda.current_stream() if stream is None else stream
        if stream in self.cuda.capturing:
            raise RuntimeError("operation not permitted when stream is capturing: an event")
        assert not self.timing or self.at is None, "a step in flight loses its time"
        self.recorded_on, self.at = stream, time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self.cuda.counts["waits"] += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timing and end.timing
        if self.at is None or end.at is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return 1e3 * (end.at - self.at)


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.recorder, self.memory = cuda, Recorder(), None

    def pool(self) -> Any:
        return self.memory

    def replay(self) -> None:
        self.cuda.counts["replays"] += 1
        self.cuda.log.append(("replay", self.cuda.current_stream(), id(self)))
        self.recorder.run()


class Capture:
    """``torch.cuda.graph``."""

    def __init__(
        self, cuda: FakeCuda, graph: FakeGraph, pool: Any, stream: FakeStream, capture_error_mode: str
    ) -> None:
        assert capture_error_mode == "thread_local", "other threads may use the GPU meanwhile"
        self.cuda, self.graph, self.stream = cuda, graph, stream
        graph.memory = object() if pool is None else pool

    def __enter__(self) -> None:
        cuda = self.cuda
        if any(stream.device == cuda.device for stream in cuda.capturing):
            raise RuntimeError("operation would make the device wait while a stream of it is capturing")
        cuda.counts["captures"] += 1
        cuda.capturing[self.stream] = self.graph
        self.before = cuda.current_stream()
        cuda.streams[cuda.device] = self.stream
        self.graph.recorder.__enter__()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.graph.recorder.__exit__(kind, error, trace)
        self.graph.recorder.undo()
        del self.cuda.capturing[self.stream]
        if error is not None:  # torch.cuda.graph does not get to the end then
            raise RuntimeError("operation failed due to a previous error during capture") from error
        self.cuda.streams[self.cuda.device] = self.before


class Restored:
    """A context that sets a value of the thread for a while."""

    def __init__(self, kept: Any, name: Any, value: Any) -> None:
        self.kept, self.name, self.value = kept, name, value

    def __enter__(self) -> None:
        self.before = self.kept.get(self.name)
        self.kept[self.name] = self.value

    def __exit__(self, *_: object) -> None:
        self.kept[self.name] = self.before


class FakeCuda:
    """What the engine uses of :mod:`torch.cuda`.

    Attributes:
        counts: ``captures``, ``replays``, and ``waits`` of the host for an event or stream.
        log: replays and waits of streams, in order.
        held: storage that was freed while a stream used it, and the stream.
        lost: what a GPU that failed for good answers; empty: it works.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.log: list[tuple[Any, ...]] = []
        self.held: list[tuple[int, FakeStream]] = []
        self.lost = ""
        self.capturing: dict[FakeStream, FakeGraph] = {}  # of all threads
        self._threads = threading.local()
        self._default = FakeStream(cuda=self)

    @property
    def streams(self) -> dict[torch.device, FakeStream]:
        """The thread's current streams."""
        return vars(self._threads).setdefault("streams", {})

    @property
    def current(self) -> dict[str, torch.device]:
        return vars(self._threads).setdefault("current", {})

    @property
    def device(self) -> torch.device:
        return self.current.get("device") or CPU

    def current_stream(self, device: Any = None) -> FakeStream:
        return self.streams.get(self.device if device is None else torch.device(device)) or self._default

    def on(self, stream: FakeStream) -> Restored:
        return Restored(self.streams, stream.device, stream)

    def synchronize(self, device: Any = None) -> None:
        """Wait for the whole device, which spoils the capture of any thread."""
        if self.capturing:
            raise RuntimeError("operation not permitted when stream is capturing")

    def new_stream(self, device: Any = CPU) -> FakeStream:
        return FakeStream(device, self)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Take the CPU for a GPU: captured, timed by events, with static shapes."""
    cuda = FakeCuda()
    own = session.Session.__init__

    def static(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        self.trims = False

    for name, value in {
        "Stream": cuda.new_stream,
        "Event": lambda **options: FakeEvent(cuda, **options),
        "CUDAGraph": lambda: FakeGraph(cuda),
        "graph": lambda graph, **options: Capture(cuda, graph, **options),
        "stream": cuda.on,
        "current_stream": cuda.current_stream,
        "synchronize": cuda.synchronize,
        "get_device_name": lambda device: "a CPU",
        "device": lambda device: Restored(cuda.current, "device", torch.device(device)),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: cuda.held.append((tensor.data_ptr(), stream)))
    monkeypatch.setattr(replay, "is_gpu", lambda device: True)
    monkeypatch.setattr(replay, "_lanes", {})
    monkeypatch.setattr(session.Session, "__init__", static)
    # PyTorch's attention on a CPU is no part of a step on a GPU.
    monkeypatch.setitem(ATTENTION.implementations, "cpu", ATTENTION.reference)
    return cuda
