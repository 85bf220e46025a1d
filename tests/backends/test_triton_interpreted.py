"""The Triton ops in triton's interpreter beyond their contracts; test_triton.py starts the process.

As operators: schema, fakes, torch.compile without a graph break. No kernel reads or writes past a tensor: every tensor
ends at a page that must not be touched, and an access past the end kills the process, so every op runs in a fork of it.
And a tiny model generates through them: the tokens of the reference, hence of the model alone.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from typing import Any

import models
import pytest
import torch
from graphs import drafted
from guards import guarded, in_a_fork
from ops.contracts.attention import ATTENTION, small_case
from ops.contracts.backends import assert_bit_equal
from ops.contracts.graph import GRAPHS
from ops.contracts.inputs import flatten_arguments, merge_arguments, named_inputs, op_inputs, verify_arguments
from ops.contracts.ngram import Memory, remembered, two_sources
from ops.contracts.sampling import EACH
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.sampling import warped_log_probs
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


# No access past the end.


def attention() -> None:
    for name in ("float32-D80", "float16-D64", "window", "chunk", "sinks", "1000-nodes", "odd-63"):
        case = ATTENTION[name]
        tight = replace(case, capacity=max(case.prefixes) + case.nodes)
        tensors, options = tight.build("cpu")
        tensors = {n: guarded(t) for n, t in tensors.items()}
        # The mask's words reach past the cache's end.
        gsd.dag_attention(**tensors, **options, backend="triton")


def merge_and_flatten() -> None:
    for name in ("graph", "tree", "shallow-path"):
        config, vocab = GRAPHS[name]
        empty = gsd.TokenGraph.empty
        gsd.TokenGraph.empty = lambda *a, empty=empty: gsd.TokenGraph(*(guarded(t) for t in empty(*a).tensors()))
        graph = drafted(config, vocab=vocab, backend="triton")
        gsd.TokenGraph.empty = empty
        gsd.flatten(graph, config.max_rows, config.max_path, backend="triton")


def sampling() -> None:
    logits = guarded(torch.randn(2, 2, 5003))
    positions = guarded(torch.zeros(2, 2, dtype=torch.int32))
    keys = {"seed": guarded(torch.tensor([3])).view(()), "sequence_ids": guarded(torch.arange(2, dtype=torch.int32))}
    each = {n: guarded(w[:2]) for n, w in EACH.items()}
    gsd.draft_candidates(logits, positions, branch=3, **keys, **each, backend="triton")
    gsd.sample_rows(logits, positions, **keys, backend="triton")
    warped_log_probs(logits, **each, backend="triton")


def verify_and_commit() -> None:
    config, vocab = GRAPHS["graph"]
    rows = gsd.flatten(drafted(config, vocab=vocab), config.max_rows, config.max_path, backend="reference")
    rows = gsd.Rows(*(guarded(t) for t in rows.tensors()))
    options = {
        "eos_ids": guarded(torch.tensor([1], dtype=torch.int32)),
        "remaining": guarded(torch.tensor([9, 9], dtype=torch.int32)),
        "done": guarded(torch.tensor([False, True])),
        "max_path": config.max_path,
    }
    gsd.verify(rows, guarded(rows.token_ids), **options, backend="triton")
    k, v = (list(guarded(torch.randn(2, 2, 3, 30, 80))) for _ in range(2))
    accepted = guarded(torch.tensor([[0, 9, 4], [2, -1, -1]], dtype=torch.int32))
    lengths = guarded(torch.tensor([20, 27], dtype=torch.int32))
    gsd.commit_kv(k, v, accepted, guarded(torch.tensor([3, 1], dtype=torch.int32)), lengths, backend="triton")
    before = [t.clone() for t in (*k, *v)]
    gsd.commit_kv(k, v, accepted, lengths.clone(), lengths.fill_(30), backend="triton")  # behind the last slot
    assert all(torch.equal(now, then) for now, then in zip((*k, *v), before, strict=True))


def write() -> None:
    caches = [guarded(torch.zeros(2, 3, 30, dim)) for dim in (80, 7)]
    rows = [guarded(torch.randn(2, 5, 3, dim)).transpose(1, 2) for dim in (80, 7)]
    positions = guarded(torch.tensor([[0, 29, 4, 3, 2], [25, 26, 27, 28, 29]]))
    gsd.write_kv(*caches, *rows, positions, backend="triton")


def ngram() -> None:
    for case in (Memory(rows=(9,)), Memory(capacity=4, max_context=4, branch=3, rows=(7,))):
        table = case.empty()
        table = replace(table, **{n: guarded(getattr(table, n)) for n in ("keys", "tokens", "log_probs")})
        gsd.ngram_insert(table, *(guarded(t) for t in case.calls()[0]), backend="triton")
        gsd.ngram_lookup(table, guarded(case.queries(3)), backend="triton")
    keys = {"seed": guarded(torch.tensor(1)), "sequence_ids": guarded(torch.arange(2, dtype=torch.int32))}
    gsd.perturb_candidates(*(guarded(t) for t in remembered(0, 3)), **keys, backend="triton")
    gsd.mix_candidates(*(guarded(t) for t in two_sources(0, 3, 4)), backend="triton")


def past_the_end() -> None:
    """What the guard is for."""
    ctypes.string_at(guarded(torch.zeros(100)).data_ptr() + 400, 1)


OPS = {f.__name__: f for f in (attention, merge_and_flatten, sampling, verify_and_commit, write, ngram, past_the_end)}


@pytest.mark.parametrize("name", OPS)
def test_no_access_past_the_end(name, capfd):
    status = in_a_fork(OPS[name])
    if name == "past_the_end":
        assert os.WIFSIGNALED(status), "the guard page did not stop an access past the end"
    else:
        assert status == 0, capfd.readouterr().err[-2000:]


# A model.

CONFIG = gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=6, merge_context=0)
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "seed": 5}


@pytest.mark.parametrize(
    ("family", "sampling", "tokens"), [("llama-gqa", {}, 6), ("mistral-window", SAMPLING, 3)], ids=["greedy", "sampled"]
)
def test_tokens_equal_the_reference(family, sampling, tokens):
    target = models.tiny(family, dtype=torch.float32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    common = {
        **models.prompts(1, 15),
        **sampling,
        "max_new_tokens": tokens,
        "assistant_model": models.noised(target, 0.02),
        "graph_config": CONFIG,
        "draft_sources": ("model",),
        "return_dict_in_generate": True,
    }
    got = gsd.generate(target, **common, backend="triton")
    expected = gsd.generate(target, **common, backend="reference")
    assert torch.equal(got.sequences, expected.sequences)
    assert got.stats.steps == expected.stats.steps
    assert sampling or got.stats.steps < tokens - 1, "nothing was accepted"
