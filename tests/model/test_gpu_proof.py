"""A GPU proves the operator of rows before it serves there; shown on a CPU, whose own operator takes its place."""

from __future__ import annotations

import json
import multiprocessing
import re

import pytest
import torch
from ops.contracts.backends import needs_cpu

from gsd_kernels.ops.decoder_rows import cuda
from gsd_kernels_hf.model import fused, gpu_proof, replay, rows_proof
from gsd_kernels_hf.model.fused import FusedRows
from gsd_kernels_hf.model.gpu_proof import Kind, proof_of
from gsd_kernels_hf.model.rows_proof import Sizes
from gsd_kernels_hf.model.runner import RowModel
from gsd_kernels_hf.store import Document

CPU = torch.device("cpu")
KIND = Kind(torch.bfloat16, 64, "mma")
FASTER = {rows: {"operator": 0.5, "modules": 1.0} for rows in gpu_proof.TIMED_ROWS}
own = FusedRows.rows


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    """Small sizes, times that are none, a cache folder of its own, and no GPU's name."""
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(gpu_proof, "SIZES", Sizes(hidden=128, inner=192, layers=1, vocabulary=96))
    monkeypatch.setattr(gpu_proof, "PREFIX", 45)
    monkeypatch.setattr(gpu_proof, "PADS", (0, 7))
    monkeypatch.setattr(gpu_proof, "REPLAYS", 4)
    monkeypatch.setattr(gpu_proof, "_known", {})
    monkeypatch.setattr(rows_proof, "milliseconds", lambda *_: FASTER)
    monkeypatch.setattr(gpu_proof, "document_of", lambda device: Document("gpu-proof", {"gpu": str(device)}))


def proved(kind=KIND, **options):
    return proof_of(kind, CPU, fused.ways(), **options)


# What is found.


@needs_cpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_right_operator_proves_itself(dtype, head_dim):
    state, default = torch.get_rng_state(), torch.get_default_dtype()
    proof = proved(Kind(dtype, head_dim, "mma"))
    assert proof["why"] is None and proof["seconds"] > 0 and set(proof["apart"].values()) == {0}
    assert 0 < proof["errors"]["operator"]["row"] < 2 * proof["errors"]["modules"]["row"] + 1e-5
    assert torch.equal(torch.get_rng_state(), state) and torch.get_default_dtype() == default


def another_bit(part):
    """The last bit of a row, where a part of the rows is by itself."""

    def rows(of, inputs, keep):
        logits = own(of, *inputs, keep=keep)
        if part(inputs, keep):
            logits = logits.clone()
            logits.view(torch.int16)[0, -1, 3] ^= 1
        return logits

    return rows


class Stale:
    """A replay reads what the call before has left; the first two calls are those that say what is right."""

    def __init__(self):
        self.calls = {}

    def __call__(self, of, inputs, keep):
        logits, (_, calls) = own(of, *inputs, keep=keep), self.calls.setdefault((id(inputs[1]), keep), (inputs[1], []))
        calls.append(logits)
        return calls[-2] if len(calls) > 3 else logits


def broken(*_):
    raise RuntimeError("an illegal\n  instruction \x1b[31m" + 400 * "!")


@needs_cpu
@pytest.mark.parametrize(
    ("rows", "says"),
    [
        *(
            (another_bit(lambda inputs, keep, count=count: keep == count), "1 rows have other bits (alone)")
            for count in (16, 17, 32, 33, 128, 129)
        ),
        (another_bit(lambda inputs, keep: keep == 1), "2 rows have other bits (alone)"),
        (another_bit(lambda inputs, keep: len(inputs[0]) == 2), "1 rows have other bits (beside another)"),
        (Stale(), "3 rows have other bits (replayed)"),
        (lambda of, inputs, keep: own(of, *inputs, keep=keep) * 1.5, "row error 5."),
        (lambda of, inputs, keep: own(of, *inputs, keep=keep) * float("nan"), "row error 1.00e+09, the modules' is"),
        (broken, "RuntimeError: an illegal instruction ?[31m!!!"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_keeps_the_modules(rows, says, monkeypatch, caplog):
    monkeypatch.setattr(FusedRows, "rows", lambda self, *inputs, keep: rows(self, inputs, keep))
    monkeypatch.setattr(cuda, "is_measured", lambda device: True)
    reason = gpu_proof.why_not(CPU, torch.bfloat16, 64, fused.ways())
    assert reason.startswith("one operator did not prove itself on this GPU: ") and says in reason
    assert reason.endswith("; again by: gsd-kernels doctor --prove") and reason.isprintable() and len(reason) < 450
    gpu_proof._known.clear()
    assert gpu_proof.why_not(CPU, torch.bfloat16, 64, fused.ways()) == reason, "as it was kept"


@pytest.mark.parametrize(("times", "reason"), [(0.99, None), (1.2, "it takes 1.20 times as long as the modules")])
def test_what_is_slower_keeps_the_modules(times, reason):
    right = {"row": 0.001, "element": 0.01}
    ratios = [times * 2, times / 2, times * 3, times / 3]  # the mean counts
    taken = {rows: {"operator": r, "modules": 1.0} for rows, r in zip(gpu_proof.TIMED_ROWS, ratios, strict=True)}
    both = {"operator": right, "modules": right}
    assert gpu_proof.verdict(both, {"alone": 0}, taken, torch.bfloat16) == reason
    assert gpu_proof.verdict(both, {"alone": 2}, taken, torch.bfloat16) == "2 rows have other bits (alone)"


@needs_cpu
def test_both_ways_are_timed(monkeypatch):
    monkeypatch.undo()
    of = rows_proof.Subject(
        lambda: rows_proof.random_model(Sizes(128, 192, 1, 96), torch.float32, 64, CPU), fused.ways()
    )
    found = rows_proof.milliseconds(of, rows_proof.Case(20), (1, 3))
    assert found.keys() == {1, 3} and all(set(ms) == {"operator", "modules"} for ms in found.values())
    assert min(value for ms in found.values() for value in ms.values()) > 0


# What is kept.


def given(monkeypatch, proof):
    """Counts proofs that are made."""
    made = []
    monkeypatch.setattr(gpu_proof, "prove", lambda kind, *_: made.append(kind) or proof)
    return made


def figures(why=None):
    return {**gpu_proof.not_ended("", 2.5), "why": why}


def test_it_is_made_once_a_machine_and_kind(monkeypatch):
    made = given(monkeypatch, figures())
    other = Kind(torch.float16, 64, "mma")
    for kind in (KIND, KIND, other):
        assert proved(kind) == figures()
    assert made == [KIND, other]
    gpu_proof._known.clear()
    assert proved() == proved(other) == figures() and len(made) == 2, "another process reads it"
    proved(again=True)
    assert len(made) == 3


def test_other_kernels_have_a_proof_of_their_own(monkeypatch):
    made = given(monkeypatch, figures())
    monkeypatch.setattr(cuda, "PRODUCTS", {"mma": {}, "other": {"GSD_KERNELS_ROWS_OTHER": "1"}})
    for setting in ("0", "1", "1"):
        monkeypatch.setenv("GSD_KERNELS_ROWS_OTHER", setting)
        assert gpu_proof.why_not(CPU, torch.bfloat16, 64, fused.ways()) is None
    assert [kind.products for kind in made] == ["mma", "other"]


@pytest.mark.parametrize(
    ("capability", "archs", "names"),
    [((9, 0), "9.0a", ["mma", "wgmma"]), ((9, 0), "9.0", ["mma"]), ((8, 0), "9.0a", ["mma"])],
)
def test_groups_of_warps_are_proved_where_they_are(capability, archs, names, monkeypatch):
    """On GPUs that have them, by a library that has their code."""
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(cuda, "architectures", lambda: ("8.0", archs))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cuda.product_kernels(gpu) == names and cuda.selected(gpu) == "mma"
    monkeypatch.setenv(cuda.GROUP, "1")
    assert cuda.selected(gpu) == names[-1]
    assert cuda.selecting("mma") == {cuda.GROUP: None} and cuda.selecting("wgmma") == {cuda.GROUP: "1"}


def test_a_report_proves_every_kind_by_its_own_kernels(monkeypatch):
    monkeypatch.setattr(cuda, "PRODUCTS", {"mma": {}, "other": {"GSD_KERNELS_ROWS_OTHER": "1"}})
    monkeypatch.setenv("GSD_KERNELS_ROWS_OTHER", "1")
    taken = []

    def prove(kind, *_):
        taken.append((kind.products, cuda.selected(CPU)))
        if kind.head_dim == 128:
            raise gpu_proof.UnprovedError("full")
        return figures()

    monkeypatch.setattr(gpu_proof, "prove", prove)
    assert gpu_proof.report(CPU, fused.ways(), again=False) == {} and not taken
    found = gpu_proof.report(CPU, fused.ways(), again=True)
    assert len(found) == len(taken) == 8 and all(named == really for named, really in taken)
    assert {proof["why"] for proof in found.values()} == {None, "full"} and cuda.selected(CPU) == "other"
    assert set(gpu_proof.report(CPU, fused.ways(), again=False)) == {n for n, p in found.items() if p["why"] is None}


@pytest.mark.parametrize("bad", ["{", '{"why": null}', "[1, 2]", "NaN"])
def test_a_bad_file_is_forgotten(bad, monkeypatch):
    made = given(monkeypatch, figures("planted"))
    for count in (1, 2):
        proved()
        path = gpu_proof.document_of(CPU).path
        text, kept = path.read_text(), json.dumps(figures("planted"))
        assert kept in text and len(made) == count
        path.write_text(text.replace(kept, bad))
        gpu_proof._known.clear()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (KeyboardInterrupt(), None),
        (torch.OutOfMemoryError("full"), "there is no memory to prove one operator on this GPU (1 GB)"),
        (TypeError("another library"), "one operator could not be proved on this GPU: TypeError: another library"),
    ],
    ids=repr,
)
def test_what_breaks_off_is_no_answer(error, reason, monkeypatch):
    def breaks(*_):
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(rows_proof, "errors_of", breaks)
        with pytest.raises(KeyboardInterrupt if reason is None else gpu_proof.UnprovedError):
            proved()
        if reason is not None:
            for measured, said in ((True, None), (False, reason)):
                patched.setattr(cuda, "is_measured", lambda device, found=measured: found)
                assert gpu_proof.why_not(CPU, torch.bfloat16, 64, fused.ways()) == said
    made = given(monkeypatch, figures())
    if reason is not None:
        with pytest.raises(gpu_proof.UnprovedError, match=re.escape(reason)):
            proved()
        assert not made, "the process tried once, and a session's begin does not try again"
        gpu_proof._known.clear()
    assert proved() == figures() and made == [KIND], "another process tries"


def test_what_broke_off_is_tried_again_where_that_is_asked(monkeypatch):
    monkeypatch.setattr(gpu_proof, "prove", broken_off)
    with pytest.raises(gpu_proof.UnprovedError, match="full"):
        proved()
    made = given(monkeypatch, figures())
    assert proved(again=True) == proved() == figures() and made == [KIND]


def test_a_gpu_that_fails_is_remembered(monkeypatch):
    monkeypatch.setattr(rows_proof, "errors_of", broken)
    monkeypatch.setattr(replay, "lost", lambda device: "an illegal address")
    with pytest.raises(replay.DeviceLostError, match="the GPU failed while rows as one operator were proved"):
        proved()
    gpu_proof._known.clear()
    made = given(monkeypatch, figures())
    assert "the GPU failed while" in proved()["why"] and not made


def broken_off(*_):
    raise gpu_proof.UnprovedError("full")


def dies():
    gpu_proof.prove = lambda *_: __import__("os")._exit(3)
    proved()


def test_a_process_that_dies_of_it_leaves_word(monkeypatch):
    process = multiprocessing.get_context("fork").Process(target=dies)
    process.start()
    process.join(60)
    assert process.exitcode == 3
    made = given(monkeypatch, figures())
    assert proved()["why"] == "a proof was begun and did not end, as where a GPU hangs" and not made
    assert proved(again=True) == figures() and made == [KIND]


def asks(queue, folder):
    def prove(*_):
        with (folder / "made").open("a") as file:
            file.write(".")
        __import__("time").sleep(0.3)
        return figures()

    gpu_proof.prove = prove
    queue.put(proved())


def test_processes_that_ask_at_once_wait_for_one(tmp_path):
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()
    processes = [fork.Process(target=asks, args=(queue, tmp_path)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert found == 4 * [figures()] and (tmp_path / "made").read_text() == "."


def test_a_proof_is_of_a_gpu_a_driver_and_a_build(monkeypatch):
    monkeypatch.undo()
    properties = type("Properties", (), {"name": "A", "major": 8, "minor": 0})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(gpu_proof, "driver", lambda: "driver 1")
    paths = {gpu_proof.document_of(CPU).path}
    for name, value in (("driver", lambda: "driver 2"), ("build", lambda: "another")):
        monkeypatch.setattr(gpu_proof, name, value)
        paths.add(gpu_proof.document_of(CPU).path)
    monkeypatch.setattr(properties, "name", "B")
    paths.add(gpu_proof.document_of(CPU).path)
    assert len(paths) == 4


@pytest.mark.parametrize(("head_dim", "setting"), [(64, "1"), (64, "cuda")])
def test_a_model_asks_for_its_own_kind(head_dim, setting, monkeypatch):
    from models import tiny

    model, asked = tiny(dtype=torch.float16, head_dim=head_dim), []
    monkeypatch.setattr(replay, "is_gpu", lambda device: True)
    monkeypatch.setattr(fused, "unavailable_reason", lambda *_: None)
    monkeypatch.setenv("GSD_KERNELS_FUSED_ROWS", setting)
    monkeypatch.setattr(fused.proof, "why_not_proved", lambda *_, **__: None)  # which would run the kernels
    monkeypatch.setattr(gpu_proof, "proof_of", lambda kind, *_: asked.append(kind) or figures("planted"))
    reason = fused.why_not(model, "auto")
    if setting == "cuda":
        assert reason is None and not asked, "on request, unproved"
    else:
        assert "planted" in reason and asked == [Kind(torch.float16, head_dim, "mma")]
        rows = fused.rows_of(model, 8, torch.zeros(1, dtype=torch.int32), "auto")
        assert type(rows) is RowModel and rows.why_modules == reason
