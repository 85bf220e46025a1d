"""The verdict on the operator of rows: every point of it fails where the operator is wrong, and nothing follows."""

from __future__ import annotations

import pytest
import torch

from gsd_kernels_bench.gpu import duel, pair, right, sanitize
from gsd_kernels_bench.gpu import packed as gpu_packed
from gsd_kernels_bench.gpu.work import perform
from gsd_kernels_bench.kernels.rows import random_model
from gsd_kernels_hf.model.fused import FusedRows
from gsd_kernels_hf.model.rows_proof import errors

own = FusedRows.rows


def nothing(of, inputs, keep):
    return torch.full((inputs[0].shape[0], keep, of.vocab_size), 7.0)


def one_row(of, inputs, keep):
    """The last row of many reads another row's logits: 1 of 64, which the norm of all of them hides."""
    logits = own(of, *inputs, keep=keep).clone()
    if keep == right.ROWS:
        logits[:, -1] = logits[:, -2]
    return logits


def by_count(of, inputs, keep):
    """As other tiles for other numbers of rows would."""
    return own(of, *inputs, keep=keep) * (1 + 1e-6 * (keep > 16))


def by_batch(of, inputs, keep):
    return own(of, *inputs, keep=keep) * (1 + 1e-6 * (inputs[0].shape[0] > 1))


class Stale:
    """What is read too early is what the call before left."""

    before = None, None

    def __call__(self, of, inputs, keep):
        logits, (same, left) = own(of, *inputs, keep=keep), self.before
        self.before = inputs[1], logits.clone()
        if same is not inputs[1] or left.shape != logits.shape:
            return logits
        return torch.cat([logits[:, :-1], left[:, -1:]], 1)


def padded_keys(of, inputs, keep):
    """The first of the positions is taken for padding, where there is padding."""
    if int(of.kv_start.max()):
        of.kv_start = of.kv_start.clamp(min=1)
    return own(of, *inputs, keep=keep)


ERRORS = {"tiny prefix=40", "tiny prefix=33", "tiny prefix=39 pads=0,7"}


@pytest.mark.parametrize(
    ("wrong", "failed"),
    [
        (nothing, ERRORS | {"tiny launches"}),
        (one_row, ERRORS),
        (by_count, {"tiny bits"}),
        (by_batch, {"tiny batch"}),
        (Stale(), {"tiny launches"}),
        (padded_keys, {"tiny prefix=39 pads=0,7"}),
    ],
    ids=["nothing", "one row", "by count", "by batch", "stale", "padding"],
)
def test_what_is_wrong_fails_where_it_is_looked_for(work, monkeypatch, wrong, failed):
    monkeypatch.setattr(FusedRows, "rows", lambda self, *inputs, keep: wrong(self, inputs, keep))
    verdict = work("right")
    perform(verdict)
    assert set(verdict.failed) >= failed and not right.passed(work("rows"), "tiny"), verdict.points
    assert set(verdict.failed) - failed <= {"tiny bits", "tiny batch", "tiny launches"}


def test_errors_are_held_to_the_modules_and_to_rounding():
    good = {"row": 0.01, "element": 0.05}
    right.judge(good, good, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"wrong: row error 2.10e-02, the modules' is 1.00e-02"):
        right.judge({**good, "row": 0.021}, good, torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"wrong: element error 5.00e-01, torch.bfloat16 may have 4.00e-01"):
        right.judge({**good, "element": 0.5}, {"row": 0.01, "element": 0.4}, torch.bfloat16)
    with pytest.raises(RuntimeError, match="wrong: row error nan"):
        right.judge({**good, "row": float("nan")}, good, torch.bfloat16)
    exact = torch.randn(1, 64, 100)
    assert errors(exact, exact) == {"row": 0.0, "element": 0.0}
    off = exact.clone()
    off[0, 3] = 0.0
    assert errors(off, exact)["row"] == pytest.approx(1.0)
    off = exact.clone()
    off[0, 3, 4] += 5 * exact[0, 3].norm() / 10
    assert errors(off, exact)["element"] == pytest.approx(5.0, rel=1e-5)


def test_rows_that_are_wrong_are_not_timed(work, monkeypatch):
    monkeypatch.setattr(FusedRows, "rows", lambda self, *inputs, keep: nothing(self, inputs, keep))
    perform(work("right"))
    timed = work("rows")
    perform(timed)
    assert set(timed.points) == {"bandwidth", "tiny rows=1 modules", "tiny rows=5 modules"}
    assert len(timed.waiting) == 5, "it is not done"
    tables = work("inside")
    perform(tables)
    assert not tables.points and tables.waiting == ["tiny"]


def test_a_verdict_of_another_device_or_in_part_is_none(work, monkeypatch):
    verdict = work("right")
    verdict.points = {name: {} for name in list(right.points_of("tiny", small=True))[:-1]}
    verdict.write()
    assert not right.passed(work("rows"), "tiny")
    verdict.points |= {name: {} for name in right.points_of("tiny", small=True)}
    verdict.write()
    assert right.passed(work("rows"), "tiny")
    other = work("rows")
    other.environment = {**other.environment, "device": "another GPU"}
    assert not right.passed(other, "tiny")


@pytest.fixture
def models():
    models = [random_model("tiny", torch.float32) for _ in range(2)]
    for model in models:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    return models


def test_a_captured_step_that_writes_another_text_fails(work, models):
    step = work("pair")
    step.points["plain operator"] = {"text": [1, 2, 3]}
    with pytest.raises(RuntimeError, match=r"graph operator wrote \[.*\], plain operator \[1, 2, 3\]"):
        pair.judged(step, *models, "graph operator")


def test_a_step_by_the_modules_is_no_step_by_the_operator(work, models, monkeypatch):
    monkeypatch.setitem(pair.WAYS, "operator", "0")
    with pytest.raises(RuntimeError, match="rows went through the modules: GSD_KERNELS_FUSED_ROWS=0"):
        pair.judged(work("pair"), *models, "graph operator")
    monkeypatch.setitem(pair.WAYS, "modules", "1")
    with pytest.raises(RuntimeError, match="rows went through the operator"):
        pair.judged(work("pair"), *models, "graph modules")


CLEAN = "7 passed in 3 s\n========= ERROR SUMMARY: 0 errors\n"


def test_what_a_sanitizer_finds_fails():
    assert sanitize.verdict(0, CLEAN) == {"tests": 7, "errors": 0}
    races = "7 passed in 3 s\n========= RACECHECK SUMMARY: 2 hazards displayed (0 errors, 2 warnings)\n"
    for code, said, match in (
        (sanitize.FOUND, CLEAN.replace("0 errors", "3 errors"), "found something, exit code 86"),
        (0, races, "found something, exit code 0"),
        (1, CLEAN.replace("7 passed", "1 failed, 6 passed"), "did not end well, exit code 1"),
        (5, CLEAN.replace("7 passed", "no tests ran"), "did not end well"),
        (0, "7 passed in 3 s\n", "did not end well"),
    ):
        with pytest.raises(RuntimeError, match=match):
            sanitize.verdict(code, said)


def test_packed_matrices_with_other_bits_are_not_timed(work, monkeypatch):
    own = gpu_packed.unpack_rows
    monkeypatch.setattr(
        gpu_packed, "unpack_rows", lambda matrix, **how: own(matrix, **how) * (matrix.kind.name != "int8")
    )
    done = work("packed")
    perform(done)
    assert done.failed == ["tiny int8 bits"] and "int8, 5 rows: 5 rows have other bits" in str(done.points)
    assert done.waiting == ["tiny rows=1 int8", "tiny rows=5 int8"] and done.is_done("tiny rows=5 int4")


def test_the_verdict_of_a_duel():
    def points(op, *seconds):
        return {f"{op} {form}": {"median": s} for form, s in zip(duel.FORMS, seconds, strict=True)}

    named = {
        "flatten rows=16": (2.0, 2.0), "flatten rows=64": (1.0, 1.6),  # 1.26 in the mean
        "verify rows=16": (1.0, 1.4),
        "dag_attention tiny prefix=64 rows=8": (1.0, 1.0),
    }  # fmt: skip
    found = {name: point for op, seconds in named.items() for name, point in points(op, *seconds).items()}
    ops = duel.verdict({**found, "step triton": {"text": [1]}})["ops"]
    assert {op: form["goes"] for op, form in ops.items()} == {
        "flatten": "triton", "verify": "cuda", "dag_attention": "cuda",
    }  # fmt: skip
    assert ops["flatten"]["cuda_over_triton"] == pytest.approx(1.6**0.5)
    faster = points("dag_attention tiny prefix=64 rows=8", 1.0, 0.9)
    assert duel.verdict(faster)["ops"]["dag_attention"]["goes"] == "neither"


def test_two_texts_of_a_duel_fail(work, monkeypatch):
    texts = iter([[1, 2], [1, 3]])
    monkeypatch.setattr(duel.pair, "twice", lambda *_: {"text": next(texts)})
    done = work("duel")
    duel.steps(done)
    assert done.failed == ["step cuda"] and "the forms wrote two texts" in done.points["step cuda"]["error"]
