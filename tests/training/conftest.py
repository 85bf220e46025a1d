"""A pair, a text and chats to train on."""

from __future__ import annotations

import json

import pytest
from checkpoints import save_pair
from transformers import AutoTokenizer

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="package")
def folder(tmp_path_factory):
    """``target``, ``draft``, ``text.txt`` of a few thousand tokens, ``chats.jsonl``."""
    folder = tmp_path_factory.mktemp("training")
    save_pair(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "target")
    said = [
        (f"{i} times {i % 7}", f"is {i * (i % 7)}, said the {('quick', 'brown', 'lazy')[i % 3]} fox")
        for i in range(120)
    ]
    (folder / "text.txt").write_text("\n".join(map(" ".join, said)), encoding="utf-8")
    roles = ("user", "assistant")
    chats = [[{"role": role, "content": text} for role, text in zip(roles, one, strict=True)] for one in said]
    (folder / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return folder
