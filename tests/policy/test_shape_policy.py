"""The policy of shapes on simulated machines and texts: what it ends with, and what does not scare it away."""

from __future__ import annotations

import itertools
import logging
import re
from collections import Counter

import numpy as np
import pytest
from simulated import BFLOAT16, DISTURBANCES, EASY, HOPELESS, KNOWN, MACHINES, USUAL, World, experience, start

import gsd_kernels as gsd
from gsd_kernels_hf.costs.model import PLAIN
from gsd_kernels_hf.policy.base import Observation
from gsd_kernels_hf.policy.experience import MAX_CHOICE_INTERVAL_STEPS
from gsd_kernels_hf.policy.fixed import FixedPolicy
from gsd_kernels_hf.policy.settings import Automatic
from gsd_kernels_hf.policy.shape_policy import KNOWN_CHOICE_STEPS, TRIAL_STEPS, ShapePolicy

SETTINGS = Automatic()


def usual_rate(world: World, shapes) -> float:
    """The rate of the shape that steps mostly have."""
    return world.rate(Counter(shapes).most_common(1)[0][0])


@pytest.mark.parametrize("bandwidth", [1.0, *(pytest.param(other, marks=pytest.mark.many) for other in (0.25, 4.0))])
@pytest.mark.parametrize("text", [EASY, USUAL, HOPELESS], ids=["easy", "usual", "hopeless"])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_ends_with_the_best_shape(machine, text, bandwidth):
    """Whatever the bandwidth was believed to be: seeds within 3% of the best on average, each within 11%."""
    found = []
    for seed in range(4):
        world, policy, pair = start(machine, text, bandwidth, seed=seed)
        shapes = world.run(policy, 300)[-80:]
        found.append(usual_rate(world, shapes) / world.best(pair.shapes.values()))
    assert np.mean(found) >= 0.97 and min(found) >= 0.89, found


@pytest.mark.parametrize("machine", MACHINES)
def test_a_first_call_is_not_slower_than_the_tree(machine):
    for text in (EASY, USUAL):
        tree = gsd.GraphConfig.preset("tree", depth=5, width=3, branch=3, max_rows=12)
        ratios = []
        for seed in range(5):
            world, policy, _ = start(machine, text, seed=seed)
            shapes = world.run(policy, 16)
            assert None not in shapes[:4], "speculation was off before anything was timed"
            ratios.append(sum(world.brings(s) for s in shapes) / sum(sum(world.takes(s)) for s in shapes))
        assert np.median(ratios) >= 0.95 * world.rate(tree)


def test_plain_decoding_is_never_chosen_before_it_was_timed():
    """A prior that takes one row to be nearly free must not turn speculation off."""
    world, policy, pair = start("float32", USUAL)
    pair.costs.prior_other[1:] *= 50.0
    assert policy._rates(policy.expected).argmax() == 0
    assert ShapePolicy(pair).shape() is not None
    shapes = world.run(policy, 250)
    assert usual_rate(world, shapes[-60:]) >= 0.93 * world.best(pair.shapes.values())


def test_a_draft_that_is_never_right_is_off_soon_and_tried_again_seldom():
    """And used once it is right: the median seed has the best shape, and every seed one that speculates as deep."""
    found, tries = [], []
    for seed in range(5):
        world, policy, pair = start("bfloat16", HOPELESS, seed=seed)
        shapes = world.run(policy, 1500)
        assert shapes[40:60].count(None) == 20
        assert any(shapes[60:]), "never tried again"
        tries.append(sum(shape is not None for shape in shapes[60:]))
        world.read(EASY)
        pair.wait = 0  # the next retry; waiting doubles
        found.append(usual_rate(world, world.run(policy, 300)[-100:]) / world.best(pair.shapes.values()))
    assert np.mean(tries) < 0.05 * 1440 and max(tries) < 0.08 * 1440, tries
    assert np.median(found) >= 0.97 and min(found) >= 0.85, found


def test_speculation_goes_off_where_a_step_costs_more_than_it_brings():
    world, policy, pair = start("float32", USUAL, level=0.5, step=0.5)
    shapes = world.run(policy, 200)
    assert shapes[-100:].count(None) >= 90
    assert world.best(pair.shapes.values()) == world.rate(None)


def test_a_draft_that_does_not_pay_is_left_out_and_the_history_goes_on():
    world, policy, _ = start("bfloat16", (USUAL[0], (0.8, 0.05, 0.02, 0.01)), level=0.1)
    shapes = world.run(policy, 200)[-60:]
    assert None not in shapes[-10:] and all(s.depth == 0 for s in shapes[-10:])


@pytest.mark.parametrize(("more", "tried", "leaves"), [(1.1, 0.0, False), (1.4, 0.0, True), (1.1, 400.0, True)])
def test_the_model_is_not_left_out_for_a_promise_that_nothing_supports(more, tried, leaves):
    """10% more, of shapes that never ran, is no reason to hide what the model would have brought; 40% more is."""
    _, policy, pair = start("float32", USUAL)
    depths = [shape.depth for shape in pair.shapes.values()]
    rates = np.array([0.0, *(1.0 if depth else more for depth in depths)])
    pair.acceptance.accepted["lookup"] = (tried, tried)
    home = 1 + depths.index(max(depths))
    chosen = pair.shapes[policy.names[policy._most_promising(rates, home)]]
    assert (chosen.depth == 0) == leaves
    without = 1 + depths.index(0)
    assert policy._most_promising(rates, without) == without, "shows as little as the current one"


def test_a_model_that_was_left_out_gets_another_chance():
    world, policy, _ = start("bfloat16", (HOPELESS[0], (0.8, 0.05, 0.02, 0.01)))
    world.run(policy, 100)
    assert policy.shape().depth == 0
    world.read(((0.95, 0.03, 0.01, 0.0), (0.05, 0.01, 0.0, 0.0)))
    shapes = world.run(policy, 600)
    assert any(shape is not None and shape.depth for shape in shapes[-100:])


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("text", [EASY, USUAL], ids=["easy", "usual"])
def test_a_busy_second_scares_nothing_away(machine, text):
    """Ten times slower for a second, at the start or in the middle: afterwards the choice is as good as ever."""
    found = []
    for seed, begin in itertools.product(range(4), (0.0, 3.0)):
        world, policy, pair = start(machine, text, seed=seed)
        world.slow = lambda now, begin=begin: 10.0 if begin <= now < begin + 1.0 else 1.0
        while world.now < begin + 1.0:
            world.step(policy)
        shapes = world.run(policy, 160)
        found.append(np.median([world.rate(s) for s in shapes[-60:]]) / world.best(pair.shapes.values()))
        assert shapes.count(None) <= 8
    assert np.mean(found) >= 0.93 and min(found) >= 0.85, found


@pytest.mark.parametrize("machine", ["float32", "bfloat16", "GPU"])
def test_hiccups_do_not_move_it(machine):
    """Every tenth step takes five times as long."""
    found = []
    for seed in range(3):
        world, policy, pair = start(machine, USUAL, seed=seed)
        hiccups = np.random.default_rng(seed)
        world.slow = lambda now, hiccups=hiccups: 5.0 if hiccups.random() < 0.1 else 1.0
        shapes = world.run(policy, 400)
        found.append(usual_rate(world, shapes[-150:]) / world.best(pair.shapes.values()))
        assert shapes.count(None) < 40
    assert sorted(found)[1] >= 0.97 and min(found) >= 0.9, found


def test_a_hiccup_in_the_only_trial_of_plain_decoding_or_of_a_shape_is_no_verdict():
    """The shape that is best was slow both times that it was tried: it is tried again."""
    world, policy, pair = start("no AMX", USUAL)
    best = max(pair.shapes.values(), key=world.rate)
    name = next(n for n, s in pair.shapes.items() if s == best)
    seconds = world.takes(best)
    for _ in range(TRIAL_STEPS):
        pair.costs.observe(name, best.max_rows, 200.0, 1, 4 * seconds[0], 4 * seconds[1])
    shapes = world.run(policy, 500)
    assert world.rate(Counter(shapes[-100:]).most_common(1)[0][0]) >= 0.95 * world.rate(best)


def test_trials_cost_little():
    """By what steps of the shapes that were tried take beyond what the settled one had needed for their tokens."""
    for machine in MACHINES:
        world, policy, _ = start(machine, USUAL)
        lost = total = 0.0
        for _ in range(400):
            home = policy.return_to
            shape = world.step(policy)
            seconds, tokens = sum(world.takes(shape)), world.brings(shape)
            total += seconds
            lost += 0.0 if home is None else max(0.0, seconds - tokens / world.rate(policy.configs[home]))
        assert lost <= 0.05 * total


@pytest.mark.parametrize("machine", MACHINES)
def test_without_times_it_goes_by_the_prior_and_what_was_accepted(machine):
    """Captured steps on a GPU: seconds are 0."""
    world, policy, pair = start(machine, EASY)
    world.told = False
    shapes = world.run(policy, 120)
    assert None not in shapes and pair.costs.steps == 0
    assert usual_rate(world, shapes[-40:]) >= 0.8 * world.best(pair.shapes.values())
    world.read(HOPELESS)
    assert None in world.run(policy, 120), "nothing was accepted, which needs no clock"


def test_depth_grows_with_acceptance():
    found = []
    for text in (((0.3, 0.1, 0.05, 0.02), (0.1, 0.05, 0.0, 0.0)), EASY):
        world, policy, _ = start("GPU", text)
        world.run(policy, 200)
        found.append(policy.shape())
    hard, easy = (0 if s is None else s.depth + s.history_depth for s in found)
    assert easy > hard


def test_rows_follow_the_cost_curve():
    found = {"no AMX": 0, "GPU": 0}
    for machine in found:
        for seed in range(3):
            world, policy, _ = start(machine, USUAL, seed=seed)
            shapes = world.run(policy, 200)[-60:]
            found[machine] += Counter(shapes).most_common(1)[0][0].max_rows
    assert found["no AMX"] < found["GPU"]


def test_batches_take_fewer_rows_where_rows_are_expensive():
    one, many = (start("no AMX", USUAL, batch=batch) for batch in (1, 8))
    many = (many[0], ShapePolicy(many[2], batch=8, prefix=200), many[2])
    rates = []
    for world, policy, pair in (one, many):
        shapes = world.run(policy, 200)
        rates.append(usual_rate(world, shapes[-60:]) / world.best(pair.shapes.values()))
    assert min(rates) >= 0.95


def test_the_next_generation_and_the_next_process_go_on_where_this_one_ended():
    for text in (EASY, USUAL, HOPELESS):
        world, policy, pair = start("bfloat16", text)
        world.run(policy, 200)
        policy.end()
        last = policy.configs[policy.current if policy.return_to is None else policy.return_to]
        again = experience(KNOWN)
        again.costs.load(pair.costs.as_dict())
        again.load(pair.as_dict())
        for known in (pair, again):
            following = ShapePolicy(known, prefix=200)
            assert world.run(following, KNOWN_CHOICE_STEPS) == [last] * KNOWN_CHOICE_STEPS


def test_a_generation_that_ends_during_a_retry_leaves_the_shape_before_it():
    """The next one must not begin with ten steps of a shape that nothing speaks for yet."""
    world, policy, pair = start("bfloat16", (HOPELESS[0], (0.8, 0.05, 0.02, 0.01)))
    world.run(policy, 100)
    pair.wait = 0
    while policy.shape() is None or not policy.shape().depth:
        world.step(policy)
    before = policy.names[policy.before_retry]
    assert pair.shapes[before].depth == 0
    policy.end()
    assert pair.last["1"] == before
    assert ShapePolicy(pair, prefix=200).shape().depth == 0


def test_a_text_unlike_the_last_is_noticed_before_ten_steps_are_lost():
    """The last one repeated itself, and ended with a shape of many rows from the history alone."""
    world, policy, pair = start("bfloat16", (USUAL[0], EASY[1]))
    world.run(policy, 100)
    policy.end()
    assert pair.shapes[pair.last["1"]].depth == 0
    world.read((USUAL[0], HOPELESS[1]))
    policy = ShapePolicy(pair, prefix=200)
    first = policy.current
    world.run(policy, 4)
    assert policy.current != first
    assert usual_rate(world, world.run(policy, 100)[-60:]) >= 0.97 * world.best(pair.shapes.values())


def test_a_text_like_the_last_begins_as_it_ended():
    for text in (EASY, USUAL):
        world, policy, pair = start("bfloat16", text)
        world.run(policy, 100)
        policy.end()
        policy = ShapePolicy(pair, prefix=200)
        assert len(set(world.run(policy, KNOWN_CHOICE_STEPS))) == 1


def test_a_model_that_the_last_text_ended_without_is_tried_in_the_next():
    world, policy, pair = start("bfloat16", (HOPELESS[0], (0.8, 0.05, 0.02, 0.01)))
    world.run(policy, 400)
    policy.end()
    assert pair.wait > 2 * KNOWN_CHOICE_STEPS and pair.shapes[pair.last["1"]].depth == 0
    world.read((EASY[0], USUAL[1]))
    shapes = world.run(ShapePolicy(pair, prefix=200), 2 * KNOWN_CHOICE_STEPS)
    assert any(shape is not None and shape.depth for shape in shapes)


@pytest.mark.parametrize("known", [False, True], ids=["first", "known"])
def test_behind_a_long_prompt_the_first_step_is_plain_and_the_rest_as_behind_a_short_one(known):
    runs = []
    for prefix in (SETTINGS.long_prompt_tokens - 1, SETTINGS.long_prompt_tokens):
        world, policy, pair = start("bfloat16", USUAL)
        if known:
            world.run(policy, 100)
            policy.end()
            world = World(BFLOAT16, USUAL)
        pair.costs.timed.clear()
        following = ShapePolicy(pair, prefix=prefix, reads_prompt=True)
        opens = prefix >= SETTINGS.long_prompt_tokens
        assert (following.shape() is None) == opens
        shapes = world.run(following, 1 + opens)[opens:]
        assert pair.costs.timed.get(PLAIN, 0) == opens
        runs.append(shapes + world.run(following, 6))
    short, long = runs
    same = KNOWN_CHOICE_STEPS if known else 2
    assert None not in short and long[:same] == short[:same]


def test_the_first_step_is_plain_only_where_a_source_reads_the_prompt():
    long = SETTINGS.long_prompt_tokens
    assert ShapePolicy(experience(), prefix=long).shape() is not None
    without = experience(device="cuda", with_model=False)
    assert ShapePolicy(without, prefix=long, reads_prompt=True).shape() is not None


def test_a_generation_of_one_plain_step_leaves_the_shape_that_would_have_followed():
    pair = experience()
    first = ShapePolicy(pair, prefix=200)
    policy = ShapePolicy(pair, prefix=SETTINGS.long_prompt_tokens, reads_prompt=True)
    policy.end()
    assert pair.last["1"] == first.names[first.current] != PLAIN


def test_a_neighbour_process_makes_all_shapes_slower_and_none_more_promising():
    """Half-way every step takes twice and three times as long, a quarter of them more: the choice stays good."""
    found = []
    for machine in ("float32", "bfloat16"):
        for seed in range(3):
            world, policy, pair = start(machine, USUAL, seed=seed)
            world.run(policy, 120)
            tails = np.random.default_rng(seed)
            world.slow = lambda now, tails=tails: 2.0 + (tails.exponential() if tails.random() < 0.25 else 0.0)
            shapes = world.run(policy, 2 * MAX_CHOICE_INTERVAL_STEPS)
            costs = policy._seconds(policy.rows)[0] / [world.takes(c)[0] for c in policy.configs]
            assert costs.min() > 1.4, "a shape that did not run is still believed to be fast"
            shapes += world.run(policy, 60)
            found.append(np.mean([world.rate(s) for s in shapes]) / world.best(pair.shapes.values()))
    assert np.median(found) >= 0.95 and min(found) >= 0.88, found


@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("machine", ["bfloat16", "no AMX"])
def test_other_programs_do_not_switch_speculation_off(machine, disturbance):
    """With a draft that pays: neither in the first text nor in those that go on with what it learned."""
    found, plain = [], []
    for seed in range(2):
        world, policy, pair = start(machine, USUAL, seed=seed)
        steps = itertools.count()
        world.slow = lambda now, steps=steps: DISTURBANCES[disturbance](next(steps))
        shapes = world.run(policy, 100)
        policy.end()
        policy = ShapePolicy(pair, prefix=200)
        shapes += world.run(policy, 100)
        policy.end()
        found.append(np.mean([world.rate(s) for s in shapes]) / world.best(pair.shapes.values()))
        plain.append(shapes.count(None))
    assert max(plain) < 20, plain
    assert np.mean(found) > 0.85, found


def test_damaged_experience_is_refused_whole():
    world, policy, pair = start("bfloat16", USUAL)
    world.run(policy, 50)
    policy.end()
    good = pair.as_dict()
    for part, bad in (("wait", "x"), ("next_wait", 0), ("last", 3), ("acceptance", {"hits": [[1]]})):
        fresh = experience()
        with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
            fresh.load({**good, part: bad})
        assert fresh.as_dict() == experience().as_dict(), part


def test_choosing_is_seldom():
    """What a choice costs is the prediction of all shapes at once: at most one in four steps, one in ten later."""
    world, policy, pair = start("float32", USUAL)
    predict, asked = pair.forecast.predict, []
    pair.forecast.predict = lambda pools: asked.append(1) or predict(pools)
    world.run(policy, 100)
    early = len(asked)
    world.run(policy, 400)
    assert 5 < early <= 30 and len(asked) - early <= 60


def test_switches_are_logged_with_the_figures_that_caused_them(caplog):
    """Off and on again for the user (INFO), trials and other shapes for who looks closer (DEBUG); nothing else."""
    world, policy, pair = start("bfloat16", HOPELESS)
    with caplog.at_level(logging.DEBUG, "gsd_kernels"):
        shapes = world.run(policy, 300)
        world.read(EASY)
        pair.wait = 0
        shapes += world.run(policy, 200)
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    told = [line for level, line in lines if level == logging.INFO]
    assert "speculation off" in told[0] and "speculation on" in told[-1]
    assert all(("off" if place % 2 == 0 else "on") in line.split(" after ")[0] for place, line in enumerate(told))
    figures = r"auto: .+ after (\d+) steps: (\S+) has (\S+) tokens/s by \S+ tokens a step, (\S+) (\S+) by \S+"
    for _, line in lines:
        _, taken, rate, before, other = re.fullmatch(figures, line).groups()
        assert taken in policy.names and before in policy.names and float(rate) > 0 and float(other) > 0
    changes = sum(one != other for one, other in itertools.pairwise(shapes))
    assert 0 < changes <= len(lines)
    off = re.fullmatch(figures, told[0]).groups()
    assert off[1] == PLAIN and float(off[2]) > float(off[4])


def test_the_end_saves():
    class Saver:
        saved = 0

        def save(self):
            self.saved += 1

    saver = Saver()
    pair = experience()
    policy = ShapePolicy(pair, batch=3, saver=saver)
    policy.end()
    assert saver.saved == 1 and list(pair.last) == ["3"]


def test_a_fixed_policy_is_one_shape():
    config = gsd.GraphConfig(depth=2)
    policy = FixedPolicy(config)
    policy.observe(Observation(None, [1], 3, {}, 1.0))
    policy.end()
    assert policy.shape() is config and policy.largest_shapes() == [config] and policy.acceptance is None
    assert FixedPolicy(None).shape() is None and FixedPolicy(None).largest_shapes() == []


def test_the_names_of_costs_and_of_the_policy_are_the_same_shapes():
    pair = experience()
    policy = ShapePolicy(pair)
    assert policy.names == (PLAIN, *pair.shapes) and policy.largest_shapes() == list(pair.shapes.values())
    assert [pair.costs.names[i] for i in policy.of_costs] == list(policy.names)
