"""Tables of the benchmarks: of shapes, sources and drafters, behind long contexts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from commands import bench

from gsd_kernels_bench.generation import drafters_table, generate, long_table, sources_table, tree_table
from gsd_kernels_bench.generation.pairs import load_pair
from gsd_kernels_bench.generation.tree_table import Cell, Grid, cells

CPU = torch.device("cpu")


def test_tree_table(tmp_path, monkeypatch):
    grid = Grid(draft_rows=(9,), target_rows=(8, 16), texts=("copy",), temperatures=(0.0, 0.7))
    options = {"pair": "tiny", "prompts": 2, "new_tokens": 8, "folder": tmp_path, "name": "tree"}
    decode, calls = tree_table.decode, []

    def interrupted(*arguments):
        calls.append(arguments[3])
        if len(calls) == 5:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(tree_table, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tree_table.run(grid, **options)
    text = tree_table.run(grid, **options)
    assert len(calls) == 4 * 4 + 1, "what was finished is not done again"
    data = json.loads((tmp_path / "tree.json").read_text())
    assert (tmp_path / "tree.md").read_text() == text + "\n"
    assert data["summary"]["cells"] == len(data["cells"]) == 4
    for cell in data["cells"]:
        steps = cell["per_step"]
        for rows in ("expanded_nodes", "computed_draft_rows", "computed_target_rows"):
            assert steps["tree"][rows] == steps["merged"][rows] == steps["graph"][rows]
        assert steps["graph"]["expanded_nodes"] == 9
        assert all(step["used_target_rows"] <= step["computed_target_rows"] for step in steps.values())
        for variant, decoded in cell["decoded"].items():
            assert [run_["tokens"] for run_ in decoded["runs"]] == [8, 8]
            assert all(sum(n * k for n, k in enumerate(run_["accepted"])) == 8 for run_ in decoded["runs"])
            assert cell["tokens_per_step"][variant] == 16 / sum(run_["steps"] for run_ in decoded["runs"])
        assert set(cell["tokens_per_step"]) == {"chain", "tree", "merged", "graph"}
    readme_file = tmp_path / "README.md"
    readme_file.write_text("<!-- bench:tree -->\n<!-- /bench:tree -->\n")
    bench("readme", "--readme", str(readme_file), "--results", str(tmp_path))
    assert "| copy, T = 0.7 | 9 |" in readme_file.read_text()


@pytest.mark.slow
def test_sources_table(tmp_path, monkeypatch):
    names = ("hf-greedy", "hf-prompt-lookup", "plain", "merged", "history", "layer-skip", "graph", "all")
    options = {"pair": "tiny", "target_shape": "none", "prompts": 2, "new_tokens": 8, "competitors": names}
    settings = generate.Settings(device=CPU, dtype=torch.float32, **options)
    run, calls = generate.run, []

    def interrupted(cell):
        calls.append((cell.text, cell.temperature))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return run(cell)

    monkeypatch.setattr(generate, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sources_table.run(settings, texts=("copy",), folder=tmp_path)
    text = sources_table.run(settings, texts=("copy",), folder=tmp_path)
    assert calls == [("copy", 0.0), ("copy", 0.7), ("copy", 0.7)], "what was finished is not done again"
    assert (tmp_path / "sources.md").read_text() == text + "\n"
    data = json.loads((tmp_path / "sources.json").read_text())
    assert len(data["cells"]) == 2 and not list(tmp_path.glob("*partial*"))
    for cell in data["cells"]:
        assert cell["missing"] == {"all": "the pair has no trained heads"}
        assert {run_["competitor"] for run_ in cell["runs"]} == set(names) - {"all"}
        assert all(run_["same"] for run_ in cell["runs"] if run_["competitor"] in generate.OURS[1:])
        asked = {(answer["ours"], answer["against"], answer["by"]) for answer in cell["questions"]}
        assert ("history", "hf-prompt-lookup", "target_forwards") in asked
        assert ("graph", "merged", "seconds") in asked and ("graph", "merged", "target_forwards") in asked
    (tmp_path / "README.md").write_text("<!-- bench:sources -->\n<!-- /bench:sources -->\n")
    bench("readme", "--readme", str(tmp_path / "README.md"), "--results", str(tmp_path))
    assert "| layer skipping alone |" in (tmp_path / "README.md").read_text()


def test_drafters_table(tmp_path):
    given = generate.Settings(
        device=CPU, dtype=torch.float32, pair="tiny", target_shape="none", prompts=1, new_tokens=6
    )
    settings = drafters_table.settings_of(given, ("plain", "merged", "heads-history", "dflash-lattice", "every"))
    assert settings.fresh
    spec = replace(drafters_table.TABLE, temperatures=(0.7,))
    text = sources_table.run(settings, texts=("code",), folder=tmp_path, name="drafters", spec=spec)
    (cell,) = json.loads((tmp_path / "drafters.json").read_text())["cells"]
    assert cell["missing"]["dflash-lattice"] == "the pair has no trained dflash"
    assert cell["missing"]["every"] == "the pair has no trained eagle3, dflash, heads"
    assert "| draft model |" in text and "| DFlash, lattice |" not in text
    with pytest.raises(ValueError, match=r"--competitors: 'hf-greedy' is none of plain, chain"):
        drafters_table.settings_of(given, ("hf-greedy",))


def test_drafters_counted(tmp_path):
    """No time is in the file, and a second run writes the same."""
    found = []
    for folder in ("a", "b"):
        out = tmp_path / folder
        out.mkdir()
        given = ["--counts", "--quick", "--dtype", "float32", "--temperatures", "0.7", "--name", "drafters-counts"]
        bench("drafters", *given, "--competitors", "eagle3-chain,history-16,dflash-history", "--out", str(out))
        data = json.loads((out / "drafters-counts.json").read_text())
        (cell,) = data["cells"]
        assert all(row["tokens_per_forward"] >= 1 for row in cell["summary"]) and len(cell["runs"]) == 3
        assert not any("second" in key for row in [*cell["runs"], *cell["summary"]] for key in row)
        found.append((cell["runs"], (out / "drafters-counts.md").read_text()))
    assert found[0] == found[1]
    (tmp_path / "README.md").write_text("<!-- bench:drafters-counts -->\n<!-- /bench:drafters-counts -->\n")
    bench("readme", "--readme", str(tmp_path / "README.md"), "--results", str(tmp_path / "a"))
    assert "| EAGLE-3, chain |" in (tmp_path / "README.md").read_text()


def test_drafters_behind_long_contexts(tmp_path):
    """Contexts end at the same places; past the positions of training all models turn as YaRN has it."""
    arguments = ["--positions", "600,1200", "--prompts", "1", "--new-tokens", "6", "--dtype", "float32"]
    bench("drafters", *arguments, "--competitors", "eagle3,history", "--out", str(tmp_path))
    data = json.loads((tmp_path / "drafters-long.json").read_text())
    assert [b["length"] for b in data["bins"]] == [600, 1200] and all(b["same"] for b in data["bins"])
    assert all(set(b["found"]) == {"eagle3", "history"} for b in data["bins"])
    assert data["settings"]["rope"]["rope_type"] == "yarn" and max(data["losses"]) < 4
    (tmp_path / "README.md").write_text("<!-- bench:drafters-long -->\n<!-- /bench:drafters-long -->\n")
    bench("readme", "--readme", str(tmp_path / "README.md"), "--results", str(tmp_path))
    assert "| EAGLE-3 |" in (tmp_path / "README.md").read_text()


def test_all_models_of_a_long_context_turn_alike():
    pair = load_pair("demo", device=CPU, dtype=torch.float32, prompts=1)
    like, places = torch.zeros(1, 1, 64), torch.arange(0, 4096, 97)[None]
    before = pair.target.model.rotary_emb(like, places)[0]
    rotaries = [pair.draft.model.rotary_emb, *(drafter.rotary for drafter in pair.drafters.values())]
    assert all(torch.equal(rotary(like, places)[0], before) for rotary in rotaries)
    long_table.stretched(pair, 4096)
    turned = pair.target.model.rotary_emb(like, places)[0]
    assert not torch.allclose(turned, before, atol=0.1)
    rotaries[0] = pair.draft.model.rotary_emb
    assert len(rotaries) == 3 and all(torch.equal(rotary(like, places)[0], turned) for rotary in rotaries)


@pytest.mark.slow
def test_fresh_prompts_are_others():
    pairs_ = [
        load_pair("demo", device=CPU, dtype=torch.float32, texts=["code", "copy"], prompts=3, fresh=f) for f in (0, 1)
    ]
    first, fresh = ({prompt.name for prompt in pair.prompts} for pair in pairs_)
    assert len(first) == len(fresh) == 6 and not first & fresh
    assert sum(name.startswith("fresh-copy-") for name in fresh) == 3


def test_the_whole_grid_is_valid():
    grid = list(cells(Grid()))
    assert len(grid) == 3 * 2 * 4 * 5
    for cell in grid:
        for variant in ("chain", "tree", "merged", "graph"):
            assert cell.config(variant).max_rows <= max(cell.target_rows, 2)
    cell = Cell("code", 0.0, 64, 8)
    assert cell.config("chain").depth == 7, "no longer than the rows that verify it"


@pytest.mark.slow
def test_a_shape_of_a_larger_vocabulary_has_no_drafters(monkeypatch):
    """The Llama shapes that a GPU is measured with: the demo target's drafters do not fit them."""
    from gsd_kernels_bench.lib import shapes
    from gsd_kernels_cli.demo.inflate import ModelShape

    large = ModelShape(320, 704, 6, 5, 5, 64, 4096, tie_word_embeddings=False)
    monkeypatch.setitem(shapes.SHAPES, "large", large)
    pair = load_pair("demo", device=CPU, dtype=torch.float32, target_shape="large", prompts=1)
    assert not pair.drafters and pair.heads is not None
