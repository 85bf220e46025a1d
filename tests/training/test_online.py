"""Drafts that learn while serving: the same text, more of it accepted, bounded, undone bit for bit, whole on disk."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from models import noised, prompts, tiny

import gsd_kernels as gsd

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.4, "seed": 3}
INPUTS = prompts(1, 12, seed=2)


@pytest.fixture(scope="module")
def target():
    return tiny()


@pytest.fixture(scope="module")
def expected(target):
    return gsd.generate(target, **INPUTS, **GREEDY)


@pytest.fixture
def draft(target):
    return noised(target, 0.1)


@contextmanager
def patched(model, draft, **options):
    kind, source = ("draft_heads", "heads") if isinstance(draft, gsd.DraftHeads) else ("assistant_model", "model")
    options = {"graph_config": "chain", "draft_sources": (source,), **options}
    handle = gsd.patch(model, **{kind: draft}, **options)
    try:
        yield handle
    finally:
        gsd.unpatch(model)


def bits(model) -> list[bytes]:
    return [p.detach().clone().view(torch.uint8).numpy().tobytes() for p in model.parameters()]


def steps_of(handle, model, expected, calls: int, **options) -> list[int]:
    found = []
    for _ in range(calls):
        assert torch.equal(model.generate(**INPUTS, **{**GREEDY, **options}), expected)
        found.append(handle.stats.steps)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["draft", "heads"])
def test_more_is_accepted_on_a_topic_that_comes_again(kind, target, draft, expected):
    if kind == "heads":
        draft = gsd.DraftHeads.for_model(target, 2)
    first, theirs = bits(draft), bits(target)
    with patched(target, draft) as handle:
        without = steps_of(handle, target, expected, 2)
        assert without[0] == without[1]
        with gsd.OnlineLearner(handle, draft, steps=4, lr=3e-3 if kind == "draft" else 3e-2) as learner:
            learned = steps_of(handle, target, expected, 5)
            assert learned[0] == without[0] and learned[-1] < 0.7 * without[0]
            assert learner.taken == 20 and bits(draft) != first
        assert bits(draft) == first
        assert steps_of(handle, target, expected, 1) == without[:1]
    assert bits(target) == theirs and all(p.grad is None for p in (*target.parameters(), *draft.parameters()))


@pytest.mark.slow
def test_sampled_text_is_the_seeds_before_during_and_after(target, draft):
    inputs = prompts(2, 9, seed=5)
    plain = gsd.generate(target, **inputs, **SAMPLED)
    seen = []
    with patched(target, draft, graph_config="graph", draft_sources=("model", "history")) as handle:
        assert torch.equal(target.generate(**inputs, **SAMPLED), plain)
        state = torch.get_rng_state()
        with gsd.OnlineLearner(handle, draft, lr=1e-2) as learner, torch.inference_mode():
            for _ in range(3):
                assert torch.equal(target.generate(**inputs, **SAMPLED, observer=seen.append), plain)
            assert learner.taken == 3 and len(learner) == 6 and len(seen) > 3
            # A call without the draft teaches nothing.
            target.generate(**inputs, **SAMPLED, assistant_model=False, draft_sources=("history",))
            assert learner.taken == 3 and len(learner) == 6
        assert torch.equal(torch.get_rng_state(), state)
        assert torch.equal(target.generate(**inputs, **SAMPLED), plain)


def test_what_was_saved_goes_on(target, draft, expected, tmp_path):
    file, again = tmp_path / "learned", copy.deepcopy(draft)
    with patched(target, draft) as handle, gsd.OnlineLearner(handle, draft, batch=1) as learner:
        with pytest.raises(ValueError, match="no step was taken"):
            learner.save(file)
        steps_of(handle, target, expected, 2)
        learner.save(file)
        saved = bits(draft)
        learner.step()
        later = bits(draft)
        texts = list(learner._texts)
    with patched(target, again) as handle, gsd.OnlineLearner(handle, again, batch=1) as learner:
        learner.load(file)
        assert bits(again) == saved and learner.taken == 2
        learner._texts.extend(texts)
        learner.step()
        assert bits(again) == later  # the optimizer goes on too


def test_what_cannot_learn_is_refused_by_name(target, draft):
    shared = noised(target)
    shared.model.embed_tokens.weight = target.model.embed_tokens.weight
    whole, offloaded = noised(target), noised(target)
    whole.register_parameter("scale", torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False))
    offloaded.lm_head.to("meta")
    with torch.inference_mode():
        frozen = noised(target)
    cases = [
        (None, TypeError, "the history, a LayerSkip"),
        (gsd.LayerSkip(target, mlp=[0], attention=[]), TypeError, "a LayerSkip"),
        (shared, ValueError, "shares weights with the target"),
        (target, ValueError, "shares weights with the target"),
        (whole, ValueError, "quantised"),
        (offloaded, ValueError, "offloaded"),
        (frozen, ValueError, "inference_mode"),
        (tiny(vocab_size=5000), ValueError, "draft: vocabulary"),
        (gsd.DraftHeads(8, 2), ValueError, "hidden_size"),
    ]
    with patched(target, draft) as handle:
        for given, kind, message in cases:
            with pytest.raises(kind, match=message):
                gsd.OnlineLearner(handle, given)
        for name in ("steps", "batch", "texts", "window", "top", "lr"):
            for value in (-1, True, "1", float("nan")):
                with pytest.raises(ValueError, match=f"{name}: expected"):
                    gsd.OnlineLearner(handle, draft, **{name: value})
        assert handle.engines.learner is None
        with gsd.OnlineLearner(handle, draft) as learner:
            with pytest.raises(ValueError, match="a learner already"):
                gsd.OnlineLearner(handle, noised(target))
            other = tiny(seed=4)
            with patched(other, draft) as second, pytest.raises(ValueError, match="another learner changes it"):
                gsd.OnlineLearner(second, draft)
        learner.close()  # once more
        with pytest.raises(ValueError, match="closed"):
            learner.load("nowhere")
    with pytest.raises(ValueError, match="not patched any more"):
        gsd.OnlineLearner(handle, draft)
    with pytest.raises(TypeError, match="handle: expected what patch returns, got Llama"):
        gsd.OnlineLearner(target, draft)
