"""``gsd-kernels index``, and ``--corpus`` of the commands that decode."""

from __future__ import annotations

import json

import pytest
from terminal import run

from gsd_kernels_cli import demo
from gsd_kernels_cli.pair import load_pair
from gsd_kernels_hf.sources.corpus import Corpus

TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"


@pytest.fixture(scope="module")
def indexed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.py").write_text(TEXT)
    (folder / "texts" / "b.bin").write_bytes(b"\xff\xfe\x00")
    done = run("index", folder / "texts", "-o", folder / "corpus", "--json")
    assert done.exit_code == 0, done.output
    assert "1 files are not UTF-8" in done.stderr
    assert json.loads(done.stdout)["documents"] == 1
    return folder


def test_generate_with_a_corpus_prints_the_same_text(indexed):
    prompt = "def fibonacci(n):\n    if n"
    arguments = ("generate", demo.path() / "target", prompt, "--max-new-tokens", 24, "--no-stream")
    plain = run(*arguments, "--draft", "none")
    assert plain.exit_code == 0 and plain.stdout
    for draft in ("history", "none"):
        config = ("--graph-config", "graph,depth=0,history_depth=3", "--stats", "json")
        found = run(*arguments, "--draft", draft, "--corpus", indexed / "corpus", *config)
        assert found.stdout == plain.stdout, found.stderr
        assert json.loads(found.stderr.splitlines()[-1])["steps"] < 24


def test_beside_which_sources_it_stands(indexed):
    def names(**options):
        sources = load_pair(None, **options, corpus=str(indexed / "corpus")).speculation["draft_sources"]
        return [source.name if isinstance(source, Corpus) else source for source in sources]

    assert names(draft=None) == ["model", "history", "corpus"]
    assert names(draft="history") == ["history", "corpus"]
    assert names(draft="none") == ["corpus"]
    assert names(draft="none", heads="demo") == ["heads", "history", "corpus"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("index", "{}/texts", "-o", "{}/corpus"), "exists; remove it"),
        (("index", "{}/nothing", "-o", "{}/new"), "FILES: no such file"),
        (("index", "{}/texts/b.bin", "-o", "{}/new"), "b.bin is not UTF-8"),
        (("index", "{}/texts/a.py", "-o", "{}/new", "--tokenizer", "./none"), "--tokenizer: no such folder: ./none"),
        (("generate", "x", "--corpus", "{}/texts"), "holds no index"),
    ],
)
def test_refusals(arguments, match, indexed):
    result = run(*(a.format(indexed) for a in arguments))
    assert result.exit_code == 2 and match in " ".join(result.stderr.split())
    assert not (indexed / "new").exists()
