"""The policy of rows, on machines and texts of numbers: near the best fixed count, off where that is best, kept."""

from __future__ import annotations

import functools
import logging
import math
import re

import numpy as np
import pytest
from simulated import BFLOAT16, DISTURBANCES, NO_AMX
from simulated_rows import EASY, FLAT, HOPELESS, MACHINES, MEAGRE, STEEP, USUAL, World, experience

from gsd_kernels_hf.costs.model import PLAIN
from gsd_kernels_hf.policy.base import Observation
from gsd_kernels_hf.policy.row_policy import KNOWN_CHOICE_STEPS, NEW_TEXT_MAX_WAIT_STEPS, RowExperience, RowPolicy
from gsd_kernels_hf.policy.settings import Automatic

SETTINGS, FIRST_WAIT = Automatic(), RowExperience.first_wait


@pytest.mark.parametrize("free_rows", [4.0, 60.0])
@pytest.mark.parametrize("bandwidth", [1.0, *(pytest.param(other, marks=pytest.mark.many) for other in (0.25, 4.0))])
@pytest.mark.parametrize("machine", MACHINES)
def test_as_fast_as_the_best_fixed_number_of_rows(machine, bandwidth, free_rows):
    """Whatever was believed of the machine before."""
    found = []
    for seed in range(3):
        world = World(MACHINES[machine], seed=seed)
        policy = RowPolicy(experience(bandwidth, free_rows), prefix=200)
        world.run(policy, 60)
        found.append(world.share(policy, 300))
    assert np.mean(found) >= 0.97 and min(found) >= 0.92, found


@functools.cache
def undisturbed_rate(machine: str, disturbance: str | None) -> float:
    """Tokens a second that the choices of three generations would have on an undisturbed machine."""
    tokens = seconds = 0.0
    for seed in range(4):
        world, pair = World(MACHINES[machine], MEAGRE, seed=seed), experience()
        if disturbance is not None:
            world.slow = DISTURBANCES[disturbance]
        for _ in range(3):
            policy = RowPolicy(pair, prefix=200)
            world.run(policy, 100)
            policy.end()
        tokens, seconds = tokens + world.tokens, seconds + world.idle
    return tokens / seconds


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("machine", ["steep", "no AMX"])
def test_other_programs_do_not_change_the_choices(machine, disturbance):
    """They slow steps down whatever those forward, which is no cost of speculation nor of a number of rows."""
    rate, alone = undisturbed_rate(machine, disturbance), undisturbed_rate(machine, None)
    assert rate > (0.88 if disturbance == "by eight steps" else 0.92) * alone


def test_rows_follow_the_machine():
    """It becomes another: 11 rows that were expensive cost what one does."""
    world, policy = World(STEEP), RowPolicy(experience(), prefix=200)
    steep = world.run(policy, 200)[-100:]
    world.target = FLAT
    flat = world.run(policy, 200)[-100:]
    assert np.mean(flat) > np.mean(steep) + 2


def test_sequences_share_the_rows_of_a_forward():
    """A batch of eight has eight times the rows, so each of its sequences has fewer."""
    one, eight = World(BFLOAT16), World(BFLOAT16, batch=8)
    alone = one.run(RowPolicy(experience(), prefix=200), 150)[-80:]
    policy = RowPolicy(experience(), batch=8, prefix=200)
    together = eight.run(policy, 150)[-80:]
    assert np.mean(together) < np.mean(alone)
    assert eight.share(policy, 200) >= 0.95


def test_off_where_nothing_is_right_and_on_again():
    """Plain decoding where drafts are never right, tried again after a while, more and more seldom."""
    world, pair = World(NO_AMX, HOPELESS, drafting=0.02), experience()
    policy = RowPolicy(pair, prefix=200)
    rows = world.run(policy, 400)
    assert rows[0] > 0 and rows.count(0) > 300 and pair.next_wait > FIRST_WAIT
    tries = "".join("x" if n else " " for n in rows[60:]).split()
    assert tries and max(map(len, tries)) <= SETTINGS.retry_steps + 1
    world.text = EASY
    rows = world.run(policy, 600)
    assert all(rows[-50:]) and np.mean(rows[-50:]) > 4
    assert pair.next_wait == FIRST_WAIT


def test_switches_are_logged_with_the_figures_that_caused_them(caplog):
    world, policy = World(NO_AMX, HOPELESS, drafting=0.02), RowPolicy(experience(), prefix=200)
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        rows = world.run(policy, 200)
    lines = [record.getMessage() for record in caplog.records]
    figures = (
        r"auto: speculation (off|on) after (\d+) steps: (\S+) tokens/s lately by \S+ tokens a step, plain has (\S+)"
    )
    found = [re.fullmatch(figures, line).groups() for line in lines]
    switches = [step for step in range(1, 200) if (rows[step] == 0) != (rows[step - 1] == 0)]
    assert [int(step) for _, step, *_ in found] == switches and len(switches) > 2
    assert [how for how, *_ in found] == (["off", "on"] * len(found))[: len(found)]
    assert float(found[0][2]) < float(found[0][3]), "plain decoding had more tokens a second"


def test_a_new_text_tries_again_soon():
    world, pair = World(NO_AMX, HOPELESS, drafting=0.02), experience()
    first = RowPolicy(pair, prefix=200)
    world.run(first, 200)
    first.end()
    assert pair.off
    world.text = EASY
    rows = world.run(RowPolicy(pair, prefix=200), 60)
    assert rows[0] == 0 and all(rows[NEW_TEXT_MAX_WAIT_STEPS + 2 :])


def test_never_off_by_a_guess():
    """A prior that holds many rows to be expensive does not end speculation before one row was timed."""
    world = World(FLAT, USUAL)
    assert all(world.run(RowPolicy(experience(4.0, 1.0), prefix=200), 100))


def test_the_next_process_begins_where_this_one_ended():
    world, pair, saved = World(STEEP), experience(), []
    policy = RowPolicy(pair, prefix=200, saver=type("Saver", (), {"save": lambda self: saved.append(1)})())
    assert not pair.known
    last = world.run(policy, 200)[-40:]
    policy.end()
    assert saved == [1]
    other = experience()
    other.costs.load(pair.costs.as_dict())
    other.load(pair.as_dict())
    assert other.known and other.as_dict() == pair.as_dict()
    following = RowPolicy(other, prefix=200)
    assert following.next_choice == KNOWN_CHOICE_STEPS
    assert abs(np.mean(world.run(following, 40)) - np.mean(last)) < 2.0


@pytest.mark.parametrize(
    "damage",
    [
        {"tokens": 0.5},
        {"tokens": math.nan},
        {"rows": 33.0},
        {"next_wait": 0},
        {"wait": -1},
        {"edges": {}},
        {"off": None},
    ],
)
def test_damaged_experience_changes_nothing(damage):
    pair = experience()
    before = pair.as_dict()
    data = {**before, **damage}
    if damage == {"off": None}:
        del data["off"]
    with pytest.raises((ValueError, KeyError, TypeError)):
        pair.load(data)
    assert pair.as_dict() == before


def test_unknown_times_teach_nothing():
    pair = experience()
    policy = RowPolicy(pair)
    for _ in range(40):
        policy.observe(Observation(None, [2], 4, {}))
    policy.end()
    assert pair.costs.steps == 0 and not pair.known


def test_one_hiccup_hardly_counts():
    world, pair = World(STEEP), experience()
    policy = RowPolicy(pair, prefix=200)
    world.run(policy, 100)
    before = pair.costs.target_seconds(np.array([6.0]), 500)[0]
    policy.observe(Observation(None, [2], 6, {}, 1.0, 0.5))
    world.run(policy, 20)
    assert pair.costs.target_seconds(np.array([6.0]), 500)[0] < 1.1 * before
    assert PLAIN in pair.costs.index and not policy.off
