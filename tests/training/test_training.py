"""What is learned: losses, and learning while serving."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from models import noised, prompts, tiny
from training.options import options_for
from transformers import AutoModelForCausalLM

import gsd_kernels as gsd
from gsd_kernels_train import loop
from gsd_kernels_train.distill import Distillation
from gsd_kernels_train.heads import HeadTraining
from gsd_kernels_train.job import load_target
from gsd_kernels_train.loop import Budget, Checkpoints, Interval, learning_rate_factor
from gsd_kernels_train.streams import Streams
from gsd_kernels_train.text import read_text

# The losses of drafts and heads, and the measures before and after.


@pytest.fixture(scope="module")
def windows(folder):
    _, tokenizer = load_target(options_for(folder))
    stream = read_text([folder / "text.txt"], [], tokenizer, 12).training
    return Streams([(1.0, stream)], 0, 36).batch(0, 12)[0]


def distillation(folder, **changed):
    options = options_for(folder, **changed)
    target, tokenizer = load_target(options)
    draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float64)
    return Distillation(options, target, tokenizer, draft, tokenizer, torch.float32)


def head_training(folder, **changed):
    options = options_for(folder, **changed)
    target, _ = load_target(options)
    trained = HeadTraining(options, target, 3, 1, torch.float32)
    for parameter in trained.module.parameters():
        torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(1))
    return trained


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_drafts_loss_is_divergence_and_likelihood(folder, windows, weight):
    trained = distillation(folder, token_level=weight)
    with torch.no_grad():
        p, q = (model(windows[:, :-1]).logits.softmax(-1) for model in (trained.target, trained.module))
    expected = []
    for row in range(windows.shape[0]):
        for place in range(12):
            divergence = (p[row, place] * (p[row, place] / q[row, place]).log()).sum()
            expected.append(weight * divergence - (1 - weight) * q[row, place, windows[row, place + 1]].log())
    torch.testing.assert_close(trained.loss(windows).detach(), torch.stack(expected).mean())


@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_the_heads_loss_compares_with_the_token_that_each_is_for(folder, windows, weight):
    trained = head_training(folder, token_level=weight)
    target, heads = trained.target, trained.module
    expected = 0.0
    with torch.no_grad():
        for k in range(3):
            losses = []
            for row in windows:
                for place in range(12 - 3):
                    seen = target(row[None, : place + 1], output_hidden_states=True).hidden_states[-1][:, -1]
                    q = heads(seen, target.lm_head)[0, k].softmax(-1)
                    p = target(row[None, : place + k + 2]).logits[0, -1].softmax(-1)
                    divergence = (p * (p / q).log()).sum()
                    losses.append(weight * divergence - (1 - weight) * q[row[place + k + 2]].log())
            expected += 0.8**k * torch.stack(losses).mean()
    torch.testing.assert_close(trained.loss(windows).detach(), expected)


# The training loop: schedule, checkpoints, losses that are not finite.


class Dropping(torch.nn.Module):
    """A model whose training draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def losses(self, step, _):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        yield torch.nn.functional.dropout(self.linear(x), 0.5).square().mean()


def train_dropping(folder, *, losses=None, every=4, steps=20):
    torch.manual_seed(0)
    model = Dropping()
    optimizers = loop.build_optimizers(model, matrix_lr=0.01, lr=0.01)
    budget, interval = Budget(steps=steps), Interval(steps=every)
    given = (budget, Checkpoints(folder))
    loop.train("test", model, losses or model.losses, optimizers, *given, tokens_per_step=4, every=interval)
    return model.state_dict()


def same_state(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    whole = train_dropping(tmp_path / "whole")
    save, calls = torch.save, []

    def torn(state, file):
        calls.append(file)
        if len(calls) == 3:
            Path(file).write_bytes(b"half a state")
            raise KeyboardInterrupt
        save(state, file)

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        train_dropping(tmp_path / "cut")
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "cut").steps() == [8]
    assert same_state(train_dropping(tmp_path / "cut"), whole)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_checkpoint(tmp_path):
    def losses(step, progress):
        torch.manual_seed(step)
        loss = torch.ones((), requires_grad=True)
        yield loss * (float("nan") if step == 10 else 1.0)

    with pytest.raises(RuntimeError, match=r"test: the loss is nan at step 10; the checkpoint of step 8 stays"):
        train_dropping(tmp_path, losses=losses)
    assert Checkpoints(tmp_path).steps() == [8] and Checkpoints(tmp_path).load()["record"]["steps"] == 8


def test_the_learning_rate_rises_stays_and_falls_to_zero():
    rates = [learning_rate_factor(progress, 0.1, 0.5) for progress in (0, 0.05, 0.2, 0.5, 0.75, 1.0)]
    assert 0 < rates[0] < rates[1] < 1 and rates[2:4] == [1.0, 1.0] and rates[4:] == [0.5, 0.0]
    assert learning_rate_factor(0.3, 0.0, 0.0) == 1.0


# Drafts that learn while serving: the same text, more of it accepted, bounded, undone bit for bit, whole on disk.


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
