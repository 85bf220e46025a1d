"""The facts of a model: found once a call, and until when they count; what a class, a setting, a container changes."""

from __future__ import annotations

import itertools
import logging
import types

import models
import pytest
import torch
from models import noised, prompts, tiny
from ops.contracts.backends import needs_cpu
from torch import nn
from transformers import DynamicCache, LlamaForCausalLM, StoppingCriteria

import gsd_kernels as gsd
from gsd_kernels_hf.model import fused
from gsd_kernels_hf.model.facts import Facts, fact, looked, looking
from gsd_kernels_hf.model.fused import why_not
from gsd_kernels_hf.model.properties import cache_argument


@pytest.fixture
def function():
    """Answers how often it ran."""
    runs = itertools.count(1)
    return fact(lambda facts, *rest, **options: next(runs))


def test_a_call_makes_the_facts_of_a_model_once(function):
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert [function(one), function(one)] == [1, 2]  # outside of a call a model is looked at anew
    with looking():
        assert [function(one), function(one), function(other)] == [3, 3, 4]
        handed_on = Facts.of(one)
        with looking():  # another call, from a callback
            assert [function(one), function(one)] == [5, 5]
        assert function(one) == 3
        looked()
        assert [function(one), function(one)] == [6, 7]
        assert function(handed_on) == 3  # a record is what it was
        with looking():
            assert [function(one), function(one)] == [8, 8]
        assert function(one) == 9
    assert [function(one), function(one)] == [10, 11]


def test_an_error_is_no_answer():
    model, errors = Facts(nn.Linear(2, 2)), [ValueError("once")]

    @fact
    def function(facts):
        if errors:
            raise errors.pop()
        return 5

    with pytest.raises(ValueError, match="once"):
        function(model)
    assert function(model) == 5
    with pytest.raises(ZeroDivisionError), looking():
        _ = 1 / 0


def test_a_call_looks_at_each_model_once(monkeypatch):
    target = tiny()
    draft, looks = noised(target), []
    inner = Facts.structure.func
    monkeypatch.setattr(Facts.structure, "func", lambda facts: looks.append(facts.model) or inner(facts))
    prompt = torch.arange(3, 9)[None]
    gsd.generate(target, prompt, assistant_model=draft, max_new_tokens=8)
    assert [looks.count(model) for model in (target, draft)] == [1, 1]
    gsd.patch(target, assistant_model=draft)
    looks.clear()
    target.generate(prompt, max_new_tokens=8)
    assert [looks.count(model) for model in (target, draft)] == [1, 1]
    gsd.unpatch(target)


def test_what_a_callback_changes_counts_for_the_calls_that_it_makes():
    """A call from a stopping criterion sees the model as the criterion has left it."""
    target, other = tiny(), tiny()
    draft = noised(target)
    prompt, found = torch.arange(3, 9)[None], []

    class Nested(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if not found:
                hook = target.model.layers[0].mlp.register_forward_hook(lambda _, __, output: 3.0 * output)
                for kwargs in ({"assistant_model": draft}, {}):
                    found.append(gsd.generate(target, prompt, max_new_tokens=12, eos_token_id=None, **kwargs))
                hook.remove()
            return torch.zeros(len(input_ids), dtype=torch.bool)

    options = {"max_new_tokens": 12, "eos_token_id": None}
    text = gsd.generate(target, prompt, assistant_model=draft, stopping_criteria=[Nested()], **options)
    assert torch.equal(text, other.generate(prompt, do_sample=False, **options))
    other.model.layers[0].mlp.register_forward_hook(lambda _, __, output: 3.0 * output)
    changed = other.generate(prompt, do_sample=False, **options)
    assert not torch.equal(changed, text)
    assert all(torch.equal(nested, changed) for nested in found) and len(found) == 2


@needs_cpu
def test_a_callback_asks_anew():
    target, found = tiny(dtype=torch.float32), []

    def observe(_):
        hook = target.model.layers[0].register_forward_hook(lambda *_: None)
        found.append(why_not(target, "auto"))
        hook.remove()

    gsd.generate(target, torch.arange(3, 9)[None], max_new_tokens=4, observer=observe)
    assert found and all("has a hook" in reason for reason in found)


def why(target, **options) -> str | None:
    inputs = prompts(1, 6)
    return gsd.generate(target, **inputs, max_new_tokens=3, return_dict_in_generate=True, **options).stats.why_modules


@needs_cpu
def test_the_statistics_and_the_log_say_why(caplog, monkeypatch):
    fused._log_once.cache_clear()
    target, changed = tiny(dtype=torch.float32), tiny(dtype=torch.float32)
    changed.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        assert why(target, assistant_model=noised(target)) is None
        assert not any("its modules" in record.getMessage() for record in caplog.records)
        for _ in range(2):
            assert why(changed) == "model.layers.1.mlp has a hook"
        assert "torch.float64, which is none of float32" in why(tiny())
        monkeypatch.setenv(fused.SWITCH, "0")
        assert why(target) == "GSD_KERNELS_FUSED_ROWS=0"
    said = [record.getMessage() for record in caplog.records if "through its modules" in record.getMessage()]
    assert len(said) == len(set(said)) == 3
    assert "rows of LlamaForCausalLM go through its modules: model.layers.1.mlp has a hook" in said


class Older(LlamaForCausalLM):
    """Foreign code, written when a cache was called ``past_key_values``."""

    def forward(self, input_ids=None, past_key_values=None, logits_to_keep=0, **kwargs):
        kwargs |= {"logits_to_keep": logits_to_keep}
        return super().forward(input_ids, **{cache_argument(models.tiny()): past_key_values}, **kwargs)


class Newer(LlamaForCausalLM):
    def forward(self, input_ids=None, cache=None, logits_to_keep=0, **kwargs):
        kwargs |= {"logits_to_keep": logits_to_keep}
        return super().forward(input_ids, **{cache_argument(models.tiny()): cache}, **kwargs)


class Anything(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


def test_a_cache_goes_by_the_models_own_name_or_by_transformers():
    target = models.tiny()
    name = cache_argument(target)
    cache = DynamicCache()
    target(torch.tensor([[3, 4]]), **{name: cache}, use_cache=True)
    assert cache.get_seq_length() == 2
    for kind, its in ((Older, "past_key_values"), (Newer, "cache"), (Anything, name)):
        assert cache_argument(kind(target.config)) == its


def test_a_model_of_either_name_is_decoded():
    target = models.tiny()
    draft = models.noised(target)
    prompt = {"input_ids": torch.tensor([[5, 9, 5, 9, 5]]), "max_new_tokens": 12, "eos_token_id": None}
    plain = gsd.generate(target, **prompt)
    for kind in (Older, Newer):
        model = kind(target.config).eval()
        model.load_state_dict(target.state_dict())
        assert torch.equal(gsd.generate(model, **prompt, assistant_model=draft, graph_config="tree"), plain)


CALL = {**prompts(1, 12), "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class Scaled(nn.Module):
    """A module whose output is scaled by what lies in a container beside it."""

    def __init__(self, inner, held):
        super().__init__()
        self.inner, self.held = inner, held

    def forward(self, x):
        held = self.held
        return self.inner(x) * (held["by"] if isinstance(held, dict) else held[0] if len(held) < 9 else sum(held))


def put(held, value):
    held["by" if isinstance(held, dict) else 0] = value


HELD = {
    "a list of 300 numbers": (lambda: [1.0] + 299 * [0.0], lambda held: put(held, 9.0)),
    "a dict of a number": (lambda: {"by": 1.0}, lambda held: put(held, -9.0)),
    "a tensor of a list, written": (lambda: [torch.ones(())], lambda held: held[0].mul_(9.0)),
    "a tensor of a list, replaced": (lambda: [torch.ones(())], lambda held: put(held, torch.tensor(9.0))),
    "a tensor of a dict, written": (lambda: {"by": torch.ones(())}, lambda held: held["by"].mul_(-9.0)),
    "a tensor of a tuple, written": (lambda: (torch.ones(()),), lambda held: held[0].mul_(-9.0)),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_container_holds_is_a_setting(name):
    made, change = HELD[name]
    model = tiny()
    held = made()
    model.model.layers[0].mlp = Scaled(model.model.layers[0].mlp, held)
    with gsd.patch(model, draft_sources=("history",), graph_config="tree"), torch.no_grad():
        before = model.generate(**CALL)
        change(held)
        after = model.generate(**CALL)
        assert torch.equal(after, type(model).generate(model, **CALL)) and not torch.equal(after, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_inside_a_forward_goes_to_transformers(dtype):
    """As Trainer(bf16=True) and accelerate leave it: keys are turned in float32, values are not."""
    model = tiny(dtype=dtype)
    with gsd.patch(model, draft_sources=("history",), graph_config="tree") as handle:
        model.forward = types.MethodType(torch.autocast("cpu", torch.bfloat16)(type(model).forward), model)
        assert torch.equal(model.generate(**CALL), type(model).generate(model, **CALL))
        assert (handle.stats.why is None) == (dtype == torch.bfloat16), handle.stats.why


@pytest.mark.parametrize("size", [40, 97, 120])
def test_the_weights_say_how_many_tokens_there_are(size):
    """Whatever the config says."""
    model = tiny()
    model.config.vocab_size = size
    ids = torch.tensor([[90, 41, 96, 60, 90, 41]])
    options = {name: value for name, value in CALL.items() if name not in ("input_ids", "attention_mask")}
    plain = type(model).generate(model, ids, **options)
    assert torch.equal(gsd.generate(model, ids, draft_sources=("history",), graph_config="tree", **options), plain)
