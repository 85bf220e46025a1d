"""No kernel reads or writes past a tensor: every tensor ends at a page that must not be touched.

An access past the end kills the process, so every op runs in a child, a fork of this process: triton is imported once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from graphs import drafted
from guards import guarded
from ops.contracts.attention import ATTENTION
from ops.contracts.graph import GRAPHS
from ops.contracts.ngram import Memory, remembered, two_sources
from ops.contracts.sampling import EACH
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops.sampling import warped_log_probs

pytestmark = [pytest.mark.quick, pytest.mark.interpreter]
LIMIT = 300.0  # seconds of a child


def guarded_empty(*shape: object, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
    """torch.empty for the launch code: outputs and scratch are guarded too."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return guarded(torch.zeros(sizes, dtype=dtype))


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


def in_a_fork(function: Callable[[], None]) -> int:
    """Runs ``function`` with guarded outputs in a child process; returns its wait status."""
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        torch.empty = guarded_empty
        try:
            function()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"{function.__name__} takes longer than {LIMIT:.0f} s")
