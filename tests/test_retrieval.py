"""examples/retrieval.py: whatever the cache guesses, the tokens are those of retrieving every time."""

from __future__ import annotations

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
