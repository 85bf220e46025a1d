"""A race of everyday work: a small model of one's own, engines that are faked, and llama.cpp's server, faked too."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from collections import Counter

import pytest
import torch
from fake_engines import Failing, Recorded
from typer.testing import CliRunner

from gsd_kernels_bench import readme
from gsd_kernels_bench.cli import app
from gsd_kernels_bench.generation.peers import race
from gsd_kernels_bench.generation.real import run as real_run
from gsd_kernels_bench.generation.real import ways
from gsd_kernels_bench.generation.real.models import load_real
from gsd_kernels_bench.generation.real.names import DRAFTER, DRAFTER_ALONE, HF, HF_LOOKUP, HISTORY, PLAIN, UNLEARNED
from gsd_kernels_bench.generation.real.prompts import encoded, read_chats
from gsd_kernels_bench.generation.real.report import RealReport
from gsd_kernels_bench.generation.real.run import Settings
from gsd_kernels_cli import demo
from gsd_kernels_cli.demo.drafters import FOLDER
from gsd_kernels_hf.costs.pair import fingerprint
from gsd_kernels_hf.engine import known
from gsd_kernels_hf.learning import learn

NEW = 8
PROMPTS = ("for name in names:\n    print(name)\nfor name in", "import os\nimport sys\nimport")


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [{"name": f"p{number}", "kind": f"k{number}", "prompt": text} for number, text in enumerate(PROMPTS)]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    return file


@pytest.fixture
def settings(prompts):
    return Settings(str(demo.path() / "target"), dtype=torch.float32, new_tokens=NEW, prompts=prompts)


@pytest.mark.slow
def test_all_ways_decode_every_prompt_from_a_cold_start(settings, tmp_path, monkeypatch):
    real = load_real(settings.model, None, None, torch.float32)
    texts = {}
    for prompt in encoded(read_chats(settings.prompts)[0], real.tokenizer):
        out = real.model.generate(prompt.input_ids, do_sample=False, max_new_tokens=race.TUNING_TOKENS)
        texts[tuple(prompt.input_ids[0].tolist())] = out[0, prompt.input_ids.shape[1] :].tolist()
    cold = set()
    monkeypatch.setattr(real_run, "engines_for", lambda *_: [Recorded(texts), Failing()])
    decode = real_run._decode
    monkeypatch.setattr(
        real_run, "_decode", lambda *given: (cold.add(os.environ["GSD_KERNELS_CACHE"]), decode(*given))[1]
    )
    before = os.environ["GSD_KERNELS_CACHE"]
    report = real_run.run(settings, folder=tmp_path, name="out")
    rows = {row["way"]: row for row in report.summary}
    assert list(rows) == [HF, HF_LOOKUP, "openvino", "openvino-lookup", PLAIN, HISTORY]
    for way in (HF_LOOKUP, "openvino", PLAIN, HISTORY):
        assert rows[way]["same"] == rows[way]["compared"] == 2, way
    assert rows[HISTORY]["same_as_plain"] == 2 and rows["openvino-lookup"]["same"] == 0
    assert (rows["openvino-lookup"]["same_as_plain"], rows["openvino-lookup"]["compared_with_plain"]) == (0, 2)
    assert rows[PLAIN]["tokens_per_step"] == 1 and rows[HISTORY]["by_kind"]["k0"]["prompts"] == 1
    assert report.missing == {name: "ValueError: no such format" for name in ("llama-cpp", "llama-cpp-lookup")}
    assert len(cold) == 1 and before not in cold and os.environ["GSD_KERNELS_CACHE"] == before
    assert report.peers["openvino-lookup"]["drafted_tokens"] == 5, "the fastest"
    assert RealReport(**json.loads((tmp_path / "out.json").read_text())).summary == report.summary


def test_a_drafter_alone_the_history_alone_and_both(settings, tmp_path):
    raced = (PLAIN, HISTORY, DRAFTER_ALONE, DRAFTER)
    drafter = str(FOLDER / "eagle3")
    report = real_run.run(dataclasses.replace(settings, ways=raced, drafter=drafter))
    rows = {row["way"]: row for row in report.summary}
    assert list(rows) == [PLAIN, HISTORY, DRAFTER_ALONE, DRAFTER]
    for way in raced[1:]:
        assert rows[way]["same_as_plain"] == rows[way]["compared_with_plain"] == 2, way
    report.write(tmp_path, "real-float32")
    shown = readme.equal(tmp_path)
    assert "| drafter and history | float32 | 2 of 2 |" in shown and "drafter alone" in shown


def test_the_history_with_what_was_learned_and_without_is_counted_and_raced(settings, tmp_path, monkeypatch):
    """Where the package brings something of the model; rows of every step, and auto's."""
    model, _, tokenizer = demo.load(torch.float32, "cpu")
    asked = ("def mean(", "class Queue")
    settings.prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in asked))
    place = learn(model, tokenizer, prompts=asked, new_tokens=NEW, file=tmp_path / "learned", progress=False)
    monkeypatch.setattr(known, "shipped_file", lambda model: (place, fingerprint(model)))
    monkeypatch.setattr(ways, "shipped_file", known.shipped_file)
    arguments = ["--model", settings.model, "--prompts", str(settings.prompts), "--dtype", "float32"]
    arguments += ["--new-tokens", str(NEW), "--rows", "4,auto", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, ["sources", *arguments])
    assert done.exit_code == 0, done.output
    counts = json.loads((tmp_path / "sources-float32-prompts.json").read_text())["counts"]
    steps = Counter()
    for run in counts:
        assert run["same"] and run["tokens"] == NEW
        steps[run["way"]] += run["steps"]
    assert list(steps) == ["plain", "4 rows", "4 rows, not learned", "auto", "auto, not learned"]
    assert steps["plain"] == 2 * NEW and steps["4 rows"] < steps["4 rows, not learned"]
    assert all(run["rows"] <= 4 * run["steps"] for run in counts if run["way"].startswith("4"))
    assert f"| 4 rows | {2 * NEW / steps['4 rows']:.2f} |" in done.stdout and "| 2 of 2 |" in done.stdout
    report = real_run.run(dataclasses.replace(settings, ways=(PLAIN, HISTORY, UNLEARNED)))
    rows = {row["way"]: row for row in report.summary}
    assert rows[HISTORY]["tokens_per_step"] > rows[UNLEARNED]["tokens_per_step"]
    assert rows[UNLEARNED]["same_as_plain"] == 2


@pytest.mark.parametrize("rows", ["1", "129", "some", "8,x"])
def test_rows_that_no_step_has_are_refused(rows):
    done = CliRunner().invoke(app, ["sources", "--rows", rows])
    assert isinstance(done.exception, ValueError) and "--rows: expected numbers from 2 to 128" in str(done.exception)


def test_later_turns_go_on_with_the_first_ways_answer(settings, tmp_path):
    """Spec-Bench's format: every way is asked the same, and the turns of a question are one in its means."""
    questions = [
        {"question_id": 1, "category": "qa", "turns": PROMPTS},
        {"question_id": 2, "category": "rag", "turns": ["def"]},
    ]
    settings.prompts.write_text(
        "".join(json.dumps(row) + "\n" for row in [*questions, {**questions[0], "question_id": 3}])
    )
    chosen = dataclasses.replace(settings, ways=(PLAIN, HISTORY), rounds=2, limit=1)
    report = real_run.run(chosen, folder=tmp_path, name="out")
    assert list(report.prompts) == ["1", "2", "1/2"] and report.prompts["1/2"]["question"] == "1"
    real = load_real(settings.model, None, None, torch.float32)
    first, *_ = read_chats(settings.prompts)[0]
    (prompt,) = encoded([first], real.tokenizer)
    answer = real.model.generate(prompt.input_ids, do_sample=False, max_new_tokens=NEW)[0, prompt.input_ids.shape[1] :]
    (second,) = encoded([first.answered(real.tokenizer.decode(answer, skip_special_tokens=True))], real.tokenizer)
    assert report.prompts["1/2"]["tokens"] == second.input_ids.shape[1]
    rows = {row["way"]: row for row in report.summary}
    assert rows[HISTORY]["same_as_plain"] == rows[HISTORY]["compared_with_plain"] == 3
    assert rows[PLAIN]["acceptance_length"] == 1 and rows[HISTORY]["by_kind"]["qa"]["prompts"] == 2
    assert len(report.runs) == 2 * 2 * 3


def test_ways_that_are_none_are_refused(settings):
    with pytest.raises(ValueError, match=r"--ways: there is no 'fast'; expected one of transformers, .*gsd-history"):
        real_run.run(dataclasses.replace(settings, ways=("fast",)))


def stopping(monkeypatch, at, how):
    """The ``at``-th decoding of the race stops it."""
    decode, count = real_run._decode, []

    def stop(*given):
        count.append(1)
        if len(count) == at:
            how()
        return decode(*given)

    monkeypatch.setattr(real_run, "_decode", stop)


@pytest.mark.parametrize("how", ["Ctrl-C", "SIGTERM"])
def test_a_race_that_is_stopped_shows_the_prompts_so_far(settings, tmp_path, monkeypatch, how):
    def interrupt():
        if how == "Ctrl-C":
            raise KeyboardInterrupt
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    stopping(monkeypatch, 4, interrupt)  # in the second prompt
    before = signal.getsignal(signal.SIGTERM)
    options = ["--model", settings.model, "--prompts", str(settings.prompts), "--dtype", "float32", "--new-tokens", "4"]
    result = CliRunner().invoke(app, ["real", *options, "--ways", f"{HF},{HISTORY}", "--out", str(tmp_path)])
    assert result.exit_code == 130, result.output
    assert "Stopped after 1 of 2 prompts." in result.stdout and "| transformers, plain |" in result.stdout
    assert "the other 1 take about" in result.stderr
    data = json.loads((tmp_path / "real-float32-target-prompts.jsonl-part.json").read_text())
    assert data["stopped"] and {run["prompt"] for run in data["runs"]} == {"p0"}
    assert data["busy"] is None or "do not trust" in data["busy"]
    assert signal.getsignal(signal.SIGTERM) is before
