"""The command line: what goes where, exit codes, JSON; every command once, on a small pair."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from checkpoints import save_pair
from terminal import run

import gsd_kernels
from gsd_kernels_cli import comparison, demo
from gsd_kernels_cli.options import read_graph_config
from gsd_kernels_cli.pair import load_pair
from gsd_kernels_hf import learning
from gsd_kernels_hf.sources.corpus import Corpus

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
SMALL = ["--graph-config", "graph,depth=3,width=2,branch=2,max_rows=8"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), chat_template=TEMPLATE)
    return ["--model", target, "--draft", draft]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))


def done(*arguments, code=0, **more):
    result = run(*arguments, **more)
    assert result.exit_code == code, result.output
    return result


def stats_of(result):
    return json.loads(result.stderr.splitlines()[-1])


# ---- the program


def test_help_needs_neither_torch_nor_transformers():
    code = (
        "import sys; sys.argv = ['gsd-kernels', '--help']\n"
        "from gsd_kernels_cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leave: assert not leave.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    commands = "demo chat generate serve check index export learn distill train-heads train-drafter doctor bench"
    assert all(command in shown.stdout for command in commands.split()) and "130 interrupted" in shown.stdout


def test_a_version_is_told_and_nothing_to_do_is_a_usage_error():
    assert run("--version").stdout == f"gsd-kernels {gsd_kernels.__version__}\n"
    assert [run(*given).exit_code for given in ((), ("fly",), ("generate", "x", "--dtype", "int3"))] == [2, 2, 2]


# ---- generate


@pytest.fixture(scope="module")
def expected(pair):
    """What transformers' own generate continues."""
    loaded = load_pair(pair[1], "none")

    def text(prompts, new_tokens):
        inputs = loaded.encode(prompts)
        out = loaded.target.generate(**inputs, **loaded.padding, do_sample=False, max_new_tokens=new_tokens)
        return loaded.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)

    return text


def test_generate_streams_the_continuation_alone(pair, expected):
    result = done("generate", *pair, *SMALL, "--max-new-tokens", 24, "--stats", "json", "hello")
    assert result.stdout == expected(["hello"], 24)[0] + "\n"
    stats = stats_of(result)
    assert stats["new_tokens"] == 24 and stats["tokens_per_step"] > 1 and stats["steps"] < 24
    unstreamed = run("generate", *pair, *SMALL, "--max-new-tokens", 24, "--no-stream", "--echo", "hello")
    assert unstreamed.stdout == "hello" + result.stdout
    table = done("generate", *pair[:2], "--max-new-tokens", 4, "--stats", "table", "hello")
    assert "plain decoding" in table.stderr and "tokens per step" in table.stderr and "per step" not in table.stdout


def test_generate_reads_arguments_stdin_files_and_chats(pair, expected, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    options = ["generate", *pair, *SMALL, "--max-new-tokens", 8]
    hello = run(*options, "hello").stdout
    assert run(*options, stdin="hello").stdout == run(*options, "--prompt-file", "-", stdin="hello").stdout == hello
    assert run(*options, "--prompt-file", file).stdout == run(*options, "one\n\ntwo\n").stdout
    first, second = expected(["one", "two"], 8)
    assert run(*options, "--prompt-file", file, "--lines").stdout == f"==> 1 <==\n{first}\n==> 2 <==\n{second}\n"
    assert done(*options, "--chat", "hi").stdout == run(*options, "[user]hi[assistant]").stdout


def test_generate_sampling_depends_on_the_seed_not_on_the_draft(pair, expected):
    def text(*more, draft=pair):
        sampling = ["--max-new-tokens", 16, "--temperature", 0.8, "--top-k", 20]
        return done("generate", *draft, *sampling, *more, "hello").stdout

    seeded = text(*SMALL, "--seed", 5)
    assert seeded == text("--graph-config", "chain", "--seed", 5)
    assert seeded == text("--seed", 5, draft=[*pair[:2], "--draft", "none"])
    assert seeded != text(*SMALL, "--seed", 6)
    greedy = run("generate", *pair, *SMALL, "--max-new-tokens", 16, "--temperature", 0, "hello").stdout
    assert greedy == expected(["hello"], 16)[0] + "\n"
    for criterion, lossless in (("speculative", True), ("typical", False)):
        options = ["--max-new-tokens", 8, "--temperature", 0.8, "--criterion", criterion, "--stats", "json"]
        stats = stats_of(done("generate", *pair, "--graph-config", "chain", *options, "hello"))
        assert (stats["criterion"], stats["lossless"]) == (criterion, lossless)


def another_tokenizer(pair, folder):
    """A copy of the target behind another tokenizer, which is written second."""
    import two_tokenizers as two
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gsd_kernels_hf.model.vocabulary import Vocabulary

    ours = AutoTokenizer.from_pretrained(pair[1])
    theirs = two.renumbered(ours, names={name: getattr(ours, name) for name in ("pad_token", "bos_token", "eos_token")})
    both = (Vocabulary.of(one, "tokenizer") for one in (ours, theirs))
    two.behind(AutoModelForCausalLM.from_pretrained(pair[1]), *both).save_pretrained(folder)
    refused = done("generate", *pair[:2], "--draft", folder, "Hello", code=2).stderr
    assert "error: --draft: " in refused and f"{folder} has no tokenizer that can be read" in refused
    theirs.save_pretrained(folder)
    return [*pair[:2], "--draft", folder]


def a_drafter(pair, folder):
    from sources.drafters import eagle3_config, random_eagle3, safeailab, save
    from transformers import AutoModelForCausalLM

    config = eagle3_config(AutoModelForCausalLM.from_pretrained(pair[1]))
    return [*pair[:2], "--drafter", save(folder, config, safeailab(random_eagle3(config).float()))]


def own_heads(pair, folder):
    import shutil

    from sources.mtp_checkpoints import give_head

    shutil.copytree(pair[1], folder, dirs_exist_ok=True)
    give_head(folder, "mimo")
    return ["--model", folder, "--drafter", "mtp"]


@pytest.mark.parametrize("drafts", [another_tokenizer, a_drafter, own_heads], ids=lambda make: make.__name__)
def test_whatever_drafts_the_text_is_the_targets(drafts, pair, expected, tmp_path):
    given = [*drafts(pair, tmp_path / "draft"), "--max-new-tokens", 24, "--no-stream", *SMALL]
    result = done("generate", *given, "--stats", "json", "Hello")
    assert result.stdout == expected(["Hello"], 24)[0] + "\n" and stats_of(result)["draft_rows"] > 0
    if drafts is another_tokenizer:
        assert sum(stats_of(result)["accepted"][2:]) > 0, "nothing of the draft was accepted"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (None, None),
        ("auto", "auto"),
        ("tree", "tree"),
        ("depth=4, width=2", gsd_kernels.GraphConfig(depth=4, width=2)),
        ("tree,sibling_ratio=0.1", gsd_kernels.GraphConfig(merge_context=-1, sibling_ratio=0.1)),
        ("chain,depth=3,max_path=none", gsd_kernels.GraphConfig.preset("chain", depth=3)),
    ],
)
def test_graph_config_option(text, config):
    assert read_graph_config(text) == config


# ---- check


@pytest.mark.slow
def test_check_equal(pair):
    result = done("check", *pair, *SMALL, "--max-new-tokens", 24, "--json", "hello", "graph")
    report = json.loads(result.stdout)
    assert report["summary"]["verdict"] == "equal" and report["summary"]["equal"] == 2
    assert report["dtype"] == "float32" and report["graph_config"]["max_rows"] == 8
    for row in report["prompts"]:
        assert row["equal"] and row["divergence"] is None and row["new_tokens"] == 24
        assert row["plain"]["target_forwards"] == 24 > row["graph"]["target_forwards"]
        assert row["graph"]["stats"]["tokens_per_step"] > 1
        if sys.platform == "linux":
            assert min(row["plain"]["peak_bytes"], row["graph"]["peak_bytes"]) > 2**20
    shown = done("check", *pair, *SMALL, "--max-new-tokens", 4, "[INST] hello").stdout
    assert "1 of 1 prompts: the same tokens" in shown and "[INST] hello" in shown


@pytest.mark.parametrize(("wrong", "verdict", "code"), [("least likely", "differs", 3), ("a tie", "rounding", 0)])
def test_check_judges_another_token(wrong, verdict, code, pair, monkeypatch, tmp_path):
    """The least likely one must not pass; of two tokens with the same row of the head either is right."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(pair[1]), AutoTokenizer.from_pretrained(pair[1])
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    first = int(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
    model.lm_head.weight.data[first + 1] = model.lm_head.weight.data[first]
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    honest, at = comparison.generate, ids.shape[1]

    def lying(model, **options):
        out = honest(model, **options)
        with torch.no_grad():
            logits = model(out.sequences[:, :at]).logits[0, -1]
        out.sequences[0, at] = first + 1 if wrong == "a tie" else logits.argmin()
        return out

    monkeypatch.setattr(comparison, "generate", lying)
    options = ["--model", tmp_path, "--draft", pair[3], *SMALL, "--max-new-tokens", 4]
    report = json.loads(done("check", *options, "--json", "hello", code=code).stdout)
    assert report["summary"]["verdict"] == verdict
    divergence = report["prompts"][0]["divergence"]
    assert divergence["index"] == 0 and divergence["within_rounding"] == (divergence["gap"] <= divergence["bound"])
    assert ("DIFFER BEYOND ROUNDING" in done("check", *options, "hello", code=code).stdout) == bool(code)


# ---- demo


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["embedded", "own"])
def test_demo(whose, pair, tmp_path):
    (tmp_path / "asked").write_text("def first(n):\nimport os\n")
    own = [*pair, "--prompt-file", tmp_path / "asked", "--lines"]
    options = ["--max-new-tokens", 24, "--seconds", 0, "--out", tmp_path / "out", "--json", tmp_path / "numbers.json"]
    result = done("demo", *(own if whose == "own" else ["--embedded"]), *options)
    report = json.loads((tmp_path / "numbers.json").read_text())
    asked = [answer["question"] for answer in report["answers"]]
    assert asked == ["def first(n):", "import os"] if whose == "own" else len(asked) == 1
    assert all(answer["tokens_per_step"] >= 1 for answer in report["answers"])  # how many, the clock decides
    ours = report["race"]["ways"][-1]
    assert ours["way"] == "gsd_kernels, draft model" and ours["equal"] == report["race"]["prompts"] == 1
    assert "its draft model has" in result.stdout and "time is up after 1 of" in result.stdout
    assert report["drawing"]["nodes"] > report["drawing"]["accepted_tokens"] >= 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"step.svg", "step.png"}


# ---- index and learn: files that later calls draft with

TEXT = "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.py").write_text(TEXT)
    (folder / "texts" / "b.bin").write_bytes(b"\xff\xfe\x00")
    made = done("index", folder / "texts", "-o", folder / "corpus", "--json")
    assert "1 files are not UTF-8" in made.stderr and json.loads(made.stdout)["documents"] == 1
    return folder / "corpus"


def test_a_corpus_drafts_beside_which_sources(corpus):
    prompt = "def fibonacci(n):\n    if n"
    arguments = ("generate", demo.path() / "target", prompt, "--max-new-tokens", 24, "--no-stream")
    plain = done(*arguments, "--draft", "none")
    found = run(*arguments, "--draft", "none", "--corpus", corpus, "--graph-config", "graph", "--stats", "json")
    assert found.stdout == plain.stdout and stats_of(found)["steps"] < 24, found.stderr

    def names(**options):
        sources = load_pair(None, **options, corpus=str(corpus)).speculation["draft_sources"]
        return [source.name if isinstance(source, Corpus) else source for source in sources]

    assert names(draft=None) == ["model", "history", "corpus"]
    assert names(draft="history") == ["history", "corpus"] and names(draft="none") == ["corpus"]
    assert names(draft="none", heads="demo") == ["heads", "history", "corpus"]


def test_what_was_learned_changes_no_text(pair, tmp_path, monkeypatch):
    target = pair[1]
    monkeypatch.setattr(learning, "everyday_prompts", lambda: ["one", "two"])
    own = done("learn", target, "--max-new-tokens", 4, "-o", tmp_path / "own.safetensors")
    assert f"{tmp_path / 'own.safetensors'}: 0.0" in own.stdout
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob("learned-*"))
    (tmp_path / "asked.txt").write_text("one two\n\nthree\n")
    (tmp_path / "read.txt").write_text("one two three one two three")
    plain = done("generate", "one two", "--model", target, "--max-new-tokens", 12, "--no-stream")
    arguments = ("--prompts", tmp_path / "asked.txt", "--texts", tmp_path / "read.txt", "--max-new-tokens", 12)
    report = json.loads(done("learn", target, *arguments, "--json").stdout)
    assert report["bytes"] > 0 and report["file"].startswith(str(tmp_path / "cache"))
    assert done("generate", "one two", "--model", target, "--max-new-tokens", 12, "--no-stream").stdout == plain.stdout
