"""``--chats``: what of a chat is learned, where windows begin, and what is refused; ``--target-head``."""

from __future__ import annotations

import json

import pytest
import torch
from models import tiny
from safetensors.torch import load_file
from training.options import options_for
from training.test_commands import done, refused
from training.test_losses import distillation, head_training
from training.test_train_drafter import random_training
from transformers import AutoModelForCausalLM, AutoTokenizer

import gsd_kernels as gsd
from gsd_kernels_hf.sources.eagle3 import Eagle3, Eagle3Config
from gsd_kernels_hf.sources.load import load_drafter
from gsd_kernels_train.chats import encode_chats
from gsd_kernels_train.clock import RunClock
from gsd_kernels_train.drafters import frequent_tokens
from gsd_kernels_train.job import load_target, read
from gsd_kernels_train.streams import blocks
from gsd_kernels_train.text import own_text

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LAST_ONLY = (  # as models that think: what was thought is dropped from earlier answers
    "{% for message in messages %}<{{ message.role }}>{% if loop.last and message.role == 'assistant' %}hm, {% endif %}"
    "{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
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


def test_the_last_chats_are_held_out_and_measured_where_answers_begin(folder, chats):
    options = options_for(folder, text=[], chats=[chats], length=24)
    _, tokenizer = load_target(options)
    text = read(options, tokenizer, RunClock(None))
    # A twentieth of 60 chats, each of which goes beyond two windows.
    assert len(text.held_out.answers) == 3 and len(text.held_out.starts) == 9 and text.digests.keys() == {"chats"}
    prefix, _ = blocks(text.held_out.before_answers(6), 6, 8)
    assert len(prefix) == 3 and all(tokenizer.decode(row).endswith("stant>") for row in prefix)
    windows, counted = blocks(text.held_out, 25, 8)
    assert windows.shape == counted.shape and counted.dtype == torch.bool


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


def test_what_the_target_writes_itself_counts_alone(folder, chats):
    options = options_for(folder, text=[], chats=[chats], length=24)
    target, tokenizer = load_target(options)
    text = read(options, tokenizer, RunClock(None))
    work = folder / "own"
    work.mkdir()
    settings = {"at_once": 4, "sequences": 8, "seconds": None, "may_write": lambda: True}
    own, _ = own_text(target, text.training, 24, 0, work, **settings)
    said = own.counted.nonzero()[0]
    begins = said[~own.counted[said - 1]]
    assert len(begins) == 8 and 0 < own.counted.mean() < 1
    assert all(tokenizer.decode(own.tokens[at - 6 : at]).endswith("stant>") for at in begins)


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


def test_a_drafter_that_shares_the_output_matrix_is_as_wide(tmp_path, folder):
    target = tiny(hidden_size=48, head_dim=8)
    config = json.loads((folder / "learned" / "config.json").read_text())
    narrow = config | {"target_hidden_size": 48}
    module = Eagle3(Eagle3Config.of(narrow, own_embedding=True))
    with pytest.raises(ValueError, match="no output matrix of its own, and is 32 wide where"):
        module.check_target(target)


def test_templates_that_do_not_serve(folder, chats):
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = LAST_ONLY
    with pytest.raises(ValueError, match=r"chats\.jsonl, line 8: .* writes earlier turns otherwise"):
        encode_chats("chats", [chats], tokenizer, 24, RunClock(None))
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="chats: the target's tokenizer has no chat template"):
        encode_chats("chats", [chats], tokenizer, 24, RunClock(None))


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
