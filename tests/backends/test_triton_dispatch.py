"""The Triton ops as operators: schema, fakes, torch.compile without a graph break."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops.contracts.attention import small_case
from ops.contracts.backends import assert_bit_equal
from ops.contracts.inputs import (
    flatten_arguments,
    merge_arguments,
    named_inputs,
    op_inputs,
    verify_arguments,
)
from ops.contracts.ngram import Memory, two_sources
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.table import all_ops

pytestmark = [pytest.mark.quick, pytest.mark.interpreter]

LAUNCHED = sorted(name for name, op in all_ops().items() if "triton" in op.implementations)
OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")
MEMORY, SOURCES = Memory(rows=(9,)), "tokens log_probs other_tokens other_log_probs weight"
CALLS = {
    gsd.dag_attention: lambda: small_case(0, dtype=torch.float32),
    gsd.merge: merge_arguments,
    gsd.flatten: flatten_arguments,
    gsd.sample_rows: lambda: {**named_inputs(gsd.sample_rows, 4), "temperature": 0.7, "top_k": 5},
    gsd.verify: verify_arguments,
    gsd.commit_kv: lambda: named_inputs(gsd.commit_kv, 5),
    gsd.write_kv: lambda: named_inputs(gsd.write_kv, 5),
    gsd.ngram_insert: lambda: named(MEMORY.empty(), *MEMORY.calls()[0], names="table contexts tokens log_probs valid"),
    gsd.ngram_lookup: lambda: named(MEMORY.empty(), MEMORY.queries(), names="table contexts"),
    gsd.mix_candidates: lambda: named(*two_sources(0, 3, 2), names=SOURCES),
}
"""Public ops, and what each is given by name."""


def named(*values: Any, names: str) -> dict[str, Any]:
    return dict(zip(names.split(), values, strict=True))


def operator_calls() -> dict[str, tuple]:
    """Arguments by the name of an operator that launches kernels; its schema is the op's."""
    inputs = op_inputs()
    return {f"triton_{name}": inputs[name] for name in LAUNCHED}


@pytest.mark.parametrize("name", LAUNCHED)
def test_opcheck(name):
    operator = getattr(torch.ops.gsd_kernels, f"triton_{name}").default
    torch.library.opcheck(operator, op_inputs()[name], test_utils=OPCHECKS)


def tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, gsd.NgramTable):
        return [value.keys, value.tokens, value.log_probs]
    if hasattr(value, "tensors"):
        return list(value.tensors())
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@pytest.mark.parametrize("op", CALLS, ids=lambda op: op.__name__)
def test_compiles_without_a_graph_break(op):
    """It reads what was computed, and what it returns and writes is read."""

    def step(given):
        computed = {n: t + 0 if n in ("q", "logits", "sampled", "k", "tokens") else t for n, t in given.items()}
        return [t + 0 for t in tensors_in([op(**computed), given])]

    def inputs():
        torch.manual_seed(0)
        return {**CALLS[op](), "backend": "triton"}

    torch._dynamo.reset()  # which counts how often ``step`` is compiled, whatever it calls
    assert_bit_equal(torch.compile(step, fullgraph=True, backend="aot_eager")(inputs()), step(inputs()))


def test_auto_never_interprets():
    attention = all_ops()["dag_attention"]
    assert attention.chosen("auto", torch.device("cpu")) != attention.launched
    assert attention.chosen("triton", torch.device("cpu")) == attention.launched
