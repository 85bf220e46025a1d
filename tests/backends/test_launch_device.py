"""Triton kernels are launched on the GPU of their tensors, whatever the current one is: shown by a fake second GPU."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are launched nowhere", allow_module_level=True)

from backends.test_triton_dispatch import operator_calls
from triton.runtime.jit import JITFunction

from gsd_kernels.ops.sampling.triton import TICKETS, Tickets

SECOND = torch.device("cuda", 1)
CALLS = operator_calls()
pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")]


@pytest.fixture
def current(monkeypatch):
    """The current GPU of a machine that has none, as a list of one index."""
    index = [0]

    def exchange(device: int) -> int:
        before = index[0]
        if device >= 0:
            index[0] = device
        return before

    monkeypatch.setattr(torch.cuda, "_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", exchange)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(Tickets, "of", lambda self, like, rows: like.new_empty(rows, dtype=torch.int32))
    return index


def call(name: str, device: torch.device) -> None:
    """Run the launch code of an operator on tensors of ``device`` without content."""

    def there(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    with FakeTensorMode():
        OPDEFS[f"gsd_kernels::{name}"]._init_fn(*tree_map_only(torch.Tensor, there, CALLS[name]))


def launches(name: str, device: torch.device, current: list[int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The current GPU at every launch of an operator, called with tensors on ``device``."""
    seen: list[int] = []
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: seen.append(current[0]))
    call(name, device)
    return seen


@pytest.mark.parametrize("name", sorted(CALLS))
def test_kernels_are_launched_where_the_tensors_lie(name, current, monkeypatch):
    seen = launches(name, SECOND, current, monkeypatch)
    assert seen and set(seen) == {1}
    assert current == [0], "the current device is as it was"


def test_every_launching_operator_is_looked_at():
    assert {f"gsd_kernels::{name}" for name in CALLS} == {n for n in OPDEFS if n.startswith("gsd_kernels::")}


def test_a_failed_launch_leaves_the_current_device(current, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(JITFunction, "run", fail)
    with pytest.raises(RuntimeError, match="out of resources"):
        call("triton_commit_kv", SECOND)
    assert current == [0]


def test_tensors_elsewhere_switch_nothing(monkeypatch):
    def refuse(*args):
        raise AssertionError("switched")

    monkeypatch.setattr(torch.cuda, "_exchange_device", refuse)
    assert launches("triton_verify", torch.device("cpu"), [7], monkeypatch) == [7]


def test_compiled_operators_switch_too():
    """Read in the source: the stable ABI has no dispatch key that would do it for them."""
    files = ("ops.cpp", "decoder_rows.cpp", "glue.h")
    sources = [(Path(__file__).parents[2] / "csrc/cuda" / file).read_text() for file in files]
    made = [re.findall(r'm\.impl\("\w+", (?:(?:TORCH_BOX\(\(&Typed)?LaunchedOp<|FeedRows::)', text) for text in sources]
    named = [
        (name, text)
        for text in sources
        for name in re.findall(r'm\.impl\("\w+", TORCH_BOX\(&(?:gsd::)?(\w+)\)\)', text)
    ]
    assert len(made[0]) > 10 and len(made[1]) == 2 and named
    assert sum(text.count("m.impl(") for text in sources) == sum(map(len, made)) + len(named)
    bodies = {name: source[re.search(rf" {name}\((const|Tensor|int64_t)", source).start() :] for name, source in named}
    bodies |= {name: sources[2][sources[2].index(f"struct {name}") :] for name in ("LaunchedOp {", "TypedLaunchedOp<")}
    for name, body in bodies.items():
        body = body.partition("\n}")[0]
        launch = re.search(r"current_stream\(|\bpick\(|\blaunch_rows\(|\blaunch_on<", body)
        assert launch and 0 < body.find("const DeviceGuard guard(") < launch.start(), name


class Zeros:
    """A tensor of a GPU, as much as :class:`Tickets` asks of it."""

    is_cuda = True

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)


def test_tickets_are_of_a_stream_and_never_of_a_graph(monkeypatch):
    made, state = [], {"capturing": True, "stream": 7}

    class Stream:
        cuda_stream = property(lambda self: state["stream"])

        def synchronize(self):
            assert not state["capturing"]

    def zeros(*shape, dtype, device):
        made.append(shape)
        return torch.empty(shape, dtype=dtype).fill_(0)

    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    tickets, first, second = Tickets(), Zeros(0), Zeros(1)
    assert tickets.of(first, 5).shape == (5,) and not tickets.kept, "what a capture makes is its graph's"
    state["capturing"] = False
    kept = tickets.of(first, 5)
    state["capturing"] = True
    assert len(made) == 2 and tickets.of(first, 5).data_ptr() == kept.data_ptr(), "a graph uses what was there before"
    state.update(capturing=False, stream=8)
    places = {kept.data_ptr(), tickets.of(first, 9).data_ptr(), tickets.of(second, 9).data_ptr()}
    assert len(places) == 3 and len(made) == 3, "another stream and another GPU have their own"
    assert tickets.of(first, TICKETS + 1).shape == (TICKETS + 1,) and len(made) == 4
    for stream in range(100, 200):
        state["stream"] = stream
        assert tickets.of(first, 3).eq(0).all()
    assert len(made) > 4, "more streams than there are places"
