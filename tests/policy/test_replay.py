"""Choices on recorded steps: seeded machines and texts, replayed choice by choice against ``replay.json``.

It is not a judgement of the policy (``test_policy.py`` is): it holds it as it is, so that a change of names, files or
records shows that it changed nothing, and a change of a constant shows where. Made anew by ``python
tests/policy/test_replay.py``, where choices are meant to change.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulated import EASY, HOPELESS, MACHINES, USUAL, World, experience

from gsd_kernels_hf.policy.learning import LearningPolicy

RECORDED = Path(__file__).with_name("replay.json")
ROWS = np.array([1.0, 2.0, 5.0, 8.0, 12.0, 32.0, 128.0])
AGREES = 1e-4  # relative: another machine's libraries round otherwise


def replay(machine: str, batch: int, told: bool = True) -> dict[str, Any]:
    """Four texts of one pair, the third of another process, on a machine that is five times as slow now and then."""
    known, choices = experience(machine), []
    world, slow = World(MACHINES[machine][0], batch=batch), np.random.default_rng(1)
    world.slow, world.told = lambda number: 5.0 if slow.random() < 0.05 else 1.0, told
    for number, text in enumerate((USUAL, HOPELESS, EASY, USUAL)):
        if number == 2:
            again = experience(machine)
            again.costs.load(known.costs.as_dict())
            again.load(known.as_dict())
            known = again
        world.text = text
        policy = LearningPolicy(known, batch=batch, prefix=(200, 700)[number % 2], reads_prompt=number % 2 == 1)
        for _ in range(60):
            choices.append(f"{policy.names[policy.current]}" if policy.selector is None else "")
            choices[-1] += f":{world.step(policy)}"
        policy.end()
    figures = [*policy.tokens, *policy.seconds, *known.means, *known.waits, *known.costs.target_std(ROWS)]
    figures += [*known.costs.target_seconds(ROWS, policy.cached), *known.edges.posterior.weights.tolist()]
    told_choices = " ".join(f"{choice}*{len(list(some))}" for choice, some in groupby(choices))
    return {"choices": told_choices, "figures": [float(f"{value:.8g}") for value in figures]}


REPLAYS = {
    "shapes, float32": ("float32", 1),
    "shapes, no AMX, batch 3": ("no AMX", 3),
    "shapes, GPU": ("GPU", 1),
    "shapes, bfloat16, no times": ("bfloat16", 1, False),
    "rows, steep": ("rows, steep", 1),
    "rows, no AMX, batch 2": ("rows, no AMX", 2),
}


@pytest.mark.parametrize("name", REPLAYS)
def test_choices_and_what_is_learned_are_those_that_were_recorded(name):
    recorded, found = json.loads(RECORDED.read_text())[name], replay(*REPLAYS[name])
    assert found["choices"] == recorded["choices"]
    assert found["figures"] == pytest.approx(recorded["figures"], rel=AGREES, abs=1e-9)


if __name__ == "__main__":
    lines = (f"{json.dumps(name)}: {json.dumps(replay(*each))}" for name, each in REPLAYS.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
