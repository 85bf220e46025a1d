"""`gsd-kernels bench drafters --window`: tokens a forward by place in the output."""

from __future__ import annotations

import json

import pytest
from commands import bench
from hypothesis import given
from hypothesis import strategies as st

from gsd_kernels_bench.generation import output_table
from gsd_kernels_bench.generation.output_table import begins_of, repeats, windows_of


@given(st.lists(st.integers(1, 12), min_size=1, max_size=60), st.integers(12, 40))
def test_every_token_and_forward_is_in_one_window(steps, window):
    begins = begins_of(sum(steps), window)
    tokens, forwards = windows_of(steps, begins)
    assert sum(tokens) == sum(steps) and sum(forwards) == len(steps) and len(tokens) == len(begins)
    starts = [sum(steps[:n]) for n in range(len(steps))]
    expected = [0] * len(begins)
    for start in starts:
        expected[min(start // window, len(begins) - 1)] += 1
    assert forwards == expected


def test_a_text_that_runs_in_a_circle_repeats_itself():
    fresh, circle = list(range(100, 132)), [1, 2, 3, 4] * 20
    assert repeats([*fresh, *circle], [0, 32, 64]) == [0.0, (32 - output_table.GRAM - 3) / 32, 1.0]
    assert repeats(fresh, [0, 16]) == [0.0, 0.0]


def test_windows_of_the_demo_target_and_a_run_that_goes_on(tmp_path, monkeypatch):
    ways = ["--competitors", "history-16,eagle3,eagle3-history"]
    call = ["drafters", "--window", "32", "--new-tokens", "70", "--prompts", "1", "--texts", "code", *ways]
    call += ["--dtype", "float32", "--out", str(tmp_path)]
    honest, calls = output_table.decoded, []

    def interrupted(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("stopped")
        return honest(*arguments)

    monkeypatch.setattr(output_table, "decoded", interrupted)
    with pytest.raises(OSError, match="stopped"):
        bench(*call)
    text = bench(*call)
    assert len(calls) == 3, "what was finished is not done again"
    data = json.loads((tmp_path / "drafters-output.json").read_text())
    for run in data["runs"]:
        assert all(sum(way["tokens"]) == 70 and way["same"] for way in run["ways"].values())
        assert all(1 <= forwards <= 38 for way in run["ways"].values() for forwards in way["forwards"])
        assert run["ended"] is None and len(run["repeats"]) == 2
    assert "| output tokens | 0–32 | 32–70 |" in text and "Texts equal to the first way's: 6 of 6." in text
    assert "EAGLE-3 and history against the better of the two alone, T = 0.7" in text
    (tmp_path / "README.md").write_text("<!-- bench:drafters-output -->\n<!-- /bench:drafters-output -->\n")
    bench("readme", "--readme", str(tmp_path / "README.md"), "--results", str(tmp_path))
    assert "| history alone, greedy |" in (tmp_path / "README.md").read_text()


def test_the_chat_models_ends_are_counted_and_another_text_is_refused(stand_in, tmp_path, monkeypatch):
    call = ["drafters", "--target", "smollm2", "--window", "32", "--new-tokens", "40", "--prompts", "1", "--out"]
    call += [str(tmp_path), "--dtype", "float32", "--texts", "prose", "--temperatures", "0"]
    stand_in.generation_config.eos_token_id = list(range(0, stand_in.config.vocab_size, 2))
    text = bench(*call)
    (run,) = json.loads((tmp_path / "drafters-smollm2-output.json").read_text())["runs"]
    assert 0 <= run["ended"] < 40 and "| texts past their end where it begins, greedy | 0 of 1 |" in text
    assert all(sum(way["tokens"]) == 40 for way in run["ways"].values()), "and went on past it"
    honest = output_table.competitors

    def wrong(*arguments, **options):
        first, *rest = honest(*arguments, **options)
        yield first
        for way in rest:

            def decode(ids, new_tokens, seed, right=way.decode):
                decoded = right(ids, new_tokens, seed)
                decoded.sequences[0, -9] = (decoded.sequences[0, -9] + 1) % stand_in.config.vocab_size
                return decoded

            yield type(way)(way.name, decode)

    monkeypatch.setattr(output_table, "competitors", wrong)
    with pytest.raises(RuntimeError, match="eagle3: another text than the other ways', beyond rounding, in story-"):
        bench(*call)
    with pytest.raises(ValueError, match="--window: takes neither --positions nor --drafter"):
        bench("drafters", "--window", "32", "--positions", "600")
