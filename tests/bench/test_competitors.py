"""The ways of decoding that a race can name, and the pairs and prompts that they are raced on."""

from __future__ import annotations

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


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_demo_target_has_every_drafter(temperature):
    pair = load_pair("demo", device=CPU, dtype=torch.float32, texts=["code"], prompts=1, fresh=True)
    ways = competitors(pair, ("plain", *DRAFTERS), temperature=temperature)
    texts = [way.decode(pair.prompts[0].input_ids, 12, 3) for way in ways]
    assert all(torch.equal(text.sequences, texts[0].sequences) for text in texts)
    assert all(text.target_forwards > 0 for text in texts) and texts[1].target_forwards < texts[0].target_forwards


@pytest.mark.slow
def test_fresh_prompts_are_others():
    pairs_ = [
        load_pair("demo", device=CPU, dtype=torch.float32, texts=["code", "copy"], prompts=3, fresh=f) for f in (0, 1)
    ]
    first, fresh = ({prompt.name for prompt in pair.prompts} for pair in pairs_)
    assert len(first) == len(fresh) == 6 and not first & fresh
    assert sum(name.startswith("fresh-copy-") for name in fresh) == 3


@pytest.mark.slow
def test_a_shape_of_a_larger_vocabulary_has_no_drafters(monkeypatch):
    """The Llama shapes that a GPU is measured with: the demo target's drafters do not fit them."""
    from gsd_kernels_bench.lib import shapes
    from gsd_kernels_cli.demo.inflate import ModelShape

    large = ModelShape(320, 704, 6, 5, 5, 64, 4096, tie_word_embeddings=False)
    monkeypatch.setitem(shapes.SHAPES, "large", large)
    pair = load_pair("demo", device=CPU, dtype=torch.float32, target_shape="large", prompts=1)
    assert not pair.drafters and pair.heads is not None
