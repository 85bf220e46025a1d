"""No kernel is compiled in the middle of a text: counted where Triton compiles, with nothing compiled and no GPU."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os

import fake_cuda
import pytest
import torch
from chats import ask, pair, patched, words
from torch._library.custom_ops import CustomOpDef

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from triton.runtime.jit import JITFunction

from gsd_kernels import kernel_report
from gsd_kernels.ops.commit_kv import api as commit_kv
from gsd_kernels.ops.dag_attention import api as dag_attention
from gsd_kernels.ops.flatten import api as flatten
from gsd_kernels.ops.merge import api as merge
from gsd_kernels.ops.verify import api as verify
from gsd_kernels.ops.write_kv import api as write_kv
from gsd_kernels_hf.engine import capture, loop, warming
from gsd_kernels_hf.policy import auto
from gsd_kernels_hf.policy.ladder import ladder

OPS = (commit_kv, dag_attention, flatten, merge, verify, write_kv)
KERNELS = {"_commit_kernel", "_split_kernel", "_combine_kernel", "_flatten_kernel", "_merge_kernel", "_verify_kernel"}


def described(value):
    """An argument without its content, as much as the compiler sees of it."""
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if isinstance(value, (list, tuple)):
        return [described(element) for element in value]
    if dataclasses.is_dataclass(value):
        value = copy.copy(value)
        vars(value).update({name: described(field) for name, field in vars(value).items()})
    return value


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that a GPU's steps would compile, in order; the reference computes."""
    found: list[str] = []
    seen = set()
    run = JITFunction.run

    def compile_nothing(self, key, *args):
        if (self, key) not in seen:
            seen.add((self, key))
            found.append(self.fn.__name__)

    def both(launch, reference):
        def call(*args, **kwargs):
            launch(*map(described, args))
            return reference(*args, **kwargs)

        return call

    fake_cuda.install(monkeypatch)
    monkeypatch.setattr(capture, "can_capture", lambda session: False)  # launch code runs in every step
    monkeypatch.setattr(CustomOpDef, "__call__", lambda self, *args: self._init_fn(*args))
    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, warmup, **kw: run(self, *args, warmup=True, **kw))
    for op in OPS:
        call = both(op.IMPLEMENTATIONS["triton"], op.IMPLEMENTATIONS["reference"])
        monkeypatch.setattr(op, "resolve", lambda backend, device, found, call=call: call)
    with kernel_report._target(90):
        yield found


def texts(compiled, monkeypatch, prompts):
    """What is compiled in the first step of a text of two shapes, and later, by prompt."""
    shapes = [shape for shape in ladder("cpu", with_model=True).values() if shape.depth][:2]
    monkeypatch.setattr(auto.AutoPolicy, "largest_shapes", lambda self: shapes)
    target, draft = pair(dtype=torch.float32)
    counts = []
    with patched(target, assistant_model=draft, graph_config="auto"):
        for prompt in prompts:
            taken = itertools.chain([shapes[0]] * 2, itertools.repeat(shapes[1]))
            monkeypatch.setattr(auto.AutoPolicy, "shape", lambda self, taken=taken: next(taken))
            compiled.clear()
            steps: list[int] = []
            ask(target, prompt, tokens=16, observer=lambda record, steps=steps: steps.append(len(compiled)))
            assert len(steps) > 3
            counts.append((compiled[: steps[0]], compiled[steps[0] :]))
    return counts


@pytest.mark.slow
def test_shapes_of_a_ladder_are_compiled_before_the_first_step(compiled, monkeypatch):
    warmed, own = [], warming._warm_graph
    monkeypatch.setattr(warming, "_warm_graph", lambda session, shape: warmed.append(shape) or own(session, shape))
    (first, later), second = texts(compiled, monkeypatch, [words(2, 9, seed=1), words(2, 12, seed=2)])
    assert set(first) >= KERNELS
    assert not later
    assert second == ([], []), "another prompt in the same bucket"
    assert len(warmed) == len(set(warmed)) == 2, "each shape once"


def test_the_count_notices(compiled, monkeypatch):
    monkeypatch.setattr(loop, "warm", lambda session, shapes: None)
    [(_, later)] = texts(compiled, monkeypatch, [words(2, 9, seed=1)])
    assert set(later) >= {"_flatten_kernel", "_verify_kernel", "_commit_kernel"}
