"""Wrong arguments and interruptions: the text is the target's own before and after.

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
from gsd_kernels_hf.validate.options import OF_DICTS

pytestmark = pytest.mark.quick

WRONG, INTERRUPTS = 110, 120
torch.set_num_threads(1)


def seeds(count: int) -> list[Any]:
    """All but the first fifteen are slow together; a third runs everywhere."""
    slow, many = [pytest.mark.slow], [pytest.mark.slow, pytest.mark.many]
    marks = [(), *(slow if seed < count // 3 else many for seed in range(1, count))]
    return [pytest.param(seed, marks=() if seed < 15 else marks[seed]) for seed in range(count)]


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


# ---- wrong arguments


def wrong(rng: random.Random, vocab: int, batch: int, length: int) -> tuple[str, Any]:
    """An argument's name and a value that it cannot have."""
    ids = torch.randint(3, vocab, (batch, length))
    ones = torch.ones_like(ids)
    choices: dict[str, list[Any]] = {
        "graph_config": ["forest", "", {"depth": 3}, 7, 2.5, ("tree",)],
        "seed": ["7", 1.5, True, 2**64, -(2**64), [1]],
        "backend": ["tpu", "", 3, None],
        "draft_sources": [("oracle",), "history", (), ("model", 3), ("layer_skip",)],
        "draft_heads": ["heads", 3, torch.nn.Linear(2, 2)],
        "assistant_model": ["gpt2", 3, torch.nn.Linear(2, 2)],
        "criterion": ["lossy", 3, None, ["exact"]],
        "reference_ids": ["text", [3, 4], ids[0].float(), torch.tensor([vocab]), torch.tensor([-1]), ids[None]],
        "input_ids": [ids.float(), ids + vocab, ids - vocab, ids[0], ids[:, :0], ids.tolist(), ids.bool()],
        "attention_mask": [ones[:, 1:], ones.tolist(), torch.cat([ones[:, 1:], 0 * ones[:, :1]], 1), "mask"],
        "num_beams": [2, 5],
        "max_new_tokens": [0, -3],
        "max_length": [-1, 0],
        "temperature": [0.0, -1.0],
        "top_p": [-0.1, -2.0],
        "top_k": [-1],
        "min_p": [-0.5, 1.5],
        "penalty": [0.0, -2.0],  # transformers' name for it in the refusal
        "penalty_alpha": [0.6],
        "guidance_scale": [2.0],
        "prompt_lookup_num_tokens": [3],
        "output_hidden_states": [True],
        "output_attentions": [True],
        "cache_implementation": ["quantized", "offloaded"],
        "past_key_values": [filled()],
        "inputs_embeds": [torch.zeros(batch, length, 32)],
        "position_ids": [ones],
        "dola_layers": ["high"],
        "stop_strings": [["x"]],
        "invented": [3, "x"],
    }
    name = rng.choice(list(choices))
    return name, rng.choice(choices[name])


def filled() -> Any:
    cache = fuzzing.transformers.DynamicCache()
    fuzzing.oracle("llama")(torch.tensor([[3, 4]]), past_key_values=cache, use_cache=True)
    return cache


@pytest.mark.parametrize("seed", seeds(WRONG))
def test_a_wrong_argument_is_named_and_changes_nothing(seed):
    name, shared, own = fuzzing.random_call(10_000 + seed)
    rng, model = random.Random(seed), fuzzing.target(name)
    good = {**shared, **own}
    vocab = fuzzing.TARGETS[name][1]["vocab_size"]
    argument, value = wrong(rng, vocab, *shared["input_ids"].shape)
    bad = {**good, "repetition_penalty" if argument == "penalty" else argument: value}
    for other in refused_without(argument):
        bad.pop(other, None)
    if argument in ("temperature", "top_p", "top_k", "min_p", "seed"):
        bad["do_sample"] = True
    if argument in OF_DICTS:  # without effect on token ids
        bad["return_dict_in_generate"] = True
    expected = sequences(plain(name, shared, own))
    models = fuzzing.models_of(name, own)
    stay_patched = rng.random() < 0.3
    with patched(model, own) if stay_patched else contextlib.nullcontext(own) as rest:
        call = model.generate if stay_patched else (lambda **kwargs: gsd.generate(model, **kwargs))
        before, weights = fuzzing.state_of(models), fuzzing.weights_of(models)
        what = f"seed {seed}: {argument}={value!r} in {name} {good}"
        with pytest.raises((ValueError, TypeError), match=argument):
            call(**bad)
            print("not refused:", what)
        assert fuzzing.state_of(models) == before, what
        assert all(map(torch.equal, fuzzing.weights_of(models), weights)), what
        if "streamer" in rest:
            rest["streamer"].heard.clear()
        assert torch.equal(sequences(call(**shared, **rest)), expected), what


def refused_without(argument: str) -> tuple[str, ...]:
    """Options that would be refused first, or give the wrong value a meaning."""
    others = {
        "draft_sources": ("assistant_model", "draft_heads", "reference_ids"),
        "max_length": ("max_new_tokens", "min_new_tokens", "min_length"),
        "max_new_tokens": ("min_new_tokens", "max_length", "min_length"),
        "stop_strings": ("tokenizer",),
    }
    return others.get(argument, ())


# ---- interruptions


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


@pytest.mark.parametrize("seed", seeds(INTERRUPTS))
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
