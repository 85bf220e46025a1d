"""The process's defaults, of dtype and of device, are its own: nothing here is made by them."""

from __future__ import annotations

import contextlib
import copy
import functools

import hybrids
import models
import pytest
import torch
from sources.drafters import dflash_config, eagle3_config, random_dflash, random_eagle3
from validate.calls import VOCAB, prompt

import gsd_kernels as gsd
from gsd_kernels_hf.costs import machine, pair

OPTIONS = {
    "auto": {},
    "model": {"assistant_model": True},
    "graph": {"assistant_model": True, "graph_config": "graph"},
    "reference": {"assistant_model": True, "graph_config": "graph", "backend": "reference"},
    "heads": {"draft_heads": True, "graph_config": "tree"},
    "layer_skip": {"layer_skip": True, "graph_config": "tree"},
    "eagle3": {"drafter": random_eagle3, "graph_config": "tree"},
    "dflash": {"drafter": random_dflash},
    "speculative": {"assistant_model": True, "criterion": "speculative"},
    "typical": {"assistant_model": True, "criterion": "typical", "graph_config": "tree"},
    "packed": {"graph_config": "tree"},
    "qwen3.5": {"graph_config": "tree"},
}
CONFIGS = {random_eagle3: eagle3_config, random_dflash: dflash_config}


@functools.cache
def target(dtype, name):
    if name in hybrids.FAMILIES:
        model = hybrids.build(name).to(dtype)
    else:
        model = models.tiny(vocab_size=VOCAB, dtype=dtype, num_hidden_layers=3)
    model.generation_config.eos_token_id = None
    return gsd.pack(model) if name == "packed" else model


def made(dtype, name):
    """A target that was never used, and options of a call."""
    model, options = copy.deepcopy(target(dtype, name)), dict(OPTIONS[name])
    if options.get("assistant_model"):
        options["assistant_model"] = models.noised(model, 0.02)
    if options.pop("layer_skip", False):
        options["assistant_model"] = gsd.LayerSkip(model, mlp=[0])
    if options.get("draft_heads"):
        options["draft_heads"] = gsd.DraftHeads.for_model(model, 2).requires_grad_(False)
    if make := options.get("drafter"):
        options["drafter"] = make(CONFIGS[make](model)).to(dtype)
    return model, options


def texts(model, options, calls):
    return [gsd.generate(model, **options, **each) for each in calls]


@functools.cache
def expected(dtype, name):
    return texts(*made(dtype, name), calls())


def calls():
    """Greedy, sampled and with processors."""
    call = prompt(3, max_new_tokens=6)
    sampled = {"do_sample": True, "seed": 4, "top_k": 9, "top_p": 0.9, "min_p": 0.01}
    return [call, {**call, **sampled}, {**call, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2}]


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "_known", {})
    monkeypatch.setattr(pair, "_pairs", {})


@contextlib.contextmanager
def by_default(value):
    """Another default than PyTorch's; the meta device stands for any other than the model's."""
    before = torch.get_default_dtype()
    if isinstance(value, torch.dtype):
        torch.set_default_dtype(value)
    else:
        torch.set_default_device(value)
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(before)


CASES = [
    *((torch.float32, name, default) for name in OPTIONS for default in (torch.bfloat16, "meta")),
    *((dtype, "model", default) for dtype in (torch.bfloat16, torch.float64) for default in (torch.float16, "meta")),
    (torch.bfloat16, "auto", torch.float64),
]


@pytest.mark.parametrize(("dtype", "name", "default"), CASES, ids=str)
def test_texts_do_not_depend_on_defaults(dtype, name, default, empty_cache):
    wanted, (model, options), each = expected(dtype, name), made(dtype, name), calls()
    with by_default(default):
        assert [text.tolist() for text in texts(model, options, each)] == [text.tolist() for text in wanted]
        with gsd.patch(model, **options):
            for _ in range(2):
                assert model.generate(**each[0]).tolist() == wanted[0].tolist()


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_what_is_made_under_another_default(default, empty_cache, tmp_path):
    """Heads and packed layers have the model's dtype, and files are read as they are."""
    model, call = copy.deepcopy(target(torch.float32, "auto")), calls()[0]
    wanted = gsd.generate(model, **call)
    with by_default(default):
        heads = gsd.DraftHeads.for_model(model, 2)
        assert heads.weight.dtype == torch.float32
        heads.save_pretrained(tmp_path / "heads")
        found = gsd.generate(model, draft_heads=tmp_path / "heads", **call)
        packed = gsd.pack(copy.deepcopy(model))
        assert packed.dtype == torch.float32 and packed.lm_head.weight.dtype == torch.float32
        assert torch.equal(gsd.generate(packed, **call), gsd.generate(packed, backend="reference", **call))
    assert torch.equal(found, wanted)
