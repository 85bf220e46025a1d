"""The demo: the embedded pair and its drafters, the real model, an inflated one, where texts differ, a picture."""

from __future__ import annotations

import re

import pytest
import torch
from models import noised, prompts, tiny
from transformers import LlamaConfig, LlamaForCausalLM

import gsd_kernels as gsd
from gsd_kernels import GraphConfig
from gsd_kernels_cli import demo
from gsd_kernels_cli.demo import smollm2
from gsd_kernels_cli.demo.drafters import embedded
from gsd_kernels_cli.demo.inflate import inflate, llama
from gsd_kernels_cli.drawing import ACCEPTED, StepPicture, draw_step
from gsd_kernels_hf.extras import cure
from gsd_kernels_hf.packed import gguf

# ---- The embedded pair and drafters: right now and then, hence placed and fed as they were trained


GRAPH = GraphConfig(depth=3, width=2, branch=2, max_rows=12, merge_context=0)
LEAST = {"model": 2.3, "eagle3": 2.15, "dflash": 1.78}
"""Tokens a step: 2.34 and 1.92 of the drafters; 2.04 and 1.68 where features come from the position behind theirs."""


@pytest.mark.parametrize("kind", LEAST)
def test_texts_are_the_targets_and_take_as_few_steps_as_drafts_were_trained_for(kind):
    target, draft, tokenizer = demo.load()
    drafts = {"assistant_model": draft} if kind == "model" else {"drafter": embedded(target)[kind]}
    options = {**drafts, "draft_sources": ("model" if kind == "model" else "drafter",), "graph_config": GRAPH}
    tokens = steps = 0
    for prompt in demo.prompts("code")[-3:]:
        ids = tokenizer(prompt["text"], return_tensors="pt").input_ids
        plain = target.generate(ids, max_new_tokens=32, do_sample=False, eos_token_id=None)
        out = gsd.generate(target, ids, max_new_tokens=32, eos_token_id=None, return_dict_in_generate=True, **options)
        assert torch.equal(out.sequences, plain)
        tokens, steps = tokens + out.stats.new_tokens, steps + out.stats.steps
    assert tokens / steps > LEAST[kind]


# ---- The real model's folder: why it cannot be had, made once and as a whole. No wheel is needed


def test_a_folder_is_made_once_and_without_the_package_pips_line_is_named(tmp_path, monkeypatch):
    package, read = tmp_path / smollm2.MODULE, []
    package.mkdir()
    for name in ("__init__.py", "Model-Q4.gguf"):
        (package / name).touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gguf, "NEEDED", ("json",))
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf, "load_model", lambda file: read.append(file) or tiny(dtype=torch.float32))
    monkeypatch.setattr(gguf, "load_tokenizer", lambda file: demo.load()[2])
    assert smollm2.folder() == smollm2.folder() and len(read) == 1
    (package / "Model-Q4.gguf").unlink()
    with pytest.raises(smollm2.MissingModelError, match=f"which is not installed: .*{re.escape(cure('gguf'))}"):
        smollm2.load()


# ---- An inflated model computes what its source computes, whatever grows


@torch.no_grad()
def test_an_inflated_model_keeps_its_function():
    sizes = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 8}
    torch.manual_seed(1)
    source = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1, rms_norm_eps=1e-2))
    for name, parameter in source.eval().named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2 if "proj" in name else 0.05)
    inflated = inflate(source, llama(96, 96, 3, 16, 8, 24, 128))
    tokens = torch.randint(0, 97, (2, 33), generator=torch.Generator().manual_seed(1))
    want, got = source(tokens).logits, inflated(tokens).logits
    assert want.std() > 0.1 and got.shape[-1] == 128
    torch.testing.assert_close(got[..., :97], want, atol=1e-4, rtol=1e-4)
    for dtype in (torch.float32, torch.float16):  # added tokens are never picked, in half precision either
        logits = got if dtype == torch.float32 else inflated.to(dtype)(tokens).logits
        assert not logits.isnan().any() and logits[..., 97:].max() < logits[..., :97].min() - 50
    with pytest.raises(ValueError, match=r"shape\.num_hidden_layers: expected"):
        inflate(source, llama(48, 80, 1, 4, 1, 8, 97))


# ---- A step's picture: the right nodes and edges, and files that open


@pytest.mark.quick
def test_pictures_tell_what_happened_and_name_every_token(tmp_path):
    target, inputs = tiny(dtype=torch.float32), prompts(1, 12)
    pictures, emitted = [], []
    config = GraphConfig(depth=4, width=4, branch=3, max_rows=12, merge_context=0)
    options = {"assistant_model": noised(target), "graph_config": config, "max_new_tokens": 40, "do_sample": False}
    out = gsd.generate(target, **inputs, **options, observer=lambda record: pictures.append(StepPicture.of(record)))
    for picture in pictures:
        emitted += [picture.tokens[i] for i in picture.accepted[1:]] + [picture.next_token]
        assert {node for node, kind in enumerate(picture.kinds) if kind == ACCEPTED} == {*picture.accepted[1:]}
        children = [edge.target for edge in picture.edges if not edge.merged]
        assert sorted(children) == list(range(1, len(picture.tokens)))  # every node hangs on one primary edge
    assert emitted == out[0, 12:].tolist()
    picture = max(pictures, key=lambda p: p.interest)
    assert picture.merges
    draw_step(picture, lambda t: f"${t}$", [tmp_path / "a.svg"], "a title")
    text = (tmp_path / "a.svg").read_text()
    assert all(f">${token}$<" in text for token in (*picture.tokens, picture.next_token))
