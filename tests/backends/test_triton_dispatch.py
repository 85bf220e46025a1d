"""The Triton ops as operators: schema, fakes, torch.compile without a graph break."""

from __future__ import annotations

import pytest
import torch
from graphs import candidates, drafted, tails
from ops.contracts.attention import Attention
from ops.contracts.ngram import Memory, contents, remembered, two_sources

import gsd_kernels as gsd
from gsd_kernels.ops.table import OPS

pytestmark = [pytest.mark.quick, pytest.mark.interpreter]

CONFIG = gsd.GraphConfig(depth=3, width=3, branch=2, max_rows=12, merge_context=0)
OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")


def small_attention() -> tuple:
    tensors, _ = Attention(rows=3, nodes=5, capacity=90, prefixes=(40, 30), paddings=(0, 2)).build("cpu")
    tensors = {n: t.nan_to_num(0.0) if t.is_floating_point() else t for n, t in tensors.items()}
    names = ("q", "k", "v", "ancestor_mask", "kv_len", "kv_start")
    return tuple(tensors[n] for n in names)


def level() -> tuple:
    gen = torch.Generator().manual_seed(0)
    graph = gsd.TokenGraph.empty(2, CONFIG, "cpu")
    graph.reset(torch.tensor([3, 4], dtype=torch.int32), tails(2, 5, gen))
    return graph, *candidates("random", 6, (2, 1, CONFIG.branch), gen)


def sampling_arguments() -> tuple:
    return torch.randn(2, 3, 70), torch.arange(6, dtype=torch.int32).view(2, 3)


def rows_arguments() -> tuple:
    rows = gsd.flatten(drafted(CONFIG, vocab=5), CONFIG.max_rows, CONFIG.max_path, backend="reference")
    ints = torch.tensor([9, 9], dtype=torch.int32)
    return rows, torch.zeros_like(rows.token_ids), torch.tensor([1], dtype=torch.int32), ints, ints > 10


def commit_arguments() -> tuple:
    caches = [[torch.randn(2, 2, 20, 16) for _ in range(2)] for _ in range(2)]
    rows = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    return *caches, rows, torch.tensor([2, 1], dtype=torch.int32), torch.tensor([5, 8], dtype=torch.int32)


def write_arguments() -> tuple:
    caches, rows = ([torch.randn(2, 2, n, 16) for _ in range(2)] for n in (20, 3))
    return *caches, *rows, torch.tensor([[4, 1, 9], [0, 19, 3]])


def remembered_arguments() -> tuple:
    case = Memory(rows=(9,))
    return case.empty(), *case.calls()[0], *two_sources(0, 3, 2)


def operator_calls() -> dict[str, tuple]:
    graph, tokens, log_probs = level()
    rows, sampled, eos, remaining, done = rows_arguments()
    logits, positions = sampling_arguments()
    stream = torch.tensor(1), torch.arange(2, dtype=torch.int32)
    warpers = 0.0, 5, 1.0, 0.0, torch.tensor([0.5, 1.0]), None, None, None
    memory, *given = remembered_arguments()
    stored = (memory.keys, memory.tokens, memory.log_probs)
    return {
        "triton_dag_attention": (*small_attention(), None, None, 0.125, None, None, None, torch.randn(2)),
        "triton_merge": ([*graph.tensors()], graph.root_frontier(), tokens, log_probs, 0, 3, 0, -1.0, -5.0),
        "triton_flatten": (graph.token_ids, graph.edge_targets, graph.edge_log_probs, 12, 6),
        "triton_sample_rows": (logits, positions, *stream, *warpers),
        "triton_draft_candidates": (logits, positions, 2, *stream, *warpers, True),
        "triton_warped_log_probs": (logits, *warpers),
        "triton_verify": (*rows.tensors()[:4], rows.num_rows, sampled, eos, remaining, done, 6),
        "triton_commit_kv": commit_arguments(),
        "triton_write_kv": write_arguments(),
        "triton_ngram_insert": (*stored, *given[:4], 3, 4),
        "triton_ngram_lookup": (*stored, given[0], 3, 4),
        "triton_perturb_candidates": (*remembered(0, 3), *stream),
        "triton_mix_candidates": tuple(given[4:]),
    }


@pytest.mark.parametrize("name", operator_calls())
def test_opcheck(name):
    torch.library.opcheck(getattr(torch.ops.gsd_kernels, name).default, operator_calls()[name], test_utils=OPCHECKS)


def attend(q, k, v, mask, kv_len, kv_start):
    options = {"kv_start": kv_start, "backend": "triton"}
    return gsd.dag_attention(q, k, v, mask, kv_len, **options) * 2


def draft(graph, tokens, log_probs):
    rules = {"level": 0, "width": 3, "merge_context": 0, "backend": "triton"}
    frontier = gsd.merge(graph, graph.root_frontier(), tokens, log_probs, **rules)
    rows = gsd.flatten(graph, 12, 6, backend="triton")
    return *rows.tensors(), frontier.node_ids, frontier.ancestor_mask, graph.num_nodes + 0


def sample(logits, positions):
    options = {"temperature": 0.7, "top_k": 5, "backend": "triton"}
    sequences = torch.arange(2, dtype=torch.int32)
    return gsd.sample_rows(logits + 1, positions, seed=torch.tensor(4), sequence_ids=sequences, **options)


def accept(rows, sampled, eos, remaining, done):
    options = {"eos_ids": eos, "remaining": remaining, "done": done, "max_path": 6, "backend": "triton"}
    return gsd.verify(rows, sampled + 1, **options).tensors()


def commit(k, v, rows, accepted, kv_len):
    gsd.commit_kv(k, v, rows, accepted, kv_len, backend="triton")
    return k[1] + 0, v[0] + 0, kv_len + 0


def write(k_cache, v_cache, k, v, positions):
    gsd.write_kv(k_cache, v_cache, k + 1, v, positions, backend="triton")
    return k_cache + 0, v_cache + 0


def remember(memory, contexts, tokens, log_probs, valid, *sources):
    gsd.ngram_insert(memory, contexts, tokens + 1, log_probs, valid, backend="triton")
    found = gsd.ngram_lookup(memory, contexts, backend="triton")
    return *found, *gsd.mix_candidates(*sources, backend="triton"), *(t + 0 for t in contents(memory))


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (attend, small_attention),
        (draft, level),
        (sample, sampling_arguments),
        (accept, rows_arguments),
        (commit, commit_arguments),
        (write, write_arguments),
        (remember, remembered_arguments),
    ],
    ids=lambda f: f.__name__,
)
def test_compiles_without_a_graph_break(function, arguments):
    torch.manual_seed(0)
    expected = function(*arguments())
    torch.manual_seed(0)
    got = torch.compile(function, fullgraph=True, backend="aot_eager")(*arguments())
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_auto_never_interprets():
    attention = OPS["dag_attention"]
    assert attention.chosen("auto", torch.device("cpu")) != attention.launched
    assert attention.chosen("triton", torch.device("cpu")) == attention.launched
