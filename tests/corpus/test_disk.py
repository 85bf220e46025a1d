"""What is kept on disk: whole files, ignored when damaged, safe between processes, and an index of texts."""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Iterator

import pytest
from checkpoints import corpus_of, random_text
from models import tokenizer
from simulated import KNOWN

from gsd_kernels_cli.corpus import build_corpus, files_of, tokenized
from gsd_kernels_hf import store
from gsd_kernels_hf.costs.model import CostModel
from gsd_kernels_hf.files import locked, write_folder
from gsd_kernels_hf.sources.corpus import HEADER, open_corpus, read_header
from gsd_kernels_hf.store import Document, cache_dir, write_later


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "deep" / "folder"))


def test_what_a_killed_writer_of_a_folder_left_goes_and_anothers_stays(tmp_path):
    """A folder is whole or absent; whoever writes it holds a lock."""
    killed, held, other = (tmp_path / f".partial-{name}" for name in ("0a-index", "0b-index", "0c-else"))
    for folder in (killed, held, other):
        (folder / "inside").mkdir(parents=True)
    with locked(held) as alone, locked(held, 0.05) as second:
        assert (alone, second) == (True, False)
        with pytest.raises(OSError), write_folder(tmp_path / "index") as new:
            (new / "file").write_text("half")
            raise OSError
        assert sorted(tmp_path.glob(".partial-*")) == [held, other] and not (tmp_path / "index").exists()
        with write_folder(tmp_path / "index") as new:
            (new / "file").write_text("whole")
    assert (tmp_path / "index" / "file").read_text() == "whole"


def test_values_are_read_back_and_the_oldest_files_of_a_kind_go(monkeypatch):
    monkeypatch.setattr(store, "MOST_FILES", 2)
    for kind, number in (("else", 0), ("pair", 0), ("pair", 1), ("pair", 2)):
        document = Document(kind, {"a": number})
        document.write({"costs": {"x": number}})
        os.utime(document.path, (number, number))
    found = [Document(kind, {"a": number}).read() for kind, number in (("else", 0), ("pair", 0), ("pair", 2))]
    assert found == [{"costs": {"x": 0}}, {}, {"costs": {"x": 2}}]


@pytest.mark.parametrize("damage", [lambda raw: b"", lambda raw: raw[:-1], lambda raw: raw.replace(b"costs", b"casts")])
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(damage, caplog):
    document = Document("pair", {"a": 1})
    document.write({"costs": 1})
    document.path.write_bytes(damage(document.path.read_bytes()))
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        assert document.read() == {} and document.read() == {}
    (line,) = caplog.messages
    assert str(document.path) in line
    document.write({"costs": 1})
    assert Document("pair", {"a": 1}).read() == {"costs": 1}


def test_a_folder_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "gsd_kernels"):
        for name in ("pair", "gpu-proof"):
            Document(name, {}).write({"a": 1})
    assert len(caplog.records) == 1 and "GSD_KERNELS_CACHE names another folder" in caplog.text


def test_no_save_waits_for_the_disk_and_the_last_is_written(monkeypatch):
    monkeypatch.setattr(store, "WRITE_AFTER_SECONDS", 0.3)
    store._flush_all()
    document, costs = Document("pair", {}), CostModel(KNOWN, {})
    for costs.timed[0] in (1, 2):
        write_later({document: costs})
    assert not document.path.exists()
    store._writer.join()
    assert document.read()["timed"] == [2]


def _write_many(number: int) -> None:
    for i in range(30):
        Document("pair", {}).write({f"learned {number}": [i] * 500})


def test_processes_that_write_at_once_leave_a_whole_file():
    context, document = multiprocessing.get_context("fork"), Document("pair", {})
    processes = [context.Process(target=_write_many, args=(n,)) for n in range(3)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        document.read()
        assert not store._told
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert any(value == [29] * 500 for value in document.read().values())
    assert not list(cache_dir().glob(".partial-*"))


# An index of texts.


@pytest.fixture
def folder(tmp_path):
    return corpus_of(tmp_path / "index", random_text(6_000), [5, 6, 7])


def test_a_changed_header_and_exchanged_arrays_are_refused_by_name(folder):
    header = folder / HEADER
    text = header.read_text()
    for changed, match in (
        (("6001", "6002"), "corpus.json is damaged"),
        (('"version": 1', '"version": 2'), "newer than 1"),
        (('gsd_kernels corpus"', '"'), "is no index of gsd_kernels"),
        (('"version": 1', " " * 2**20 + '"version": 1'), "corpus.json is damaged"),
    ):
        header.write_text(text.replace(*changed))
        with pytest.raises(ValueError, match=match):
            open_corpus(folder)
    header.write_text(text)
    shutil.copy(folder / "order.npy", folder / "following.npy")
    with pytest.raises(ValueError, match=rf"{folder}.*following\.npy is damaged"):
        open_corpus(folder)


def test_an_index_of_another_tokenizer_is_refused(tmp_path):
    own = tokenizer()
    build_corpus(tmp_path / "index", tokenized(["def f(x): return x"], own), tokenizer=own)
    open_corpus(tmp_path / "index", tokenizer())
    with pytest.raises(ValueError, match=r"another tokenizer .* index the files anew with the target's"):
        open_corpus(tmp_path / "index", tokenizer(60))
    assert read_header(tmp_path / "index").vocab_size == len(own)


def test_what_cannot_be_indexed_is_refused_and_leaves_nothing(tmp_path):
    place = tmp_path / "index"
    for documents, match in (
        ([[4], [9], []], "no text of two tokens"),
        ([[2**31, 1]], "expected a sequence of token ids"),
    ):
        with pytest.raises(ValueError, match=match):
            build_corpus(place, documents)
        assert list(tmp_path.iterdir()) == []
    place.mkdir()
    with pytest.raises(ValueError, match="index exists; remove it, or name another folder"):
        build_corpus(place, [[1, 2]])
    with pytest.raises(ValueError, match="no file to index"):
        files_of([place])


@pytest.mark.skipif(sys.platform != "linux", reason="needs fork")
def test_a_build_that_is_killed_at_any_time_leaves_no_index(tmp_path):
    place, killed = tmp_path / "index", 0
    for event in range(1, 100):
        child = os.fork()
        if child == 0:
            events = itertools.count(1)

            def hook(name: str, _: object, event: int = event, events: Iterator[int] = events) -> None:
                if name in ("open", "os.mkdir", "os.rename", "os.rmdir", "shutil.rmtree") and next(events) == event:
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                sys.addaudithook(hook)
                build_corpus(place, [[1, 2, 3, 1, 2]])
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        killed += 1
        if place.exists():  # killed after it was renamed: then it is whole
            open_corpus(place)
            shutil.rmtree(place)
    assert killed >= 8
    assert open_corpus(place)[0].tokens == 5
    assert [each.name for each in tmp_path.iterdir()] == ["index"], "the next build removes what a killed one left"
