"""The command line: what goes where, exit codes, JSON, and refusals in one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from checkpoints import save_pair
from terminal import one_line_error, run

import gsd_kernels
from gsd_kernels_cli import comparison
from gsd_kernels_cli.options import read_graph_config

TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
SMALL = ["--graph-config", "graph,depth=3,width=2,branch=2,max_rows=8"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    target, draft = save_pair(tmp_path_factory.mktemp("pair"), chat_template=TEMPLATE)
    return ["--model", target, "--draft", draft]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))


# ---- the program


def test_help_needs_neither_torch_nor_transformers():
    code = (
        "import sys; sys.argv = ['gsd-kernels', '--help']\n"
        "from gsd_kernels_cli.app import main\n"
        "try: main()\n"
        "except SystemExit as leave: assert not leave.code\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for command in ("demo", "generate", "serve", "check", "distill", "train-heads", "doctor", "bench"):
        assert command in done.stdout
    assert "130 interrupted" in done.stdout


def test_a_version_is_told_and_nothing_to_do_is_a_usage_error():
    assert run("--version").stdout == f"gsd-kernels {gsd_kernels.__version__}\n"
    assert run().exit_code == 2
    assert run("fly").exit_code == 2
    assert run("generate", "x", "--dtype", "int3").exit_code == 2


def test_error_exit_codes(pair, monkeypatch):
    from gsd_kernels_cli import pair as module

    def failing(error):
        def load(*_, **__):
            raise error

        return load

    for error, code in [
        (ValueError("a\nb"), 2),
        (TypeError("t"), 2),
        (OSError("no such checkpoint"), 1),
        (RuntimeError("out of memory"), 1),
    ]:
        monkeypatch.setattr(module, "load_pair", failing(error))
        assert " ".join(str(error).split()) in one_line_error(run("generate", *pair, "x"), code)
        with_traceback = run("--debug", "generate", *pair, "x")
        assert with_traceback.exit_code == 1 and with_traceback.exception is error
    monkeypatch.setattr(module, "load_pair", failing(KeyboardInterrupt()))
    assert run("generate", *pair, "x").exit_code == 130


# ---- generate


def expected(pair, prompts, new_tokens, **options):
    from gsd_kernels_cli.pair import load_pair

    loaded = load_pair(pair[1], "none")
    inputs = loaded.encode(prompts)
    out = loaded.target.generate(**inputs, **loaded.padding, do_sample=False, max_new_tokens=new_tokens, **options)
    return loaded.tokenizer.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_generate_streams_the_continuation_alone(pair):
    result = run("generate", *pair, *SMALL, "--max-new-tokens", 24, "--stats", "json", "hello")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == expected(pair, ["hello"], 24)[0] + "\n"
    stats = json.loads(result.stderr.splitlines()[-1])
    assert stats["new_tokens"] == 24 and stats["tokens_per_step"] > 1 and stats["steps"] < 24
    unstreamed = run("generate", *pair, *SMALL, "--max-new-tokens", 24, "--no-stream", "--echo", "hello")
    assert unstreamed.stdout == "hello" + result.stdout


def test_generate_reads_stdin_and_files(pair, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n")
    options = ["generate", *pair, *SMALL, "--max-new-tokens", 8]
    assert run(*options, stdin="hello").stdout == run(*options, "hello").stdout
    assert run(*options, "--prompt-file", "-", stdin="hello").stdout == run(*options, "hello").stdout
    assert run(*options, "--prompt-file", file).stdout == run(*options, "one\n\ntwo\n").stdout
    batch = run(*options, "--prompt-file", file, "--lines").stdout
    first, second = expected(pair, ["one", "two"], 8)
    assert batch == f"==> 1 <==\n{first}\n==> 2 <==\n{second}\n"


def test_generate_sampling_depends_on_the_seed_not_on_the_draft(pair):
    def text(*more, draft=pair):
        result = run("generate", *draft, "--max-new-tokens", 16, "--temperature", 0.8, "--top-k", 20, *more, "hello")
        assert result.exit_code == 0, result.stderr
        return result.stdout

    seeded = text(*SMALL, "--seed", 5)
    assert seeded == text("--graph-config", "chain", "--seed", 5)
    assert seeded == text("--seed", 5, draft=[*pair[:2], "--draft", "none"])
    assert seeded == text("--seed", 5, draft=[*pair[:2], "--draft", "history"])
    assert seeded != text(*SMALL, "--seed", 6)
    greedy = run("generate", *pair, *SMALL, "--max-new-tokens", 16, "--temperature", 0, "hello").stdout
    assert greedy == expected(pair, ["hello"], 16)[0] + "\n"


def test_generate_criterion(pair):
    for criterion, lossless in (("speculative", True), ("typical", False)):
        options = ["--max-new-tokens", 8, "--temperature", 0.8, "--criterion", criterion, "--stats", "json"]
        result = run("generate", *pair, "--graph-config", "chain", *options, "hello")
        assert result.exit_code == 0, result.stderr
        stats = json.loads(result.stderr.splitlines()[-1])
        assert (stats["criterion"], stats["lossless"]) == (criterion, lossless)
    assert "chain" in one_line_error(run("generate", *pair, *SMALL, "--criterion", "speculative", "x"), 2)
    assert run("generate", *pair, "--criterion", "lucky", "x").exit_code == 2


def test_generate_chat_template_and_automatic_shape(pair):
    chat = run("generate", *pair, "--chat", "--max-new-tokens", 12, "hi")
    assert chat.exit_code == 0, chat.stderr
    assert chat.stdout == run("generate", *pair, *SMALL, "--max-new-tokens", 12, "[user]hi[assistant]").stdout


def test_generate_statistics_table_and_missing_draft(pair):
    result = run("generate", *pair[:2], "--max-new-tokens", 4, "--stats", "table", "hello")
    assert result.exit_code == 0 and "plain decoding" in result.stderr
    assert "tokens per step" in result.stderr and "tokens per step" not in result.stdout


def renumbered_draft(folder, target):
    """A copy of the target behind another tokenizer."""
    import two_tokenizers as two
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from gsd_kernels_hf.model.vocabulary import Vocabulary

    ours = AutoTokenizer.from_pretrained(target)
    theirs = two.renumbered(ours, names={name: getattr(ours, name) for name in ("pad_token", "bos_token", "eos_token")})
    both = (Vocabulary.of(one, "tokenizer") for one in (ours, theirs))
    two.behind(AutoModelForCausalLM.from_pretrained(target), *both).save_pretrained(folder)
    return theirs


def test_a_draft_of_another_tokenizer(pair, tmp_path):
    """Text is the target's, tokens are accepted; weights without their tokenizer are refused."""
    tokenizer = renumbered_draft(tmp_path, pair[1])
    given = ["generate", *pair[:2], "--draft", tmp_path, "--max-new-tokens", 24, "--stats", "json", *SMALL, "Hello"]
    error = one_line_error(run(*given), 2)
    assert (
        error.startswith("gsd-kernels: error: --draft: ") and f"{tmp_path} has no tokenizer that can be read" in error
    )
    tokenizer.save_pretrained(tmp_path)
    result = run(*given)
    assert result.stdout.rstrip("\n") == expected(pair, ["Hello"], 24)[0]
    accepted = json.loads(result.stderr.splitlines()[-1])["accepted"]
    assert sum(accepted[2:]) > 0, "nothing of the draft was accepted"
    checked = run("check", *pair[:2], "--draft", tmp_path, "--max-new-tokens", 16, "--json", "Hello")
    assert checked.exit_code == 0 and json.loads(checked.stdout)["summary"]["beyond_rounding"] == 0


@pytest.mark.parametrize(
    ("text", "config"),
    [
        (None, None),
        ("auto", "auto"),
        ("tree", "tree"),
        ("depth=4, width=2", gsd_kernels.GraphConfig(depth=4, width=2)),
        (
            "tree,max_rows=16,sibling_ratio=0.1",
            gsd_kernels.GraphConfig(merge_context=-1, max_rows=16, sibling_ratio=0.1),
        ),
        ("chain,depth=3,max_path=none", gsd_kernels.GraphConfig.preset("chain", depth=3)),
    ],
)
def test_graph_config_option(text, config):
    assert read_graph_config(text) == config


# ---- check


@pytest.mark.slow
def test_check_equal(pair):
    result = run("check", *pair, *SMALL, "--max-new-tokens", 24, "--json", "hello", "graph")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["summary"]["verdict"] == "equal" and report["summary"]["equal"] == 2
    assert report["dtype"] == "float32" and report["graph_config"]["max_rows"] == 8
    for row in report["prompts"]:
        assert row["equal"] and row["divergence"] is None and row["new_tokens"] == 24
        assert row["plain"]["target_forwards"] == 24 > row["graph"]["target_forwards"]
        assert row["graph"]["stats"]["tokens_per_step"] > 1
        if sys.platform == "linux":
            assert min(row["plain"]["peak_bytes"], row["graph"]["peak_bytes"]) > 2**20
    table = run("check", *pair, *SMALL, "--max-new-tokens", 4, "hello")
    assert table.exit_code == 0 and "1 of 1 prompts: the same tokens" in table.stdout


def test_check_finds_a_wrong_token(pair, monkeypatch):
    """A decoder that emits the least likely token once must not pass."""
    honest = comparison.generate

    def lying(model, **options):
        out = honest(model, **options)
        prompt = options["input_ids"].shape[1]
        with torch.no_grad():
            out.sequences[0, prompt + 2] = model(out.sequences[:, : prompt + 2]).logits[0, -1].argmin()
        return out

    monkeypatch.setattr(comparison, "generate", lying)
    result = run("check", *pair, *SMALL, "--max-new-tokens", 8, "--json", "hello")
    assert result.exit_code == 3
    report = json.loads(result.stdout)
    assert report["summary"]["verdict"] == "differs"
    divergence = report["prompts"][0]["divergence"]
    assert divergence["index"] == 2 and divergence["gap"] > divergence["bound"] and not divergence["within_rounding"]
    shown = run("check", *pair, *SMALL, "--max-new-tokens", 8, "hello")
    assert shown.exit_code == 3 and "DIFFER BEYOND ROUNDING" in shown.stdout


def test_check_forgives_a_tie(pair, monkeypatch, tmp_path):
    """Two tokens of the same head row cannot be told apart: another pick among them is rounding, not a bug."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(pair[1])
    tokenizer = AutoTokenizer.from_pretrained(pair[1])
    ids = tokenizer("hello", return_tensors="pt")["input_ids"]
    first = int(model.generate(ids, max_new_tokens=1, do_sample=False)[0, -1])
    twin = first + 1
    model.lm_head.weight.data[twin] = model.lm_head.weight.data[first]
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    honest = comparison.generate

    def flipping(model, **options):
        out = honest(model, **options)
        out.sequences[0, options["input_ids"].shape[1]] = twin
        return out

    monkeypatch.setattr(comparison, "generate", flipping)
    options = ["--model", tmp_path, "--draft", pair[3], *SMALL, "--max-new-tokens", 4]
    result = run("check", *options, "--json", "hello")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)["summary"]
    assert (summary["verdict"], summary["within_rounding"]) == ("rounding", 1)


# ---- demo


@pytest.mark.slow
def test_demo_of_the_embedded_pair(tmp_path):
    file = tmp_path / "numbers.json"
    options = ["--max-new-tokens", 24, "--seconds", 0, "--out", tmp_path / "out", "--json", file]
    result = run("demo", "--embedded", *options)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    (answer,) = report["answers"]
    assert answer["tokens"] == 24 and answer["tokens_per_step"] > 1
    ways = {way["way"]: way for way in report["race"]["ways"]}
    assert ways["gsd_kernels, draft model"]["equal"] == report["race"]["prompts"] == 1
    assert "time is up after 1 of 4 prompts: --seconds 0" in result.stdout
    assert report["drawing"]["nodes"] > report["drawing"]["accepted_tokens"] >= 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"step.svg", "step.png"}


@pytest.mark.slow
def test_demo_of_ones_own_model(pair, tmp_path):
    """Its prompts are answered and raced, its draft drafts; what does not go together is refused by name."""
    (tmp_path / "asked").write_text("def first(n):\nimport os\n")
    file = tmp_path / "numbers.json"
    own = ["--prompt-file", tmp_path / "asked", "--lines", "--max-new-tokens", 8, "--out", tmp_path, "--json", file]
    result = run("demo", *pair, *own, "--seconds", 5)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [answer["question"] for answer in report["answers"]] == ["def first(n):", "import os"]
    assert [way["way"] for way in report["race"]["ways"]][-1] == "gsd_kernels, draft model"
    assert not any(way["beyond_rounding"] for way in report["race"]["ways"])
    assert "its draft model has" in result.stdout
    assert "--draft: needs --model" in one_line_error(run("demo", *pair[2:]), 2)
    assert "--embedded" in one_line_error(run("demo", "--embedded", *pair[:2]), 2)


# ---- drafters


def test_a_drafter_is_recognised_and_gives_the_same_text(pair, tmp_path):
    from sources.drafters import eagle3_config, random_eagle3, safeailab, save
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(pair[1])
    config = eagle3_config(target)
    folder = save(tmp_path / "eagle3", config, safeailab(random_eagle3(config).float()))
    common = ["--model", pair[1], "--max-new-tokens", 8, "--no-stream", "Say"]
    plain = run("generate", "--draft", "none", *common)
    drafted = run("generate", "--drafter", folder, "--stats", "json", *SMALL, *common)
    assert drafted.exit_code == plain.exit_code == 0
    assert drafted.stdout == plain.stdout
    assert json.loads(drafted.stderr.splitlines()[-1])["draft_rows"] > 0
    line = one_line_error(run("generate", "--drafter", tmp_path / "none", *common), 2)
    assert "drafter: no such folder" in line


def test_the_targets_own_heads_draft(pair, tmp_path):
    from sources.mtp_checkpoints import give_head

    folder = shutil.copytree(pair[1], tmp_path / "target")
    common = ["--max-new-tokens", 8, "--no-stream", "Say"]
    plain = run("generate", "--model", pair[1], "--draft", "none", *common)
    line = one_line_error(run("generate", "--model", folder, "--drafter", "mtp", *common), 2)
    assert "has no multi-token-prediction heads; looked for were layers.2.eh_proj.weight" in line
    give_head(folder, "mimo")
    drafted = run("generate", "--model", folder, "--drafter", "mtp", "--stats", "json", *SMALL, *common)
    assert drafted.exit_code == plain.exit_code == 0
    assert drafted.stdout == plain.stdout
    assert json.loads(drafted.stderr.splitlines()[-1])["draft_rows"] > 0
