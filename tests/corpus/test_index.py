"""An index on disk: whole or absent, shared by processes, and refused by name where it is damaged or foreign."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from checkpoints import corpus_of, random_text
from models import tokenizer

from gsd_kernels_cli.corpus import build_corpus, files_of, tokenized
from gsd_kernels_hf.corpus import index
from gsd_kernels_hf.corpus.index import HEADER, open_corpus, read_header

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs fork and /proc")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return corpus_of(tmp_path_factory.mktemp("whole") / "index", random_text(60_000), [5, 6, 7])


@pytest.fixture
def folder(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "index"))


def test_what_was_written_is_what_is_opened(whole):
    header, corpus = open_corpus(whole)
    assert (header.tokens, header.documents, header.entries) == (60_003, 2, 60_001)
    assert header.largest_token == int(corpus.text.max())
    assert corpus.text[:60_000].tolist() == random_text(60_000).tolist()
    assert corpus.text[60_000:].tolist() == [-1, 5, 6, 7, -1]
    assert {file.name for file in whole.iterdir()} == {HEADER, "text.npy", "order.npy", "following.npy"}


def truncate(file: Path, by: int = 1) -> None:
    os.truncate(file, file.stat().st_size - by)


def rewrite(folder: Path, **changes: object) -> None:
    """Another header, with a right digest."""
    values = json.loads((folder / HEADER).read_text())
    del values["sha256"]
    values.update(changes)
    (folder / HEADER).write_text(json.dumps({**values, "sha256": index._digest(values)}))


DAMAGES = {
    "a digit of the header": (
        lambda f: (f / HEADER).write_text((f / HEADER).read_text().replace("60001", "60002")),
        "corpus.json is damaged",
    ),
    "something else": (lambda f: rewrite(f, format="recipe"), "is no index of gsd_kernels"),
    "newer": (lambda f: rewrite(f, version=2, extra=1), "has version 2, newer than 1; update"),
    "a header without end": (lambda f: os.truncate(f / HEADER, 1 << 40), "corpus.json is damaged"),
    "an array is gone": (lambda f: (f / "order.npy").unlink(), "order.npy is not there"),
    "arrays exchanged": (lambda f: shutil.copy(f / "order.npy", f / "following.npy"), "following.npy is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused_by_name(damage, folder):
    spoil, match = DAMAGES[damage]
    spoil(folder)
    with pytest.raises(ValueError, match=match) as error:
        open_corpus(folder)
    assert str(folder) in str(error.value)


def test_an_index_of_another_tokenizer_is_refused(tmp_path):
    own, other = tokenizer(), tokenizer(60)
    build_corpus(tmp_path / "index", tokenized(["def f(x): return x"], own), tokenizer=own)
    open_corpus(tmp_path / "index", tokenizer())
    with pytest.raises(ValueError, match=r"another tokenizer .* index the files anew with the target's"):
        open_corpus(tmp_path / "index", other)
    assert read_header(tmp_path / "index").vocab_size == len(own)


def test_what_cannot_be_indexed_is_refused_and_leaves_nothing(tmp_path):
    place = tmp_path / "index"
    for documents, match in (
        ([], "no text of two tokens"),
        ([[4], [9], []], "no text of two tokens"),
        ([[3, -1]], "expected a sequence of token ids"),
        ([[0.5, 1.5]], "expected a sequence of token ids"),
        ([[2**31, 1]], "expected a sequence of token ids"),
    ):
        with pytest.raises(ValueError, match=match):
            build_corpus(place, documents)
        assert list(tmp_path.iterdir()) == []
    place.mkdir()
    with pytest.raises(ValueError, match="index exists; remove it, or name another folder"):
        build_corpus(place, [[1, 2]])
    with pytest.raises(ValueError, match="no such file or folder"):
        files_of([tmp_path / "none"])
    with pytest.raises(ValueError, match="no file to index"):
        files_of([place])


@linux
def test_a_build_that_is_killed_at_any_time_leaves_no_index(tmp_path):
    place, killed = tmp_path / "index", 0
    for event in range(1, 100):
        child = os.fork()
        if child == 0:
            seen = 0

            def hook(name: str, _: object, event: int = event) -> None:
                nonlocal seen
                if name in ("open", "os.mkdir", "os.rename", "os.rmdir", "shutil.rmtree"):
                    seen += 1
                    if seen == event:
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
