"""The policy of rows, on machines and texts of numbers: near the best fixed count, off where that is best, kept."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from simulated import BFLOAT16, FLOAT32, KNOWN, NO_AMX

import gsd_kernels as gsd
from gsd_kernels_hf.policy.budget import RowBudget
from gsd_kernels_hf.policy.costs import PLAIN, CostModel
from gsd_kernels_hf.policy.ladder import every_shape, row_shape, shape_name
from gsd_kernels_hf.policy.patience import RETRY_STEPS
from gsd_kernels_hf.policy.rows import KNOWN_CHOICE, KNOWN_WAIT, PATIENCE, RowExperience, RowPolicy
from gsd_kernels_hf.records import Verified

FLAT = {1: 0.0188, 11: 0.0188, 12: 0.0194, 16: 0.0248, 24: 0.036, 32: 0.0468}  # memory is slow
STEEP = {1: 0.0127, 6: 0.0133, 7: 0.0193, 8: 0.0166, 12: 0.0209, 16: 0.0273, 32: 0.0535}  # arithmetic is
MACHINES = {"flat": FLAT, "steep": STEEP, "float32": FLOAT32, "bfloat16": BFLOAT16, "no AMX": NO_AMX}
# What the sources say of a token and how often they are right, in three kinds of steps: nothing found, some, a copy.
USUAL = ((0.2, 0.0, 0.0), (0.5, 0.6, 0.5), (0.3, 0.9, 0.93))
EASY = ((1.0, 0.95, 0.95),)
HOPELESS = ((1.0, 0.3, 0.0),)
CONFIG = row_shape()
DEPTH = 10


class World:
    """What steps really take and bring: a chain of likely tokens, and a second choice beside each of them.

    Args:
        target: seconds by rows.
        text: kinds of steps: how often, the probability that is claimed of a token, and the true one.
        drafting: seconds of a step besides the target.
    """

    def __init__(
        self, target: dict[int, float], text=USUAL, *, batch: int = 1, drafting: float = 0.001, seed: int = 0
    ) -> None:
        self.target, self.text, self.batch, self.drafting, self.seed = target, text, batch, drafting, seed
        self.noise = np.random.default_rng(seed)
        self.now, self.tokens, self.steps = 0.0, 0, 0

    def takes(self, rows: int) -> float:
        seconds = np.interp(self.batch * rows, list(self.target), list(self.target.values()))
        return float(seconds) * max(1.0, self.batch * rows / max(self.target))

    def _texts(self) -> list[tuple[float, int]]:
        """Of every sequence, the probability that is claimed of the next tokens, and how many of them are right."""
        found, rng = [], np.random.default_rng((self.seed, self.steps))  # whatever was chosen before
        self.steps += 1
        for _ in range(self.batch):
            _, claimed, right = self.text[rng.choice(len(self.text), p=[kind[0] for kind in self.text])]
            depth = 0
            while claimed and depth < DEPTH and rng.random() < right:
                depth += 1
            found.append((claimed, depth))
        return found

    def fixed(self, rows: int, begin: int, steps: int) -> float:
        """Tokens a second of a fixed number of rows, likeliest first as is claimed, in the same steps."""
        tokens, seconds, self.steps = 0, 0.0, begin
        for _ in range(steps):
            texts = self._texts()
            size = max(1 + 2 * DEPTH if claimed else 1 for claimed, _ in texts)
            seconds += self.takes(min(rows, size)) + self.drafting
            for claimed, right in texts:
                scores = [0.0]
                for depth in range(DEPTH if claimed else 0):
                    scores += [depth * math.log(claimed) + math.log(p) for p in (claimed, 1.0 - claimed)]
                order = sorted(range(len(scores)), key=lambda row: (-scores[row], row))[:rows]
                tokens += 1 + sum(1 + 2 * depth in order for depth in range(right))
        return tokens / seconds

    def share(self, policy: RowPolicy, steps: int) -> float:
        """Tokens a second of ``policy``, in steps to come, over those of the best fixed number."""
        now, tokens, begin = self.now, self.tokens, self.steps
        self.run(policy, steps)
        rate = (self.tokens - tokens) / (self.now - now)
        return rate / max(self.fixed(rows, begin, steps) for rows in (1, 2, 3, 4, 6, 8, 11, 12, 16, 21))

    def run(self, policy: RowPolicy, steps: int) -> list[int]:
        """Rows of these steps; 0 where speculation was off."""
        return [self.step(policy) for _ in range(steps)]

    def step(self, policy: RowPolicy) -> int:
        budget, off = policy.budget, policy.shape() is None
        assert budget is not None
        counts, rows = ([1] * self.batch, 1) if off else self._speculate(budget)
        noise = np.exp(0.03 * self.noise.standard_normal(2))
        target, other = self.takes(rows) * noise[0], (0.0003 if off else self.drafting) * noise[1]
        self.now, self.tokens = self.now + target + other, self.tokens + sum(counts)
        policy.observe({}, counts, rows=rows, target_seconds=target, other_seconds=other)
        return 0 if off else rows

    def _speculate(self, budget: RowBudget) -> tuple[list[int], int]:
        """Tokens of the sequences and rows of a step: of each depth, token 1 is right or none is, token 2 is wrong."""
        texts, graph = self._texts(), gsd.TokenGraph.empty(self.batch, CONFIG, "cpu")
        graph.reset(torch.zeros(self.batch, dtype=torch.int32), torch.full((self.batch, 8), -1, dtype=torch.int32))
        for b, (claimed, _) in enumerate(texts):
            for node in range(0, 2 * DEPTH if claimed else 0, 2):
                above = max(0, node - 1)
                graph.edge_targets[b, above, :2] = torch.tensor([node + 1, node + 2])
                graph.edge_log_probs[b, above, :2] = torch.tensor([claimed, 1.0 - claimed]).log()
                graph.token_ids[b, node + 1 : node + 3] = torch.tensor([1, 2])
                graph.depths[b, node + 1 : node + 3] = 1 + node // 2
        rows = budget(graph, CONFIG, 1000)
        paths = [[0] for _ in texts]
        for path, nodes, (_, right) in zip(paths, rows.node_ids.tolist(), texts, strict=True):
            path += [node for node in range(1, 2 * right, 2) if node in nodes]
        counts = [len(path) for path in paths]
        nodes, tokens = (torch.full((self.batch, max(counts)), none, dtype=torch.int32) for none in (-2, 0))
        for b, path in enumerate(paths):
            nodes[b, : len(path)] = torch.tensor(path)
            tokens[b, : len(path)] = 1
            if path[-1] == max(0, 2 * texts[b][1] - 1):  # then no token of the graph is right
                tokens[b, len(path) - 1] = 9
        accepted = gsd.Acceptance(nodes, torch.tensor(counts, dtype=torch.int32), torch.zeros(self.batch))
        empty = torch.empty(0)
        budget.observe(Verified(graph, rows, empty, {}, accepted, empty, tokens, nodes))
        return counts, rows.token_ids.shape[1]


def experience(bandwidth: float = 1.0, free_rows: float = 24.0) -> RowExperience:
    """Of a pair that nobody ran."""
    shapes = every_shape("cpu", with_model=False)
    known = replace(KNOWN, target_bytes=2.5e8, bandwidth=bandwidth * KNOWN.bandwidth, free_rows=free_rows)
    return RowExperience(CostModel(known, shapes, rows_vary=True), shape_name(CONFIG), CONFIG)


@pytest.mark.parametrize("free_rows", [4.0, 60.0])
@pytest.mark.parametrize("bandwidth", [0.25, 1.0, 4.0])
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


def test_rows_follow_the_machine():
    """It becomes another: 11 rows that were dear cost what one does."""
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
    assert rows[0] > 0 and rows.count(0) > 300 and pair.patience > PATIENCE
    tries = "".join("x" if n else " " for n in rows[60:]).split()
    assert tries and max(map(len, tries)) <= RETRY_STEPS + 1
    world.text = EASY
    rows = world.run(policy, 600)
    assert all(rows[-50:]) and np.mean(rows[-50:]) > 4
    assert pair.patience == PATIENCE


def test_a_new_text_tries_again_soon():
    world, pair = World(NO_AMX, HOPELESS, drafting=0.02), experience()
    first = RowPolicy(pair, prefix=200)
    world.run(first, 200)
    first.end()
    assert pair.off
    world.text = EASY
    rows = world.run(RowPolicy(pair, prefix=200), 60)
    assert rows[0] == 0 and all(rows[KNOWN_WAIT + 2 :])


def test_never_off_by_a_guess():
    """A prior that holds many rows to be dear does not end speculation before one row was timed."""
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
    assert following.next_choice == KNOWN_CHOICE
    assert abs(np.mean(world.run(following, 40)) - np.mean(last)) < 2.0


@pytest.mark.parametrize(
    "damage",
    [{"tokens": 0.5}, {"tokens": math.nan}, {"rows": 33.0}, {"patience": 0}, {"wait": -1}, {"odds": {}}, {"off": None}],
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
        policy.observe({}, [2], rows=4)
    policy.end()
    assert pair.costs.steps == 0 and not pair.known


def test_one_hiccup_hardly_counts():
    world, pair = World(STEEP), experience()
    policy = RowPolicy(pair, prefix=200)
    world.run(policy, 100)
    before = pair.costs.target_seconds(np.array([6.0]), 500)[0]
    policy.observe({}, [2], rows=6, target_seconds=1.0, other_seconds=0.5)
    world.run(policy, 20)
    assert pair.costs.target_seconds(np.array([6.0]), 500)[0] < 1.1 * before
    assert PLAIN in pair.costs.index and not policy.off
