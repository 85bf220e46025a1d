"""The shipped pair is what its card says: small, good enough to speculate with, and free of local traces."""

import json
import math
import re
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoTokenizer, LlamaForCausalLM

from gsd_kernels_cli import demo
from gsd_kernels_cli.demo.drafters import FOLDER, heads_folder
from gsd_kernels_hf.sources.heads import DraftHeads
from gsd_kernels_train.recipes.stdlib import HELD_OUT

MEMBERS = ("target", "draft")


@cache
def pair():
    return demo.load()


def card() -> str:
    return (demo.path() / "README.md").read_text(encoding="utf-8")


def test_it_is_small():
    assert sum(file.stat().st_size for file in demo.path().rglob("*") if "__pycache__" not in file.parts) <= 17e6


def test_the_draft_has_at_most_an_eighth_of_the_parameters():
    target, draft, _ = pair()
    assert target.num_parameters() >= 8 * draft.num_parameters()
    assert f"{target.num_parameters():,}" in card() and f"{draft.num_parameters():,}" in card()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_loads(dtype):
    for model in demo.load(dtype)[:2]:
        assert {p.dtype for p in model.parameters()} == {dtype}
        assert not model.training
        assert all(p.isfinite().all() for p in model.parameters())


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


def test_prompts_are_held_out_and_of_natural_length():
    tokenizer = pair()[2]
    prompts = demo.prompts()
    assert len(demo.prompts("code")) >= 24 and len(demo.prompts("copy")) >= 3
    assert len({prompt["name"] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        assert prompt["file"] in HELD_OUT
        assert 60 <= len(tokenizer(prompt["text"])["input_ids"]) <= 150
        assert prompt["text"] == prompt["text"].rstrip()
    assert demo.excerpt()["file"] in HELD_OUT


@torch.no_grad()
def test_bits_per_byte_on_the_shipped_excerpt():
    target, _, tokenizer = pair()
    excerpt = demo.excerpt()
    tokens = tokenizer(excerpt["text"], return_tensors="pt")["input_ids"]
    nats = F.cross_entropy(target(tokens[:, :-1]).logits[0], tokens[0, 1:], reduction="sum").item()
    bits_per_byte = nats / math.log(2) / len(excerpt["text"].encode())
    assert bits_per_byte == pytest.approx(excerpt["bits_per_byte"], abs=0.005)
    over_all_files = float(re.search(r"bits per byte \| \*\*([\d.]+)\*\*", card())[1])
    assert over_all_files <= 1.6
    assert 0.5 * over_all_files < bits_per_byte < 1.5 * over_all_files


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


@torch.no_grad()
@pytest.mark.slow
def test_the_heads_guess_what_the_target_says_later():
    target, _, tokenizer = pair()
    trained = DraftHeads.from_pretrained(heads_folder(), target)
    assert f"{sum(p.numel() for p in trained.parameters()):,} parameters" in card()
    untrained = DraftHeads.for_model(target, trained.num_heads)
    right = torch.zeros(2, trained.num_heads)
    count = 0
    for prompt in demo.prompts("code")[::4]:
        inputs = tokenizer(prompt["text"], return_tensors="pt")
        length = inputs["input_ids"].shape[1]
        tokens = target.generate(**inputs, max_new_tokens=64, do_sample=False)
        hidden = target.model(tokens).last_hidden_state[0, length - 1 : -1 - trained.num_heads]
        following = tokens[0, length + 1 :].unfold(0, trained.num_heads, 1)  # [places, heads]
        for row, heads in enumerate((trained, untrained)):
            right[row] += (heads(hidden, target.lm_head).argmax(-1) == following).sum(0)
        count += len(following)
    ours, theirs = (right / count).tolist()
    assert count >= 300
    assert ours[0] >= 0.15 and ours[0] > 2 * theirs[0]
    assert ours[0] > ours[-1]


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
