"""``distill``, ``train-heads``, ``train-drafter``: what each writes is read and drafts; interruption, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from models import tiny
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig, GraniteForCausalLM, Qwen2Config
from typer.testing import CliRunner

import gsd_kernels as gsd
from gsd_kernels_cli.app import app
from gsd_kernels_train.loop import load_checkpoint

QUICK = ["--batch", 4, "--length", 24, "--lr", 0.01, "--checkpoint-every", 5, "--device", "cpu"]


def run(*given):
    return CliRunner().invoke(app, [str(a) for a in given])


def done(*given):
    result = run(*given, "--json")
    assert result.exit_code in (0, 1) and result.stdout, result.stderr
    report = json.loads(result.stdout)
    assert result.exit_code == (0 if report["learned"] else 1), result.stderr
    assert ("nothing was learned" in result.stderr) is not report["learned"]
    return report


def refused(*given):
    result = run(*given)
    assert result.exit_code == 2, result.output
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("gsd-kernels: error: ")]
    return line


def arguments(kind, folder, out, *more, text=("--text", "{}/text.txt")):
    """The command that trains a kind of draft."""
    parts = {"distill": ["distill", "--draft", "{}/draft"], "train-heads": ["train-heads", "--heads", 3]}
    given = [*parts.get(kind, ["train-drafter", "--kind", kind]), "--target", "{}/target", "--out", out, *QUICK]
    return [str(one).format(folder) for one in [*given, *text, *more]]


BLOCK = {"fc", "hidden_norm", "layers", "norm"}
EAGLE = {"fc", "midlayer", "norm", "d2t", "t2d"}
KINDS = {  # its options; of a published drafter: architecture, what names of tensors begin with
    "distill": (["--steps", 12],),
    "train-heads": (["--steps", 40],),
    "eagle3": (["--depth", 3, "--draft-vocabulary", 250], "LlamaForCausalLMEagle3", EAGLE | {"lm_head"}),
    "jetspec": (["--block-size", 4, "--layers", 2], "DFlashDraftModel", BLOCK),
    "dspark": (["--block-size", 3, "--layers", 1, "--markov-rank", 8, "--markov-head", "gated", "--lr", 0.03],
               "Qwen3DSparkModel", BLOCK | {"markov_head", "confidence_head"}),
    "mtp": (["--depth", 3], "LlamaMTP", {"mtp"}),
    "chats": (["--steps", 40, "--depth", 2, "--draft-vocabulary", 120, "--target-head"],
              "LlamaForCausalLMEagle3", EAGLE),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_learns_is_laid_out_as_published_and_drafts(kind, folder, tmp_path):
    out, (options, *layout) = tmp_path / kind, KINDS[kind]
    text = {"text": ["--chats", "{}/chats.jsonl"]} if kind == "chats" else {}
    given = ["--steps", 30, "--own-sequences", 64, *options, *(["--sequence-level", 1] if layout and not text else [])]
    report = done(*arguments("eagle3" if kind == "chats" else kind, folder, out, *given, **text))
    before, after = report["before"], report["after"]
    if kind == "distill":
        assert after["divergence"] < 0.9 * before["divergence"]
        alone = Qwen2Config(vocab_size=259, hidden_size=64, num_hidden_layers=1)
        alone.save_pretrained(tmp_path / "config")  # without a tokenizer
        assert done(*arguments(kind, folder, tmp_path / "new", "--draft", tmp_path / "config", "--steps", 1))
    elif kind == "train-heads":
        first = done(*arguments(kind, folder, tmp_path / "first", *given, "--steps", 1))
        assert report["training"]["loss"] < 0.95 * first["training"]["loss"] and before == first["before"] != after
    else:
        assert len(after["continuation_accuracy"]) >= 2 and (text or after["accepted"] > 0)
        assert sum(after["continuation_accuracy"]) > sum(before["continuation_accuracy"]) + 0.05
    assert report["training"]["tokens"] == report["training"]["steps"] * 4 * 24 and not (out / "checkpoints").exists()
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    if layout:
        architecture, parts = layout
        config, tensors = json.loads((out / "config.json").read_text()), load_file(out / "model.safetensors")
        assert config["architectures"] == [architecture] and {name.split(".")[0] for name in tensors} == parts
        drafting = {"drafter": out, "draft_sources": ("drafter",)}
    elif kind == "distill":
        draft = AutoModelForCausalLM.from_pretrained(out)
        assert draft.dtype == torch.float32 and (out / "tokenizer.json").exists()
        drafting = {"assistant_model": draft.double(), "draft_sources": ("model",)}
    else:
        heads = gsd.DraftHeads.from_pretrained(out, target)
        assert heads.num_heads == 3 and heads.weight.abs().sum() > 0
        drafting = {"draft_heads": heads, "draft_sources": ("heads",)}
    ids = AutoTokenizer.from_pretrained(folder / "target")("3 times 3", return_tensors="pt").input_ids
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    drafted = gsd.generate(target, ids, max_new_tokens=24, return_dict_in_generate=True, **drafting)
    assert torch.equal(drafted.sequences, plain) and (kind == "train-heads" or drafted.stats.draft_rows > 0)


def test_a_run_that_ends_while_a_checkpoint_is_written_goes_on_to_equal_weights(folder, tmp_path, monkeypatch):
    save, calls = torch.save, []

    def torn(state, file):
        calls.append(file)
        if len(calls) == 3:
            Path(file).write_bytes(b"half a state")
            raise KeyboardInterrupt
        save(state, file)

    cut, whole = (arguments("distill", folder, tmp_path / name, "--steps", 22) for name in ("cut", "whole"))
    monkeypatch.setattr(torch, "save", torn)
    assert run(*cut).exit_code == 130
    monkeypatch.undo()
    assert load_checkpoint(tmp_path / "cut" / "checkpoints")["record"]["steps"] == 10
    assert not (tmp_path / "cut" / "training.json").exists()
    resumed, report = done(*cut), done(*whole)
    assert (resumed["before"], resumed["after"]) == (report["before"], report["after"])
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    for name, *more in (  # of another run
        ("lr", "--steps", 22, "--lr", 0.02),
        ("text", "--steps", 22, folder / "draft" / "config.json"),  # as the shell expands --text *
    ):
        line = refused(*arguments("distill", folder, tmp_path / "cut", *more))
        assert f"error: --{name}: the run in {tmp_path / 'cut'} has" in line and "name another folder" in line
    assert "error: --heads: the run in" in refused(*arguments("train-heads", folder, tmp_path / "cut", "--steps", 22))
    assert done(*cut, "--checkpoint-every", "9s")  # which does not change the run


def test_a_run_without_a_step_says_so_and_exits_with_1(folder, tmp_path):
    result = run(*arguments("eagle3", folder, tmp_path / "out", "--minutes", 1e-5))
    assert result.exit_code == 1 and result.stdout == "" and not (tmp_path / "out").exists()
    assert "gsd-kernels: error: nothing was learned, and nothing is written: the 0.0006 s are over" in result.stderr


@pytest.fixture(scope="package")
def bad(folder):
    """Files and folders that no run can use; beside them what others write to ``out``."""
    for name in ("granite", "other", "used"):
        (folder / name).mkdir()
    sizes = {"vocab_size": 259, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = GraniteConfig(**sizes, num_attention_heads=4, logits_scaling=4.0)
    GraniteForCausalLM(config).save_pretrained(folder / "granite")
    AutoTokenizer.from_pretrained(folder / "target").save_pretrained(folder / "granite")
    tiny(vocab_size=5000, dtype=torch.float32).save_pretrained(folder / "other")
    short = json.dumps({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]})
    for name, text in {
        "empty.txt": " \n",
        "no.jsonl": "{",
        "unanswered.jsonl": '{"messages": [{"role": "user", "content": "a"}]}',
        "short.jsonl": f"{short}\n" * 3,
        "used/mine.txt": "do not touch",
    }.items():
        (folder / name).write_text(text)
    return folder


GRANITE = ["--target", "{}/granite"]
REFUSED = [  # a kind of draft, what it is given beside a good run's options, and what is said
    ("distill", ["--text", "{}/empty.txt"], "text: no text in"),
    ("distill", ["--text", "{}/draft"], "draft is a folder; name its files"),
    ("distill", ["--length", 4000], "tokens after the held-out part are less than a block of"),
    ("distill", ["--minutes", 1], "steps, minutes: expected one of them"),
    ("distill", ["--sequence-level", 1.5], "--sequence-level: expected a share"),
    ("distill", ["--draft", "{}/other"], "draft: vocabulary sizes 259 (target) and 5000 (draft) mean different"),
    ("distill", ["--dtype", "float16"], "dtype: expected float32, bfloat16 or float64"),
    ("distill", ["--out", "{}/used"], "used is not empty and holds no checkpoint"),
    ("train-heads", GRANITE, "target: GraniteForCausalLM changes its logits after the output matrix"),
    ("train-heads", ["--heads", 30], "length: expected more than the 30 heads"),
    ("dspark", ["--markov-head", "lstm"], "--markov-head: expected one of vanilla, gated, rnn, got 'lstm'"),
    ("dflash", ["--mask-token-id", 1000], "mask token 1000 has no row"),
    ("dflash", ["--markov-rank", 4], "--markov-rank: not a setting of dflash"),
    ("mtp", ["--layers", 2], "layers: not a setting of mtp, which is a layer as the target's own"),
    ("eagle3", ["--draft-vocabulary", 260], "--draft-vocabulary: expected at most the target's 259"),
    ("eagle3", ["--hidden-layers", "1,9"], "--hidden-layers: expected numbers from 0 to 2"),
    ("eagle3", ["--depth", 23], "length: expected more than 24 for 23 guesses, got 24"),
    ("train-heads", ["--chats", "{}/empty.txt"], "chats: no chat in"),
    ("train-heads", ["--chats", "{}/no.jsonl"], "line 1: not JSON"),
    ("train-heads", ["--chats", "{}/unanswered.jsonl"], 'line 1: nobody with the "role" assistant'),
    ("train-heads", ["--chats", "{}/short.jsonl"], "23 tokens after the held-out part are less than a block of 25"),
    ("train-heads", ["--chats", "{}/short.jsonl", "--text", "{}/text.txt"], "text, chats: expected files of one of"),
    ("train-heads", ["--text", "{}/text.txt", "--held-out-chats", "{}/short.jsonl"], "--held-out-chats: is for chats"),
]  # fmt: skip


@pytest.mark.parametrize("row", range(len(REFUSED)))
def test_bad_arguments_are_refused_by_name(row, bad, tmp_path):
    kind, more, says = REFUSED[row]
    text = {"text": ()} if {"--text", "--chats"} & set(more) else {}
    assert says in refused(*arguments(kind, bad, tmp_path / "out", "--steps", 1, *more, **text))
    assert not (tmp_path / "out").exists() and [file.name for file in (bad / "used").iterdir()] == ["mine.txt"]
