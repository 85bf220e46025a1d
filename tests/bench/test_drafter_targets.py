"""`gsd-kernels bench drafters`: SmolLM2 with its shipped drafter, a lattice with edges and without, equal texts."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from commands import bench
from models import prompts, tiny
from sources.drafters import (
    dflash_config,
    fit_dflash,
    random_dflash,
    save,
)

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_bench.generation import chat_pair, generate, sources_table
from gsd_kernels_bench.generation.drafters_table import EDGES, weights_of
from gsd_kernels_bench.generation.lattices import KIND, Marginals, with_lattice
from gsd_kernels_bench.generation.pairs import load_pair
from gsd_kernels_bench.generation.real.prompts import read_chats
from gsd_kernels_cli.demo.drafters import FOLDER

CPU = torch.device("cpu")
VOCAB = 41
EDGED = {"DSpark": {"markov_rank": 6}, "DFlash 2": {"selector_rank": 6, "selector_top_k": 8}}


def test_every_kind_of_chat_belongs_to_one_text():
    kinds = Counter(kind for kinds in chat_pair.TEXTS.values() for kind in kinds)
    assert set(kinds.values()) == {1} and set(kinds) == {chat.kind for chat in read_chats()[0]}
    assert [chat.kind for chat in chat_pair.chats_of("chat", 4)] == ["chat", "questions", "agent", "chat"]
    assert sum(len(chat_pair.chats_of(text, 99)) for text in chat_pair.TEXTS) == len(read_chats()[0])
    with pytest.raises(ValueError, match="--texts: 'table' is none of chat, code, copy, prose"):
        chat_pair.chats_of("table", 1)


def test_the_chat_model_has_a_table_of_its_own(stand_in, tmp_path):
    given = ["--target", "smollm2", "--counts", "--prompts", "1", "--new-tokens", "10", "--dtype", "float32"]
    text = bench("drafters", *given, "--texts", "chat", "--out", str(tmp_path))
    data = json.loads((tmp_path / "drafters-smollm2-counts.json").read_text())
    assert [(c["text"], c["temperature"]) for c in data["cells"]] == [("chat", 0.0), ("chat", 0.7)]
    assert "SmolLM2-135M-Instruct" in text and "at most 10 new tokens, 1 prompts of each text." in text
    assert "Texts equal to plain decoding's: 8 of 8." in text, "four ways of two cells, beside plain decoding"
    assert data["settings"]["drafter_weights"] == weights_of("smollm2") and len(weights_of("smollm2")["eagle3"]) == 12
    (tmp_path / "README.md").write_text(
        "<!-- bench:drafters-smollm2-counts -->\n<!-- /bench:drafters-smollm2-counts -->\n"
    )
    bench("readme", "--readme", str(tmp_path / "README.md"), "--results", str(tmp_path))
    assert "| EAGLE-3 and history |" in (tmp_path / "README.md").read_text()


@pytest.mark.parametrize("temperature", ["0", "0.7"])
def test_another_text_stops_the_table(stand_in, tmp_path, monkeypatch, temperature):
    honest = generate.competitors

    def wrong(*arguments, **options):
        for way in honest(*arguments, **options):
            if way.name != "eagle3":
                yield way
                continue

            def decode(ids, new_tokens, seed, right=way.decode):
                decoded = right(ids, new_tokens, seed)
                decoded.sequences[0, -1] = (decoded.sequences[0, -1] + 1) % stand_in.config.vocab_size
                return decoded

            yield type(way)(way.name, decode)

    given = ["--target", "smollm2", "--counts", "--quick", "--dtype", "float32", "--temperatures", temperature]
    bench("drafters", *given, "--competitors", "plain,eagle3", "--out", str(tmp_path))
    monkeypatch.setattr(generate, "competitors", wrong)
    with pytest.raises(RuntimeError, match="eagle3: another text than plain decoding's, beyond rounding, in code-"):
        bench("drafters", *given, "--competitors", "plain,eagle3", "--out", str(tmp_path))


@pytest.fixture(scope="module")
def target():
    return tiny(num_hidden_layers=3, vocab_size=VOCAB)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("kind", EDGED)
def test_without_edges_a_place_has_the_drafters_own_average(kind, sampled, target, monkeypatch):
    """Summed over all paths; and the text is the target's."""
    config = dflash_config(target, inner=EDGED[kind])
    drafter, seen = fit_dflash(random_dflash(config), target, steps=30), []
    honest = Marginals.marginals

    def compared(self, hidden, logits):
        found, temperature = honest(self, hidden, logits), 0.7 if sampled else 1.0
        every = torch.arange(VOCAB)[None]
        before, weights = self.state.root_tokens().long()[:, None], torch.ones(1, 1)
        for place in range(logits.shape[1]):
            given = (part[:, place : place + 1].expand(-1, before.shape[1], -1) for part in (logits, hidden))
            after = (drafter.edges(*given, before) / temperature).softmax(-1).float()  # [1, W, V]
            average = (weights[..., None] * after).sum(1)
            torch.testing.assert_close((found[:, place] / temperature).softmax(-1), average, rtol=1e-4, atol=1e-5)
            before, weights = every, average
        seen.append(found)
        return found

    monkeypatch.setattr(Marginals, "marginals", compared)
    options = {
        **prompts(1, 9, vocab=VOCAB),
        "max_new_tokens": 40,
        "eos_token_id": None,
        "return_dict_in_generate": True,
    }
    options |= {"do_sample": True, "temperature": 0.7, "seed": 3} if sampled else {"do_sample": False}
    shape = GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=0)
    plain = gsd.generate(target, **options).sequences
    out = gsd.generate(target, **options, draft_sources=(Marginals(drafter),), graph_config=shape)
    assert torch.equal(out.sequences, plain) and sum(out.stats.accepted[2:]) > 0 and len(seen) > 4
    assert len(set(plain[0, 9:].tolist())) >= 15 or not sampled


def test_a_lattice_of_ones_own_is_raced_with_edges_and_without(tmp_path):
    pair = load_pair("demo", device=CPU, dtype=torch.float32, prompts=1)
    config = dflash_config(pair.target, inner={"markov_rank": 6}, block_size=8, hidden_size=256)
    sizes = {
        key: getattr(pair.target.config, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    }
    folder = save(tmp_path / "mine", {**config, **sizes}, random_dflash({**config, **sizes}).float().state_dict())
    text = bench("drafters", "--drafter", str(folder), "--quick", "--dtype", "float32", "--out", str(tmp_path))
    data = json.loads((tmp_path / "drafters-edges-quick.json").read_text())
    assert {row["competitor"] for row in data["cells"][0]["summary"]} == set(EDGES.names) and not data["cells"][0][
        "missing"
    ]
    assert data["settings"]["drafter"] == "mine" and set(data["settings"]["drafter_weights"]) == {KIND}
    against = {(answer["ours"], answer["against"]) for answer in data["cells"][0]["questions"]}
    assert against >= {("lattice", "lattice-chain"), ("lattice", "lattice-marginals")}
    assert "Texts equal to plain decoding's: 10 of 10." in text
    with pytest.raises(ValueError, match=r"--drafter: expected a DSpark .* got <Eagle3"):
        with_lattice(pair, FOLDER / "eagle3")
    with pytest.raises(ValueError, match="--positions: measured for the demo target"):
        bench("drafters", "--drafter", str(folder), "--positions", "600")


def test_two_questions_of_one_way_are_two_answers():
    """The same ours by the same cost against another way."""
    runs = [
        {"competitor": name, "tokens": 8, "target_forwards": forwards}
        for name, forwards in (("lattice", 2), ("lattice-chain", 4), ("lattice-marginals", 3))
        for _ in range(2)
    ]
    rows = [
        {"competitor": name, "tokens_per_forward": 1.0, **dict.fromkeys(sources_table.SAME, 0)} for name in EDGES.names
    ]
    cell = {"text": "code", "temperature": 0.0, "prompts": ["a", "b"], "summary": rows}
    cell["questions"] = sources_table._answers(runs, EDGES)
    settings = {"pair": "demo", "target_shape": "none", "dtype": "float32", "new_tokens": 8}
    made = sources_table.table({"cells": [cell], "settings": settings, "parameters": {"target": 1, "draft": 1}}, EDGES)
    assert "| lattice with edges against its own walk, tokens/forward | 2.00" in made
    assert "| lattice with edges against lattice, the same places without edges, tokens/forward | 1.50" in made
