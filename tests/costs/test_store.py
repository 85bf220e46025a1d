"""What is kept on disk: whole files, ignored when damaged, safe between processes."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import platformdirs
import pytest

from gsd_kernels_hf import store
from gsd_kernels_hf.store import MAX_SECTIONS, Document, Saver, cache_dir


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
