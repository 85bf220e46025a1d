"""The Triton ops as they are shipped: interpreted in a process of their own, compiled, launched, captured.

Compiled for GPUs that need not be here; launched on the GPU of their tensors, whatever the current one is, which a fake
second GPU shows.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from graphs import candidates, tails
from ops.contracts.attention import Attention
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are neither compiled nor launched", allow_module_level=True)

from backends.test_triton_interpreted import operator_calls
from triton.runtime.jit import JITFunction

import gsd_kernels as gsd
from gsd_kernels.attention_config import attention_config, load_table
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.sampling.triton import TICKETS, Tickets
from gsd_kernels_cli import kernel_report

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")]


# In triton's interpreter, which is asked for before triton is imported.

TESTS = Path(__file__).parents[1]
FILES = {
    "ops": ("dag_attention", "graph_ops", "step_ops", "ngram"),
    "backends": ("triton_interpreted",),
}
LEAST = 200 if os.environ.get("EVERY") else 70  # cases


@pytest.mark.long
@pytest.mark.slow
def test_in_the_interpreter():
    inherited = {n: v for n, v in os.environ.items() if not n.startswith("PYTEST_")}  # this may be an xdist worker
    environment = {**inherited, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    files = [str(TESTS / folder / f"test_{name}.py") for folder, names in FILES.items() for name in names]
    command = [sys.executable, "-m", "pytest", *files, "-p", "no:cacheprovider", "-p", "no:xdist"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, cwd=TESTS.parent)
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed, run.stdout[-20000:] + run.stderr[-2000:]
    assert int(passed[1]) >= LEAST and "skipped" not in run.stdout, f"only {passed[1]} cases ran"


def test_every_file_with_such_cases_is_listed():
    marked = re.compile(r'"interpreter"|mark\.interpreter')
    for folder, names in FILES.items():
        found = [path for path in (TESTS / folder).glob("test_*.py") if marked.search(path.read_text())]
        assert {path.stem.removeprefix("test_") for path in found if path != Path(__file__)} == set(names)


# Compiled.

kept = pytest.mark.kept("gsd_kernels", "python/gsd_kernels_cli/kernel_report.py")
KERNELS = {
    *("split", "combine", "merge", "flatten", "verify", "cut", "score", "log_probs", "commit", "write"),
    *("lookup", "mix", "perturb"),
}
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


@pytest.mark.long
@kept
@pytest.mark.slow
def test_the_gate_fails_for_a_configuration_that_is_too_large():
    from gsd_kernels.ops.dag_attention.triton import dag_attention

    def meta(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    config = attention_config(80, 2, 128, 64, 8192)
    q, cache = meta(1, 8, 64, 128, dtype=torch.bfloat16), meta(1, 8, 8192, 128, dtype=torch.bfloat16)

    def problems(**changes: int) -> list[str]:
        changed = replace(config, **changes)
        arguments = (q, cache, cache, meta(1, 64, 2), meta(1), None, None, None, 0.1, *4 * [None], changed)
        kernels = dict(kernel_report.compile_launches(lambda: dag_attention(*arguments), 80))
        return kernel_report.gate(kernel_report.facts(kernels["split"], 80, read=False))

    assert not problems()
    assert any("shared memory" in p for p in problems(num_stages=8))
    assert any("stack" in p for p in problems(block_m=256))


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
CALLS = operator_calls()


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


# On a GPU.

DEVICE = "cuda"
REASON = "no CUDA GPU" if not torch.cuda.is_available() else unavailable_reason("triton", torch.device(DEVICE))


@pytest.mark.gpu
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_one_captured_graph_serves_every_length():
    """Capture a step's ops once; replay with other lengths, tokens and graphs, and compare with fresh calls."""
    config = gsd.GraphConfig(depth=2, width=4, branch=3, max_rows=16)
    case = Attention(rows=16, nodes=16, group=4, dtype=torch.float16)
    tensors, _ = case.build(DEVICE)
    tensors = {n: t.nan_to_num(0.5) if t.is_floating_point() else t for n, t in tensors.items()}
    gen = torch.Generator().manual_seed(0)
    graph = gsd.TokenGraph.empty(2, config, DEVICE)
    root, tail = torch.tensor([1, 2], dtype=torch.int32, device=DEVICE), tails(2, 5, gen).to(DEVICE)
    tokens, log_probs = (t.to(DEVICE) for t in candidates("random", 5, (2, 1, 3), gen))
    logits = torch.randn(2, 16, 5000, device=DEVICE)
    positions = torch.zeros(2, 16, dtype=torch.int32, device=DEVICE)
    keys = {"seed": torch.tensor(1, device=DEVICE), "sequence_ids": torch.arange(2, dtype=torch.int32, device=DEVICE)}
    eos, left = torch.tensor([3], dtype=torch.int32, device=DEVICE), torch.full_like(root, 99)
    done = torch.zeros(2, dtype=torch.bool, device=DEVICE)

    def step() -> tuple[torch.Tensor, ...]:
        graph.reset(root, tail)
        gsd.merge(graph, graph.root_frontier(), tokens, log_probs, level=0, width=4, merge_context=1, backend="triton")
        rows = gsd.flatten(graph, 16, config.max_path, backend="triton")
        out = gsd.dag_attention(**tensors, backend="triton")
        picked = gsd.sample_rows(logits, positions, **keys, temperature=0.8, top_p=0.9, backend="triton")
        budget = {"eos_ids": eos, "remaining": left, "done": done, "max_path": config.max_path}
        accepted = gsd.verify(rows, picked, **budget, backend="triton")
        return out, picked, *rows.tensors(), *accepted.tensors()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        static = step()
    for seed in range(4):
        torch.manual_seed(seed)
        tensors["kv_len"].copy_(torch.randint(80, 250, (2,)))
        tensors["q"].normal_()
        tokens.copy_(torch.randint(0, 9, tokens.shape).sort(-1).values + torch.arange(3))
        logits.normal_(std=2)
        positions.random_(0, 100)
        captured.replay()
        for got, expected in zip(static, step(), strict=True):
            assert torch.equal(got, expected)
