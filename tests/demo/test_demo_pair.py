"""The shipped pair is what its card says: small, good enough to speculate with, and free of local traces."""

import json
import re
from functools import cache

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

from gsd_kernels_cli import demo
from gsd_kernels_cli.demo.drafters import FOLDER

MEMBERS = ("target", "draft")


@cache
def pair():
    return demo.load()


def card() -> str:
    return (demo.path() / "README.md").read_text(encoding="utf-8")


def test_it_is_small():
    assert sum(file.stat().st_size for file in demo.path().rglob("*") if "__pycache__" not in file.parts) <= 17e6


@pytest.mark.parametrize("member", MEMBERS)
def test_both_are_ordinary_checkpoint_folders(member):
    folder = demo.path() / member
    model = LlamaForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float16
    assert len(tokenizer) == model.config.vocab_size
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(model.config, name) == getattr(model.generation_config, name) == getattr(tokenizer, name)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.float16}  # noqa: SIM118


def test_the_tokenizer_reverses_and_begins_with_bos():
    tokenizer = pair()[2]
    text = 'def f(x):\n\treturn "ü 漢字 \\n",   x  # 12345\r\n\n    pass'
    tokens = tokenizer(text)["input_ids"]
    assert tokens[0] == tokenizer.bos_token_id and tokens.count(tokenizer.bos_token_id) == 1
    assert tokenizer.decode(tokens, skip_special_tokens=True) == text


@torch.no_grad()
@pytest.mark.slow
def test_the_draft_agrees_with_the_targets_greedy_text():
    target, draft, tokenizer = pair()
    agreed = count = 0
    for prompt in demo.prompts("code")[::2]:
        inputs = tokenizer(prompt["text"], return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        tokens = target.generate(**inputs, max_new_tokens=80, do_sample=False)
        picked = draft(tokens[:, :-1]).logits[0, length - 1 :].argmax(-1)
        agreed += int((picked == tokens[0, length:]).sum())
        count += len(picked)
    assert count >= 600
    assert agreed / count >= 0.65
    assert agreed < count


def test_nothing_tells_where_it_was_made():
    # Any absolute path; the slashes of URLs and of relative paths come after other characters.
    local = re.compile(r"(/(?:root|home|tmp|Users)/|file:|(?<![\w.:/])/\w+/|[A-Z]:\\Users)")
    assert all(map(local.search, ('"/build/x"', "in /srv/a/b", "file:///opt/x/y", "a/home/b")))
    for file in (*demo.path().rglob("*"), *FOLDER.rglob("*")):
        if file.suffix in (".json", ".md") and file.name not in ("prompts.json", "tokenizer.json"):
            text = file.read_text(encoding="utf-8")
            assert not local.search(text), file.name
            if file.name == "config.json":
                assert not json.loads(text).get("_name_or_path")
    for member in MEMBERS:
        with safe_open(demo.path() / member / "model.safetensors", "pt") as weights:
            assert not local.search(json.dumps(weights.metadata()))
