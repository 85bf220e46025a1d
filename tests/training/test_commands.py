"""``distill`` and ``train-heads``: what they reach, interruption, and options that are refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models import tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, GraniteForCausalLM
from typer.testing import CliRunner

from gsd_kernels_cli.app import app
from gsd_kernels_hf.sources.heads import DraftHeads
from gsd_kernels_train.loop import Checkpoints

QUICK = ["--steps", 12, "--batch", 4, "--length", 24, "--lr", 0.01, "--checkpoint-every", 5, "--device", "cpu"]


def arguments(command, folder, out, *more, quick=QUICK):
    draft = ["--draft", folder / "draft"] if command == "distill" else ["--heads", 3]
    given = [command, "--target", folder / "target", *draft, "--out", out, *quick, *more]
    return [str(a) for a in [*given, "--text", folder / "text.txt"]]


def run(*given):
    return CliRunner().invoke(app, [str(a) for a in given])


def done(*given):
    result = run(*given, "--json")
    assert result.exit_code in (0, 1) and result.stdout, result.stderr
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["learned"] else 1), result.stderr
    assert ("nothing was learned" in result.stderr) is not report["learned"]
    return report


def refused(*given, code=2):
    result = run(*given)
    assert result.exit_code == code, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("gsd-kernels: error: ")]
    return line


def weights(out):
    (file,) = Path(out).glob("*.safetensors")
    return load_file(file)


def assert_equal_weights(one, other):
    ours, theirs = weights(one), weights(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture(scope="module")
def distilled(folder):
    out = folder / "distilled"
    return out, done(*arguments("distill", folder, out))


@pytest.fixture(scope="module")
def headed(folder):
    out = folder / "headed"
    return out, done(*arguments("train-heads", folder, out, quick=[*QUICK, "--steps", 40]))


def test_distillation_brings_a_draft_nearer_to_its_target(folder, distilled):
    out, report = distilled
    assert report["after"]["divergence"] < 0.9 * report["before"]["divergence"] and report["learned"]
    assert report["training"]["steps"] == 12 and report["training"]["tokens"] == 12 * 4 * 24
    assert report["own_text"]["tokens"] > 24
    draft = AutoModelForCausalLM.from_pretrained(out)
    before = AutoModelForCausalLM.from_pretrained(folder / "draft")
    assert draft.config.vocab_size == before.config.vocab_size and draft.dtype == before.dtype
    assert not torch.equal(draft.lm_head.weight, before.lm_head.weight)
    assert not (out / "checkpoints").exists() and (out / "tokenizer.json").exists()


def test_heads_learn_what_their_target_says_later(folder, headed):
    out, report = headed
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    heads = DraftHeads.from_pretrained(out, target)
    assert heads.num_heads == 3 and heads.weight.abs().sum() > 0
    first = done(*arguments("train-heads", folder, folder / "first", quick=[*QUICK, "--steps", 1]))
    assert report["training"]["loss"] < 0.95 * first["training"]["loss"]
    assert len(report["after"]["accuracy"]) == len(report["after"]["continuation_accuracy"]) == 3
    assert report["before"] == first["before"] and report["after"] != report["before"]


@pytest.mark.slow
def test_a_killed_run_goes_on_to_equal_weights(folder, tmp_path):
    long = [*QUICK, "--steps", 60]
    given = arguments("distill", folder, tmp_path / "killed", quick=long)
    program = [sys.executable, "-m", "gsd_kernels_hf", *given]
    process = subprocess.Popen(program, stderr=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    checkpoints = Checkpoints(tmp_path / "killed" / "checkpoints")
    try:
        deadline = time.monotonic() + 120
        while not checkpoints.steps():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (tmp_path / "killed" / "training.json").exists()
    at = checkpoints.steps()[-1]
    assert at % 5 == 0 and 0 < at < 60
    resumed = done(*given)
    whole = done(*arguments("distill", folder, tmp_path / "whole", quick=long))
    assert_equal_weights(tmp_path / "killed", tmp_path / "whole")
    assert resumed["before"] == whole["before"] and resumed["after"] == whole["after"]


def test_a_run_with_other_options_is_refused_by_name(folder, distilled):
    out, _ = distilled
    for name, *more in (
        ("lr", "--lr", 0.02),
        ("steps", "--steps", 13),
        ("seed", "--seed", 1),
        ("sequence_level", "--sequence-level", 0.25),
        ("text", "--text", folder / "draft" / "config.json"),
        ("text", folder / "draft" / "config.json"),  # as the shell expands --text *
    ):
        line = refused(*arguments("distill", folder, out, *more))
        assert f"error: {name}: the run in {out} has" in line and "name another folder" in line
    assert "error: heads: the run in" in refused(*arguments("train-heads", folder, out))
    assert done(*arguments("distill", folder, out, "--checkpoint-every", "9s"))  # which does not change the run


@pytest.fixture(scope="module")
def bad(folder):
    """Files and folders that no run can use; beside them what others write to ``out``."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    for name in ("granite", "other", "used"):
        (folder / name).mkdir()
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = GraniteConfig(**sizes, num_attention_heads=4, logits_scaling=4.0)
    GraniteForCausalLM(config).save_pretrained(folder / "granite")
    tokenizer.save_pretrained(folder / "granite")
    tiny(vocab_size=5000, dtype=torch.float32).save_pretrained(folder / "other")
    (folder / "empty.txt").write_text(" \n")
    (folder / "binary.txt").write_bytes(b"abc\xff")
    (folder / "used" / "mine.txt").write_text("do not touch")
    return folder


GRANITE = ["--target", "{}/granite"]
REFUSED = [  # a command, or a kind of train-drafter, what it is given beside a good run's options, and what is said
    ("distill", ["--text", "{}/empty.txt"], "text: no text in"),
    ("distill", ["--text", "{}/binary.txt"], "is not UTF-8 text (byte 3:"),
    ("distill", ["--text", "{}/draft"], "draft is a folder; name its files"),
    ("distill", ["--length", 4000], "tokens after the held-out part are less than a block of"),
    ("distill", ["--length", 5000], "length: expected at most 4095"),
    ("distill", ["--held-out-text", "{}/binary.txt"], "held_out_text: "),
    ("distill", ["--dtype", "float16"], "dtype: expected float32, bfloat16 or float64"),
    ("distill", ["--checkpoint-every", "often"], "checkpoint_every: expected steps, or seconds"),
    ("distill", ["--minutes", 1], "steps, minutes: expected one of them"),
    ("distill", ["--sequence-level", 1.5], "sequence_level: expected a share"),
    ("distill", ["--lr", -1], "lr: expected a positive number"),
    ("distill", ["--target", "{}/none"], "--target: no such folder"),
    ("distill", ["--draft", "{}/used"], "--draft: no config.json in"),
    ("distill", ["--draft", "{}/other"], "draft: vocabulary sizes 259 (target) and 5000 (draft) mean different"),
    ("distill", ["--out", "{}/used"], "used is not empty and holds no checkpoint"),
    ("train-heads", ["--heads", 30], "length: expected more than the 30 heads"),
    ("train-heads", GRANITE, "target: GraniteForCausalLM changes its logits after the output matrix"),
    ("dflash", GRANITE, "(a scale or a soft cap), which drafters of blocks"),
    ("dflash", ["--markov-rank", 4], "markov_rank: not a setting of dflash"),
    ("dspark", ["--markov-head", "lstm"], "markov_head: expected one of vanilla, gated, rnn, got 'lstm'"),
    ("dspark", ["--markov-rank", 0], "markov_rank: expected at least 1, got 0"),
    ("eagle3", ["--block-size", 4], "block_size: not a setting of eagle3"),
    ("mtp", ["--layers", 2], "layers: not a setting of mtp, which is a layer as the target's own"),
    ("dflash", ["--block-size", 1], "block_size: expected at least 2, got 1"),
    ("eagle3", ["--draft-vocabulary", 260], "draft_vocabulary: expected at most the target's 259"),
    ("eagle3", ["--hidden-layers", "1,x"], "hidden_layers: expected numbers between commas"),
    ("eagle3", ["--hidden-layers", "1,1"], "hidden_layers: expected different numbers"),
    ("eagle3", ["--hidden-layers", "1,9"], "hidden_layers: expected numbers from 0 to 2"),
    ("dflash", ["--hidden-layers", "0,1"], "hidden_layers: expected numbers from 1 on"),
    ("dflash", ["--mask-token-id", 1000], "mask token 1000 has no row"),
    ("eagle3", ["--depth", 23], "length: expected more than 24 for 23 guesses, got 24"),
    ("eagle3", ["--kind", "medusa"], "kind: expected one of eagle3, dflash, jetspec, dspark, mtp, got 'medusa'"),
]


@pytest.mark.parametrize(("what", "more", "says"), REFUSED, ids=lambda value: str(value)[:30])
def test_bad_arguments_are_refused_by_name(bad, tmp_path, what, more, says):
    out, parts = tmp_path / "out", {"distill": ["--draft", bad / "draft"], "train-heads": ["--heads", 3]}
    given = [what, *parts[what]] if what in parts else ["train-drafter", "--kind", what]
    text = [] if "--text" in more else ["--text", bad / "text.txt"]
    more = [str(one).format(bad) for one in more]
    assert says in refused(*given, "--target", bad / "target", "--out", out, *QUICK, *text, *more)
    assert not out.exists() and [file.name for file in (bad / "used").iterdir()] == ["mine.txt"]
