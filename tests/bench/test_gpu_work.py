"""What the stages of a GPU measure, at tiny sizes on a CPU, with what only a GPU can do replaced."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from commands import record
from typer.testing import CliRunner

from gsd_kernels import backends
from gsd_kernels.ops.table import OPS
from gsd_kernels_bench.cli import app
from gsd_kernels_bench.gpu import gpu_tests, group, inside, right, stages
from gsd_kernels_bench.gpu import work as module_of_work
from gsd_kernels_bench.gpu.work import perform

ROOT = Path(__file__).resolve().parents[2]


def test_points_are_measured_once_and_kept_one_by_one(work, tmp_path):
    measured = []

    def measure(name):
        measured.append(name)
        if name == "b":
            raise ValueError("no")
        if name == "c":
            raise KeyboardInterrupt
        return {"median": 1.0}

    with pytest.raises(KeyboardInterrupt):
        work("gemm").each("abc", measure)
    kept = record(tmp_path, "gemm")
    assert kept["points"] == {"a": {"median": 1.0}, "b": {"error": "ValueError: no"}} and not kept["complete"]
    assert {"device", "versions", "commit", "date"} <= set(kept["environment"])
    assert "driver" in kept["environment"]["versions"] and kept["dtype"] == "float32"
    work("gemm").each("ab", measure)
    assert measured == ["a", "b", "c", "b"], "an error is no measurement"
    work("gemm", again=True).each("a", measure)
    assert measured[-1] == "a"
    other = record(tmp_path, "gemm")
    other["environment"]["device"] = "another GPU"
    stages.write(tmp_path / "gemm.json", other)
    assert work("gemm").points == {}, "one table, one device"


def test_no_point_is_begun_that_would_end_too_late(work):
    late = work("gemm", seconds=0.3)
    late.each("abc", lambda name: time.sleep(0.2) or {})
    assert list(late.points) == ["a"] and late.waiting == ["b", "c"]


def test_an_error_of_the_device_is_known_by_what_it_says_next(work, monkeypatch):
    """Our own ops raise a RuntimeError for it, as for anything else."""

    def measure(name):
        raise RuntimeError("gsd_kernels: an illegal memory access was encountered")

    monkeypatch.setattr(module_of_work, "lost", lambda device: "an illegal memory access was encountered")
    broken = work("gemm")
    with pytest.raises(SystemExit, match="unusable"):
        broken.each("ab", measure)
    assert list(broken.points) == ["a"]
    monkeypatch.setattr(module_of_work, "lost", lambda device: None)
    fine = work("gemm")
    fine.each("ab", measure)
    assert fine.failed == ["a", "b"]


IDS = [
    *(f"t.py::test_op[{backend}-{dtype}-D{size}]" for backend in ("triton", "cuda") for dtype in ("float32", "bfloat16")
      for size in (64, 128)),
    "t.py::test_plain[triton-one]",
    "t.py::test_captured_on_a_gpu[greedy-tree]",
    "t.py::test_captured_on_a_gpu[sampled-tree]",
    "t.py::test_alone",
]  # fmt: skip


def test_gpu_tests_come_in_order_of_worth():
    order = gpu_tests.ordered(IDS)
    assert sorted(order) == sorted(IDS)
    kernels = ["test_op[triton-bfloat16-D128]", "test_op[cuda-bfloat16-D128]", "test_plain[triton-one]", "test_alone"]
    assert [name.partition("::")[2] for name in order[:4]] == kernels, "every kernel and backend once"
    assert all("captured" in name for name in order[4:6])
    assert [name.partition("::")[2] for name in order[6:8]] == [
        "test_op[triton-float32-D64]",
        "test_op[cuda-float32-D64]",
    ]


@pytest.mark.slow
def test_outcomes_are_kept_by_id_until_time_is_over(work, tmp_path, monkeypatch):
    file = tmp_path / "test_few.py"
    file.write_text(
        "import pytest, time\npytestmark = pytest.mark.gpu\n"
        "def test_a(): pass\ndef test_b(): assert 0\ndef test_c(): pytest.skip('why')\n"
        "def test_d(): time.sleep(0.3)\ndef test_e(): pass\n"
    )
    monkeypatch.setattr(gpu_tests, "FILES_WITHOUT_GPU", (str(file),))
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: x\n")
    first = work("tests")
    monkeypatch.setattr(first, "left", lambda: 600.0 if len(first.points) < 4 else 0.0)
    gpu_tests.run(first)
    outcomes = {name.partition("::")[2]: point["outcome"] for name, point in first.points.items()}
    assert outcomes == {"test_a": "passed", "test_b": "failed", "test_c": "skipped", "test_d": "passed"}
    assert [name.partition("::")[2] for name in first.waiting] == ["test_e"]
    assert "assert 0" in first.points["test_few.py::test_b"]["error"] and first.failed == ["test_few.py::test_b"]
    second = work("tests")
    gpu_tests.run(second)
    assert second.points["test_few.py::test_e"]["outcome"] == "passed" and not second.waiting
    assert "test_few.py::test_a" in second.points, "kept, and not run again"


def test_no_test_follows_one_that_lost_the_gpu(work, monkeypatch):
    """Every one of them would fail, and hide the first."""
    plugin = gpu_tests.Plugin(work("tests"))
    item = SimpleNamespace(session=SimpleNamespace(shouldstop=None))
    for says in (None, "an illegal memory access"):
        assert plugin.pytest_runtest_protocol(item) is None
        monkeypatch.setattr(gpu_tests, "lost", lambda device, says=says: says)
        report = SimpleNamespace(when="call", outcome="failed", nodeid=f"t.py::{says}", longrepr="wrong")
        plugin.pytest_runtest_logstart(report.nodeid)
        plugin.pytest_runtest_logreport(report)
    assert plugin.pytest_runtest_protocol(item) is True
    assert item.session.shouldstop == "the GPU is unusable: an illegal memory access"


def test_every_file_of_gpu_tests_is_among_those_asked():
    marked = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"mark\.gpu|block_code\.DEVICES|@backends\(|@cases\(", file.read_text(encoding="utf-8"))
        and file != Path(__file__)
    }
    two_gpus = {"tests/engine/test_device_map.py"}
    assert {name for name in marked if not name.startswith(gpu_tests.FILES)} <= two_gpus
    assert all((ROOT / name).exists() for name in (*gpu_tests.FILES, *gpu_tests.FILES_WITHOUT_GPU))


REHEARSED = [
    "right",
    "gemm",
    "attention",
    "rows",
    "inside",
    "ahead",
    "packed",
    "pair",
    "auto",
    "duel",
    pytest.param("race", marks=pytest.mark.slow),
    pytest.param("kernels", marks=[pytest.mark.slow, pytest.mark.many]),
]


def found_right(work, **errors) -> None:
    """The record of a verdict: right, but for the points that ``errors`` names by their last word."""
    verdict = work("right")
    for name in right.points_of("tiny", small=True):
        word = name.split()[-1].split("=")[0]
        verdict.points[name] = {"error": errors[word]} if word in errors else {"bounds": {}}
    verdict.write()


@pytest.mark.parametrize("name", REHEARSED)
def test_rehearsal(name, work, tmp_path, monkeypatch):
    if name in ("kernels", "race"):
        from gsd_kernels_bench.gpu import races

        def call(arguments, seconds):
            result = CliRunner().invoke(app, arguments[2:])
            assert result.exit_code == 0, result.output
            return True

        monkeypatch.setattr(races, "call", call)
    if name in ("rows", "inside", "ahead", "pair"):
        found_right(work)
    done = work(name)
    perform(done)
    assert not done.failed and not done.waiting, done.points
    kept = record(tmp_path, name)
    assert kept["complete"] and kept["points"] and (tmp_path / f"{name}.json").exists()
    if name in CHECKS:
        CHECKS[name](kept["points"])
    again, before = work(name), dict(done.points)
    monkeypatch.setattr(again, "keep", lambda *_: pytest.fail("measured twice"))
    perform(again)
    assert again.points == json.loads(json.dumps(before))


@pytest.mark.parametrize("name", ["attention", "right"])
def test_a_rehearsal_needs_no_compiled_ops(name, work, monkeypatch):
    """A fresh checkout has none; on a GPU the first stage builds them."""
    monkeypatch.setitem(backends.COMPILED_UNAVAILABLE, "cpu", "they were not built")
    done = work(name)
    perform(done)
    assert not done.failed, done.points
    assert any("they were not built" in what for what in done.not_run)


def check_gemm(points):
    assert len(points) == 1 + 5 * 2
    point = points["tiny gate_up M=8"]
    assert point["shape"] == [8, 256, 64] and point["bytes"] == 4 * (256 * 64 + 8 * (256 + 64))
    assert 0 < point["p20"] <= point["median"] <= point["p80"] and point["copies"] == 2
    assert point["of_floor"] == pytest.approx(point["floor_seconds"] / point["median"])
    assert point["floor_seconds"] == pytest.approx(point["bytes"] / max(points["bandwidth"].values()))


def check_rows(points):
    ways = ("operator", "operator in turn", "modules")
    assert set(points) == {"bandwidth", "tiny prompt", *(f"tiny rows={r} {w}" for r in (1, 5) for w in ways)}
    assert set(points["tiny prompt"]["seconds"]) == {"operator", "modules"} and points["tiny prompt"]["prompt"] == 2000
    point = points["tiny rows=5 operator"]
    assert point["median"] > 0 and point["floor_seconds"] == pytest.approx(point["bytes"] / points["bandwidth"]["read"])


def check_ahead(points):
    sizes = ("24", "0", "8", "16", "32", "48")
    assert set(points) == {"bandwidth", *(f"tiny rows=5 ahead={size}" for size in sizes)}


def check_race(points):
    raced = {row["competitor"]: row for row in points["race"]["report"]["summary"]}
    assert set(raced) == {"plain", "graph", "graph-new", "auto", "auto-new"}
    assert all(row["beside_seconds"] is not None and not row["beyond_rounding"] for row in raced.values())


def check_right(points):
    cases = ("prefix=40", "prefix=33", "prefix=39 pads=0,7")
    assert set(points) == {f"tiny {name}" for name in (*cases, "bits", "launches", "batch")}
    for case in cases:
        point = points[f"tiny {case}"]
        assert 0 < point["errors"]["operator"]["row"] < point["bounds"]["row"]
        assert 0 < point["errors"]["operator"]["element"] < point["bounds"]["element"]
    assert points["tiny launches"]["wrong"] == {"early": {"called": 0}, "in turn": {"called": 0}}


def check_pair(points):
    texts = {name: points[name]["text"] for name in ("graph operator", "plain operator", "graph modules")}
    assert texts["graph operator"] == texts["plain operator"] and len(texts["graph modules"]) == 12
    assert points["graph operator"]["again"] == texts["graph operator"]
    points = {"graph": points["graph operator"]}
    first, second = points["graph"]["calls"]
    assert first["stats"]["why_modules"] is None
    assert points["graph"]["graphs"][0]["replays"] > 3
    assert first["captured"] and not second["captured"], "what the first call captured serves the second"
    assert first["stats"]["steps"] > 3, "nothing drafted is accepted"
    assert second["stats"]["steps"] <= first["stats"]["steps"], "the history remembers the text"
    assert 0 < len(points["graph"]["replay"]["top"]) <= 20 and points["graph"]["replay"]["seconds"] > 0


def check_duel(points):
    ops = points["verdict"]["ops"]
    sampling = {name for name in ops if name.startswith(("sample_rows", "draft_candidates"))}
    history = {"ngram_insert", "ngram_lookup", "perturb_candidates", "mix_candidates"}
    others = {"merge all levels", "flatten", "verify", "commit_kv", "dag_attention", "warped_log_probs"}
    assert set(ops) == {*others, *history, *sampling} and len(sampling) == 4
    both = {name for name, op in OPS.items() if {"triton", "cuda"} <= set(op.implementations)}
    assert {op.split()[0] for op in ops} == both, "of every op that has two forms"
    for op in ops.values():
        assert len(op["triton"]) == len(op["cuda"]) == 1 and op["cuda_over_triton"] > 0
    assert points["step triton"]["text"] == points["step cuda"]["text"] and points["step cuda"]["graphs"]


CHECKS = {
    "ahead": check_ahead,
    "race": check_race,
    "duel": check_duel,
    "right": check_right,
    "gemm": check_gemm,
    "rows": check_rows,
    "pair": check_pair,
}


def product(name, seconds):
    return (f"void gsd::{name}<gsd::Bfloat16, 64>(gsd::RowsProduct)", seconds)


def test_products_of_a_forward_are_told_apart_by_their_order():
    layer = [("path_end_kernel", 5.0), *(product("rows_product_kernel", float(at)) for at in (1, 2, 3))]
    layer.append(product("rows_group_kernel", 4.0))
    launches = [*(inside.LAYERS * layer), ("rows_norm_kernel", 9.0), product("rows_wide_product_kernel", 7.0)]
    products = {"q, k, v": 1.0, "o": 2.0, "gate and up": 3.0, "down": 4.0, "head": 7.0}
    assert inside.by_product(launches) == {"products": products}
    with pytest.raises(RuntimeError, match="16 products in a forward of 4 layers"):
        inside.by_product(launches[:-1])


def test_kernels_that_agree_with_themselves_decide_nothing():
    """A library for 9.0, not 9.0a, has no group of warps, and launches the others in their place."""
    few, groups = [product("rows_wide_product_kernel", 1.0)], [product("rows_group_kernel", 1.0)]
    assert group.taken(False)(few) == group.taken(True)(groups) == {}
    for grouped, launches in ((True, few), (False, groups)):
        with pytest.raises(RuntimeError, match=f"GROUP={int(grouped)} took .*compiled for 9.0a"):
            group.taken(grouped)(launches)


def test_groups_of_warps_are_measured_where_they_were_right(work):
    verdict = work("group")
    names = [f"{shape} {kind}" for shape in right.SHAPES for kind in group.kinds_of(verdict)]
    verdict.points = {name: {} for name in names}
    verdict.write()
    found = work("rows")
    assert not group.passed_by_groups(found), "a rehearsal has none"
    found.rehearse = False
    assert group.passed_by_groups(found)
    verdict.points[names[0]] = {"error": "other bits"}
    verdict.write()
    assert not group.passed_by_groups(found)
