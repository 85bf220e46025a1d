"""A machine and a text of numbers: steps that take seconds by a formula and bring tokens by a formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

import gsd_kernels as gsd
from gsd_kernels_hf.costs.model import CostModel, CostPrior
from gsd_kernels_hf.policy.learning import Experience, LearningPolicy, Observation
from gsd_kernels_hf.policy.row_selector import RowSelector
from gsd_kernels_hf.policy.shapes import ladder, row_shape, shape_name
from gsd_kernels_hf.records import Verified

#: A target of 250M parameters in float32 and a draft of 0.8M in one operator, on two cores; 8B on a GPU.
KNOWN = CostPrior(1e9, 12, 3.2e6, 2, 3e4, bandwidth=1.4e10, free_rows=24.0, draft_layer_seconds=5e-5)
ON_GPU = CostPrior(1.6e10, 32, 2.4e9, 16, 1.3e5, bandwidth=4e12, free_rows=128.0, layer_seconds=1e-4)
# Seconds of a forward by rows.
FLOAT32 = {1: 0.077, 2: 0.127, 8: 0.127, 16: 0.156, 32: 0.211, 64: 0.298, 128: 0.550}
BFLOAT16 = {1: 0.052, 4: 0.055, 8: 0.060, 16: 0.068, 32: 0.097, 64: 0.150, 128: 0.280}
NO_AMX = {1: 0.060, 2: 0.066, 4: 0.080, 8: 0.105, 16: 0.150, 32: 0.270, 64: 0.500, 128: 1.0}
STEEP = {1: 0.0127, 6: 0.0133, 7: 0.0193, 8: 0.0166, 12: 0.0209, 16: 0.0273, 32: 0.0535}  # arithmetic is
GPU = {1: 0.0056, 16: 0.0058, 64: 0.0066, 128: 0.0076}

# A text: kinds of steps by how often they come, and the chance that a draft model's best candidate is right, and that
# of the other sources' best. Behind a colon: what these claim.
Text = Sequence[tuple[float, float, float]]
USUAL: Text = ((0.4, 0.5, 0.05), (0.4, 0.75, 0.5), (0.2, 0.95, 0.93))
EASY: Text = ((1.0, 0.95, 0.93),)
HOPELESS: Text = ((1.0, 0.0, 0.0),)
LOOKED_UP: Text = ((1.0, 0.0, 0.85),)  # only what is looked up is right
CLAIMED = {0.0: 0.3, 0.05: 0.0, 0.5: 0.6, 0.85: 0.85, 0.93: 0.9}  # by its true chance; 0: nothing is proposed
CHAIN = 10  # tokens of what is looked up, a second choice beside each
ROWS = row_shape()


class World:
    """What steps really take and bring.

    Args:
        target: seconds of a forward by rows.
        level, step: seconds of a draft forward, and of all else in a step.

    Attributes:
        now, idle: seconds of all steps, and what they take on an undisturbed machine.
    """

    def __init__(
        self, target: dict[int, float], text: Text = USUAL, *, level=0.0012, step=0.001, batch=1, seed=0
    ) -> None:
        self.target, self.text, self.level, self.step_seconds, self.batch = target, text, level, step, batch
        self.rng = np.random.default_rng(seed)
        self.slow: Callable[[int], float] = lambda number: 1.0
        self.now, self.idle, self.tokens, self.number = 0.0, 0.0, 0, 0
        self.told = True  # whether times are known

    def takes(self, shape: gsd.GraphConfig | None, rows: int) -> tuple[float, float]:
        """Seconds of the target and of all else, on an idle machine."""
        rows = self.batch * rows
        target = float(np.interp(rows, list(self.target), list(self.target.values())))
        target *= max(1.0, rows / max(self.target))
        if shape is None:
            return target, 0.3 * self.step_seconds
        return target, self.step_seconds + shape.depth * self.level * (1.0 + 0.03 * shape.width)

    def chances(self, shape: gsd.GraphConfig, model: float, lookup: float) -> np.ndarray:
        """Of every level to be accepted: a wide tree has the second choice as well."""
        levels = np.array([model] * shape.depth + [lookup] * shape.history_depth)[: shape.max_rows - 1]
        wide = shape.max_rows > 2 * len(levels)
        return levels + wide * (1.0 - levels) * levels / 2

    def rate(self, shape: gsd.GraphConfig | None) -> float:
        """Tokens a second of a sequence, in all kinds of steps."""
        tokens = 1.0
        if shape is not None:
            tokens += sum(share * self.chances(shape, *text).cumprod().sum() for share, *text in self.text)
        return tokens / sum(self.takes(shape, 1 if shape is None else shape.max_rows))

    def run(self, policy: LearningPolicy, steps: int) -> list[int]:
        """Rows of these steps; 0 where speculation was off."""
        return [self.step(policy) for _ in range(steps)]

    def step(self, policy: LearningPolicy) -> int:
        """Decode one step as the policy wants it."""
        plan = policy.plan()
        kinds = self.rng.choice(len(self.text), self.batch, p=[share for share, *_ in self.text])
        texts = [self.text[kind][1:] for kind in kinds]
        verified, rows, counts = None, 1, [1] * self.batch
        if plan.rows is not None and plan.shape is not None:
            verified, rows, counts = self._by_rows(plan.rows, [lookup for _, lookup in texts])
        elif plan.shape is not None:
            rows, chances = plan.shape.max_rows, [self.chances(plan.shape, *text) for text in texts]
            counts = [1 + int((self.rng.random(len(each)) < each).cumprod().sum()) for each in chances]
        alone = np.array(self.takes(plan.shape, rows))
        taken = alone * np.exp(0.03 * self.rng.standard_normal(2)) * self.slow(self.number)
        self.number += 1
        self.now, self.idle, self.tokens = self.now + taken.sum(), self.idle + alone.sum(), self.tokens + sum(counts)
        policy.observe(Observation(verified, counts, rows, *(taken if self.told else (0.0, 0.0))))
        return rows if plan.shape is not None else 0

    def _by_rows(self, selector: RowSelector, chances: Sequence[float]) -> tuple[Verified, int, list[int]]:
        """Record, rows and tokens of a step: of each depth, token 1 is right or none is, token 2 is wrong."""
        graph = gsd.TokenGraph.empty(self.batch, ROWS, "cpu")
        graph.reset(torch.zeros(self.batch, dtype=torch.int32), torch.full((self.batch, 8), -1, dtype=torch.int32))
        size = 2 * CHAIN + 1
        for b, chance in enumerate(chances):
            if claimed := CLAIMED[chance]:
                likely = torch.tensor([claimed, 1.0 - claimed]).log()
                for node in range(0, 2 * CHAIN, 2):
                    above = max(0, node - 1)
                    graph.edge_targets[b, above, :2] = torch.tensor([node + 1, node + 2])
                    graph.edge_log_probs[b, above, :2] = likely
                graph.token_ids[b, 1:size] = torch.tensor([1, 2] * CHAIN)
                graph.depths[b, 1:size] = torch.arange(2 * CHAIN) // 2 + 1
        rows = selector(graph, ROWS, 1000)
        right = [int((self.rng.random(CHAIN) < chance).cumprod().sum()) for chance in chances]
        right = [deep if CLAIMED[chance] else 0 for deep, chance in zip(right, chances, strict=True)]
        paths = [
            [0, *(node for node in range(1, 2 * deep, 2) if node in kept)]
            for deep, kept in zip(right, rows.node_ids.tolist(), strict=True)
        ]
        counts = [len(path) for path in paths]
        nodes, tokens = (torch.full((self.batch, max(counts)), none, dtype=torch.int32) for none in (-2, 0))
        for b, path in enumerate(paths):
            nodes[b, : len(path)] = torch.tensor(path)
            tokens[b, : len(path)] = 1
            if path[-1] == max(0, 2 * right[b] - 1):  # then no token of the graph is right
                tokens[b, len(path) - 1] = 9
        accepted = gsd.Acceptance(nodes, torch.tensor(counts, dtype=torch.int32), torch.zeros(self.batch))
        empty = torch.empty(0)
        return Verified(graph, rows, empty, {}, accepted, empty, tokens, nodes), rows.token_ids.shape[1], counts

    def best(self, shapes: Sequence[gsd.GraphConfig]) -> float:
        """Tokens a second of the best shape, or of plain decoding; by rows, of the best number of the likeliest."""
        if list(shapes) != [ROWS]:
            return max(self.rate(shape) for shape in (None, *shapes))
        return max(self.rate(None), *(self._fixed(rows) for rows in (1, 2, 3, 4, 6, 8, 11, 12, 16, 21)))

    def _fixed(self, most: int) -> float:
        tokens = seconds = 0.0
        for share, _, chance in self.text:
            claimed = CLAIMED[chance]
            scores = [
                (depth * math.log(claimed) + math.log(p), depth, p == claimed)
                for depth in range(CHAIN if claimed else 0)
                for p in (claimed, 1.0 - claimed)
            ]
            kept = sorted(scores, reverse=True)[: most - 1]
            tokens += share * (1.0 + sum(chance ** (depth + 1) for _, depth, likely in kept if likely))
            seconds += share * sum(self.takes(ROWS, 1 + len(kept)))
        return tokens / seconds


MACHINES = {
    "float32": (FLOAT32, "cpu", KNOWN),
    "bfloat16": (BFLOAT16, "cpu", KNOWN),
    "no AMX": (NO_AMX, "cpu", replace(KNOWN, free_rows=8.0)),
    "GPU": (GPU, "cuda", ON_GPU),
    "rows, steep": (STEEP, "rows", replace(KNOWN, target_bytes=2.5e8)),
    "rows, no AMX": (NO_AMX, "rows", replace(KNOWN, target_bytes=2.5e8)),
}


def experience(machine: str = "bfloat16", bandwidth: float = 1.0) -> Experience:
    """Of a pair that nobody ran, whose memory is believed to be faster by ``bandwidth`` than it is."""
    _, device, known = MACHINES[machine]
    by_rows = device == "rows"
    shapes = {shape_name(ROWS): ROWS} if by_rows else ladder(device, with_model=True)
    known = replace(known, bandwidth=bandwidth * known.bandwidth)
    return Experience(CostModel(known, shapes), by_rows=by_rows)


def start(machine: str, text: Text = USUAL, bandwidth: float = 1.0, **world) -> tuple[World, LearningPolicy]:
    """A text of a pair that nobody ran."""
    policy = LearningPolicy(experience(machine, bandwidth), prefix=200)
    return World(MACHINES[machine][0], text, **world), policy
