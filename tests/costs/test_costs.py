"""What steps cost: learned, predicted, kept on disk."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import platformdirs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import tiny
from simulated import BFLOAT16, GPU, KNOWN, NO_AMX

from gsd_kernels.config import PLAIN
from gsd_kernels_hf import store
from gsd_kernels_hf.costs import machine
from gsd_kernels_hf.costs.model import CostModel
from gsd_kernels_hf.costs.prior import CostPrior, weight_bytes
from gsd_kernels_hf.policy.shapes import ladder
from gsd_kernels_hf.store import MAX_SECTIONS, Document, Saver, cache_dir

# The cost model: priors from bytes, corrected by steps, robust against a machine that is busy now and then.


SHAPES = ladder("cpu", with_model=True)
FIRST = next(iter(SHAPES))


def model(known: CostPrior = KNOWN) -> CostModel:
    return CostModel(known, SHAPES)


def target(costs: CostModel, rows: float, cached: float = 0.0) -> float:
    return float(costs.target_seconds(np.array([float(rows)]), cached)[0])


def test_the_prior_is_the_bytes_over_the_bandwidth():
    known = CostPrior(target_bytes=1.4e9, target_layers=0, bandwidth=1.4e10, cache_bytes=1e5)
    assert target(model(known), 1) == pytest.approx(0.1)
    assert target(model(known), 1, cached=1.4e4) == pytest.approx(0.2)
    assert target(model(known), 32) > 1.3 * 0.1


def test_known_counts_the_weights_of_a_model_but_not_an_embedding_that_is_read_by_rows():
    untied, tied = tiny(tie_word_embeddings=False), tiny(tie_word_embeddings=True)
    everything = sum(p.nbytes for p in untied.parameters())
    assert weight_bytes(untied) == everything - untied.get_input_embeddings().weight.nbytes
    assert weight_bytes(tied) == sum(p.nbytes for p in tied.parameters())
    known = CostPrior.of(untied, tied, 1e10, one_op=False)
    assert known.draft_bytes == weight_bytes(tied) and known.target_layers == untied.config.num_hidden_layers
    assert CostPrior.of(untied, None, 1e10, one_op=False).draft_bytes == 0
    deep, shallow = (SHAPES[name] for name in ("10x1x1x12", "3x2x2x4"))
    fast, slow = (CostPrior.of(untied, tied, 1e10, one_op=True, compiled=compiled) for compiled in (True, False))
    assert fast.other_seconds(None) < slow.other_seconds(None)
    level = fast.forward_seconds + fast.level_seconds + tied.config.num_hidden_layers * fast.draft_layer_seconds
    assert fast.other_seconds(deep) - fast.other_seconds(shallow) == pytest.approx(7 * level, rel=0.1)


def test_an_expensive_draft_makes_shapes_with_it_expensive_and_no_others():
    found = model()
    before, place = found.other_seconds(1), found.index
    found.observe(FIRST, 0.0, [(4, target(found, 4), 20 * before[place[FIRST]])] * 2)
    ratio = found._besides() / before
    alike = [name for name, shape in SHAPES.items() if shape.depth]
    others = [name for name in (PLAIN, *SHAPES) if name not in alike]
    assert min(ratio[place[name]] for name in alike) > 3 * max(ratio[place[name]] for name in others)


@pytest.mark.parametrize("factor", [0.25, 1.0, 4.0])
@pytest.mark.parametrize("curve", [BFLOAT16, NO_AMX, GPU])
def test_a_few_steps_overrule_the_prior(curve, factor):
    known = CostPrior(target_bytes=0.05 * 1.4e10, target_layers=0, bandwidth=factor * 1.4e10)
    found, rng = model(known), np.random.default_rng(0)
    for rows, seconds in [*list(curve.items())] * 5:
        found.observe(FIRST, 100.0, [(rows, seconds * float(np.exp(0.05 * rng.standard_normal())), 0.001)])
    for rows, seconds in curve.items():
        assert target(found, rows, 100.0) / target(found, 1, 100.0) == pytest.approx(seconds / curve[1], rel=0.2), rows


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5])
def test_slow_steps_among_quick_ones_are_no_cost_of_their_rows(share):
    """A share of the forwards is disturbed, by chance more of eight rows or more of one."""
    known, rng = model(), np.random.default_rng(0)
    for period in range(12):
        alone = [(1, 0.02)] * 8 + [(8, 0.03)] * 8
        steps = [(rows, seconds * (2.5 if rng.random() < share else 1.0), 0.001) for rows, seconds in alone]
        known.observe(PLAIN, 200.0 + 16 * period, steps)
    assert target(known, 8, 300) / target(known, 1, 300) == pytest.approx(1.5, rel=0.05)
    assert known.steps == known.timed[PLAIN] == 12 * 16


def test_a_neighbour_process_makes_all_alike_slower_and_what_lasts_is_believed():
    found = model()
    for _ in range(10):
        found.observe(FIRST, 0.0, [(rows, BFLOAT16[rows], 0.003) for rows in (1, 8, 16)])
    before = [target(found, rows) for rows in (1, 8, 16)]
    found.observe(FIRST, 0.0, [(8, 30 * BFLOAT16[8], 0.09)])
    assert [target(found, rows) for rows in (1, 8, 16)] == pytest.approx(before, rel=0.02), "a hiccup"
    found.observe(FIRST, 0.0, [(8, 2.5 * BFLOAT16[8], 0.0075)] * 16)
    assert [target(found, rows) for rows in (1, 8, 16)] == pytest.approx([2.5 * each for each in before], rel=0.05)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 512),
            st.floats(0, 1e5),
            st.floats(0, 1e300),
            st.floats(0, 1e300),
            st.sampled_from([PLAIN, *SHAPES]),
        ),
        max_size=60,
    )
)
def test_seconds_never_fall_with_rows_and_stay_finite(steps):
    found = model()
    for rows, cached, seconds, other, name in steps:
        found.observe(name, cached, [(rows, seconds, other)])
    rows = 2.0 ** np.linspace(0, 12, 60)
    seconds = found.target_seconds(rows, 1000.0)
    assert np.isfinite(seconds).all() and (seconds > 0).all() and (np.diff(seconds) >= -1e-9 * seconds[1:]).all()
    assert np.isfinite(found.other_seconds(3)).all() and (found.other_seconds(3) > 0).all()
    assert np.isfinite(found.target_std(rows)).all()


def test_costs_survive_the_disk_but_for_the_pace():
    found = model()
    for rows in (1, 8, 16):
        found.observe(FIRST, 50.0, [(rows, 0.01 * rows, 0.002)] * 3)
    copy = model()
    copy.load(found.as_dict())
    rows = np.array([1.0, 3.0, 16.0, 100.0])
    ratio = copy.target_seconds(rows, 77.0) / found.target_seconds(rows, 77.0)
    np.testing.assert_allclose(ratio, ratio[0])
    assert copy.timed == found.timed and copy.steps == found.steps == 9


def test_a_machine_is_measured_once_and_that_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 20)
    machine._known.clear()
    found = machine.bandwidth(torch.device("cpu"))
    monkeypatch.setattr(machine, "measure_bandwidth", lambda device: pytest.fail("it is known"))
    for _ in range(2):
        assert machine.bandwidth(torch.device("cpu")) == found > 1e7
        machine._known.clear()  # another process
    assert len(list(tmp_path.glob("machine-*.json"))) == 1


def test_the_arithmetic_of_few_rows_hides_behind_reading_their_weights():
    known = CostPrior(target_bytes=1e9, target_layers=0, bandwidth=2e10, free_rows=6.0)
    seconds = known.target_seconds(np.array([1.0, 4.0, 7.0, 601.0]), 0.0)
    assert seconds / 0.05 == pytest.approx([1.0, 1.25**0.5, 2**0.5, 100.0], rel=1e-4)


# What is kept on disk: whole files, ignored when damaged, safe between processes.


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "deep" / "folder"))


def test_the_folder_is_the_platforms_unless_it_is_named(monkeypatch, tmp_path):
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "platformdirs", None)
        assert "platformdirs" not in vars(store) and cache_dir() == tmp_path / "deep" / "folder"
    monkeypatch.delenv("GSD_KERNELS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == Path(platformdirs.user_cache_dir("gsd_kernels", appauthor=False))


def test_sections_are_read_back_and_others_stay():
    document = Document("pair", {"a": 1})
    assert document.read() == {}
    document.write({"costs": {"x": 1.5}})
    Document("pair", {"a": 1}).write({"learned 1": [2]})
    assert Document("pair", {"a": 1}).read() == {"costs": {"x": 1.5}, "learned 1": [2]}
    assert Document("pair", {"a": 2}).read() == {}
    assert [file.suffix for file in cache_dir().iterdir()] == [".json"]


def test_the_oldest_sections_go():
    document = Document("pair", {})
    for i in range(MAX_SECTIONS + 3):
        document.write({f"learned {i}": i, "costs": i})
    kept = document.read()
    assert len(kept) == MAX_SECTIONS and kept["costs"] == MAX_SECTIONS + 2 and "learned 0" not in kept


@pytest.mark.parametrize("content", ["", "{", "[]", b"\xff\xfe\x00", "[" * 100_000, "NaN"])
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(content, caplog):
    document = Document("pair", {"a": 1})
    document.path.parent.mkdir(parents=True)
    document.path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        assert document.read() == {} and document.read() == {}
    assert len(caplog.records) == 1 and str(document.path) in caplog.text
    document.write({"costs": 1})
    assert Document("pair", {"a": 1}).read() == {"costs": 1}


@pytest.mark.parametrize("change", [{"version": 99}, {"about": {"a": 2}}], ids=["version", "pair of the same digest"])
def test_another_version_or_pair_is_not_read_and_no_damage(change, caplog):
    document = Document("pair", {"a": 1})
    document.write({"costs": 1})
    document.path.write_text(json.dumps(json.loads(document.path.read_text()) | change))
    assert document.read() == {} and not caplog.records


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "file"))
    document = Document("pair", {})
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        document.write({"a": 1})
        Document("gpu-proof", {}).write({"a": 1})
    assert [record.levelname for record in caplog.records] == ["WARNING"], "one line for all of a folder"
    assert "GSD_KERNELS_CACHE names another folder" in caplog.text
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "fine"))
    document = Document("pair", {})
    document.write({"a": object})  # what cannot be said in JSON is not kept, and stops nothing
    assert document.read() == {} and not list(cache_dir().glob(".partial-*"))


def test_writes_are_few_and_the_last_one_is_made_up_for(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    document = Document("pair", {})
    value = [0]
    saver = Saver(document, lambda: {"value": value[0]})
    for step in range(20):
        value[0] = step
        saver.save()
    saver.writing.join()
    assert document.read() == {"value": 0}
    now[0] += store.WRITE_INTERVAL_SECONDS
    saver.save()
    saver.writing.join()
    assert document.read() == {"value": 19}
    value[0] = 20
    saver.save()
    store._flush_all()  # at the process's end
    assert document.read() == {"value": 20}


def test_a_saver_that_waits_outlives_its_engine(monkeypatch):
    """As where a model is unpatched, or goes, a moment after its last text."""
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now))
    now, document = 100.0, Document("pair", {})
    saver = Saver(document, lambda: {"value": 1})
    saver.written = now
    saver.save()
    del saver
    gc.collect()
    assert document.read() == {}
    store._flush_all()
    assert document.read() == {"value": 1}


def test_of_savers_of_one_part_the_last_is_heard_and_other_parts_are_not_forgotten(monkeypatch):
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    now, document = [100.0], Document("pair", {})
    one, other, another = (
        Saver(document, lambda part=part, value=value: {part: value}, part)
        for part, value in (("a", 1), ("a", 2), ("b", 3))
    )
    for saver in (one, another, other):
        saver.written = now[0]
        saver.save()
    assert document.read() == {} and not one.waiting and other.waiting and another.waiting
    now[0] += store.WRITE_INTERVAL_SECONDS
    other.save()
    for saver in (other, another):  # whose time has come as well
        saver.writing.join()
    assert document.read() == {"a": 2, "b": 3} and not another.waiting


def test_no_call_waits_for_the_disk(monkeypatch):
    now, disk = [100.0], threading.Event()
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    document, written = Document("pair", {}), []
    monkeypatch.setattr(document, "write", lambda sections: (disk.wait(20), written.append(sections["value"])))
    value = [0]
    saver = Saver(document, lambda: {"value": value[0]})
    for step in (1, 2):  # the second while the first is still being written
        value[0], now[0] = step, now[0] + store.WRITE_INTERVAL_SECONDS
        saver.save()
        assert not written
    disk.set()
    saver.flush()
    assert written == [1, 2] and not saver.waiting


def test_a_process_without_more_threads_writes_at_its_end(monkeypatch):
    def start(thread):
        raise RuntimeError("can't start new thread")

    document = Document("pair", {})
    saver = Saver(document, lambda: {"value": 1})
    monkeypatch.setattr(threading.Thread, "start", start)
    saver.save()
    assert document.read() == {}
    saver.flush()
    assert document.read() == {"value": 1}


def test_a_fork_does_not_inherit_a_thread_that_writes():
    document = Document("pair", {})
    saver = Saver(document, lambda: {"value": 1})
    with document.lock:
        process = multiprocessing.get_context("fork").Process(target=saver.document.write, args=({"value": 2},))
        process.start()
        process.join(20)
        alive = process.is_alive()
        process.kill()
    assert not alive and document.read() == {"value": 2}


def _write_many(number: int) -> None:
    for i in range(30):
        Document("pair", {}).write({f"learned {number}": [i] * 500})


def test_processes_that_write_at_once_leave_a_whole_file():
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_write_many, args=(n,)) for n in range(3)]
    for process in processes:
        process.start()
    seen = 0
    while any(process.is_alive() for process in processes):
        document = Document("pair", {})
        seen += bool(document.read())
        assert not document.warned
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = Document("pair", {}).read()
    assert seen and found and all(value == [29] * 500 for key, value in found.items() if value[0] == 29)
    assert not list(cache_dir().glob(".partial-*"))
