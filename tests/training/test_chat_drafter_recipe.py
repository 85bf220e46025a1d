"""The recipe of the drafter that comes for a chat model: its prompts, and the model's answers to them."""

from __future__ import annotations

import json

import torch
from models import tiny
from transformers import AutoTokenizer

import gsd_kernels_cli.demo as demo
from gsd_kernels_hf.sources.checkpoints import read_json
from gsd_kernels_hf.sources.shipped import SHIPPED_DRAFTERS, SHIPPED_FOLDER
from gsd_kernels_train.recipes.chat_drafter import answers
from gsd_kernels_train.recipes.chat_drafter.__main__ import DRAFTER, write_shipped
from gsd_kernels_train.recipes.chat_drafter.prompts import MEASURED_ON, Writer, overlapping, prompts

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}<assistant>"


def test_prompts_are_varied_and_none_is_measured_on(monkeypatch):
    chats, _ = prompts(300, 5)
    texts = ["\n".join(turn["content"] for turn in chat) for chat in chats]
    assert len(set(texts)) == 300 and not overlapping(texts) and chats == prompts(300, 5)[0]
    assert {turn["role"] for chat in chats for turn in chat} == {"system", "user", "assistant", "tool"}
    measured = json.loads(MEASURED_ON[0].read_text(encoding="utf-8"))["prompts"][0]["messages"][-1]["content"]
    words = measured.split()
    assert overlapping([texts[0], f"Please: {' '.join(words[3:11])}?", " ".join(words[3:10])]) == [1]
    found = iter([[{"role": "user", "content": measured}], *chats])
    monkeypatch.setattr(Writer, "chat", lambda self: next(found))
    assert prompts(3, 5)[0] == chats[:3]


def test_answers_are_chats_and_a_run_goes_on(tmp_path, monkeypatch):
    tokenizer = AutoTokenizer.from_pretrained(demo.path() / "target")
    tokenizer.chat_template = TEMPLATE
    model = tiny(vocab_size=len(tokenizer), dtype=torch.float32)
    model.generation_config.pad_token_id = 0
    monkeypatch.setattr(answers, "BATCH_PROMPTS", 4)
    monkeypatch.setattr(answers, "NEW_TOKENS", 6)
    ended = iter([True, False] * 50)
    told = answers._answers

    def cut(*given):
        return [(text, next(ended)) for text, _ in told(*given)]

    monkeypatch.setattr(answers, "_answers", cut)
    files = answers.write_chats(model, tokenizer, tmp_path, 12, 3, batches=2)
    chats = [json.loads(line)["messages"] for file in files for line in file.read_text().splitlines()]
    assert len(files) == 2 and 6 <= len(chats) <= 8
    assert all(chat[-1]["role"] == "assistant" and chat[-2]["role"] == "user" for chat in chats)
    first = files[0].read_text()
    files[1].unlink()
    ended = iter([True, False] * 50)
    assert answers.write_chats(model, tokenizer, tmp_path, 12, 3, batches=2) == files
    assert files[0].read_text() == first and files[1].is_file()


def test_what_is_shipped_is_what_the_recipe_makes(tmp_path):
    (name,) = SHIPPED_DRAFTERS
    config = read_json(SHIPPED_FOLDER / name / "config.json")
    options = DRAFTER
    assert config["intermediate_size"] == options.intermediate_size
    assert config["draft_vocab_size"] == options.draft_vocabulary and config["target_lm_head"] is options.target_head
    assert config["eagle_aux_hidden_state_layer_ids"] == list(options.hidden_layers)
    write_shipped(SHIPPED_FOLDER / name, tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (SHIPPED_FOLDER / name / "model.safetensors").read_bytes()
    assert read_json(tmp_path / "config.json") == config
