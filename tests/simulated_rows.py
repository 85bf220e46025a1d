"""A machine and a text of numbers for the policy of rows, which are chosen from a chain of likely tokens."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from simulated import BFLOAT16, FLOAT32, KNOWN, NO_AMX

import gsd_kernels as gsd
from gsd_kernels_hf.costs.model import CostModel
from gsd_kernels_hf.policy.base import Observation
from gsd_kernels_hf.policy.row_policy import RowExperience, RowPolicy
from gsd_kernels_hf.policy.row_selector import RowSelector
from gsd_kernels_hf.policy.shapes import row_shape, shape_name
from gsd_kernels_hf.records import Verified

FLAT = {1: 0.0188, 11: 0.0188, 12: 0.0194, 16: 0.0248, 24: 0.036, 32: 0.0468}  # memory is slow
STEEP = {1: 0.0127, 6: 0.0133, 7: 0.0193, 8: 0.0166, 12: 0.0209, 16: 0.0273, 32: 0.0535}  # arithmetic is
MACHINES = {"flat": FLAT, "steep": STEEP, "float32": FLOAT32, "bfloat16": BFLOAT16, "no AMX": NO_AMX}
# What the sources say of a token and how often they are right, in three kinds of steps: nothing found, some, a copy.
USUAL = ((0.2, 0.0, 0.0), (0.5, 0.6, 0.5), (0.3, 0.9, 0.93))
EASY = ((1.0, 0.95, 0.95),)
HOPELESS = ((1.0, 0.3, 0.0),)
MEAGRE = ((0.5, 0.0, 0.0), (0.3, 0.5, 0.45), (0.2, 0.9, 0.9))
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
        self.idle = 0.0  # what the same steps take on an undisturbed machine
        self.slow: Callable[[int], float] = lambda step: 1.0  # factor of all seconds, by number of the step
        self.taken = 0  # steps, also those without speculation

    def takes(self, rows: int) -> float:
        seconds = np.interp(self.batch * rows, list(self.target), list(self.target.values()))
        return float(seconds) * max(1.0, self.batch * rows / max(self.target))

    def _texts(self) -> list[tuple[float, int]]:
        """Of every sequence, the probability that is claimed of the next tokens, and how many of them are right."""
        self.steps += 1
        return texts_of(self.text, self.batch, self.seed, self.steps - 1)

    def fixed(self, rows: int, begin: int, steps: int) -> float:
        """Tokens a second of a fixed number of rows, likeliest first as is claimed, in the same steps."""
        tokens, seconds, self.steps = 0, 0.0, begin
        for _ in range(steps):
            texts = self._texts()
            size = max(1 + 2 * DEPTH if claimed else 1 for claimed, _ in texts)
            seconds += self.takes(min(rows, size)) + self.drafting
            for claimed, right in texts:
                taken = likeliest(claimed)[:rows]
                tokens += 1 + sum(1 + 2 * depth in taken for depth in range(right))
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
        plan = policy.plan()
        off = plan.shape is None
        assert plan.rows is not None
        verified, counts, rows = (None, [1] * self.batch, 1) if off else self._speculate(plan.rows)
        noise = np.exp(0.03 * self.noise.standard_normal(2))
        alone = self.takes(rows) * noise[0], (0.0003 if off else self.drafting) * noise[1]
        target, other = (seconds * self.slow(self.taken) for seconds in alone)
        self.taken, self.idle = self.taken + 1, self.idle + sum(alone)
        self.now, self.tokens = self.now + target + other, self.tokens + sum(counts)
        policy.observe(Observation(verified, counts, rows, {}, target, other))
        return 0 if off else rows

    def _speculate(self, selector: RowSelector) -> tuple[Verified, list[int], int]:
        """Record, tokens and rows of a step: of each depth, token 1 is right or none is, token 2 is wrong."""
        texts, graph = self._texts(), gsd.TokenGraph.empty(self.batch, CONFIG, "cpu")
        graph.reset(torch.zeros(self.batch, dtype=torch.int32), torch.full((self.batch, 8), -1, dtype=torch.int32))
        size = 2 * DEPTH + 1
        for b, (claimed, _) in enumerate(texts):
            if claimed:
                targets, log_probs, tokens, depths = chain_of(claimed)
                graph.edge_targets[b, :size, :2], graph.edge_log_probs[b, :size, :2] = targets, log_probs
                graph.token_ids[b, 1:size], graph.depths[b, 1:size] = tokens, depths
        rows = selector(graph, CONFIG, 1000)
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
        verified = Verified(graph, rows, empty, {}, accepted, empty, tokens, nodes)
        return verified, counts, rows.token_ids.shape[1]


@functools.cache
def texts_of(text: tuple[tuple[float, float, float], ...], batch: int, seed: int, step: int) -> list[tuple[float, int]]:
    """Of every sequence in a step, the probability that is claimed of the next tokens, and how many are right."""
    found, rng = [], np.random.default_rng((seed, step))
    for _ in range(batch):
        _, claimed, right = text[rng.choice(len(text), p=[kind[0] for kind in text])]
        depth = 0
        while claimed and depth < DEPTH and rng.random() < right:
            depth += 1
        found.append((claimed, depth))
    return found


@functools.cache
def likeliest(claimed: float) -> list[int]:
    """Nodes of a chain with a second choice beside each token, likeliest first; where none is claimed the root."""
    scores = [0.0]
    for depth in range(DEPTH if claimed else 0):
        scores += [depth * math.log(claimed) + math.log(p) for p in (claimed, 1.0 - claimed)]
    return sorted(range(len(scores)), key=lambda row: (-scores[row], row))


@functools.cache
def chain_of(claimed: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same chain's edges [nodes, 2], their targets and log-probabilities, and nodes' tokens and depths."""
    targets, log_probs = torch.full((2 * DEPTH + 1, 2), -1), torch.full((2 * DEPTH + 1, 2), -math.inf)
    for node in range(0, 2 * DEPTH, 2):
        above = max(0, node - 1)
        targets[above], log_probs[above] = (
            torch.tensor([node + 1, node + 2]),
            torch.tensor([claimed, 1.0 - claimed]).log(),
        )
    return targets, log_probs, torch.tensor([1, 2] * DEPTH), torch.arange(2 * DEPTH) // 2 + 1


def experience(bandwidth: float = 1.0, free_rows: float = 24.0) -> RowExperience:
    """Of a pair that nobody ran."""
    known = replace(KNOWN, target_bytes=2.5e8, bandwidth=bandwidth * KNOWN.bandwidth, free_rows=free_rows)
    name = shape_name(CONFIG)
    return RowExperience(CostModel(known, {name: CONFIG}, rows_vary=True), name, CONFIG)
