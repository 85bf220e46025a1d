"""Choices on recorded steps: seeded machines and texts, replayed choice by choice against ``replay.json``.

It is not a judgement of the policies (``test_shape_policy.py`` and ``test_row_policy.py`` are): it holds them as they
are, so that a change of names, files or records shows that it changed nothing, and a change of a constant shows where.
Made anew by ``python tests/policy/test_replay.py``, where choices are meant to change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simulated
import simulated_rows
from simulated import EASY, HOPELESS, USUAL

from gsd_kernels_hf.costs.model import PLAIN, CostModel
from gsd_kernels_hf.policy.row_policy import RowPolicy
from gsd_kernels_hf.policy.shape_policy import ShapePolicy

RECORDED = Path(__file__).with_name("replay.json")
ROWS = np.array([1.0, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 32.0, 128.0])
AGREES = 1e-4  # relative: another processor's libraries sum and take logarithms in their own way


def runs(choices: Iterable[Any]) -> str:
    """``"plain*3 10x1x1x12*5"``: equal choices in a row counted."""
    return " ".join(f"{choice}*{len(list(some))}" for choice, some in groupby(choices))


def slow_at_times(seed: int) -> Callable[[float], float]:
    """A machine that is five times as slow in one step of twenty, and for half a second from the second one on."""
    rng = np.random.default_rng(seed)
    return lambda now: 6.0 if 2.0 <= now < 2.5 else 5.0 if rng.random() < 0.05 else 1.0


def figures_of(costs: CostModel, cached: float, batch: int, names: Iterable[str]) -> list[float]:
    """Predicted seconds of forwards and of all else in steps of these names, and the standard deviations of both."""
    target = costs.target_seconds(batch * ROWS, cached)
    other = costs.other_seconds(batch)[[costs.index[name] for name in names]]
    std = costs.target.std(costs.target_weights(batch * ROWS, cached))
    other_std = costs.other.std(costs.other_weights([costs.index[name] for name in names], batch))
    return [*target, *other, *std, *other_std, float(costs.steps)]


def shapes(machine: str, device: str, *, batch: int = 1, seed: int = 0, told: bool = True, **pair: Any) -> Any:
    """Five generations of one pair: texts that change between and within them, long prompts, a restart from disk."""
    curve = {"float32": simulated.FLOAT32, "bfloat16": simulated.BFLOAT16, "no AMX": simulated.NO_AMX}
    world = simulated.World({**curve, "GPU": simulated.GPU}[machine], USUAL, batch=batch, seed=seed)
    world.slow, world.told = slow_at_times(seed), told
    known, choices, figures = simulated.experience(device=device, **pair), [], []
    for number, texts in enumerate(((USUAL, EASY), (HOPELESS,), (HOPELESS, EASY), (USUAL,), (USUAL, HOPELESS))):
        if number == 3:
            again = simulated.experience(device=device, **pair)
            again.costs.load(json.loads(json.dumps(known.costs.as_dict())))
            again.load(json.loads(json.dumps(known.as_dict())))
            known = again
        policy = ShapePolicy(known, batch=batch, prefix=(200, 700)[number % 2], reads_prompt=number % 2 == 1)
        for text in texts:
            world.read(text)
            choices += world.run(policy, 90)
        policy.end()
        if number not in (2, 4):
            continue
        figures += figures_of(known.costs, policy.cached, batch, policy.names)
        figures += [*policy.expected, *policy.rows, known.wait, known.next_wait]
        figures += [known.acceptance.ratio(kind) for kind in policy.kinds]
        for table in (known.acceptance.hits, known.acceptance.expected):
            figures += [float(counts.sum()) for counts in table.values()]
    by_shape = {shape: name for name, shape in known.shapes.items()}
    return {"choices": runs(by_shape.get(shape, PLAIN) for shape in choices), "figures": figures}


def rows(machine: str, *, batch: int = 1, seed: int = 0, **pair: Any) -> Any:
    """Four generations of one pair without a draft model: a usual text, a hopeless one, an easy one, from disk on."""
    world = simulated_rows.World(simulated_rows.MACHINES[machine], batch=batch, seed=seed)
    known, choices, figures = simulated_rows.experience(**pair), [], []
    for number, name in enumerate(("USUAL", "HOPELESS", "EASY", "USUAL")):
        if number == 2:
            again = simulated_rows.experience(**pair)
            again.costs.load(json.loads(json.dumps(known.costs.as_dict())))
            again.load(json.loads(json.dumps(known.as_dict())))
            known = again
        world.text, world.drafting = getattr(simulated_rows, name), 0.02 if name == "HOPELESS" else 0.001
        policy = RowPolicy(known, batch=batch, prefix=200)
        choices += world.run(policy, 70)
        policy.end()
        if number not in (1, 3):
            continue
        figures += figures_of(known.costs, policy.cached, batch, (PLAIN, known.name))
        figures += [known.tokens, known.rows, known.wait, known.next_wait, float(known.off)]
        posterior = known.edges.posterior
        figures += [*posterior.weights.tolist(), *posterior.covariance.diagonal().tolist()]
    return {"choices": runs(choices), "figures": figures}


REPLAYS: dict[str, Callable[[], Any]] = {
    "shapes, float32": lambda: shapes("float32", "cpu"),
    "shapes, no AMX, batch 3": lambda: shapes("no AMX", "cpu", batch=3, seed=1),
    "shapes, GPU": lambda: shapes("GPU", "cuda", seed=2),
    "shapes, GPU, no draft model": lambda: shapes("GPU", "cuda", seed=3, with_model=False),
    "shapes, bfloat16, no times": lambda: shapes("bfloat16", "cpu", seed=4, told=False),
    "rows, steep": lambda: rows("steep"),
    "rows, flat": lambda: rows("flat", seed=1, bandwidth=0.25),
    "rows, no AMX, batch 2": lambda: rows("no AMX", batch=2, seed=2, free_rows=60.0),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_choices_and_what_is_learned_are_those_that_were_recorded(name):
    recorded, found = json.loads(RECORDED.read_text())[name], REPLAYS[name]()
    assert found["choices"] == recorded["choices"]
    assert found["figures"] == pytest.approx(recorded["figures"], rel=AGREES, abs=1e-12)


if __name__ == "__main__":
    found = {name: replay() for name, replay in REPLAYS.items()}
    for replay in found.values():
        replay["figures"] = [float(f"{value:.12g}") for value in replay["figures"]]
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(replay)}" for name, replay in found.items())
    RECORDED.write_text(f"{{\n{lines}\n}}\n")
