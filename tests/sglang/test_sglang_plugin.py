"""The plug-in beside a stand-in for SGLang: its options, what it drafts."""

from __future__ import annotations

import importlib
import random
import sys

import numpy as np
import pytest
import torch
from fake_sglang import OURS, VOCAB, Batch, Mode, Request, arguments, install, written

from gsd_kernels.graph import TokenGraph
from gsd_kernels_sglang.drafter import TAIL, Drafter, Text
from gsd_kernels_sglang.load import RowPolicy
from gsd_kernels_sglang.options import VARIABLE, Options
from gsd_kernels_sglang.statistics import Statistics

# The plug-in where SGLang meets it, over fakes: registration, refusals, options, a worker whose batch changes.


@pytest.fixture
def registered(monkeypatch):
    yield install(monkeypatch)
    for name in OURS:
        sys.modules.pop(f"gsd_kernels_sglang.{name}", None)


def plugin():
    return importlib.import_module("gsd_kernels_sglang.plugin")


def worker(**changes):
    settings = {"speculative_num_draft_tokens": 8, "speculative_eagle_topk": 3} | changes
    return plugin().worker(None)(arguments(**settings), 0, 0, None)


def test_importing_the_package_needs_no_sglang():
    names = ("drafter", "history", "load", "options", "statistics", "versions")
    before = set(sys.modules)
    for name in names:
        importlib.import_module(f"gsd_kernels_sglang.{name}")
    assert not [name for name in set(sys.modules) - before if name.split(".")[0] in ("sglang", "transformers")]


def test_an_untested_version_is_refused_by_name(registered, monkeypatch):
    registered = install(monkeypatch, "0.6.0")
    plugin().register()
    assert "gsd_kernels_sglang.worker" not in sys.modules
    with pytest.raises(ValueError, match=r"tested with SGLang 0\.5\.23, this is 0\.6\.0.*install sglang==0\.5\.23"):
        registered["GSD"].validate_server_args(arguments())


def test_the_tested_version_registers_the_algorithm(registered):
    plugin().register()
    algorithm = registered["GSD"]
    assert algorithm.is_ngram() and not algorithm.has_draft_kv() and algorithm.get_platform_worker_cls() is None
    algorithm.validate_server_args(arguments())
    filled = arguments()
    algorithm.handle_server_args(filled)
    assert (filled.speculative_num_draft_tokens, filled.speculative_eagle_topk) == (16, 4)
    assert (filled.max_running_requests, filled.disable_overlap_schedule, filled.enable_mixed_chunk) == (
        48,
        True,
        False,
    )
    chosen = arguments(speculative_num_draft_tokens=6, speculative_eagle_topk=2, max_running_requests=3)
    algorithm.handle_server_args(chosen)
    assert (chosen.speculative_num_draft_tokens, chosen.max_running_requests) == (6, 3)
    assert chosen.speculative_num_steps * chosen.speculative_eagle_topk <= chosen.speculative_num_draft_tokens


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_draft_model_path", "a/model"),
        ("speculative_adaptive", True),
        ("speculative_ngram_external_corpus_path", "file"),
        ("enable_dp_attention", True),
        ("speculative_use_rejection_sampling", True),
        ("pp_size", 2),
        ("speculative_num_draft_tokens", 0),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(name, value, registered):
    plugin().register()
    with pytest.raises(ValueError, match="--" + name.replace("_", "-")):
        registered["GSD"].validate_server_args(arguments(**{name: value}))


@pytest.mark.parametrize(
    ("text", "error", "match"),
    [
        ("levels=10", ValueError, "JSON object"),
        ("[1]", TypeError, "JSON object"),
        ('{"level": 3}', ValueError, "unknown option 'level'; did you mean 'levels'. expected one of levels, width"),
        ('{"levels": 0}', ValueError, "levels: expected 1 … 64, got 0"),
        ('{"width": 2.5}', TypeError, "width: expected a whole number, got 2.5"),
        ('{"shared": 1}', TypeError, "shared: expected true or false, got 1"),
        ('{"capacity": 1500}', ValueError, "capacity: expected a power of two, got 1500"),
        ('{"context": 8}', ValueError, "context: expected 1 … 7, got 8"),
        ('{"batch_rows": 0}', ValueError, "batch_rows: expected 1"),
        ('{"merge_context": -2}', ValueError, "merge_context: expected -1 … 8, got -2"),
    ],
)
def test_options_out_of_range_are_refused(text, error, match):
    with pytest.raises(error, match=f"^{VARIABLE}: .*{match}"):
        Options.read({VARIABLE: text})


class Serving:
    """Requests that come and go at a worker, as SGLang's scheduler has them."""

    def __init__(self, worker) -> None:
        self.worker, self.running, self.carried = worker, [], torch.empty(0, dtype=torch.int32)

    def join(self, *requests: Request) -> None:
        result = self.worker.forward_batch_generation(Batch(reqs=list(requests), forward_mode=Mode("extend")))
        self.carried = torch.cat([self.carried, result.next_draft_input.accept_tokens])
        self.running += requests

    def leave(self, *keys: str) -> None:
        kept = [i for i, request in enumerate(self.running) if request.rid not in keys]
        self.carried = self.carried.reshape(-1, self.worker.most_rows)[kept].flatten()  # as SGLang filters it
        self.running = [self.running[i] for i in kept]

    def step(self) -> None:
        result = self.worker.forward_batch_generation(Batch(reqs=self.running, forward_mode=Mode("decode")))
        width = self.worker.speculative_num_draft_tokens
        for i, request in enumerate(self.running):
            given = result.next_token_ids[i * width :][: result.accept_lens[i]]
            request.output_ids.extend(given.tolist())
        self.carried = result.next_draft_input.accept_tokens


@pytest.mark.parametrize("backend", ["torch_native", "triton"])
@pytest.mark.parametrize("shared", ["true", "false"])
def test_requests_that_come_end_and_are_put_back_get_the_targets_text(backend, shared, registered, monkeypatch):
    monkeypatch.setenv(VARIABLE, f'{{"batch_rows": 16, "shared": {shared}, "capacity": 4096}}')
    serving, draw, done = Serving(worker(attention_backend=backend)), random.Random(7), []
    waiting = [Request(f"r{i}", [draw.randrange(VOCAB) for _ in range(2 + i % 5)]) for i in range(24)]
    while waiting or serving.running:
        if waiting and len(serving.running) < 7 and draw.random() < 0.5:
            serving.join(*(waiting.pop() for _ in range(min(len(waiting), draw.randrange(1, 4)))))
        for request in [r for r in serving.running if len(r.output_ids) > 40 or draw.random() < 0.005]:
            serving.leave(request.rid)  # ended or aborted
            done.append(request)
        if len(serving.running) > 2 and draw.random() < 0.2:  # put back, with what it has
            request = serving.running[0]
            serving.leave(request.rid)
            waiting.append(request)
        if serving.running:
            serving.step()
    assert len(done) == 24 and sum(len(request.output_ids) > 40 for request in done) > 12
    for request in done:
        assert request.output_ids == written(request.origin_input_ids_unpadded, len(request.output_ids))
    statistics, widths = serving.worker.drafter.statistics, set(serving.worker.widths)
    assert statistics.accepted > 100
    assert statistics.tokens == statistics.requests + statistics.accepted
    assert serving.worker.drafter.numbers.keys() <= {request.rid for request in done}
    if backend == "triton":
        assert widths == {8}
    else:
        assert {1, 8} <= widths and len(widths) > 3


def test_the_flushed_cache_and_the_requests_that_went_are_forgotten(registered):
    serving = Serving(worker())
    serving.join(Request("a", [1, 2, 3, 1, 2]), Request("b", [4, 5, 6]))
    serving.step()
    drafter = serving.worker.drafter
    assert set(drafter.numbers) == {"a", "b"} and bool(drafter.history.own.keys.any())
    serving.leave("b")
    serving.step()
    assert set(drafter.numbers) == {"a"}
    serving.worker.ngram_corpus.reset()
    assert not drafter.numbers and not bool(drafter.history.own.keys.any() | drafter.history.shared.keys.any())
    with pytest.raises(ValueError, match="external corpus"):
        serving.worker.ngram_corpus.load_external_corpus_named("name", [])


# Histories → token graph → the tree that SGLang verifies: its form, its rows by load, what requests share.


SMALL = {"capacity": 4096}


def drafter(rows: int = 9, branch: int = 3, batch_rows: int = 1000, **options) -> Drafter:
    return Drafter(Options(**SMALL, **options), rows, branch, RowPolicy(rows, batch_rows))


def text(key: str, tokens: list[int]) -> Text:
    return Text(key, tokens[-TAIL:], lambda: tokens)


def paths(drafted, b: int) -> list[tuple[int, ...]]:
    """The tokens from the root to each row of a request, by the arrays that SGLang gets."""
    tokens, mask = drafted.arrays()
    rows = drafted.num_rows
    tokens, mask = tokens.reshape(-1, rows)[b], mask.reshape(-1, rows, rows)[b]
    return [tuple(int(tokens[j]) for j in np.flatnonzero(mask[i])) for i in range(rows)]


def answer(drafted, nearly: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Candidates of a target that picks 50 after every row."""
    shape = (*drafted.rows.token_ids.shape, 3)
    tokens = (50 + torch.arange(3) * nearly).to(torch.int32).expand(shape).contiguous()
    return tokens, torch.tensor([0.7, 0.2, 0.1]).log().expand(shape).contiguous()


def test_the_arrays_are_trees_as_sglang_reads_them():
    """Parents first, each row below its root's text once, links found by the largest ancestor, padding unreachable."""
    draw, ours, merges = random.Random(3), drafter(rows=13, branch=3, merge_context=0), 0
    texts = {key: [draw.randrange(6) for _ in range(12)] for key in "abcd"}
    for _ in range(30):
        keys = draw.sample("abcd", draw.randrange(1, 5))
        drafted = ours.draft([text(key, texts[key]) for key in keys])
        tokens, mask = drafted.arrays()
        count = drafted.num_rows
        assert tokens.dtype == np.int64 and mask.dtype == np.bool_
        assert (tokens.shape, mask.shape) == ((len(keys) * count,), (len(keys) * count * count,))
        merges += int(drafted.graph.num_merges.sum())
        for b, key in enumerate(keys):
            real, found = int(drafted.rows.num_rows[b]), paths(drafted, b)
            tree = mask.reshape(len(keys), count, count)[b]
            assert tree.diagonal().all() and not np.triu(tree, 1).any()
            assert all(tree[i, 0] for i in range(real)) and not tree[real:, :real].any()
            assert found[0] == (texts[key][-1],) and len(set(found[:real])) == real
            for i in range(1, real):
                parent = max(j for j in range(i) if tree[i, j])
                assert found[i][:-1] == found[parent], "a row's ancestors are its parent's and itself"
        shape = (*drafted.rows.token_ids.shape, 3)
        best = torch.tensor([draw.sample(range(6), 3) for _ in range(len(keys) * count)], dtype=torch.int32)
        log_probs = torch.tensor([0.5, 0.3, 0.1]).log().expand(shape).contiguous()
        counts = torch.ones(len(keys), dtype=torch.int32)
        ours.observe(drafted, (best.view(shape), log_probs), torch.zeros(shape[:2], dtype=torch.int64), counts)
        for key in keys:
            texts[key].append(draw.randrange(6))
    assert merges > 20


@pytest.mark.parametrize("shared", [True, False])
def test_requests_see_each_others_verified_rows_only_if_shared(shared):
    ours = drafter(shared=shared)
    first = ours.draft([text("a", [1, 2, 3, 4])])
    assert paths(first, 0) == [(4,)]
    ours.observe(first, answer(first), torch.tensor([[50]]), torch.tensor([1]))
    other = paths(ours.draft([text("b", [1, 2, 3, 4])]), 0)
    assert ((4, 50) in other) is shared
    assert (4, 50) in paths(ours.draft([text("a", [1, 2, 3, 4])]), 0)
    assert paths(ours.draft([text("c", [7, 8, 9, 10])]), 0) == [(10,)]


@pytest.mark.parametrize(
    ("requests", "rows"), [(0, 16), (1, 16), (4, 16), (5, 12), (8, 8), (32, 2), (33, 1), (64, 1), (1000, 1)]
)
def test_rows_follow_the_load(requests, rows):
    assert RowPolicy(16, 64).budget(requests) == rows


def test_statistics_count_accepted_merge_edges():
    """Root 1 → 2 → 3 and 1 → 4, which a merge edge leads on to 3."""
    config = Options(**SMALL).graph_config(8, 2)
    graph = TokenGraph.empty(1, config, "cpu")
    graph.reset(torch.tensor([1], dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
    graph.token_ids[0, :4] = torch.tensor([1, 2, 4, 3], dtype=torch.int32)
    graph.parents[0, :4] = torch.tensor([-1, 0, 0, 1], dtype=torch.int32)
    graph.edge_targets[0, 0] = torch.tensor([1, 2])
    graph.edge_targets[0, 1, 0] = graph.edge_targets[0, 2, 0] = 3
    graph.edge_log_probs[0, :3] = -0.5
    graph.num_nodes.fill_(4)
    graph.num_merges.fill_(1)
    from gsd_kernels import flatten

    rows, counted = flatten(graph, 8, 7), Statistics()
    counted.add(rows, graph, torch.tensor([[4, 3, 9, 0, 0, 0, 0, 0]]), torch.tensor([3]))
    assert (counted.nodes, counted.merged, counted.accepted, counted.accepted_merged) == (3, 1, 2, 1)
    counted.add(rows, graph, torch.tensor([[2, 3, 9, 0, 0, 0, 0, 0]]), torch.tensor([3]))
    assert (counted.accepted, counted.accepted_merged, counted.tokens) == (4, 1, 6)
    assert "steps=2 tokens_per_step=3.000" in counted.line() and "merged_share=0.250" in counted.line()
