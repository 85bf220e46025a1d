"""examples/retrieval.py: whatever the cache guesses, the tokens are those of retrieving every time."""

from __future__ import annotations

import random
import runpy
import sys
import types
from pathlib import Path

import pytest

pytest.importorskip("bm25s", reason="needs the extra [retrieval]")

import gsd_kernels
from gsd_kernels_cli import demo

EXAMPLE = Path(__file__).parents[1] / "examples" / "retrieval.py"
SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 11}
LATENCY, LENGTH, INTERVAL = 0.25, 48, 4


@pytest.fixture(scope="module")
def example():
    module = types.ModuleType("retrieval")
    with pytest.MonkeyPatch.context() as patch:  # dataclasses look their module up
        patch.setitem(sys.modules, "retrieval", module)
        vars(module).update(runpy.run_path(str(EXAMPLE), run_name="retrieval"))
    return module


@pytest.fixture(scope="module")
def passages(example):
    return example.python_passages()


@pytest.fixture(scope="module")
def store(example, passages, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    example.Retriever.build(folder, passages)
    return folder


@pytest.fixture(scope="module")
def make(example, passages):
    """Generation from a prompt, by a patched model of the demo pair."""
    target, draft, tokenizer = demo.load()
    gsd_kernels.patch(target, assistant_model=draft, graph_config="tree")
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"][:48] for text in passages]

    def generation(prompt: str, arguments: dict, length: int = LENGTH):
        prompt_ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        return example.Generation(target, tokenizer, ids, prompt_ids, length, INTERVAL, 6, arguments)

    return generation


@pytest.fixture
def slept(example, monkeypatch):
    """The latencies that were waited for."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


class Oracle:
    """Guesses what the retriever finds, some of the time."""

    def __init__(self, example, store, passages, share: float) -> None:
        self.retriever, self.count, self.share = example.Retriever(store, passages), len(passages), share
        self.random = random.Random(3)

    def add(self, numbers) -> None: ...

    def guess(self, query: str) -> int:
        (best, *_), *_ = self.retriever.search([query])
        right = self.random.random() < self.share
        return best if right else (best + 1 + self.random.randrange(self.count - 1)) % self.count


@pytest.mark.parametrize("arguments", [{"do_sample": False}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prompt", ["def heappush(heap, item):\n", "class Queue:\n    def put(self, item):\n"])
def test_the_cache_changes_no_token_and_saves_waits(prompt, arguments, example, store, passages, make, slept):
    every, speculative = (example.Retriever(store, passages, LATENCY) for _ in range(2))
    expected = example.retrieving_every_time(make(prompt, arguments), every)
    assert len(expected) == LENGTH and every.waits == LENGTH // INTERVAL
    assert len({every.search([make(prompt, arguments).query(expected[:n])])[0][0] for n in range(0, LENGTH, 4)}) > 1
    cache = example.Cache(store, passages)
    slept.clear()
    tokens, guesses = example.retrieving_speculatively(make(prompt, arguments), speculative, cache, stride=3)
    assert tokens == expected
    assert speculative.waits < LENGTH // INTERVAL * 2 // 3
    assert slept == [LATENCY] * speculative.waits
    assert guesses.right > 0


@pytest.mark.parametrize("stride", [1, 2, 5])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_wrong_guesses_are_rolled_back(share, stride, example, store, passages, make):
    prompt, arguments = "def heappop(heap):\n", {"do_sample": False}
    expected = example.retrieving_every_time(make(prompt, arguments, 24), example.Retriever(store, passages))
    retriever = example.Retriever(store, passages)
    oracle = Oracle(example, store, passages, share)
    tokens, guesses = example.retrieving_speculatively(make(prompt, arguments, 24), retriever, oracle, stride=stride)
    assert tokens == expected
    if share == 1.0:
        assert (retriever.waits, guesses.right) == (-(-6 // stride), 6)
    if share == 0.0:
        assert (retriever.waits, guesses.right) == (6, 0)


def test_the_cache_scores_as_the_store_does(example, store, passages):
    cache = example.Cache(store, passages)
    assert cache.guess("queue") is None
    cache.add(range(len(passages)))
    retriever = example.Retriever(store, passages)
    queries = ["heap item push", "queue put item", "json decode string", "wrap text width width", "lexer token"]
    assert [cache.guess(query) for query in queries] == [best for best, *_ in retriever.search(queries)]


def test_the_end_of_text_ends_it(example, store, passages, make):
    generation = make("import os\n", {"do_sample": False})
    retriever = example.Retriever(store, passages)
    plain = example.retrieving_every_time(generation, retriever)
    generation.ends = {plain[9]}
    generation.arguments = {"do_sample": False, "eos_token_id": plain[9]}
    expected = example.retrieving_every_time(generation, retriever)
    assert len(expected) < LENGTH and expected[-1] == plain[9]
    cache = example.Cache(store, passages)
    assert example.retrieving_speculatively(generation, retriever, cache)[0] == expected
