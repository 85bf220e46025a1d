"""The demo of the real model: answers, the race's table and the drawing; the embedded pair where there is no model."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gsd_kernels_cli.app import app
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_cli.demo_command import HF, HF_LOOKUP, OURS, QUESTIONS

pytestmark = [pytest.mark.real, pytest.mark.slow]


def run(*arguments):
    return CliRunner().invoke(app, ["demo", *map(str, arguments)])


def test_the_demo_answers_races_compares_and_draws(place, tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(place))
    file = tmp_path / "numbers.json"
    result = run("--max-new-tokens", 8, "--seconds", 0, "--out", tmp_path / "out", "--json", file)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [answer["question"] for answer in report["answers"]] == list(QUESTIONS)
    for answer in report["answers"]:
        assert answer["text"] in result.stdout and 0 < answer["tokens"] <= 8
    ways = {way["way"]: way for way in report["race"]["ways"]}
    assert list(ways) == [HF, HF_LOOKUP, OURS] and report["dtypes"] == ["float32"]
    assert ways[OURS]["compared_with"] == HF and ways[OURS]["equal"] == report["race"]["prompts"] == 1
    assert report["drawing"]["rows"] > 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"step.svg", "step.png"}


def test_without_the_model_the_demo_says_so_and_shows_the_embedded_pair(monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2, "why_missing", lambda: "the package is not installed: pip's line")
    result = run("--quick", "--max-new-tokens", 4, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("The embedded pair, since the package is not installed: pip's line")
    assert "trained on Python source" in result.stdout
