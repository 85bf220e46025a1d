"""The first 64 tokens of a pair that nobody ran, on simulated machines: hardly slower than those of one that did run.

Counts of steps by shape and of rows, priced by what the simulated machine takes: no clock is read.
"""

from __future__ import annotations

import numpy as np
import pytest
import simulated
import simulated_rows
from simulated import EASY, HOPELESS, MACHINES, USUAL

from gsd_kernels_hf.policy.row_policy import RowPolicy
from gsd_kernels_hf.policy.shape_policy import ShapePolicy

TOKENS = 64
TEXTS = {"easy": EASY, "usual": USUAL, "hopeless": HOPELESS}
FREE_ROWS = {"steep": 8.0, "float32": 9.0, "no AMX": 6.5}  # as the speeds of such processors would have been measured


def by_shapes(world: simulated.World, policy: ShapePolicy, tokens: float = TOKENS) -> tuple[float, float]:
    """Tokens a second of a text, and the share of its seconds that trials lost."""
    brought = seconds = lost = 0.0
    while brought < tokens:
        home = policy.return_to
        shape = world.step(policy)
        taken, more = sum(world.takes(shape)), world.brings(shape)
        brought, seconds = brought + more, seconds + taken
        if home is not None:
            lost += max(0.0, taken - more / world.rate(policy.configs[home]))
    policy.end()
    return brought / seconds, lost / seconds


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("machine", MACHINES)
def test_beside_a_draft_model(machine, text):
    """Also where the pair that ran did so on usual texts; no draft is right in the hopeless one."""
    ratios, lost = [], []
    for seed in range(3):
        world, policy, _ = simulated.start(machine, TEXTS[text], seed=seed)
        first, share = by_shapes(world, policy)
        lost.append(share)
        other, policy, warm = simulated.start(machine, USUAL, seed=100 + seed)
        by_shapes(other, policy, 600)
        world, _, _ = simulated.start(machine, TEXTS[text], seed=seed)
        ratios.append(first / by_shapes(world, ShapePolicy(warm, prefix=200))[0])
    assert np.mean(ratios) >= (0.9 if text == "hopeless" else 0.95), ratios
    assert np.mean(lost) <= 0.05, lost


@pytest.mark.parametrize("machine", FREE_ROWS)
def test_by_the_history_alone(machine):
    """Each kind of text within a tenth, all together within a twentieth."""
    ratios = []
    for text in ("EASY", "USUAL", "HOPELESS"):
        rates = np.zeros((2, 2))  # tokens, seconds; of a first text, and of one of a pair that ran
        for seed in range(3):
            for warmed in (0, 1):
                pair = simulated_rows.experience(free_rows=FREE_ROWS[machine])
                kinds = [("USUAL", 100 + seed, 400)] * warmed + [(text, seed, TOKENS)]
                for kind, number, tokens in kinds:
                    world = simulated_rows.World(
                        simulated_rows.MACHINES[machine], getattr(simulated_rows, kind), seed=number
                    )
                    policy = RowPolicy(pair, prefix=200)
                    while world.tokens < tokens:
                        world.step(policy)
                    policy.end()
                rates[warmed] += world.tokens, world.idle
        ratios.append(rates[0, 0] / rates[0, 1] * rates[1, 1] / rates[1, 0])
    assert min(ratios) >= 0.9 and np.mean(ratios) >= 0.95, ratios
