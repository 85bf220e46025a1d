"""The compiled CPU ops as operators: schemas, fakes, torch.compile, clear errors, and a package without them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from ops.contracts.backends import needs_cpu
from ops.contracts.inputs import op_inputs

import gsd_kernels as gsd
from gsd_kernels.ops.table import all_ops

CPU = torch.device("cpu")
TABLE = all_ops()
OPS = sorted(TABLE)
pytestmark = [pytest.mark.quick, needs_cpu]


def test_every_op_has_inputs_which_are_as_its_line_says():
    assert sorted(op_inputs()) == OPS
    for name, given in op_inputs().items():
        TABLE[name].line.check(*given)


@pytest.mark.kept("csrc", "gsd_kernels", "tests/ops/contracts")
@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    op = getattr(torch.ops.gsd_kernels, name).default
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gsd_kernels::{name}", "CPU")
    checked = {} if TABLE[name].fake is not None else {"test_utils": "test_schema"}  # shapes hang on values
    results = torch.library.opcheck(op, op_inputs()[name], **checked)
    assert set(results.values()) == {"SUCCESS"}, results


@pytest.mark.slow
def test_a_step_compiles_to_one_graph():
    config = gsd.GraphConfig(depth=1, width=3, branch=2, max_rows=4)

    def step(tokens, log_probs):
        graph = gsd.TokenGraph.empty(1, config, "cpu")
        graph.reset(torch.ones(1, dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
        gsd.merge(graph, graph.root_frontier(), tokens, log_probs, level=0, width=3, merge_context=1, backend="cpu")
        return gsd.flatten(graph, 4, 2, backend="cpu").token_ids

    inputs = torch.tensor([[[5, 6]]], dtype=torch.int32), torch.tensor([[[-0.1, -2.0]]])
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*inputs), step(*inputs))
    assert step(*inputs).tolist() == [[1, 5, 6, 0]]


def test_auto_is_the_compiled_op_and_names_never_fall_back():
    assert TABLE["merge"].chosen("auto", CPU) == TABLE["merge"].compiled
    with pytest.raises(gsd.BackendUnavailableError, match="cuda tensors"):
        TABLE["merge"].chosen("cuda", CPU)


@pytest.mark.slow
def test_without_the_library_the_reference_runs_and_the_reason_names_the_cure(tmp_path):
    """A pure-Python install: the package without its shared objects."""
    import shutil
    from pathlib import Path

    package = Path(gsd.__file__).parent
    shutil.copytree(package, tmp_path / "gsd_kernels", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    program = (
        "import torch, gsd_kernels as gsd\n"
        "from gsd_kernels.backends import unavailable_reason\n"
        "from gsd_kernels.ops.table import OPS\n"
        f"assert gsd.__file__.startswith({str(tmp_path)!r}), gsd.__file__\n"
        "print(unavailable_reason('cpu', torch.device('cpu')))\n"
        "print(OPS['verify'].chosen('auto', torch.device('cpu')).__module__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    reason, module = done.stdout.strip().splitlines()
    assert "not built" in reason and "pip install ." in reason
    assert module == "gsd_kernels.ops.verify.reference"
