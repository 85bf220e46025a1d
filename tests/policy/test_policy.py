"""Six properties of the automatic policy, on machines and texts of numbers: no clock is read."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
from rotated import rotated
from simulated import DISTURBANCES, EASY, HOPELESS, LOOKED_UP, MACHINES, USUAL, World, experience, start

from gsd_kernels.config import PLAIN
from gsd_kernels_hf.policy.fixed import FixedPolicy
from gsd_kernels_hf.policy.learning import FIRST_WAIT_STEPS, KNOWN_CHOICE_STEPS, LearningPolicy
from gsd_kernels_hf.policy.settings import Automatic

SETTINGS = Automatic()
TEXTS = {"easy": EASY, "usual": USUAL, "hopeless": HOPELESS}


def share(world: World, policy: LearningPolicy, steps: int) -> float:
    """Tokens a second of steps to come over those of the best choice."""
    tokens, seconds = world.tokens, world.idle
    world.run(policy, steps)
    rate = (world.tokens - tokens) / world.batch / (world.idle - seconds)
    return rate / world.best(list(policy.experience.shapes.values()))


@pytest.mark.parametrize(("machine", "text", "bandwidth"), rotated(MACHINES, list(TEXTS), (0.25, 1.0, 4.0)))
def test_near_the_best_choice_whatever_was_believed_of_the_machine(machine, text, bandwidth):
    found = []
    for seed in range(3):
        world, policy = start(machine, TEXTS[text], bandwidth, seed=seed)
        world.run(policy, 80)
        found.append(share(world, policy, 250))
    assert np.mean(found) >= 0.85, found


SEVERAL = ("bfloat16", "GPU", "rows, steep", "rows, no AMX")


@pytest.mark.parametrize(
    ("disturbance", "machine"), [(name, SEVERAL[(i + k) % 4]) for i, name in enumerate(DISTURBANCES) for k in range(2)]
)
def test_other_programs_hardly_change_the_choices(disturbance, machine):
    """They slow steps down whatever those forward, which is no cost of speculation nor of a number of rows."""
    rates = []
    for slow in (None, DISTURBANCES[disturbance]):
        tokens = seconds = 0.0
        for seed in range(2):
            world, policy = start(machine, seed=seed)
            world.slow = slow or world.slow
            for _ in range(2):
                world.run(policy, 120)
                policy.end()
                policy = LearningPolicy(policy.experience, prefix=200)
            tokens, seconds = tokens + world.tokens, seconds + world.idle
        rates.append(tokens / seconds)
    assert rates[1] >= 0.8 * rates[0]


@pytest.mark.parametrize("machine", ["bfloat16", "rows, no AMX"])
def test_off_where_nothing_is_right_tried_again_seldom_and_on_where_it_pays(machine, caplog):
    world, policy = start(machine, HOPELESS, step=0.02)
    with caplog.at_level(logging.INFO, "gsd_kernels"):
        rows = world.run(policy, 600)
    assert rows[0] > 0 and rows[:40].count(0) > 0 and sum(map(bool, rows[100:])) < 0.1 * 500
    assert any(rows[60:]) and policy.experience.waits[1] > FIRST_WAIT_STEPS
    line = r"auto: speculation (off|on) after (\d+) steps: \S+ has (\S+) tokens/s by \S+ tokens a step, \S+ (\S+) by .*"
    found = [re.fullmatch(line, record.getMessage()).groups() for record in caplog.records]
    assert [how for how, *_ in found] == (["off", "on"] * len(found))[: len(found)]
    assert float(found[0][2]) > float(found[0][3]), "plain decoding had more tokens a second"
    world.text = EASY
    policy.end()
    policy = LearningPolicy(policy.experience, prefix=200)  # a new text is tried soon
    assert any(world.run(policy, 40)) and all(world.run(policy, 300)[-100:])


def test_a_draft_model_that_does_not_pay_is_left_out_and_gets_another_chance():
    world, policy = start("bfloat16", LOOKED_UP, level=0.02)
    world.run(policy, 150)
    assert policy.shape().depth == 0 and isinstance(policy.without_model(reuses=True), FixedPolicy)
    world.text, world.level = ((1.0, 0.95, 0.0),), 0.0012
    rows = [policy.shape() for _ in range(600) if world.step(policy) is not None]
    assert any(shape is not None and shape.depth for shape in rows[-50:])


@pytest.mark.parametrize("machine", ["bfloat16", "GPU", "rows, steep"])
def test_the_next_text_and_the_next_process_go_on_where_this_one_ended(machine):
    saved = []
    world, policy = start(machine)
    policy.saver = type("Saver", (), {"save": lambda self: saved.append(1)})()
    rows = world.run(policy, 200)
    policy.end()
    last, again = policy.shape(), experience(machine)
    again.costs.load(policy.experience.costs.as_dict())
    again.load(policy.experience.as_dict())
    assert saved == [1] and again.costs.steps == policy.experience.costs.steps > 150
    for known in (policy.experience, again):
        following = LearningPolicy(known, prefix=200)
        assert following.shape() == last and following.next_choice == KNOWN_CHOICE_STEPS
        assert np.mean(world.run(following, 60)) == pytest.approx(np.mean(rows[-60:]), abs=4.0)


@pytest.mark.parametrize("machine", MACHINES)
def test_without_times_it_goes_by_the_prior_and_what_was_accepted(machine):
    """Captured steps on a GPU: seconds are 0."""
    world, policy = start(machine, EASY)
    world.told = False
    assert all(world.run(policy, 120)) and policy.experience.costs.steps == 0
    assert share(world, policy, 40) >= 0.7


def test_behind_a_long_prompt_the_first_step_is_plain_where_a_source_reads_it():
    shapes = []
    for prefix, reads in ((SETTINGS.long_prompt_tokens - 1, True), (SETTINGS.long_prompt_tokens, True), (9999, False)):
        pair = experience()
        policy = LearningPolicy(pair, prefix=prefix, reads_prompt=reads)
        world = World(MACHINES["bfloat16"][0])
        shapes.append([policy.shape() for _ in range(3) if world.step(policy) is not None])
    opened = shapes[1]
    assert None not in shapes[0] + shapes[2]
    assert LearningPolicy(experience(), prefix=9999, reads_prompt=True).shape() is None and opened
    policy = LearningPolicy(experience(), prefix=9999, reads_prompt=True)
    policy.end()
    assert policy.names[policy.experience.last[0]] != PLAIN, "a text of one step leaves what would have followed"


@pytest.mark.parametrize("machine", ["no AMX", "rows, no AMX"])
def test_sequences_share_the_rows_of_a_forward(machine):
    """A batch of eight has eight times the rows, so each of its sequences has fewer."""
    rows = []
    for batch in (1, 8):
        world, policy = start(machine, batch=batch)
        rows.append(np.mean(world.run(policy, 150)[-80:]))
        assert share(world, policy, 150) >= 0.85
    assert rows[1] < rows[0]
