"""Other engines beside ours: who takes part, with what settings and weights, and what is said of the missing ones."""

from __future__ import annotations

import copy
import dataclasses
import json
import os

import pytest
import torch
from fake_engines import Failing, Recorded

from gsd_kernels_bench.generation import generate
from gsd_kernels_bench.generation.pairs import load_pair
from gsd_kernels_bench.generation.peers import race
from gsd_kernels_bench.generation.peers.base import Place, Setting
from gsd_kernels_hf.extras import cure

CPU = torch.device("cpu")
NEW = 8


@pytest.fixture(scope="module")
def pair():
    return load_pair("tiny", device=CPU, dtype=torch.float32, prompts=4)


@pytest.fixture(scope="module")
def texts(pair):
    """Greedy continuations of every prompt by transformers, with room for what tuning decodes."""
    found = {}
    for prompt in pair.prompts:
        out = pair.target.generate(prompt.input_ids, do_sample=False, max_new_tokens=race.TUNING_TOKENS)
        found[tuple(prompt.input_ids[0].tolist())] = out[0, prompt.input_ids.shape[1] :].tolist()
    return found


def settings(*names, **options):
    given = {"pair": "tiny", "target_shape": "none", "prompts": 2, "new_tokens": NEW, **options}
    return generate.Settings(CPU, torch.float32, competitors=names, **given)


@pytest.mark.slow
def test_peers_race_in_a_process_of_their_own(texts, monkeypatch, tmp_path):
    monkeypatch.setattr(race, "ENGINES", (Recorded(texts), Failing()))
    report = generate.run(settings("hf-greedy", "plain", *race.PEERS), folder=tmp_path)
    rows = {row["competitor"]: row for row in report.summary}
    assert list(rows) == ["hf-greedy", "plain", "openvino", "openvino-draft", "openvino-lookup"]
    for name in ("openvino", "openvino-draft"):
        assert rows[name]["equal"] == rows[name]["compared"] == 2
    assert rows["openvino-lookup"]["equal"] == 0 and rows["openvino-lookup"]["beyond_rounding"] == 2
    assert set(report.missing) == {"llama-cpp", "llama-cpp-draft", "llama-cpp-lookup"}
    assert report.missing["llama-cpp"] == "ValueError: no such format"
    seconds = [run["seconds"] for run in report.runs if run["competitor"] == "openvino-draft"]
    assert all(0.001 <= value < 0.2 for value in seconds), "opening is not timed"
    notes = json.loads((tmp_path / "generate.json").read_text())["settings"]["peers"]
    pid, torch_loaded = notes["openvino"]["version"].split(", ")
    assert int(pid.split()[1]) != os.getpid() and torch_loaded == "torch False"
    for name in ("openvino-draft", "openvino-lookup"):
        assert notes[name]["drafted_tokens"] == 5, "the fastest"
        assert set(notes[name]["chosen_on"]) == {"code-2", "code-3"}
    assert report.prompts == ["code-0", "code-1"], "not those that settings were chosen on"


@pytest.mark.parametrize(("at", "said"), [("die", "BrokenProcessPool"), ("short", "gave 7 tokens of 8")])
def test_a_peer_that_fails_is_named_and_the_others_go_on(at, said, monkeypatch):
    monkeypatch.setattr(race, "ENGINES", (Failing(at=at),))
    report = generate.run(settings("hf-greedy", "llama-cpp", "llama-cpp-draft", prompts=1))
    assert [row["competitor"] for row in report.summary] == ["hf-greedy"]
    assert said in report.missing["llama-cpp"] and "llama-cpp-draft" in report.missing


def test_why_a_peer_is_missing(pair):
    engine = Recorded({})
    assert race.missing(engine, pair, 0.0) is None
    absent = dataclasses.replace(engine, packages=("json", "no_such_engine"))
    assert race.missing(absent, pair, 0.0) == f"no_such_engine is not installed: {cure('peers')}"
    assert "greedily only" in race.missing(engine, pair, 0.7)
    assert "one process" in race.missing(engine, dataclasses.replace(pair, source=None), 0.0)
    double = dataclasses.replace(pair, target=copy.deepcopy(pair.target).double())
    assert "not float64" in race.missing(engine, double, 0.0)
    elsewhere = dataclasses.replace(pair, target=copy.deepcopy(pair.target).to("meta"))
    assert "is on meta" in race.missing(engine, elsewhere, 0.0)
    biased = copy.deepcopy(pair.target)
    biased.config.attention_bias = True
    assert "without biases" in race.missing(engine, dataclasses.replace(pair, draft=biased), 0.0)


def test_unknown_names_are_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr(generate, "load_pair", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match=r"'openvino-fast' is none of .*openvino-draft"):
        generate.run(settings("hf-greedy", "openvino-fast"))


def test_gguf_holds_the_weights_to_the_bit(tmp_path):
    gguf = pytest.importorskip("gguf")
    from gsd_kernels_bench.generation.peers.gguf_file import FILE, write_gguf

    model = load_pair("tiny", device=CPU, dtype=torch.bfloat16, prompts=1).target
    write_gguf(model, tmp_path)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / FILE).tensors}
    assert len(stored) == 1 + 1 + 1 + 1 + 9 * model.config.num_hidden_layers  # factors, embedding, norm, head, layers
    layer = model.model.layers[1]

    def matrix(name):
        return torch.from_numpy(stored[name].data.copy()).view(torch.bfloat16)

    assert torch.equal(matrix("blk.1.ffn_down.weight"), layer.mlp.down_proj.weight)
    rows, half = matrix("blk.1.attn_q.weight"), model.config.head_dim // 2
    heads = layer.self_attn.q_proj.weight.unflatten(0, (-1, 2, half))
    assert torch.equal(rows.unflatten(0, (-1, half, 2))[:, :, 1], heads[:, 1])
    model.model.rotary_emb.attention_scaling = 1.2
    with pytest.raises(ValueError, match="unscaled rotary cosines"):
        write_gguf(model, tmp_path / "again")


@pytest.mark.slow
@pytest.mark.parametrize("engine", race.ENGINES, ids=lambda engine: engine.name)
def test_engines_give_the_tokens_of_transformers(engine, pair, texts, tmp_path):
    for package in engine.packages:
        pytest.importorskip(package)
    engine.prepare(pair.target, pair.draft, tmp_path)
    runner = engine.start(Place(tmp_path, "float32", 1, 200))
    assert engine.about()
    for setting in (Setting("plain"), Setting("draft", 3), Setting("draft", 5), Setting("lookup", 3)):
        runner.open(setting)
        for ids, text in texts.items():
            assert runner.decode(setting, list(ids), 48) == text[:48], setting
