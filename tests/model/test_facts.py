"""The facts of a model: found once a call, and until when they count."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import noised, tiny
from ops.contracts.backends import needs_cpu
from torch import nn
from transformers import StoppingCriteria

import gsd_kernels as gsd
from gsd_kernels_hf.model.facts import Facts, fact, looked, looking
from gsd_kernels_hf.model.fused import why_not


@pytest.fixture
def function():
    """Answers how often it ran."""
    runs = itertools.count(1)
    return fact(lambda facts, *rest, **options: next(runs))


def test_a_fact_is_found_once(function):
    one, other = Facts(nn.Linear(2, 2)), Facts(nn.Linear(2, 2))
    rest = (
        function(other),
        function(one),
        function(one, "a"),
        function(one, b=1),
        function(one, b=2),
        function(one, b=1),
    )
    assert rest == (1, 2, 3, 4, 5, 4) and (function(other), function(one)) == (1, 2)
    assert Facts.of(one) is one


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
