"""The staged run on a GPU: order, limits, files, going on. The stages' processes are replaced."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from importlib import import_module
from pathlib import Path

import commands
import pytest
from commands import record

from gsd_kernels_bench.gpu import stages
from gsd_kernels_bench.gpu.stages import STAGES, Call, Stage, stage_named

ROOT = Path(__file__).resolve().parents[2]
NAMES = [stage.name for stage in STAGES]


def bench(*arguments: object, code: int = 0) -> str:
    return commands.bench("gpu", *map(str, arguments), code=code)


@pytest.fixture
def processes(monkeypatch):
    """Stages' processes are replaced: each measures one of two points a call, ``fails`` measures none."""
    ran, fails = [], set()

    def execute(command, environment, output, seconds):
        name, out = command[3], Path(command[command.index("--out") + 1])
        former = Path(command[command.index("--former") + 1])
        ran.append((name, seconds))
        if name in fails:
            output.write(b"it broke\n")
            return 1
        call = Call(out, former, "--rehearse" in command, "--again" in command)
        points = {} if call.again else call.record(stage_named(name)).get("points", {})
        points[f"point {len(points)}"] = {"median": 1.0}
        record = {"rehearsal": call.rehearse, "points": points, "complete": len(points) > 1}
        stages.write(out / f"{name}.json", record | {"waiting": [] if len(points) > 1 else ["point 1"]})
        return 0

    monkeypatch.setattr(stages, "execute", execute)
    monkeypatch.setattr(stages, "missing", lambda stage: None)
    monkeypatch.setattr(stages, "built", lambda: True)
    ran_names = lambda: [name for name, _ in ran]  # noqa: E731
    return type("Processes", (), {"ran": ran, "names": staticmethod(ran_names), "fails": fails})


def test_the_order_of_worth_and_the_limits():
    assert NAMES[:10] == ["build", "group", "right", "rows", "inside", "ahead", "duel", "pair", "race", "gemm"]
    assert len(set(NAMES)) == len(NAMES)
    build, *second = (STAGES[0], *STAGES[7:10])
    assert sum(stage.limit for stage in STAGES[:7]) <= stages.TEN_MINUTES, "what decides fits in ten minutes"
    assert sum(stage.limit for stage in (build, *second)) <= stages.TEN_MINUTES, "a bare machine builds anew"
    assert len(NAMES[:7]) + 1 == stages.FILES, "and the log is a file"
    for stage in STAGES:
        assert 0 < stage.least <= stage.limit <= 480, stage
        assert callable(import_module(f"gsd_kernels_bench.gpu.{stage.module}").run)


def test_the_runner_needs_the_standard_library_only():
    tree = ast.parse((ROOT / "bench" / "gpu" / "stages.py").read_text())
    found = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    found |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in found} <= sys.stdlib_module_names


def test_a_machine_for_ten_minutes_is_documented():
    text = (
        (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8").partition("## A machine for ten minutes\n")[2]
    )
    assert re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE) == NAMES
    files = re.search(r"bench/gpu/stages\.py --files (\d+)", (ROOT / "Makefile").read_text()).group(1)
    assert int(files) > len(STAGES)
    assert f"--budget {stages.TEN_MINUTES}" in text
    for limit, name in re.findall(r"^\| `([\w-]+)` \| (\d+) s", text, re.MULTILINE):
        assert stage_named(limit).limit == int(name)


def test_unknown_stages_are_named(tmp_path, capsys, monkeypatch):
    assert "no stage 'nothing'" in bench("--only", "nothing", "--out", tmp_path, code=2)
    monkeypatch.setattr(sys, "argv", ["stages.py", "--only", "gemm", "--only", "nothing"])
    with pytest.raises(SystemExit, match="2"):
        stages.main()
    assert "--only: no stage 'nothing'; stages: build, group, right, rows" in capsys.readouterr().err


def test_goes_on_from_the_results_of_earlier_calls(tmp_path, processes):
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    bench("--only", "gemm", "--out", first)
    assert not record(first, "gemm")["ok"] and not record(first, "gemm")["failed"]
    bench("--only", "gemm", "--out", second, "--former", first)
    assert record(second, "gemm")["ok"] and set(record(second, "gemm")["points"]) == {"point 0", "point 1"}
    bench("--only", "gemm", "--out", third, "--former", second)
    assert processes.names() == ["gemm", "gemm"] and not list(third.iterdir()), "no log of nothing"
    bench("--only", "gemm", "--out", third, "--former", second, "--rehearse")
    assert processes.names() == ["gemm"] * 3, "a measurement is no rehearsal"
    bench("--only", "gemm", "--out", second, "--again")
    assert processes.names() == ["gemm"] * 4


def test_no_more_files_than_come_back(tmp_path, processes):
    out = tmp_path / "out"
    bench("--out", out)
    assert processes.names() == NAMES[:7]
    assert sorted(f.name for f in out.iterdir()) == sorted([*(f"{name}.json" for name in NAMES[:7]), "stages.log"])
    bench("--out", out)
    bench("--out", out)
    assert processes.names()[7:14] == NAMES[:7] and processes.names()[14:] == NAMES[7:14]
    assert "ahead           done" in bench("--list", "--out", out)


def test_nothing_is_begun_beyond_the_budget(tmp_path, processes, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(stages.time, "monotonic", lambda: clock[0])
    execute = stages.execute

    def slow(command, environment, output, seconds):
        clock[0] += 200.0
        return execute(command, environment, output, seconds)

    monkeypatch.setattr(stages, "execute", slow)
    bench("--out", tmp_path, "--budget", "480")
    assert [name for name, _ in processes.ran] == ["build", "group", "right"], "rows could not end in time"
    assert [seconds for _, seconds in processes.ran] == [115.0, 45.0, 80.0], "the limit, or what is left"


def test_failures_are_recorded_and_others_go_on(tmp_path, processes):
    processes.fails |= {"gemm"}
    bench("--out", tmp_path, "--only", "tests", "--only", "gemm", code=1)
    found = record(tmp_path, "gemm")
    assert found["failed"] and not found["ok"] and found["exit_code"] == 1 and "it broke" in found["output"]
    assert processes.names() == ["gemm", "tests"]


def test_the_ops_are_built_on_every_new_machine(tmp_path, processes, monkeypatch):
    built = []
    monkeypatch.setattr(stages, "built", lambda: bool(built))
    monkeypatch.setattr(stages, "build_ops", lambda output, seconds: built.append(seconds) or 0)
    bench("--out", tmp_path, "--only", "gemm")
    assert not built, "cuBLAS needs none of ours"
    bench("--out", tmp_path, "--only", "attention", "--only", "inside", "--budget", "70")
    assert not built, "nor is there time to build and to measure"
    bench("--out", tmp_path, "--only", "attention", "--only", "inside", "--budget", "400")
    assert built == [stage_named("build").limit], "once, in time of its own"
    assert [seconds for name, seconds in processes.ran if name == "inside"] == [stage_named("inside").limit]
    monkeypatch.delenv("GSD_KERNELS_CUDA_ARCHS", raising=False)
    for there, archs in (("/usr/bin/nvidia-smi", None), (None, "9.0a")):
        monkeypatch.setattr(stages.shutil, "which", lambda name, there=there: there)
        command, environment = stages.build_command()
        assert environment.get("GSD_KERNELS_CUDA_ARCHS") == archs, "setup.py asks a GPU, and names 9.0 with wgmma"
    assert (
        "--inplace" in command
        and environment["GSD_KERNELS_BUILD_CPU"] == "0"
        and environment["GSD_KERNELS_BUILD_CUDA"] == "1"
    )


def test_a_record_names_no_folder_of_the_machine(tmp_path):
    text = (
        "[1/2] g++ -L/opt/x/torch/lib a/b.cu.o -o /srv/gsd/build/_cuda.so\n/usr/bin/ninja: https://a.org/b/c 3 tokens/s"
    )
    stages.write(tmp_path / "a.json", {"output": text, "programs": {"ninja": "/usr/bin/ninja", "nvcc": None}})
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["output"] == "[1/2] g++ -Llib a/b.cu.o -o _cuda.so\nninja: https://a.org/b/c 3 tokens/s"
    assert found["programs"] == {"ninja": "ninja", "nvcc": None}


def test_a_stage_out_of_time_is_killed_with_what_it_started(tmp_path, monkeypatch):
    pid = tmp_path / "pid"
    child = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(900)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    monkeypatch.setattr(stages, "worker", lambda *_: [sys.executable, "-S", "-c", code])
    found = stages.run(Stage("slow", "gemm", "", needs=(), with_ops=False), Call(tmp_path, tmp_path), 3.0)
    assert found["exit_code"] == 124 and found["failed"], "no point was measured"
    for _ in range(100):
        if not running(int(pid.read_text())):
            break
        time.sleep(0.05)
    assert not running(int(pid.read_text()))

    def measured(*_):
        stages.write(tmp_path / "slow.json", {"rehearsal": False, "points": {"a": {}}, "complete": False})
        return 124

    monkeypatch.setattr(stages, "execute", measured)
    found = stages.run(Stage("slow", "gemm", "", needs=(), with_ops=False), Call(tmp_path, tmp_path), 3.0)
    assert not found["failed"] and not found["ok"] and found["points"], "it goes on in the next call"


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
