"""Interruptions: the text is the target's own before and after.

Every case follows from its seed, which is its name: ``pytest tests/engine/test_fuzz.py -k "interruption and 17"``.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import fuzzing
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gsd_kernels as gsd

pytestmark = pytest.mark.quick

INTERRUPTS, EVERYWHERE = 120, 15
torch.set_num_threads(1)


def sequences(out: Any) -> torch.Tensor:
    return out if isinstance(out, torch.Tensor) else out.sequences


def plain(name: str, shared: dict[str, Any], own: dict[str, Any]) -> Any:
    """transformers' own greedy text, or what our own plain decoding draws by the same seed."""
    if not shared["do_sample"]:
        # In one piece: transformers 5.0 refuses to chunk prompts, and the text does not depend on it.
        return fuzzing.oracle(name).generate(**{k: v for k, v in shared.items() if k != "prefill_chunk_size"})
    theirs = ("draft_sources", "graph_config", "assistant_model", "draft_heads", "reference_ids", "streamer")
    rest = {k: v for k, v in own.items() if k not in theirs}
    return gsd.generate(fuzzing.oracle(name), **shared, **rest, graph_config="plain")


@contextlib.contextmanager
def patched(model: Any, own: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """``model`` patched with its sources; what is left to say at a call."""
    names = ("assistant_model", "graph_config", "draft_heads", "criterion")
    with gsd.patch(model, **{name: own[name] for name in names if name in own}):
        yield {name: value for name, value in own.items() if name not in names}


class Alarm:
    """Goes off at the ``n``-th ring."""

    def __init__(self, n: int, error: type[BaseException]) -> None:
        self.left, self.error, self.rang = n, error, False

    def __call__(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == 0:
            self.rang = True
            raise self.error("stop")


@contextlib.contextmanager
def expecting(error: type[BaseException]) -> Iterator[None]:
    """The interruption itself, or the refusal of a processor whose copying it interrupted."""
    try:
        yield
    except error:
        pass
    except ValueError as refusal:
        if not isinstance(refusal.__cause__, error):
            raise


class Ops(TorchDispatchMode):
    """Rings at every operator."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__()
        self.alarm = alarm

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.alarm()
        return func(*args, **(kwargs or {}))


class Ringing(fuzzing.LogitsProcessor):
    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm

    def __deepcopy__(self, memo):
        return self  # one count for all rows

    def __call__(self, input_ids, scores, **kwargs):
        self.alarm()
        return scores


class RingingCriterion(fuzzing.StoppingCriteria):
    def __init__(self, alarm: Alarm) -> None:
        self.alarm = alarm

    def __call__(self, input_ids, scores, **kwargs):
        self.alarm()
        return torch.zeros(len(input_ids), dtype=torch.bool)


class RingingStreamer(fuzzing.Ears):
    def __init__(self, alarm: Alarm) -> None:
        super().__init__()
        self.put = alarm


ERRORS = (KeyboardInterrupt, RuntimeError, SystemExit, StopIteration, MemoryError)


@contextlib.contextmanager
def ringing(rng: random.Random, alarm: Alarm, models: list[Any], call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The call with the alarm somewhere in it."""
    places = ["hook", "hook", "op", "op", "op", "processor", "criterion", "observer"]
    place = rng.choice(places + ["streamer"] * ("streamer" in call))
    if place == "hook":
        alarm.left = rng.randint(1, 12)
        module = rng.choice([m for _, m in rng.choice(models).named_modules()])
        add = module.register_forward_hook if rng.random() < 0.5 else module.register_forward_pre_hook
        handle = add(alarm)
        try:
            yield call
        finally:
            handle.remove()
    elif place == "op":
        alarm.left = rng.randint(1, 1500)
        with Ops(alarm):
            yield call
    elif place == "processor":
        yield {**call, "logits_processor": [*call.get("logits_processor", ()), Ringing(alarm)]}
    elif place == "criterion":
        yield {**call, "stopping_criteria": [*call.get("stopping_criteria", ()), RingingCriterion(alarm)]}
    elif place == "streamer":
        yield {**call, "streamer": RingingStreamer(alarm)}
    else:
        yield {**call, "observer": alarm}


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.many if seed >= EVERYWHERE else ()) for seed in range(INTERRUPTS)]
)
def test_the_call_after_an_interruption_is_right(seed):
    name, shared, own = fuzzing.random_call(20_000 + seed)
    rng, model = random.Random(seed), fuzzing.target(name)
    expected = sequences(plain(name, shared, own))
    models, error = fuzzing.models_of(name, own), rng.choice(ERRORS)
    stay_patched = rng.random() < 0.3
    what = f"seed {seed}: {error.__name__} in {name} {shared} {own}"
    with patched(model, own) if stay_patched else contextlib.nullcontext(own) as rest:
        call = model.generate if stay_patched else (lambda **kwargs: gsd.generate(model, **kwargs))
        before, weights, alarm = fuzzing.state_of(models), fuzzing.weights_of(models), Alarm(rng.randint(1, 4), error)
        with expecting(error), ringing(rng, alarm, models, {**shared, **rest}) as interrupted:
            out = call(**interrupted)
            told = model.generate.handle.stats.why if stay_patched else None
            assert not alarm.rang or error.__name__ in str(told), f"the error was swallowed, {what}"
            assert torch.equal(sequences(out), expected), what
        assert fuzzing.state_of(models) == before, what
        assert all(map(torch.equal, fuzzing.weights_of(models), weights)), what
        if "streamer" in rest:
            rest["streamer"].heard.clear()
        assert torch.equal(sequences(call(**shared, **rest)), expected), what
