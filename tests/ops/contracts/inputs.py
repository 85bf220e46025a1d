"""Arguments of every op: as its operator takes them, those of the schema, and as its reference does."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from graphs import drafted, tails
from ops.contracts.decoder import decoder_case, feature_case, small_case
from ops.contracts.ngram import KNOWN, Memory, arguments, indexed, remembered, tail_of, tree_of, two_sources
from ops.contracts.step import (
    EQUAL,
    chained,
    fed,
    graph_of,
    int32,
    mixture,
    path,
    posterior,
    problem,
    questions,
    sampling_inputs,
    state,
    texts,
)
from ops.contracts.step import accepted as accepted_rows

import gsd_kernels as gsd
from gsd_kernels.ops import step
from gsd_kernels.ops.history import Seen
from gsd_kernels.ops.learn.api import tables
from gsd_kernels.ops.state_rows import StateWindow


def state_tensors() -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Three rows of 4 heads over 2 groups, and a text of 3 tokens in a window of blocks of 4."""
    window = StateWindow.empty(1, 4, 2, 8, 6, 1, torch.device("cpu"), 4)
    window.reserve(3)
    keys, value = torch.randn(2, 1, 3, 2, 8), torch.randn(1, 3, 4, 6)
    tree = torch.tensor([[[-1, 0, 0]], [[0, 1, 1]]], dtype=torch.int32)
    rows = (*keys, value, -torch.rand(1, 3, 4, 1), torch.rand(1, 3, 4), *tree)
    stored = (torch.tensor([3], dtype=torch.int32), window.state, window.keys, window.updates, window.sums)
    return rows, stored


def op_inputs() -> dict[str, tuple]:
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
        "draft_candidates": (logits, positions, 3, *stream, 0.0, 0, 1.0, 0.0, *[None] * 4, True),
        "warped_log_probs": (logits, 0.7, 5, 1.0, 0.0, None, None, torch.tensor([0.9, 1.0]), None),
        "dag_attention": attention_inputs(),
        "write_kv": (*cache[:2], *torch.randn(2, 2, 1, 3, 4), torch.tensor([[0, 5, 2], [1, 2, 3]]), None),
        "decoder_rows": decoder_inputs(),
        "feature_rows": feature_inputs(),
        "corpus_recall": corpus_inputs(),
        "row_linear": (torch.randn(3, 32), torch.randn(5, 32), -1, None),
        "state_rows": (*state_tensors()[0], *state_tensors()[1], 4),
        "state_commit": (torch.tensor([[0, 2]]).int(), torch.tensor([2]).int(), *state_tensors()[1], 4),
        "unpack_rows": (torch.zeros(5, 36, dtype=torch.uint8), 3, None, 64, torch.tensor([1, 4]), torch.randn(1)),
        "ngram_insert": (*ngram_tensors(), *Memory().calls()[0], 3, 4),
        "ngram_lookup": (*ngram_tensors(), Memory().queries(), 3, 4),
        "perturb_candidates": (*remembered(0, 4), *stream),
        "mix_candidates": (*two_sources(0, 4, 3), None),
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
    return tables(*questions(0), mixture(0), 8.0, 40.0)


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
        "recall_levels": (*(known.tensors(), [*fresh.tensors()], fresh.root_frontier(), *level, first, *stream),),
    }


def step_inputs():
    path, rows, graph = accepted_rows(0)
    tokens, nodes = step.accepted_path(path, rows, backend="reference")
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
    rest = (w.windows, w.heads, w.eps, w.rope_scale, [1, 0], 3, None)
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


TENSORS = {gsd.sample_rows: 4, gsd.commit_kv: 5, gsd.write_kv: 5}
"""As many of the operator's arguments the reference takes as well."""


def good(op: Callable[..., Any]) -> dict[str, Any]:
    """What an op's reference takes, by name."""
    named: dict[str, Any] = {}
    if op is gsd.dag_attention:
        arguments, named = (), small_case(0)
    elif op in TENSORS:
        arguments = op_inputs()[op.__name__][: TENSORS[op]]
    else:
        arguments, named = next(EQUAL[op.__name__][2]())
    return dict(zip(signature(op).parameters, arguments, strict=False)) | named | {"backend": "reference"}
