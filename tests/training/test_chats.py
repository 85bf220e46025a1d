"""``--chats``: what of a chat is learned, where windows begin, and what is refused; ``--target-head``."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from training.test_commands import done, refused
from training.test_train_drafter import random_training
from training.test_training import distillation, head_training
from transformers import AutoModelForCausalLM, AutoTokenizer

import gsd_kernels as gsd
from gsd_kernels_hf.sources.eagle3 import Eagle3
from gsd_kernels_hf.sources.load import load_drafter
from gsd_kernels_train.chats import encode_chats
from gsd_kernels_train.clock import RunClock
from gsd_kernels_train.drafters import frequent_tokens

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUICK = ["--batch", 4, "--length", 24, "--lr", 0.01, "--checkpoint-every", 5, "--device", "cpu"]


def chat(*turns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]}


def write(file, chats):
    file.write_text("".join(json.dumps(one) + "\n" for one in chats), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def chats(folder):
    """``chats.jsonl``, and a template for the target's tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    foxes = ("quick", "brown", "lazy")
    found = [chat(f"{i} times {i % 7}?", f"It is {i * (i % 7)}, said the {foxes[i % 3]} fox") for i in range(60)]
    found[7] = chat("Hello.", "Good day.", "And 3 times 3?", "It is 9.")
    return write(folder / "chats.jsonl", found)


def encoded(folder, file, length=24, held_out=0.0):
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    return tokenizer, encode_chats("chats", [file], tokenizer, length, RunClock(None), held_out)


def test_answers_count_and_what_ends_them(folder, chats, tmp_path):
    file = write(tmp_path / "two.jsonl", [chat("Hello.", "Good day.", "And 3 times 3?", "It is 9."), chat("Hi", "Ho")])
    tokenizer, (stream, _, _) = encoded(folder, file)
    end = tokenizer.eos_token
    whole = "".join(tokenizer.decode([token]) for token in stream.tokens)
    assert whole == (
        f"<user>Hello.{end}\n<assistant>Good day.{end}\n<user>And 3 times 3?{end}\n<assistant>It is 9.{end}\n"
        f"<user>Hi{end}\n<assistant>Ho{end}\n"
    )
    said = tokenizer.decode(stream.tokens[stream.counted])
    assert said == f"Good day.{end}It is 9.{end}Ho{end}"
    answers = [tokenizer.decode(stream.tokens[at : at + 2]) for at in stream.answers]
    assert answers == ["Go", "It", "Ho"] and not stream.counted[stream.answers - 1].any()
    assert tokenizer.decode(stream.tokens[stream.starts[-1] :])[:8] == "<user>Hi"


def trained_of(kind, folder):
    if kind == "draft":
        return distillation(folder)
    if kind == "heads":
        return head_training(folder)
    return random_training(kind, folder, **({"depth": 3} if kind == "eagle3" else {"block_size": 4}))[0]


@pytest.mark.parametrize("kind", ["draft", "heads", "eagle3", "dflash", "dspark"])
def test_the_loss_is_the_mean_of_what_counts(folder, kind):
    trained = trained_of(kind, folder)
    windows = torch.randint(3, 250, (2, 13), generator=torch.Generator().manual_seed(3))

    @torch.no_grad()
    def loss(counted, windows=windows):
        torch.manual_seed(0)
        return trained.loss(windows, counted)

    every = torch.ones(2, 13, dtype=torch.bool)
    torch.testing.assert_close(loss(every), loss(None))
    none = torch.zeros_like(every)
    assert loss(none) == 0
    early = none.clone()
    early[:, 5:8] = True
    later = windows.clone()
    later[:, 9:] = (later[:, 9:] + 1) % 250
    torch.testing.assert_close(loss(early, later), loss(early))
    assert loss(every, later) != loss(every) and loss(early) != loss(every)
    if kind in ("draft", "heads", "eagle3"):
        single = []
        for row in range(2):
            for place in range(5, 8):
                one = none.clone()
                one[row, place] = True
                single.append(loss(one))
        torch.testing.assert_close(loss(early), torch.stack(single).mean())


def test_a_drafter_learns_answers(folder, chats):
    out = folder / "learned"
    given = ["train-drafter", "--kind", "eagle3", "--target", folder / "target", "--chats", chats, "--out", out]
    report = done(*given, "--steps", 40, "--depth", 2, "--draft-vocabulary", 120, "--target-head", *QUICK)
    assert sum(report["after"]["continuation_accuracy"]) > sum(report["before"]["continuation_accuracy"]) + 0.05
    assert report["options"]["target_head"] is True and "chats" in report["options"]
    tensors = load_file(out / "model.safetensors")
    assert "lm_head.weight" not in tensors and tensors["d2t"].shape == (120,)
    target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    _, (stream, _, _) = encoded(folder, chats, held_out=0.05)
    assert torch.equal(torch.arange(120) + tensors["d2t"], frequent_tokens(stream.tokens[stream.counted], 259, 120))
    drafter = load_drafter(out, target)
    ids = drafter.target_ids()
    assert torch.equal(drafter.lm_head.weight, target.get_output_embeddings().weight[ids])
    ids = tokenizer("3 times 3", return_tensors="pt").input_ids
    plain = target.generate(ids, max_new_tokens=24, do_sample=False)
    assert torch.equal(gsd.generate(target, ids, max_new_tokens=24, drafter=drafter), plain)
    with pytest.raises(ValueError, match="drafts by its target's output matrix; pass the target too"):
        Eagle3.from_pretrained(out)


SHORT = json.dumps(chat("a", "b"))
REFUSED = [  # a file of chats, what else is given, and what is said
    ("{", [], "line 1: not JSON"),
    ('{"messages": [{"role": "user"}]}', [], 'line 1: expected an object with "messages"'),
    ('{"messages": [{"role": "user", "content": "a"}]}', [], 'line 1: nobody with the "role" assistant'),
    ("\n", [], "chats: no chat in"),
    (f"{SHORT}\n" * 3, [], "held_out_chats: 23 tokens after the held-out part are less than a block of 25"),
    (None, [], "text, chats: expected files of one of them"),
    (SHORT, ["--text", "{}"], "text, chats: expected files of one of them"),
    (None, ["--text", "{}", "--held-out-chats", "{}"], "held_out_chats: is for chats"),
]


@pytest.mark.parametrize(("lines", "more", "says"), REFUSED)
def test_files_that_do_not_serve_are_refused_by_name(folder, chats, tmp_path, lines, more, says):
    file = tmp_path / "bad.jsonl"
    file.write_text(lines or SHORT)
    given = ["--out", tmp_path / "out", "--steps", 1, *QUICK, *([] if lines is None else ["--chats", file])]
    more = [one.format(file) for one in more]
    assert says in refused("train-heads", "--target", folder / "target", *given, *more)
