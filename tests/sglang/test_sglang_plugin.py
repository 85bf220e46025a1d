"""The plug-in beside a stand-in for SGLang: its options, what it drafts."""

from __future__ import annotations

import importlib
import random
import sys

import pytest
import torch
from fake_sglang import OURS, VOCAB, Batch, Mode, Request, arguments, install, written

from gsd_kernels_sglang.options import VARIABLE, Options

# The plug-in where SGLang meets it, over fakes: registration, refusals, options, a worker whose batch changes.


@pytest.fixture
def registered(monkeypatch):
    yield install(monkeypatch)
    for name in OURS:
        sys.modules.pop(f"gsd_kernels_sglang.{name}", None)


def plugin():
    return importlib.import_module("gsd_kernels_sglang.plugin")


def worker(**changes):
    given = arguments(speculative_num_draft_tokens=8, speculative_eagle_topk=3, **changes)
    return plugin().worker(None)(given, 0, 0, None)


def test_the_tested_version_alone_registers_and_refuses_what_it_cannot_serve(registered, monkeypatch):
    plugin().register()
    algorithm = registered["GSD"]
    assert algorithm.is_ngram() and not algorithm.has_draft_kv() and algorithm.get_platform_worker_cls() is None
    algorithm.validate_server_args(arguments())
    for given, rows, branch, most in (({}, 16, 4, 48), (CHOSEN, 6, 2, 3)):
        filled = arguments(**given)
        algorithm.handle_server_args(filled)
        found = filled.speculative_num_draft_tokens, filled.speculative_eagle_topk, filled.max_running_requests
        assert found == (rows, branch, most) and filled.speculative_num_steps * branch <= rows
        assert filled.disable_overlap_schedule and not filled.enable_mixed_chunk
    for name, value in UNSERVED.items():
        with pytest.raises(ValueError, match="--" + name.replace("_", "-")):
            algorithm.validate_server_args(arguments(**{name: value}))
    registered = install(monkeypatch, "0.6.0")
    plugin().register()
    assert "gsd_kernels_sglang.worker" not in sys.modules
    with pytest.raises(ValueError, match=r"tested with SGLang 0\.5\.23, this is 0\.6\.0.*install sglang==0\.5\.23"):
        registered["GSD"].validate_server_args(arguments())


CHOSEN = {"speculative_num_draft_tokens": 6, "speculative_eagle_topk": 2, "max_running_requests": 3}
UNSERVED = {
    "speculative_draft_model_path": "a/model",
    "speculative_ngram_external_corpus_path": "file",
    "speculative_use_rejection_sampling": True,
    "pp_size": 2,
    "speculative_num_draft_tokens": 0,
}


OPTIONS = [
    ("levels=10", "JSON object"),
    ('{"level": 3}', "unknown option 'level'; did you mean 'levels'. expected one of levels, width"),
    ('{"shared": 1}', "shared: expected true or false, got 1"),
    ('{"capacity": 1500}', "capacity: expected a power of two, got 1500"),
]


def test_options_out_of_range_are_refused():
    for text, match in OPTIONS:
        with pytest.raises((ValueError, TypeError), match=f"^{VARIABLE}: .*{match}"):
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


@pytest.mark.parametrize(("backend", "shared"), [("torch_native", "true"), ("triton", "false")])
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
    assert f"accepted={statistics.accepted}" in statistics.line() and statistics.merged > 20
    assert statistics.accepted > 100 and statistics.tokens == statistics.requests + statistics.accepted
    assert widths == {8} if backend == "triton" else {1, 8} <= widths


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


@pytest.mark.parametrize("shared", ["true", "false"])
def test_requests_see_each_others_text_only_if_shared(shared, registered, monkeypatch):
    monkeypatch.setenv(VARIABLE, f'{{"shared": {shared}}}')
    serving, later = Serving(worker()), Request("b", [1, 2])
    serving.join(Request("a", [1, 2]))
    for _ in range(6):
        serving.step()
    serving.join(later)
    serving.step()
    assert (len(later.output_ids) > 1) is (shared == "true")
