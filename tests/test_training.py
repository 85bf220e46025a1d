"""Training: drafts by distillation, heads on a target, and what both go through."""

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
from checkpoints import save_pair
from hypothesis import given
from hypothesis import strategies as st
from models import noised, tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from gsd_kernels_hf.cli import app
from gsd_kernels_hf.sources.heads import DraftHeads
from gsd_kernels_hf.training import job, loop
from gsd_kernels_hf.training.distill import Distillation
from gsd_kernels_hf.training.heads import HeadTraining
from gsd_kernels_hf.training.job import TrainingOptions, accepted_per_step, load_target
from gsd_kernels_hf.training.loop import Budget, Checkpoints, Interval, Streams, learning_rate_factor
from gsd_kernels_hf.training.text import HeldOut, own_text, read_text

# ---- heads


def hidden_states(target, rows=5):
    return torch.randn(rows, target.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(target.dtype)


def filled(target, num_heads=3, **options):
    heads = DraftHeads.for_model(target, num_heads, **options)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(parameter.numel()))
    return heads


def test_new_heads_are_the_targets_own_head():
    target = tiny()
    heads, hidden = DraftHeads.for_model(target, 3), hidden_states(target)
    logits = heads(hidden, target.lm_head)
    assert logits.shape == (5, 3, target.config.vocab_size) and logits.dtype == target.dtype
    assert (logits == target.lm_head(hidden)[:, None]).all()


@pytest.mark.parametrize("layers", [1, 2])
def test_a_head_is_a_residual_block_before_the_output_matrix(layers):
    target = tiny()
    heads, hidden = filled(target, num_layers=layers), hidden_states(target)
    for k in range(3):
        state = hidden
        for layer in range(layers):
            inner = state @ heads.weight[layer, k] + heads.bias[layer, k]
            state = state + inner * torch.sigmoid(inner)
        torch.testing.assert_close(heads(hidden, target.lm_head)[:, k], target.lm_head(state))


@torch.no_grad()
def test_heads_are_stored_and_loaded_for_their_target(tmp_path):
    target = tiny(dtype=torch.float32)
    heads, hidden = filled(target), hidden_states(target)
    heads.save_pretrained(tmp_path / "heads")
    loaded = DraftHeads.from_pretrained(tmp_path / "heads", target.double())
    assert loaded.weight.dtype == torch.float64 and not loaded.training
    stored = DraftHeads.from_pretrained(tmp_path / "heads")
    assert stored.weight.dtype == torch.float32
    assert (stored(hidden, target.float().lm_head) == heads(hidden, target.lm_head)).all()


def test_heads_of_another_target_are_refused_by_name(tmp_path):
    filled(tiny()).save_pretrained(tmp_path)
    for name, value in (("hidden_size", 64), ("vocab_size", 90), ("num_hidden_layers", 3)):
        with pytest.raises(ValueError, match=f"heads: made for a target with {name}="):
            DraftHeads.from_pretrained(tmp_path, tiny(**{name: value}))
    with pytest.raises(ValueError, match=r"model_type='llama'.*'qwen3'"):
        DraftHeads.from_pretrained(tmp_path, tiny("qwen3"))


def test_a_folder_without_whole_heads_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"heads: no draft_heads\.json in"):
        DraftHeads.from_pretrained(tmp_path)
    filled(tiny()).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "draft_heads.json").read_text())
    (tmp_path / "draft_heads.json").write_text(json.dumps(config | {"num_heads": 4}))
    with pytest.raises(ValueError, match="no readable draft heads"):
        DraftHeads.from_pretrained(tmp_path)
    (tmp_path / "draft_heads.safetensors").unlink()
    with pytest.raises(ValueError, match=r"heads: no draft_heads\.safetensors in"):
        DraftHeads.from_pretrained(tmp_path)


def test_bad_sizes_and_states_are_refused_by_name():
    with pytest.raises(ValueError, match="num_heads: expected a positive integer, got 0"):
        DraftHeads(32, 0)
    target = tiny()
    heads = DraftHeads.for_model(target, 2)
    with pytest.raises(ValueError, match=r"hidden: expected \[batch, 32\], got shape \[2, 3, 32\]"):
        heads(torch.zeros(2, 3, 32), target.lm_head)
    with pytest.raises(ValueError, match=r"hidden: expected \[rows, 32\], got shape \[2, 31\]"):
        heads(torch.zeros(2, 31), target.lm_head)


# ---- both trainings, as commands

QUICK = ["--steps", 12, "--batch", 4, "--length", 24, "--lr", 0.01, "--checkpoint-every", 5, "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``target``, ``draft``, and ``text.txt`` of a few thousand tokens."""
    folder = tmp_path_factory.mktemp("training")
    save_pair(folder)
    foxes = ("quick", "brown", "lazy")
    lines = (f"{i} times {i % 7} is {i * (i % 7)}, said the {foxes[i % 3]} fox" for i in range(120))
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def arguments(command, folder, out, *more, quick=QUICK):
    draft = ["--draft", folder / "draft"] if command == "distill" else ["--heads", 3]
    given = [command, "--target", folder / "target", *draft, "--out", out, *quick, *more]
    return [str(a) for a in [*given, "--text", folder / "text.txt"]]


def run(*given):
    return CliRunner().invoke(app, [str(a) for a in given])


def done(*given):
    result = run(*given, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


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
    assert report["after"]["divergence"] < 0.9 * report["before"]["divergence"]
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


def test_a_finished_run_answers_again_and_is_not_trained_further(folder, distilled, monkeypatch):
    out, report = distilled
    monkeypatch.setattr(job, "train", None)
    assert done(*arguments("distill", folder, out)) == report
    table = run(*arguments("distill", folder, out)).stdout
    assert f"{report['after']['agreement']:.3f}" in table and "accepted of a chain of 5" in table


def test_a_config_alone_is_a_draft_from_nothing(folder, tmp_path):
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "config.json").write_text((folder / "draft" / "config.json").read_text())
    drafts = {}
    for seed in (0, 1):
        out = tmp_path / str(seed)
        given = arguments("distill", folder, out, "--sequence-level", 0, "--token-level", 0.5, "--seed", seed)
        given[given.index("--draft") + 1] = str(fresh)
        report = done(*given)
        assert report["own_text"] == {} and report["after"] != report["before"]
        drafts[seed] = weights(out)
    assert drafts[0].keys() == weights(folder / "draft").keys()
    assert not torch.equal(drafts[0]["lm_head.weight"], drafts[1]["lm_head.weight"])


# ---- interruption


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


class Dropping(torch.nn.Module):
    """A model whose training draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def losses(self, step, _):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        yield torch.nn.functional.dropout(self.linear(x), 0.5).square().mean()


def train_dropping(folder, *, losses=None, every=4, steps=20):
    torch.manual_seed(0)
    model = Dropping()
    optimizers = loop.build_optimizers(model, matrix_lr=0.01, lr=0.01)
    budget, interval = Budget(steps=steps), Interval(steps=every)
    given = (budget, Checkpoints(folder))
    loop.train("test", model, losses or model.losses, optimizers, *given, tokens_per_step=4, every=interval)
    return model.state_dict()


def same_state(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("at", [3, 4, 11])
def test_at_most_one_interval_is_lost_and_random_numbers_go_on(tmp_path, at):
    def failing(step, progress):
        if step == at:
            raise KeyboardInterrupt
        return model.losses(step, progress)

    whole = train_dropping(tmp_path / "whole")
    torch.manual_seed(0)
    model = Dropping()
    optimizers = loop.build_optimizers(model, matrix_lr=0.01, lr=0.01)
    with pytest.raises(KeyboardInterrupt):
        loop.train(
            "test",
            model,
            failing,
            optimizers,
            Budget(steps=20),
            Checkpoints(tmp_path / "cut"),
            tokens_per_step=4,
            every=Interval(steps=4),
        )
    kept = Checkpoints(tmp_path / "cut").steps()
    assert (kept[-1] if kept else 0) > at - 4 - 1 and len(kept) <= 1
    assert same_state(train_dropping(tmp_path / "cut"), whole)


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    whole = train_dropping(tmp_path / "whole")
    save, calls = torch.save, []

    def torn(state, file):
        calls.append(file)
        if len(calls) == 3:
            Path(file).write_bytes(b"half a state")
            raise KeyboardInterrupt
        save(state, file)

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        train_dropping(tmp_path / "cut")
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "cut").steps() == [8]
    assert same_state(train_dropping(tmp_path / "cut"), whole)


def test_own_text_goes_on_with_the_next_batch(folder, tmp_path, monkeypatch):
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    stream = torch.arange(3, 250).repeat(8).numpy()
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()

    def write(name, sequences=192, may_write=lambda: True, seconds=None):
        return own_text(
            target,
            stream,
            12,
            7,
            tmp_path / name,
            at_once=64,
            sequences=sequences,
            seconds=seconds,
            may_write=may_write,
        )[0]

    whole = write("whole")
    first = write("cut", sequences=64)
    assert (whole[: len(first)] == first).all() and len(whole) == 192 * 12
    assert (write("cut", may_write=lambda: False) == first).all()  # training has begun: no more is written
    assert (write("cut") == whole).all()
    assert len(write("cut", seconds=0.0, sequences=None)) == len(whole)


# ---- refusals


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


def test_an_unfinished_run_with_other_options_is_refused_too(folder, tmp_path):
    loop.RunFolder(tmp_path / "run", {"lr": 0.1, "seed": 3})
    assert loop.RunFolder(tmp_path / "run", {"lr": 0.1, "seed": 3}).report is None
    with pytest.raises(ValueError, match=r"seed: the run in .* has 3, and now it is 4"):
        loop.RunFolder(tmp_path / "run", {"lr": 0.1, "seed": 4})


def test_bad_arguments_are_refused_by_name(folder, tmp_path):
    out, empty, binary = tmp_path / "out", tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"abc\xff")

    def line(*more, command="distill", **replaced):
        given = arguments(command, folder, out, *more)
        for option, value in replaced.items():
            given[given.index(f"--{option}") + 1] = str(value)
        return refused(*given).removeprefix("gsd-kernels: error: ")

    assert line(text=empty).startswith("text: no text in")
    assert line(text=binary).startswith("text: ") and "is not UTF-8 text (byte 3)" in line(text=binary)
    assert line(text=tmp_path).startswith(f"text: {tmp_path} is a folder; name its files")
    assert "tokens after the held-out part are less than a block of" in line("--length", 4000)
    assert line("--length", 5000).startswith("length: expected at most 4095")
    assert line("--held-out-text", binary.with_name("binary.txt")).startswith("held_out_text: ")
    assert line("--dtype", "float16").startswith("dtype: expected float32, bfloat16 or float64")
    assert line("--checkpoint-every", "often").startswith("checkpoint_every: expected steps, or seconds")
    assert line("--minutes", 1).startswith("steps, minutes: expected one of them")
    assert line("--sequence-level", 1.5).startswith("sequence_level: expected a share")
    assert line("--lr", -1).startswith("lr: expected a positive number")
    assert line(target=tmp_path / "no").startswith("target: no such folder")
    assert line(draft=tmp_path / "no").startswith("draft: no such folder")
    assert line(draft=tmp_path).startswith("draft: no config.json in")
    assert line("--heads", 30, command="train-heads").startswith("length: expected more than the 30 heads")
    assert not out.exists()
    out.mkdir()
    (out / "mine.txt").write_text("do not touch")
    assert line().startswith(f"out: {out} is not empty and holds no checkpoint")
    assert [file.name for file in out.iterdir()] == ["mine.txt"]


def test_a_draft_of_another_vocabulary_is_refused_by_name(folder, tmp_path):
    tiny(vocab_size=5000, dtype=torch.float32).save_pretrained(tmp_path / "other")
    given = arguments("distill", folder, tmp_path / "out")
    given[given.index("--draft") + 1] = str(tmp_path / "other")
    assert "error: draft: vocabulary sizes 259 (target) and 5000 (draft) mean different tokenizers" in refused(*given)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_checkpoint(tmp_path):
    def losses(step, progress):
        torch.manual_seed(step)
        loss = torch.ones((), requires_grad=True)
        yield loss * (float("nan") if step == 10 else 1.0)

    with pytest.raises(RuntimeError, match=r"test: the loss is nan at step 10; the checkpoint of step 8 stays"):
        train_dropping(tmp_path, losses=losses)
    assert Checkpoints(tmp_path).steps() == [8] and Checkpoints(tmp_path).load()["record"]["steps"] == 8


def test_a_gradient_that_is_not_finite_stops_before_the_weights(tmp_path):
    def losses(step, progress):
        yield (model.linear.weight.sum() * 0).sqrt()  # its slope is infinite

    model = Dropping()
    optimizers = loop.build_optimizers(model, matrix_lr=0.01, lr=0.01)
    with pytest.raises(RuntimeError, match=r"test: the gradient is nan at step 0; none was saved"):
        loop.train("test", model, losses, optimizers, Budget(steps=3), Checkpoints(tmp_path), tokens_per_step=1)
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_target_with_a_scale_behind_its_output_matrix_gets_no_heads(folder, tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    granite = GraniteForCausalLM(GraniteConfig(**sizes, num_attention_heads=4, logits_scaling=4.0))
    granite.save_pretrained(tmp_path / "granite")
    for file in (folder / "target").glob("tokenizer*"):
        (tmp_path / "granite" / file.name).write_bytes(file.read_bytes())
    given = arguments("train-heads", folder, tmp_path / "out")
    given[given.index("--target") + 1] = str(tmp_path / "granite")
    assert "error: target: GraniteForCausalLM changes its logits after the output matrix" in refused(*given)


# ---- losses and measures


def options_for(folder, **changed):
    given = {
        "target": str(folder / "target"),
        "text": [folder / "text.txt"],
        "out": folder / "unused",
        "held_out_text": [],
        "steps": 1,
        "minutes": None,
        "batch": 3,
        "length": 12,
        "micro_batch": None,
        "lr": 1e-3,
        "warmup": 0.0,
        "decay": 0.0,
        "weight_decay": 0.0,
        "sequence_level": 0.0,
        "token_level": 1.0,
        "own_sequences": None,
        "seed": 0,
        "dtype": torch.float64,
        "device": torch.device("cpu"),
        "checkpoint_every": Interval(steps=1),
    }
    return TrainingOptions(**{**given, **changed})


@pytest.fixture(scope="module")
def windows(folder):
    _, tokenizer = load_target(options_for(folder))
    stream = read_text([folder / "text.txt"], [], tokenizer, 12).training
    return Streams([(1.0, stream)], 0, 36).batch(0, 12)[0]


def distillation(folder, **changed):
    options = options_for(folder, **changed)
    target, tokenizer = load_target(options)
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float64)
    return Distillation(options, target, tokenizer, draft, tokenizer, torch.float32)


def head_training(folder, **changed):
    options = options_for(folder, **changed)
    target, _ = load_target(options)
    trained = HeadTraining(options, target, 3, 1, torch.float32)
    for parameter in trained.module.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return trained


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_drafts_loss_is_divergence_and_likelihood(folder, windows, weight):
    trained = distillation(folder, token_level=weight)
    with torch.no_grad():
        p, q = (model(windows[:, :-1]).logits.softmax(-1) for model in (trained.target, trained.module))
    expected = []
    for row in range(windows.shape[0]):
        for place in range(12):
            divergence = (p[row, place] * (p[row, place] / q[row, place]).log()).sum()
            expected.append(weight * divergence - (1 - weight) * q[row, place, windows[row, place + 1]].log())
    torch.testing.assert_close(trained.loss(windows).detach(), torch.stack(expected).mean())


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_heads_loss_compares_with_the_token_that_each_is_for(folder, windows, weight):
    trained = head_training(folder, token_level=weight)
    target, heads = trained.target, trained.module
    expected = 0.0
    with torch.no_grad():
        for k in range(3):
            losses = []
            for row in windows:
                for place in range(12 - 3):
                    seen = target(row[None, : place + 1], output_hidden_states=True).hidden_states[-1][:, -1]
                    q = heads(seen, target.lm_head)[0, k].softmax(-1)
                    p = target(row[None, : place + k + 2]).logits[0, -1].softmax(-1)
                    divergence = (p * (p / q).log()).sum()
                    losses.append(weight * divergence - (1 - weight) * q[row[place + k + 2]].log())
            expected += 0.8**k * torch.stack(losses).mean()
    torch.testing.assert_close(trained.loss(windows).detach(), expected)


def test_windows_that_go_through_apart_train_the_same(folder, windows):
    whole, parts = (distillation(folder) for _ in range(2))
    whole.loss(windows).backward()
    for part in windows.split(2):
        (parts.loss(part) * (len(part) / len(windows))).backward()
    for ours, theirs in zip(whole.module.parameters(), parts.module.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


@torch.no_grad()
def greedy_chain(target, prompt, new, guess, depth):
    """Mean of accepted guesses in a step of speculative decoding, by decoding; ``guess`` continues a row."""
    tokens = target.generate(prompt, max_new_tokens=new, do_sample=False)
    place, counts = prompt.shape[1], []
    while place + depth < tokens.shape[1]:
        drafted = guess(tokens[:, : place + 1])
        wanted = tokens[0, place + 1 : place + 1 + depth].tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(drafted, wanted, strict=True)) if a != b), depth)
        counts.append(accepted)
        place += accepted + 1
    return tokens, counts


def test_accepted_is_what_a_chain_accepts(folder, windows):
    trained = distillation(folder)
    target = trained.target
    trained.module = draft = noised(target, 0.02)

    def guess(tokens):
        return draft.generate(tokens, max_new_tokens=5, do_sample=False)[0, tokens.shape[1] :].tolist()

    rows = [greedy_chain(target, row[None, :6], 25, guess, 5) for row in windows]
    picks = torch.cat([tokens for tokens, _ in rows])
    counts = [count for _, counts in rows for count in counts]
    assert len(set(counts)) >= 3
    measured = trained.measure(HeldOut(windows, picks, torch.ones(3, 25, dtype=torch.bool)))
    assert measured["accepted"] == pytest.approx(sum(counts) / len(counts))
    same = (draft(windows[:, :-1]).logits.argmax(-1) == target(windows[:, :-1]).logits.argmax(-1)).double().mean()
    assert measured["agreement"] == pytest.approx(same.item()) and 0 < same < 1


def test_accepted_is_what_the_heads_guess(folder, windows):
    trained = head_training(folder)
    target, heads = trained.target, trained.module
    for parameter in heads.parameters():  # heads that are often right: those that guess one token for ever
        parameter.data.mul_(0.2)

    def guess(tokens):
        state = target(tokens[:, :-1], output_hidden_states=True).hidden_states[-1][:, -1]
        return heads(state, target.lm_head)[0].argmax(-1).tolist()

    rows = [greedy_chain(target, row[None, :6], 40, guess, 3) for row in windows]
    counts = [count for _, counts in rows for count in counts]
    picks = torch.cat([tokens for tokens, _ in rows])
    measured = trained.measure(HeldOut(windows, picks, torch.ones(3, 40, dtype=torch.bool)))
    assert measured["accepted"] == pytest.approx(sum(counts) / len(counts))
    right = [0, 0, 0]
    for row in windows:
        for place in range(12 - 3):
            guesses = guess(row[None, : place + 2])
            right = [n + int(guesses[k] == row[place + k + 2]) for k, n in enumerate(right)]
    assert measured["accuracy"] == pytest.approx([n / (3 * 9) for n in right])


GUESSES = st.lists(st.booleans(), min_size=3, max_size=3)


@given(st.lists(st.lists(GUESSES, min_size=6, max_size=6), min_size=1, max_size=3))
def test_accepted_per_step_walks(right):
    steps = accepted = 0
    for row in right:
        place = 0
        while place < 4:
            count = (row[place] + [False]).index(False)
            steps, accepted, place = steps + 1, accepted + count, place + count + 1
    lengths = torch.full((len(right),), 4)
    assert accepted_per_step(torch.tensor(right), lengths) == accepted / steps
    assert accepted_per_step(torch.tensor(right), 0 * lengths) is None


# ---- schedule


def test_the_learning_rate_rises_stays_and_falls_to_zero():
    rates = [learning_rate_factor(progress, 0.1, 0.5) for progress in (0, 0.05, 0.2, 0.5, 0.75, 1.0)]
    assert 0 < rates[0] < rates[1] < 1 and rates[2:4] == [1.0, 1.0] and rates[4:] == [0.5, 0.0]
    assert learning_rate_factor(0.3, 0.0, 0.0) == 1.0


def test_intervals_are_steps_or_seconds():
    assert Interval.parse("500") == Interval(steps=500) and Interval.parse("60s") == Interval(seconds=60)
    assert Interval(steps=5).due(5, 0.0) and not Interval(steps=5).due(4, 1e9)
    assert Interval(seconds=5).due(0, 5.0) and not Interval(seconds=5).due(10**9, 4.9)
    for text in ("0", "0s", "-1", "1m", ""):
        with pytest.raises(ValueError, match="checkpoint_every"):
            Interval.parse(text)


def test_a_run_by_minutes_counts_those_before_it_was_interrupted(tmp_path):
    def spend(seconds, folder):
        torch.manual_seed(0)
        model = Dropping()
        optimizers = loop.build_optimizers(model, matrix_lr=0.01, lr=0.01)
        budget = Budget(minutes=seconds / 60)
        return loop.train("test", model, model.losses, optimizers, budget, Checkpoints(folder), tokens_per_step=4)

    first = spend(0.05, tmp_path)
    second = spend(0.1, tmp_path)
    assert first.seconds >= 0.05 and second.seconds >= 0.1
    assert second.steps > first.steps and second.extended_at == [first.steps]
