"""examples/ray_batch.py: every row once, whatever dies, and the texts of a plain loop (``make test-ray``)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gsd_kernels_cli import demo
from gsd_kernels_hf import generate

pytest.importorskip("ray.data", reason="needs the extra [ray]: make test-ray")
pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_batch.py"
SAMPLING = ["--max-new-tokens", "24", "--temperature", "0.8", "--seed", "5"]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("ray") / "prompts.jsonl"
    texts = [p["text"][:100] for p in demo.prompts()]
    lines = [json.dumps({"prompt": text, "other": 1}) for text in (*texts, *texts)[:40]]
    file.write_text("\n".join([*lines[:3], "", *lines[3:]]) + "\n")  # row 3 is an empty line
    return file


@pytest.fixture(scope="module")
def expected(prompts):
    """Row → text of a plain loop without a draft."""
    target, _, tokenizer = demo.load()
    texts = {}
    for row, line in enumerate(prompts.read_text().splitlines()):
        if line:
            ids = tokenizer(json.loads(line)["prompt"], return_tensors="pt")["input_ids"]
            out = generate(target, ids, do_sample=True, temperature=0.8, seed=5 + row, max_new_tokens=24)
            texts[row] = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    return texts


def start(prompts, output):
    command = [sys.executable, str(EXAMPLE), str(prompts), str(output), *SAMPLING, "--actors", "2"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows_of(output) -> list[dict]:
    return [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []


def test_an_actor_that_is_killed_loses_no_row_and_doubles_none(prompts, expected, tmp_path):
    output = tmp_path / "texts.jsonl"
    running = start(prompts, output)
    until = time.monotonic() + 180
    while len({row["process"] for row in rows_of(output)}) < 2:  # both have done some
        assert time.monotonic() < until and running.poll() is None, running.communicate()[0]
        time.sleep(0.02)
    killed = rows_of(output)[-1]["process"]
    before = len(rows_of(output))
    os.kill(int(killed.rpartition(":")[2]), signal.SIGKILL)
    said, _ = running.communicate(timeout=240)
    assert running.returncode == 0, said
    rows = rows_of(output)
    assert sorted(row["row"] for row in rows) == sorted(expected)
    assert {row["row"]: row["text"] for row in rows} == expected
    assert before < len(rows) - 4, "it was killed at the end: nothing was tested"
    assert len({row["process"] for row in rows}) == 3, "the killed actor was started anew"
    assert max(row["tokens_per_step"] for row in rows) > 1.5

    # The driver is killed: a line cut short, rows missing. What is there stays as it is.
    kept, lines = 30, output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:kept]) + lines[kept][:20])
    said, _ = (running := start(prompts, output)).communicate(timeout=240)
    assert running.returncode == 0, said
    assert "40 rows, 30 done before" in said and "10 rows done now" in said
    again = rows_of(output)
    assert again[:kept] == rows[:kept]
    assert {row["row"]: row["text"] for row in again} == expected and len(again) == len(expected)

    said, _ = start(prompts, output).communicate(timeout=60)
    assert "40 rows, 40 done before" in said and "done now" not in said
