"""The compiled CPU ops as operators: schemas, fakes, torch.compile, clear errors, and a package without them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest
import torch
from graphs import drafted, tails
from ops.contracts.backends import backend_param
from ops.contracts.corpus import arguments, indexed
from ops.contracts.decoder import decoder_case, feature_case
from ops.contracts.history import KNOWN, tail_of
from ops.contracts.learn import questions, tables
from ops.contracts.ngram import Memory, remembered, tree_of, two_sources
from ops.contracts.sampling import sampling_inputs
from ops.contracts.select_rows import path, posterior, problem
from ops.contracts.step import accepted as accepted_rows
from ops.contracts.step import chained, fed, graph_of, int32, state, texts

import gsd_kernels as gsd
from gsd_kernels.ops.history import Seen
from gsd_kernels.ops.state_rows import StateWindow
from gsd_kernels.ops.table import all_ops

CPU = torch.device("cpu")
TABLE = all_ops()
OPS = sorted(TABLE)
pytestmark = [pytest.mark.quick, *backend_param("cpu").marks]


def state_tensors() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Three rows of 4 heads over 2 groups, and a text of 3 tokens in a window of blocks of 4."""
    window = StateWindow.empty(1, 4, 2, 8, 6, 1, torch.device("cpu"), 4)
    window.reserve(3)
    keys, value = torch.randn(2, 1, 3, 2, 8), torch.randn(1, 3, 4, 6)
    tree = torch.tensor([[[-1, 0, 0]], [[0, 1, 1]]], dtype=torch.int32)
    rows = (*keys, value, -torch.rand(1, 3, 4, 1), torch.rand(1, 3, 4), *tree)
    stored = (torch.tensor([3], dtype=torch.int32), window.state, window.keys, window.updates, window.sums)
    return rows, stored


def op_inputs():
    config = gsd.GraphConfig(depth=2, width=3, branch=2, max_rows=8, merge_context=0)
    graph = drafted(config, vocab=4)
    rows = gsd.flatten(graph, 8, 4, backend="reference")
    fresh = gsd.TokenGraph.empty(2, config, "cpu")
    fresh.reset(torch.tensor([1, 2], dtype=torch.int32), tails(2, 4, torch.Generator().manual_seed(0)))
    candidates = torch.tensor([[[0, 3]], [[1, 2]]], dtype=torch.int32), torch.full((2, 1, 2), -0.7)
    logits, positions, noise = sampling_inputs(50, torch.float32, 0)
    stream = (noise["seed"], noise["sequence_ids"])
    cache = [torch.randn(2, 1, 16, 4) for _ in range(4)]
    accepted = torch.tensor([[0, 2, 5], [0, -1, -1]], dtype=torch.int32), torch.tensor([3, 1], dtype=torch.int32)
    return {
        "merge": ([*fresh.tensors()], fresh.root_frontier(), *candidates, 0, 3, 0, -1.0, float("-inf")),
        "flatten": (graph.token_ids, graph.edge_targets, graph.edge_log_probs, 8, 4),
        "verify": (
            *(rows.token_ids, rows.parent_rows, rows.depths, rows.ancestor_mask, rows.num_rows),
            torch.zeros(2, 8, dtype=torch.int32),
            torch.tensor([1], dtype=torch.int32),
            torch.tensor([4, 4], dtype=torch.int32),
            torch.tensor([False, True]),
            4,
        ),
        "commit_kv": (cache[:2], cache[2:], *accepted, torch.tensor([2, 3], dtype=torch.int32)),
        "sample_rows": (logits, positions, *stream, 1.0, 0, 0.9, 0.0, None, torch.tensor([3.0, 0.0]), None, None),
        "draft_candidates": (logits, positions, 3, *stream, 0.0, 0, 1.0, 0.0),
        "warped_log_probs": (logits, 0.7, 5, 1.0, 0.0, None, None, torch.tensor([0.9, 1.0]), None),
        "dag_attention": attention_inputs(),
        "write_kv": (*cache[:2], *torch.randn(2, 2, 1, 3, 4), torch.tensor([[0, 5, 2], [1, 2, 3]])),
        "decoder_rows": decoder_inputs(),
        "feature_rows": feature_inputs(),
        "corpus_recall": corpus_inputs(),
        "row_linear": (torch.randn(3, 32), torch.randn(5, 32)),
        "state_rows": (*state_tensors()[0], *state_tensors()[1], 4),
        "state_commit": (torch.tensor([[0, 2]]).int(), torch.tensor([2]).int(), *state_tensors()[1], 4),
        "unpack_rows": (torch.zeros(5, 36, dtype=torch.uint8), 3, None, 64, torch.tensor([1, 4]), torch.randn(1)),
        "ngram_insert": (*ngram_tensors(), *Memory().calls()[0], 3, 4),
        "ngram_lookup": (*ngram_tensors(), Memory().queries(), 3, 4),
        "perturb_candidates": (*remembered(0, 4), *stream),
        "mix_candidates": two_sources(0, 4, 3),
        "calibrate_candidates": (
            torch.rand(2, 5, 4).log(),
            torch.rand(3, 6),
            torch.ones(2, 5, dtype=torch.int32),
            None,
        ),
        "learn_source": learn_inputs(),
        **select_rows_inputs(),
        **history_inputs(stream),
        **step_inputs(),
    }


def corpus_inputs():
    corpus, tree, nodes, *text = arguments(indexed([[1, 2, 3, 1, 2]]), [[1, 2], [3]], [[3], []])
    return corpus.text, corpus.order, corpus.following, tree.token_ids, tree.parents, *text, nodes, 2, 9


def select_rows_inputs():
    graph, before = problem(0)
    edges = graph.token_ids, graph.depths, graph.edge_targets, graph.edge_log_probs, before
    seconds = 1.0 + 0.01 * torch.arange(24, dtype=torch.float64)
    return {
        "select_rows": (*edges, posterior().weights, seconds, 0.03, 24, 8),
        "update_edge_model": (*edges, *path(graph, 3), *posterior(), 0.01),
    }


def learn_inputs():
    asked, nodes, picked = questions(0)
    nothing = nodes.new_empty(0)
    lists = [[nothing if t is None else t for t in part] for part in zip(*asked, strict=True)]
    mixture, reliability = tables(0)
    return nodes, picked, *lists, *mixture, *reliability, 8.0, 40.0


def history_inputs(stream):
    case = KNOWN["with what was learned"]
    known, text = case.build()
    graph = case.graph(text)
    nodes, first = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    drafted = (graph.token_ids, graph.parents, graph.contexts, graph.depths, nodes, 2, known.sizes)
    config = gsd.GraphConfig(depth=0, width=3, branch=2, max_rows=8, merge_context=0, history_depth=2)
    fresh = gsd.TokenGraph.empty(2, config, "cpu")
    fresh.reset(text[:, -1].contiguous(), tail_of(text))
    level = (known.sizes, 0, 2, 3, 0, -1.0, float("-inf"))
    _, rows, tail = tree_of(Memory(), 0)
    tokens, path = torch.zeros(2, 20, 8, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    seen = Seen(rows, tail, path, tokens, tokens.float()).tensors()
    return {
        "history_recall": (known.tensors(), *drafted, first, *stream),
        "history_append": (
            known.written(),
            torch.tensor([[3, -1], [4, 5]]).int(),
            torch.tensor([1, 2]).int(),
            seen,
            known.sizes,
        ),
        "recall_levels": (
            *(known.tensors(), [*fresh.tensors()], fresh.root_frontier(), torch.rand(7, 2)),
            *(*level, first, *stream),
        ),
    }


def step_inputs():
    path, rows, graph = accepted_rows(0)
    tokens, nodes = torch.ops.gsd_kernels.accepted_path(*path.tensors(), rows.token_ids, rows.node_ids)
    drafted_too = (nodes, graph.parents, graph.num_nodes, graph.num_merges)
    *row_inputs, vocab = fed(1).values()
    return {
        "start_graph": ([*graph_of(0).tensors()], *texts(0).values()),
        "feed_rows": (*row_inputs[:2], None, *row_inputs[2:], torch.zeros(3, 9, dtype=torch.int32), 2, 1, vocab, True),
        "feed_chain": tuple(chained(1).values()),
        "accepted_path": (*path.tensors(), rows.token_ids, rows.node_ids),
        "commit_text": (tokens, path.num_accepted, path.next_token, int32(3), *state(0).values(), *drafted_too),
    }


def attention_inputs():
    q, (k, v) = torch.randn(2, 4, 3, 16), torch.randn(2, 2, 2, 40, 16)
    lengths = (torch.tensor([20, 7], dtype=torch.int32), torch.tensor([2, 0], dtype=torch.int32))
    mask = torch.tensor([[[1], [3], [5]]], dtype=torch.int32).expand(2, -1, -1).contiguous()
    depths = torch.tensor([[0, 1, 2]], dtype=torch.int32).expand(2, -1).contiguous()
    return q, k, v, mask, *lengths, depths, depths, 0.25, None, None, 4, torch.randn(4)


def decoder_inputs():
    w, case = decoder_case()
    *rows, k_caches, v_caches = case.values()
    rest = (w.windows, w.heads, w.eps, w.rope_scale, [1, 0], 3)
    return *rows, w.embedding, w.flat_layers, *w.packing, w.final_norm, w.head, w.inv_freq, k_caches, v_caches, *rest


def feature_inputs():
    weights, case = feature_case()
    w, k_caches, v_caches = weights.decoder, case.pop("k_caches"), case.pop("v_caches")
    features = case.pop("features")
    ids, *rows = case.values()
    first = w.embedding, w.flat_layers, *w.packing, *weights.first
    rest = w.final_norm, w.head, w.inv_freq, k_caches, v_caches, w.windows, w.heads, w.eps, w.rope_scale, 3
    return ids, features, *rows, *first, *rest


def ngram_tensors():
    table = Memory().empty()
    return table.keys, table.tokens, table.log_probs


def test_every_schema_has_inputs_below():
    assert sorted(op_inputs()) == OPS


def test_public_ops_know_their_shapes():
    """What ``torch.compile`` needs of them."""
    assert {name for name in OPS if hasattr(gsd, name)} <= {name for name in OPS if TABLE[name].fake is not None}


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    op = getattr(torch.ops.gsd_kernels, name).default
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"gsd_kernels::{name}", "CPU")
    checked = {} if TABLE[name].fake is not None else {"test_utils": "test_schema"}  # a step's own ops know no shapes
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


def test_a_graph_too_small_for_the_level_is_refused():
    config = gsd.GraphConfig(depth=1, width=2, branch=2, max_rows=4)
    graph = gsd.TokenGraph.empty(1, config, "cpu")
    graph.reset(torch.ones(1, dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
    level = {"width": 2, "merge_context": -1, "backend": "cpu"}
    candidates = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[-0.1, -0.2]]])
    frontier = gsd.merge(graph, graph.root_frontier(), *candidates, level=0, **level).node_ids
    more = (c.expand(1, 2, 2).contiguous() for c in candidates)
    with pytest.raises(RuntimeError, match="needs 7 nodes, the graph holds 3"):
        gsd.merge(graph, frontier, *more, level=1, **level)


def graph_of_one():
    config = gsd.GraphConfig(depth=1, width=2, branch=2, max_rows=4)
    return [*gsd.TokenGraph.empty(1, config, "cpu").tensors()]


@pytest.mark.parametrize(
    ("name", "at", "value", "match"),
    [
        ("merge", 0, [], "graph: expected the 11 tensors of a TokenGraph, got 0"),
        ("merge", 2, torch.zeros(2, 2, 2, dtype=torch.int32), "cand_tokens: expected size"),
        ("merge", 6, 9, "merge_context"),
        ("flatten", 3, 129, "max_rows"),
        ("flatten", 4, 8, "max_path"),
        ("select_rows", 8, 129, "max_rows"),
        ("select_rows", 5, torch.zeros(3, dtype=torch.float64), "weights: expected size"),
        ("update_edge_model", 6, torch.zeros(3, 5, dtype=torch.int64), "picked: wrong dtype"),
        ("verify", 5, torch.zeros(2, 8, dtype=torch.int64), "sampled: wrong dtype"),
        ("verify", 7, torch.zeros(3, dtype=torch.int32), "remaining: expected size"),
        ("commit_kv", 3, torch.tensor([4, 1], dtype=torch.int32), "num_accepted: 4 of 3"),
        ("sample_rows", 2, torch.zeros((), dtype=torch.int32), "seed: wrong dtype"),
        ("sample_rows", 0, torch.zeros(2, 5, 50, dtype=torch.int32), "logits: expected float"),
        ("draft_candidates", 2, 0, "branch"),
        ("ngram_insert", 8, 3, "ways: expected a power of two"),
        ("ngram_insert", 6, torch.ones(2, 3, dtype=torch.bool), "valid: expected size"),
        ("perturb_candidates", 2, torch.zeros(2, 4, dtype=torch.int32), "positions: expected size"),
        ("start_graph", 2, torch.full((3,), 99, dtype=torch.int32), "out_len: expected 1 ... 40, got 99"),
        ("start_graph", 1, torch.zeros(3, 40, dtype=torch.int32), "tokens: wrong dtype"),
        ("feed_rows", 5, torch.zeros(3, 4, dtype=torch.int32), "node_depths: expected at least 6 nodes, got 4"),
        ("feed_chain", 2, torch.full((3,), 30, dtype=torch.int32), "end: expected 30 ... 40"),
        ("accepted_path", 4, torch.zeros(3, 3, dtype=torch.int32), "node_ids: expected size"),
        ("commit_text", 1, torch.full((3,), 8, dtype=torch.int32), "num_accepted: 8 of 7 rows"),
        ("commit_text", 5, torch.full((3,), 39, dtype=torch.int32), "tokens: position .* outside the text's 40"),
        ("commit_text", 12, None, "expected all or none"),
        ("learn_source", 1, torch.zeros(3, 7, dtype=torch.int64), "picked: wrong dtype"),
        ("learn_source", 3, [torch.zeros(3, 1, 4, dtype=torch.int32)], "node_ids: expected 1 ... 64 levels"),
        ("history_recall", 6, 9, "branch: expected at most 8, got 9"),
        ("history_recall", 0, KNOWN["usual"].build()[0].tensors()[:10], "history: expected 11 tensors, or 14"),
        ("history_recall", 2, torch.zeros(2, 1, dtype=torch.int32), "parents: expected size"),
        ("history_recall", 7, [4, 8, 3], "sizes: expected 4, got 3"),
        ("history_recall", 8, None, "expected all or none"),
        ("history_append", 0, KNOWN["usual"].build()[0].tensors(), "history: expected 10 tensors, got 11"),
        ("history_append", 2, torch.zeros(3, dtype=torch.int32), "counts: expected size"),
        ("history_append", 3, [torch.zeros(2)], "seen: expected 8 tensors or none, got 1"),
        ("recall_levels", 1, graph_of_one(), "keys: expected 1 sequences, got 2"),
        ("recall_levels", 2, torch.full((2, 1), 99, dtype=torch.int32), "frontier: node 99 of"),
        ("recall_levels", 3, torch.rand(4, 1), "log_ratio: expected at least 2 ranks, got 1"),
        ("recall_levels", 6, 0, "levels: expected at least 1"),
        ("recall_levels", 7, 0, "width: expected at least the frontier's 1"),
        ("recall_levels", 8, 9, "merge_context"),
        ("recall_levels", 12, None, "expected all or none"),
        ("calibrate_candidates", 1, torch.zeros(3, 2), "log_ratio: expected at least 4 ranks, got 2"),
        ("corpus_recall", 2, torch.zeros(2, dtype=torch.int32), "following: expected size"),
        ("corpus_recall", 9, 193, "branch: expected 0 ... 192, got 193"),
        ("ngram_lookup", 4, 9, "contexts: expected at least 9"),
        ("ngram_lookup", 0, torch.zeros(2, 31, dtype=torch.int64), "keys: expected a power of two"),
    ],
)
def test_wrong_arguments_of_the_plain_ops_raise(name, at, value, match):
    arguments = list(op_inputs()[name])
    arguments[at] = value
    with pytest.raises(RuntimeError, match=match):
        getattr(torch.ops.gsd_kernels, name)(*arguments)


def wrong_dtype(t):
    return t.to(torch.float16)


def too_large(t):
    return torch.cat((t, t), -1)


def with_gaps(t):
    return torch.stack((t, t), -1)[..., 0]


@pytest.mark.parametrize(
    ("change", "match"),
    [(wrong_dtype, "wrong dtype"), (too_large, "expected size"), (with_gaps, "must be contiguous")],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("name", ["merge", "start_graph", "recall_levels"])
def test_an_error_of_a_graph_names_the_field(name, change, match):
    """The operator takes the graph as a list: its order is the fields'."""
    arguments = list(op_inputs()[name])
    at = next(i for i, value in enumerate(arguments) if isinstance(value, list) and len(value) == 11)
    free = {"token_ids", "ancestor_mask", "edge_targets"}  # whose last size says that of others
    for place, field in enumerate(fields(gsd.TokenGraph)):
        if change is too_large and field.name in free:
            continue
        graph = list(arguments[at])
        graph[place] = change(graph[place])
        with pytest.raises(RuntimeError, match=rf" {field.name}: {match}"):
            getattr(torch.ops.gsd_kernels, name)(*arguments[:at], graph, *arguments[at + 1 :])


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
    assert "not built" in reason and "pip install --no-build-isolation" in reason
    assert module == "gsd_kernels.ops.verify.reference"
