"""Every benchmark runs once, small, and writes what it promises; what is wrong is never timed. No figure is judged."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import typer
from typer.testing import CliRunner

from gsd_kernels.ops.merge.api import MERGE
from gsd_kernels_bench.cli import app
from gsd_kernels_bench.generation.competitors import DEFAULT, competitors
from gsd_kernels_bench.generation.options import OfGenerate
from gsd_kernels_bench.generation.pairs import load_pair
from gsd_kernels_bench.gpu import gpu_tests
from gsd_kernels_bench.gpu.stages import STAGES, Call, stage_named
from gsd_kernels_bench.gpu.work import Work, perform
from gsd_kernels_bench.kernels import rows
from gsd_kernels_bench.kernels.cases import CASES
from gsd_kernels_bench.lib.runner import Op, Settings, run
from gsd_kernels_cli import demo

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


def bench(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.output


def test_every_benchmark_answers_help_and_needs_no_torch():
    code = "import sys, gsd_kernels_bench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    names = [*typer.main.get_command(app).commands]
    assert all(f"Usage: root {name} [OPTIONS]" in bench(name, "--help") for name in names if name != "gpu")
    assert "at most" in bench("gpu", "--list")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernel_cases_write_their_files(name, tmp_path):
    options = ["--rows", "16"] if name == "merge" else ["--shape", "tiny"]
    output = bench(name, "--quick", "--device", "cpu", "--seconds", "0", "--out", tmp_path, *options)
    assert "copy bandwidth" in output
    report = json.loads((tmp_path / f"{name}-quick.json").read_text())
    assert report["case"] == name and report["copy_bandwidth"] > 0
    measured = [row for row in report["rows"] if row["median"] is not None]
    assert {"cpu", "reference"} <= {row["contestant"] for row in measured}


@pytest.mark.parametrize(
    "given", ["rows --dtype float32 --rows 1 --rows 5 --prefix 9 --prompt 12 --seconds 0", "step-overhead --batch 2"]
)
def test_a_step_is_measured(given, tmp_path):
    bench(*given.split(), "--shape", "tiny", "--json", tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_bytes())


def test_a_wrong_result_is_never_reported():
    wrong = Op(MERGE, lambda backend: torch.full((), 0.0 if backend == "reference" else 2.0))
    with pytest.raises(RuntimeError, match="wrong result: error 2"):
        run("merge", lambda _: [wrong], Settings(CPU, torch.float32, quick=True))
    logits = torch.randn(1, 4, 9)
    with pytest.raises(RuntimeError, match=r"rows: 4 rows differ from the modules' by"):
        rows.check({"operator": lambda: 1.001 * logits, "modules": lambda: logits}, 4, torch.float32)


@pytest.mark.slow
def test_generate_races_everyone(tmp_path):
    options = ("--pair", "tiny", "--quick", "--device", "cpu", "--dtype", "float32", "--new-tokens", "10")
    shown = bench("generate", *options, "--out", tmp_path, "--name", "found")
    data = json.loads((tmp_path / "found.json").read_text())
    assert set(data["missing"]) == {"hf-static-compile"}
    present = [name for name in DEFAULT if name not in data["missing"]]
    assert [row["way"] for row in data["summary"]] == present
    assert all(one["same"] for one in data["runs"] if one["way"] != "hf-greedy"), "float32 is equal"
    assert re.search(r"\| hf-greedy \| [\d.]+ \| 1.00 \| 1.00 \| – \| – \|", shown)


@pytest.mark.slow
def test_real_sources_and_prompt_race_and_count(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    texts = ("for name in names:\n    print(name)\nfor name in", "import os\nimport sys\nimport")
    prompts.write_text("".join(json.dumps({"prompt": text, "kind": text[:3]}) + "\n" for text in texts))
    options = ["--model", demo.path() / "target", "--prompts", prompts, "--dtype", "float32", "--new-tokens", "8"]
    bench("real", *options, "--ways", "transformers,gsd-plain,gsd-history", "--out", tmp_path)
    (file,) = tmp_path.glob("real-*.json")
    raced = {row["way"]: row for row in json.loads(file.read_text())["summary"]}
    assert raced["gsd-history"]["same_as_plain"] == raced["gsd-history"]["compared_with_plain"] == 2
    bench("sources", *options, "--rows", "4", "--out", tmp_path)
    assert all(one["same"] for one in json.loads(next(tmp_path.glob("sources-*.json")).read_text())["counts"])
    ways = ["--lengths", "4,9", "--new-tokens", "3", "--rounds", "1", "--ways", "transformers,gsd-history"]
    bench("prompt", *options[:2], *options[4:6], *ways, "--out", tmp_path)
    runs = json.loads((tmp_path / "prompt-float32.json").read_text())["runs"]
    assert len({(run["way"], run["length"]) for run in runs}) == 4 and all(run["first"] > 0 for run in runs)


def test_readme_of_this_repository_is_up_to_date():
    bench("readme", "--check")


# ---- the stages of a GPU


def test_stages_have_a_limit_a_module_and_their_tests():
    for stage in STAGES:
        assert 0 < stage.least <= stage.limit <= 480 and callable(resolve_name(f"gsd_kernels_bench.gpu.{stage.work}"))
    tree = ast.parse((ROOT / "bench" / "gpu" / "stages.py").read_text())
    found = {a.name.partition(".")[0] for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    assert found <= set(sys.stdlib_module_names), "a bare machine runs it"
    assert all((ROOT / name).exists() for name in (*gpu_tests.FILES, *gpu_tests.FILES_WITHOUT_GPU, gpu_tests.SANITIZED))


REHEARSED = ["right", "attention", "rows", "inside", "ahead", "packed", "pair", "duel"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REHEARSED)
def test_a_stage_rehearses_on_a_cpu_and_measures_no_point_twice(name, tmp_path, monkeypatch):
    def work(name: str) -> Work:
        return Work(stage_named(name), Call(tmp_path, tmp_path, rehearse=True), 600.0)

    if name in ("rows", "inside", "ahead", "pair"):  # timed where the operator was right
        perform(work("right"))
    done = work(name)
    perform(done)
    assert not done.failed and not done.waiting and done.points, done.points
    again = work(name)
    monkeypatch.setattr(again, "keep", lambda *_: pytest.fail("measured twice"))
    perform(again)
    record = json.loads((tmp_path / f"{name}.json").read_text())
    assert record["complete"] and {"device", "versions", "commit", "date"} <= set(record["environment"])


# ---- under pytest-benchmark (make bench)


@pytest.mark.parametrize("name", CASES)
def test_benchmark_kernels(benchmark, name):
    settings = Settings(CPU, torch.float32, shapes=("tinyllama-1.1b",), rows=(16,), peers=[], quick=True)
    op = next(CASES[name](settings))
    with torch.no_grad():
        benchmark(op.call, "cpu")


@pytest.mark.parametrize("name", ["hf-greedy", "model+history@graph"])
def test_benchmark_generate(benchmark, name):
    given = OfGenerate(pair="tiny", target_shape="none", prompts=1)
    pair = load_pair(given, CPU, torch.float32)
    benchmark(competitors(given, pair, [name])[name], pair.prompts[0].input_ids, 16, 0)
