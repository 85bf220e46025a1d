"""The Triton ops as they are shipped: interpreted in a process of their own, compiled, launched.

In triton's interpreter, which is asked for before triton is imported, run the cases of all files that are marked, these
here among them: schemas, fakes; no access past a tensor's end, where a page must not be touched; a tiny model. Compiled
for GPUs that need not be here; launched on the GPU of their tensors, whatever the current one is, which a fake second
GPU shows.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from guards import guarded, in_a_fork
from ops.contracts.decoder import ATTENTION
from ops.contracts.inputs import op_inputs
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

import gsd_kernels as gsd
from gsd_kernels.attention_config import attention_config, load_table
from gsd_kernels.ops.sampling.triton import TICKETS, Tickets
from gsd_kernels.ops.table import all_ops
from gsd_kernels_cli import kernel_report

TESTS = Path(__file__).parents[1]
LAUNCHED = sorted(name for name, op in all_ops().items() if "triton" in op.implementations)

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")]
interpreted = pytest.mark.interpreter


def operator(name: str) -> Any:
    return getattr(torch.ops.gsd_kernels, f"triton_{name}").default


# In triton's interpreter.

LEAST = 60 if os.environ.get("EVERY") else 30  # cases


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.kept("gsd_kernels", "python/gsd_kernels_hf", "tests/ops", "tests/graphs.py", "tests/models.py")
def test_in_the_interpreter():
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}  # this may be an xdist worker
    environment = {**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    marked = re.compile(r'"interpreter"|mark\.interpreter')
    files = [str(path) for path in sorted(TESTS.glob("*/test_*.py")) if marked.search(path.read_text())]
    command = [sys.executable, "-m", "pytest", *files, "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=TESTS.parent)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed, run.stdout[-20000:] + run.stderr[-2000:]
    assert int(passed[1]) >= LEAST and "skipped" not in run.stdout, f"only {passed[1]} cases ran"


@interpreted
@pytest.mark.parametrize("name", LAUNCHED)
def test_opcheck(name):
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operator(name), op_inputs()[name], test_utils=checks)


@interpreted
def test_auto_never_interprets():
    attention = all_ops()["dag_attention"]
    assert attention.chosen("auto", torch.device("cpu")) != attention.launched
    assert attention.chosen("triton", torch.device("cpu")) == attention.launched


def attention() -> None:
    """The mask's words reach past the cache's end."""
    for name in ("float32-D80", "float16-D64", "window", "chunk", "sinks", "1000-nodes", "odd-63"):
        case = ATTENTION[name]
        tensors, options = replace(case, capacity=max(case.prefixes) + case.nodes).build("cpu")
        gsd.dag_attention(**{n: guarded(t) for n, t in tensors.items()}, **options, backend="triton")


def past_the_end() -> None:
    """What the guard is for."""
    ctypes.string_at(guarded(torch.zeros(100)).data_ptr() + 400, 1)


@interpreted
@pytest.mark.parametrize("name", [*LAUNCHED, "attention", "past_the_end"])
def test_no_access_past_the_end(name, capfd):
    """Which kills the process, so every op runs in a fork of it."""

    def touch() -> None:
        operator(name)(*tree_map_only(torch.Tensor, guarded, op_inputs()[name]))

    status = in_a_fork({"attention": attention, "past_the_end": past_the_end}.get(name, touch))
    if name == "past_the_end":
        assert os.WIFSIGNALED(status), "the guard page did not stop an access past the end"
    else:
        assert status == 0, capfd.readouterr().err[-2000:]


@interpreted
def test_a_models_tokens_equal_the_references():
    target = models.tiny(dtype=torch.float32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    common = {
        **models.prompts(1, 15),
        "max_new_tokens": 6,
        "assistant_model": models.noised(target, 0.02),
        "graph_config": gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=6, merge_context=0),
        "draft_sources": ("model",),
        "return_dict_in_generate": True,
    }
    got = gsd.generate(target, **common, backend="triton")
    expected = gsd.generate(target, **common, backend="reference")
    assert torch.equal(got.sequences, expected.sequences)
    assert got.stats.steps == expected.stats.steps < 5, "nothing was accepted"


# Compiled.

kept = pytest.mark.kept("gsd_kernels", "python/gsd_kernels_cli/kernel_report.py")
KERNELS = {"split", "combine", "merge", "flatten", "verify", "cut", "score", "commit", "write"}
READ = ("split", "score", "commit", "cut", "write")  # kernels whose instructions matter
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCMMA"}  # what a tile of 64 or more half-precision rows must use


@pytest.mark.long
@kept
@pytest.mark.slow
@pytest.mark.parametrize("arch", kernel_report.ARCHS)
def test_kernels_compile_without_spilling(arch):
    table = kernel_report.kernel_table([arch], read=READ)
    for row in table:
        print({k: v for k, v in row.items() if k != "arch"})
    assert {row["kernel"] for row in table} == KERNELS
    failures = {f"{row['kernel']} {row['case']}": kernel_report.gate(row) for row in table if kernel_report.gate(row)}
    assert not failures
    for row in table:
        if row["kernel"] == "split":
            group, rows = map(int, re.search(r"(\d+)×(\d+) rows", row["case"]).groups())
            half = not row["case"].startswith("fp32")
            assert row["load_bits"] == 128, row
            assert ("MMA" in row["matrix"]) == half, row
            assert not half or group * rows < 64 or "window" in row["case"] or MATRIX[arch] in row["matrix"], row
        if row["kernel"] in ("score", "commit", "cut", "write"):
            assert row["load_bits"] == 128, row


@pytest.mark.parametrize("arch", [75, 80, 86, 89, 90, 100, 103, 120, 130])
def test_every_shape_has_a_configuration(arch):
    for element_size in (2, 4):
        for head_dim in (64, 80, 96, 128, 256):
            for size_m in (1, 16, 17, 64, 128, 1000, 8192):
                config = attention_config(arch, element_size, head_dim, size_m, 4096)
                assert config.block_n % 16 == 0 and config.block_m >= 16
                splits = config.prefix_splits(8, 4096, 4, 1)
                assert 1 <= splits <= 31
    assert load_table().keys() == {80, 86, 90, 100, 120}
    with pytest.raises(ValueError, match="head_dim 512"):
        attention_config(arch, 2, 512, 16, 4096)


# Launched where the tensors lie.

SECOND = torch.device("cuda", 1)


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

    given = op_inputs()[name]
    with FakeTensorMode():
        OPDEFS[f"gsd_kernels::triton_{name}"]._init_fn(*tree_map_only(torch.Tensor, there, given))


@pytest.mark.parametrize("name", LAUNCHED)
def test_kernels_are_launched_where_the_tensors_lie(name, current, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: seen.append(current[0]))
    call(name, SECOND)
    assert seen and set(seen) == {1}
    assert current == [0], "the current device is as it was"
    assert {f"gsd_kernels::triton_{name}" for name in LAUNCHED} == {n for n in OPDEFS if n.startswith("gsd_kernels::")}


def test_a_failed_launch_leaves_the_current_device(current, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("out of resources")

    monkeypatch.setattr(JITFunction, "run", fail)
    with pytest.raises(RuntimeError, match="out of resources"):
        call("commit_kv", SECOND)
    assert current == [0]


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
