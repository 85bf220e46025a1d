"""The ways of decoding that a race can name, and the pairs and prompts that they are raced on."""

from __future__ import annotations

import fake_cuda
import pytest
import torch

from gsd_kernels_bench.generation.competitors import DRAFTERS, HISTORY_ROWS, OURS, competitors, fixed_configs
from gsd_kernels_bench.generation.pairs import load_pair

CPU = torch.device("cpu")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_fixed_shapes_of_the_history_have_the_rows_of_their_names(device):
    shapes = fixed_configs(torch.device(device))
    for name, rows in {**HISTORY_ROWS, "history": 11}.items():
        assert shapes[name].depth == 0 and shapes[name].max_rows == rows
        assert 0 < shapes[name].history_depth < rows  # a row of its own for every level


def test_every_way_of_ours_writes_one_text_or_says_what_is_missing():
    pair = load_pair("tiny", device=CPU, dtype=torch.float32, prompts=1)
    ways = {way.name: way for way in competitors(pair, OURS)}
    trained = {"heads", "all", *(name for name, (sources, _) in DRAFTERS.items() if sources != ("history",))}
    assert {name for name, way in ways.items() if way.decode is None} == trained
    assert ways["all"].missing == "the pair has no trained heads"
    assert ways["dflash-lattice"].missing == "the pair has no trained dflash"
    assert ways["every"].missing == "the pair has no trained eagle3, dflash, heads"
    texts = [way.decode(pair.prompts[0].input_ids, 24, 0).sequences for way in ways.values() if way.decode is not None]
    assert len(texts) == len(OURS) - len(trained) and all(torch.equal(text, texts[0]) for text in texts)


def test_new_sessions_take_nothing_and_leave_what_is_kept(monkeypatch):
    pair, cuda, captured = (
        load_pair("tiny", device=CPU, dtype=torch.float32, prompts=1),
        fake_cuda.install(monkeypatch),
        [],
    )
    kept, new = competitors(pair, ["graph", "graph-new"])
    for way in (kept, new, kept, new):
        before = cuda.counts["captures"]
        way.decode(pair.prompts[0].input_ids, 12, 0)
        captured.append(cuda.counts["captures"] - before)
    first = captured[0]
    assert first > 0 and captured == [first, first, 0, first]
