"""The benchmarks run, write what they promise, and compute their statistics right. No figure is judged here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from commands import bench
from typer.testing import CliRunner

from gsd_kernels_bench.cli import BENCHMARKS, DOCUMENTS
from gsd_kernels_bench.generation import generate
from gsd_kernels_bench.generation.competitors import DEFAULT, competitors
from gsd_kernels_bench.generation.pairs import load_pair
from gsd_kernels_bench.kernels import attention, commit, merge, rows, sample, step_overhead
from gsd_kernels_bench.lib.intervals import paired_ratio
from gsd_kernels_bench.lib.report import Report, Row
from gsd_kernels_bench.lib.runner import Contestant, Entry, Settings, run
from gsd_kernels_bench.lib.timing import Timing, time_call
from gsd_kernels_bench.readme import BLOCKS

CPU = torch.device("cpu")
CASES = {case.NAME: case for case in (attention, merge, sample, commit)}
SMALL = {"merge": ["--rows", "16"]}
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", [name for room in BENCHMARKS.values() for name in room])
def test_every_benchmark_answers_help(name):
    assert f"Usage: root {name} [OPTIONS]" in bench(name, "--help")


def test_the_registry_is_documented():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").partition("## The benchmarks\n")[2]
    assert re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE) == [n for room in BENCHMARKS.values() for n in room]


def test_it_is_a_command_of_the_package():
    from gsd_kernels_cli.app import app as shell

    asked = CliRunner().invoke(shell, ["bench", "attention", "--help"])
    assert asked.exit_code == 0 and "bench attention [OPTIONS]" in asked.output
    refused = CliRunner().invoke(shell, ["bench", "merge", "--quick", "--rows", "5"])
    assert refused.exit_code == 2 and "error: --rows: merge has graphs for 16" in refused.stderr


def test_the_command_line_needs_no_torch():
    code = "import sys, gsd_kernels_bench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernel_cases_write_their_files(name, tmp_path):
    options = SMALL.get(name, ["--shape", "tiny"])
    output = bench(name, "--quick", "--device", "cpu", "--seconds", "0", "--out", str(tmp_path), *options)
    assert "copy bandwidth" in output
    file = tmp_path / f"{name}-quick.json"
    report = Report.read(file)
    assert report.case == name
    assert report.dtype == "float32"
    assert {"device", "commit", "versions", "threads", "date"} <= set(report.environment)
    assert {"python", "torch", "triton", "transformers", "gsd_kernels"} <= set(report.environment["versions"])
    assert report.copy_bandwidth > 0
    assert all(row.missing for row in report.rows if row.median is None)
    for row in report.measured():
        assert 0 < row.p20 <= row.median <= row.p80
        assert row.samples >= 5
        assert row.bandwidth_fraction == pytest.approx(row.bytes_moved / row.median / report.copy_bandwidth)
    present = {row.contestant for row in report.measured()}
    assert {"cpu", "reference"} <= present
    assert "triton" in report.missing()


def test_rows_are_measured_beside_the_modules(tmp_path):
    file = tmp_path / "rows.json"
    sizes = "--rows 1 --rows 5 --prefix 9 --prompt 12 --seconds 0".split()
    output = bench("rows", "--shape", "tiny", "--dtype", "float32", *sizes, "--json", str(file))
    assert "| tiny, float32, rows 5 |" in output
    report = json.loads(file.read_bytes())
    lines = report["results"][0]["rows"]
    assert report["environment"]["device"] and [line["rows"] for line in lines] == [1, 5]
    for line in lines:
        assert line["operator_over_floor"] == pytest.approx(line["operator_ms"] / line["read_ms"])
    with pytest.raises(ValueError, match="--dtype: expected float32, bfloat16 or float16, got float64"):
        bench("rows", "--shape", "tiny", "--dtype", "float64")


def test_unknown_names_are_refused():
    settings = Settings(CPU, torch.float32, quick=True, seconds=0.0)
    with pytest.raises(ValueError, match=r"--backend: 'gpu' is none of"):
        run(merge, Settings(CPU, torch.float32, rows=(16,), backends=["gpu"], quick=True))
    with pytest.raises(ValueError, match=r"shape 'llama-9' is unknown"):
        run(attention, Settings(CPU, torch.float32, shapes=("llama-9",)))
    with pytest.raises(ValueError, match=r"--rows: merge has graphs for 16"):
        run(merge, Settings(CPU, torch.float32, rows=(5,)))
    assert settings.shape_names() == ("tiny", "tinyllama-1.1b")


def test_a_wrong_result_is_never_reported(monkeypatch):
    def entries(settings):
        yield Entry("s", {"rows": 1}, "op", 8, [Contestant("theirs", lambda: 2.0, peer=True)], error=lambda out: out)
        yield Entry("s", {"rows": 1}, "op", 8, [Contestant("ours", lambda: 2.0)], error=lambda out: out)

    monkeypatch.setattr(merge, "entries", entries)
    kept = []
    monkeypatch.setattr("gsd_kernels_bench.lib.runner.Report", lambda **_: type("Kept", (), {"rows": kept}))
    with pytest.raises(RuntimeError, match="wrong result: error 2"):
        run(merge, Settings(CPU, torch.float32, quick=True))
    assert kept[0].median is None
    assert "wrong result" in kept[0].missing


@pytest.mark.parametrize(("off", "dtype"), [(1e-3, torch.float32), (0.2, torch.bfloat16)], ids=str)
def test_rows_that_differ_from_the_modules_are_not_timed(off, dtype):
    logits = torch.randn(1, 4, 9)
    calls = {"operator": lambda: (1 + off) * logits, "modules": lambda: logits}
    with pytest.raises(RuntimeError, match=r"rows: 4 rows differ from the modules' by"):
        rows.check(calls, 4, dtype)
    rows.check({**calls, "operator": lambda: logits + 1e-6}, 4, dtype)


@pytest.mark.parametrize("op", ["merge", "flatten", "verify", "commit"])
def test_ops_of_a_step_that_are_wrong_are_not_timed(op, monkeypatch):
    place = commit if op == "commit" else merge
    name = "commit_kv" if op == "commit" else op
    right = getattr(place, name)

    def wrong(*args, backend, **options):
        out = right(*args, backend=backend, **options)
        if backend != "reference":
            {"merge": lambda: args[0].parents, "commit": lambda: args[-1]}.get(op, lambda: out.tensors()[0])().add_(1)
        return out

    monkeypatch.setattr(place, name, wrong)
    monkeypatch.setattr(step_overhead, "time_call", lambda *_: pytest.fail("it was timed"))
    with pytest.raises(RuntimeError, match=f"{op} differs from its reference by"):
        step_overhead.run("tiny", CPU, torch.float32, batch=2)


def test_step_overhead(monkeypatch, tmp_path):
    monkeypatch.setattr(step_overhead, "time_call", lambda call, _: call() is None or Timing(2.0, 1.0, 3.0, 5, "wall"))
    bench("step-overhead", "--shape", "tiny", "--batch", "2", "--json", str(tmp_path / "step.json"))
    row = json.loads((tmp_path / "step.json").read_text())
    assert row["graph_ops_seconds"] == 8.0 and row["fraction"] == 4.0
    assert min(row["accepted"]) > 4, "the target agrees with a path"


def test_timing():
    timing = Timing.of([5.0, 1.0, 2.0, 3.0, 4.0, 100.0], "wall")
    assert (timing.median, timing.p20, timing.p80, timing.samples) == (3.5, 2.0, 5.0, 6)
    calls = []
    assert time_call(lambda: calls.append(1), CPU, seconds=0.0).samples == 5
    calls.clear()
    timing = time_call(lambda: calls.append(1), CPU, seconds=0.01)
    assert timing.samples >= 5
    assert len(calls) > 20 * timing.samples, "short calls are timed several at once"


def test_paired_ratio():
    ours, theirs = [(10, 1.0), (10, 3.0)], [(10, 2.0), (10, 6.0)]
    ratio = paired_ratio(ours, theirs)
    assert ratio.value == ratio.low == ratio.high == 2.0  # paired: every prompt is twice as fast
    mixed = paired_ratio([(10, 1.0), (10, 4.0)], [(10, 2.0), (10, 2.0)])
    assert mixed.value == pytest.approx(0.8)
    assert (mixed.low, mixed.high) == (0.5, 2.0)
    with pytest.raises(ValueError, match="as many prompts"):
        paired_ratio(ours, theirs[:1])


def test_compare_matches_points():
    def report(median: float, shape: str = "a") -> Report:
        row = Row("op", shape, {"rows": 1}, "cpu", median=median)
        return Report("merge", "rows", {}, 1.0, "float32", True, [row])

    (pair,) = report(1.0).compare(report(3.0))
    assert pair[1] == 3.0
    assert report(1.0).compare(report(3.0, "b")) == []


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    folder = tmp_path_factory.mktemp("race")
    settings = generate.Settings(
        CPU, torch.float32, pair="tiny", target_shape="none", prompts=2, new_tokens=10, quick=True
    )
    return folder, generate.run(settings, folder=folder)


@pytest.mark.slow
def test_generate_races_everyone(raced):
    folder, report = raced
    data = json.loads((folder / "generate.json").read_text())
    assert data["case"] == "generate"
    assert set(data["missing"]) == {"hf-static-compile", "hf-mtp", "hf-dflash"}
    present = [name for name in DEFAULT if name not in data["missing"]]
    assert [row["competitor"] for row in data["summary"]] == present
    assert data["prompts"] == ["code-0", "code-1"]
    for name in present:
        runs = [run_ for run_ in data["runs"] if run_["competitor"] == name]
        assert [run_["prompt"] for run_ in runs] == data["prompts"]
        assert [run_["tokens"] for run_ in runs] == [10, 10]
        assert len({run_["place"] for run_ in runs}) == 2, "the order rotates"
    others = [run_ for run_ in data["runs"] if run_["competitor"] != "hf-greedy"]
    assert all(run_["same"] for run_ in others), "float32 is equal"
    assert data["ratios"]["auto / plain"]["low"] <= data["ratios"]["auto / plain"]["value"]
    assert [(floor["against"], floor["floor"]) for floor in data["floors"]] == [("plain", 0.97)]
    assert "| auto |" in report.table()


def test_floors_of_an_inflated_run(raced):
    _, report = raced
    rates = {"hf-greedy": 1.0, "hf-assisted-3": 3.0, "hf-assisted-5": 2.0, "auto": 4.0}

    def floors(dtype):
        settings = generate.Settings(CPU, dtype, target_shape="250m")
        return [(name, floor) for name, _, floor, _ in generate._floors(settings, report, rates)]

    assert floors(torch.float32) == [("hf-assisted-3", 1.03)]
    assert floors(torch.bfloat16) == [("hf-assisted-3", 1.10), ("hf-greedy", 2.0)]


def test_readme_of_this_repository_is_up_to_date():
    blocks = [set(re.findall(r"<!-- bench:([\w-]+) -->", file.read_text(encoding="utf-8"))) for file in DOCUMENTS]
    assert set.union(*blocks) == set(BLOCKS) and all(blocks), "a table that no page shows, or a page without one"
    bench("readme", "--check")


@pytest.mark.parametrize("name", CASES)
def test_benchmark_kernels(benchmark, name):
    settings = Settings(CPU, torch.float32, shapes=("tinyllama-1.1b",), rows=(16,), peers=[], quick=True)
    entry = next(iter(CASES[name].entries(settings)))
    contestant = next(c for c in entry.contestants if c.call is not None)
    benchmark.extra_info.update(operation=entry.operation, shape=entry.shape, backend=contestant.name)
    with torch.no_grad():
        benchmark(contestant.call)


@pytest.mark.parametrize("name", ["hf-greedy", "plain", "chain", "tree", "graph"])
def test_benchmark_generate(benchmark, name):
    pair = load_pair("tiny", device=CPU, dtype=torch.float32, prompts=1)
    (competitor,) = competitors(pair, [name])
    benchmark(competitor.decode, pair.prompts[0].input_ids, 16, 0)
