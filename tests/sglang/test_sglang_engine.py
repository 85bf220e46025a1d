"""SGLang on the CPU with the plug-in and without: the same tokens. ``make test-sglang``; elsewhere it is skipped.

Two processes, ``drive.py``, run the same phases; the one with the plug-in has a cache that is too small for its last.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang.version", reason="needs SGLang, which make test-sglang installs")

HERE = Path(__file__).parent
MINUTES = 15


def run(algorithm: str, folder: Path) -> tuple[dict, str]:
    """What the phases gave, by name, and the engine's log."""
    result, log = folder / f"{algorithm}.json", folder / f"{algorithm}.log"
    environment = {
        **os.environ,
        "PYTHONPATH": str(HERE / "stubs"),
        "SGLANG_USE_CPU_ENGINE": "1",
        "GSD_KERNELS_SGLANG_OPTIONS": '{"log_steps": 1}',
        "OMP_NUM_THREADS": "1",
    }
    with log.open("w") as out:
        command = [sys.executable, str(HERE / "drive.py"), algorithm, str(result)]
        code = subprocess.run(command, env=environment, stdout=out, stderr=out, timeout=60 * MINUTES).returncode
    text = log.read_text(encoding="utf-8", errors="replace")
    assert result.exists(), f"exit status {code}; the end of the log:\n{text[-6000:]}"
    return json.loads(result.read_text(encoding="utf-8")), text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="module")
def speculated(folder):
    return run("GSD", folder)


@pytest.fixture(scope="module")
def plain(folder):
    return run("none", folder)[0]


def tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("phase", ["repetitive", "together", "ending", "stopped", "crowd", "out_of_cache", "after"])
def test_tokens_equal_those_without_speculation(phase, speculated, plain):
    assert tokens(speculated[0][phase]) == tokens(plain[phase])


def drafted_per_step(answers: list[dict]) -> list[float]:
    """Tokens of each verification; a request's first token comes from its prompt."""
    return [(len(answer["output_ids"]) - 1) / answer["spec_verify_ct"] for answer in answers]


def test_accepted_length_on_repetitive_prompts(speculated, capsys):
    lengths = drafted_per_step(speculated[0]["repetitive"])
    mean = sum(lengths) / len(lengths)
    with capsys.disabled():
        print(f"\naccepted length on repetitive prompts: {mean:.2f}")
    assert mean > 1.3


def test_edges_are_merged_and_accepted(speculated, capsys):
    last = re.findall(r"GSD: steps=.*", speculated[1])[-1]
    with capsys.disabled():
        print(f"\n{last}")
    figures = dict(pair.split("=") for pair in last.removeprefix("GSD: ").split())
    assert int(figures["merged_edges"]) > 0 and int(figures["accepted_merged"]) > 0
    assert 0 < float(figures["merged_share"]) < 1


def test_an_aborted_request_leaves_the_others_right(speculated, plain):
    answers = speculated[0]["aborted"]
    assert [answer["finish_reason"]["type"] for answer in answers] == ["length", "abort"] * 4
    assert tokens(answers[::2]) == tokens(plain["aborted"][::2])
    for begun, whole in zip(tokens(answers[1::2]), tokens(plain["together"][9:16:2]), strict=True):
        assert len(begun) >= 6 and begun[:40] == whole[: len(begun)]


def test_requests_that_ran_out_of_cache_were_put_back(speculated, plain):
    assert sum(answer["num_retractions"] for answer in speculated[0]["out_of_cache"]) > 0
    assert all(len(answer) == 160 for answer in tokens(plain["out_of_cache"]))
