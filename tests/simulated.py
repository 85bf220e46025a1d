"""A machine and a text of numbers: steps that take seconds by a formula and bring tokens by a formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from gsd_kernels import GraphConfig
from gsd_kernels_hf.costs.model import CostModel
from gsd_kernels_hf.costs.prior import CostPrior
from gsd_kernels_hf.policy.acceptance import AcceptanceModel, Pool, TreeForecast
from gsd_kernels_hf.policy.base import Observation
from gsd_kernels_hf.policy.shape_policy import ShapeExperience, ShapePolicy
from gsd_kernels_hf.policy.shapes import BRANCH, ladder

#: A target of 250M parameters in float32 and a draft of 0.8M in one operator, on two cores.
KNOWN = CostPrior(1e9, 12, 3.2e6, 2, 3e4, bandwidth=1.4e10, free_rows=24.0, draft_layer_seconds=5e-5)

EASY = ((0.95, 0.02, 0.01, 0.0), (0.9, 0.03, 0.01, 0.0))  # of all sources, of those without a forward
USUAL = ((0.7, 0.1, 0.05, 0.03), (0.45, 0.08, 0.04, 0.02))
HOPELESS = ((1e-4,) * 4, (1e-4,) * 4)  # proposed, and never right

FLOAT32 = {1: 0.077, 2: 0.127, 4: 0.127, 8: 0.127, 16: 0.156, 32: 0.211, 64: 0.298, 128: 0.550}
BFLOAT16 = {1: 0.052, 4: 0.055, 8: 0.060, 16: 0.068, 32: 0.097, 64: 0.150, 128: 0.280}
NO_AMX = {1: 0.060, 2: 0.066, 4: 0.080, 8: 0.105, 16: 0.150, 32: 0.270, 64: 0.500, 128: 1.0}  # 16 rows: 2.5 times one
MOST_NODES = 12
GPU = {1: 0.0056, 16: 0.0058, 64: 0.0066, 128: 0.0076}

ON_GPU = CostPrior(1.6e10, 32, 2.4e9, 16, 1.3e5, bandwidth=4e12, free_rows=128.0, layer_seconds=1e-4)
MACHINES = {
    "float32": (FLOAT32, "cpu", KNOWN),
    "bfloat16": (BFLOAT16, "cpu", KNOWN),
    "no AMX": (NO_AMX, "cpu", replace(KNOWN, free_rows=8.0)),
    "GPU": (GPU, "cuda", ON_GPU),
}


def at_random(share: float, factor: float) -> Callable[[int], float]:
    """A share of the steps is slower by a factor."""
    slow = np.random.default_rng(7).random(1000) < share
    return lambda step: factor if slow[step] else 1.0


DISTURBANCES: dict[str, Callable[[int], float]] = {
    "spikes": at_random(0.1, 8.0),
    "many spikes": at_random(0.35, 4.0),
    "half of the steps": at_random(0.5, 3.0),
    "a slow period": lambda step: 3.0 if 40 <= step < 90 else 1.0,
    "half speed": lambda step: 2.0,
    "every other step": lambda step: 2.5 if step % 2 else 1.0,
    "by eight steps": lambda step: 2.5 if step // 8 % 2 else 1.0,
}


class World:
    """What steps really take and bring.

    Args:
        target: seconds by rows.
        level: seconds of a draft forward.
        text: probabilities of being picked, by rank, of both pools.
        noise: relative, of every measurement.
    """

    def __init__(
        self, target: dict[int, float], text=USUAL, *, level=0.0012, step=0.003, noise=0.05, batch=1, seed=0
    ) -> None:
        self.target, self.level, self.step_seconds, self.noise, self.batch = target, level, step, noise, batch
        self.rng = np.random.default_rng(seed)
        self.slow: Callable[[float], float] = lambda now: 1.0
        self.now = 0.0
        self.tokens = 0
        self.told = True  # whether times are known
        self.read(text)

    def read(self, text) -> None:
        """Go on with another text."""
        self.text = {"model": np.array([text[0]]), "lookup": np.array([text[1]])}
        self.known: dict[GraphConfig, float] = {}

    def brings(self, shape: GraphConfig | None) -> float:
        """Expected tokens of a step."""
        if shape is None:
            return 1.0
        if shape not in self.known:
            self.known[shape] = float(
                TreeForecast([shape], BRANCH).predict({n: Pool.of(p) for n, p in self.text.items()})[0][0]
            )
        return self.known[shape]

    def takes(self, shape: GraphConfig | None) -> tuple[float, float]:
        """Seconds of the target and of all else, on an idle machine."""
        rows = self.batch * (1 if shape is None else shape.max_rows)
        known = np.array(sorted(self.target))
        target = float(np.interp(np.log2(rows), np.log2(known), [self.target[r] for r in known]))
        target *= max(1.0, rows / known[-1])
        if shape is None:
            return target, 0.2 * self.step_seconds
        other = self.step_seconds + 0.0003 * (shape.depth + shape.history_depth)
        return target, other + shape.depth * self.level * (1 + 0.03 * shape.width)

    def rate(self, shape: GraphConfig | None) -> float:
        return self.brings(shape) / sum(self.takes(shape))

    def best(self, shapes) -> float:
        return max(self.rate(shape) for shape in (None, *shapes))

    def step(self, policy: ShapePolicy) -> GraphConfig | None:
        """Decode one step as the policy wants it."""
        shape = policy.shape()
        factor = self.slow(self.now)
        target, other = (
            seconds * factor * float(np.exp(self.noise * self.rng.standard_normal())) for seconds in self.takes(shape)
        )
        self.now += target + other
        beyond = self.brings(shape) - 1.0
        counts = [1 + int(self.rng.poisson(beyond)) if beyond > 0 else 1 for _ in range(self.batch)]
        profiles = {}
        if shape is not None:
            for name, probs in self.text.items():
                if name == "lookup" or shape.depth:
                    nodes = min(sum(counts), MOST_NODES)  # what was proposed after every accepted node is seen
                    hit = self.rng.random((nodes, 1)) < probs.cumsum(1)
                    first = hit & (hit.cumsum(1) == 1)
                    profiles[name] = (probs.repeat(nodes, 0), first)
        self.tokens += sum(counts)
        rows = 1 if shape is None else shape.max_rows
        seconds = (target, other) if self.told else (0.0, 0.0)
        policy.observe(Observation(None, counts, rows, profiles, *seconds))
        return shape

    def run(self, policy: ShapePolicy, steps: int) -> list[GraphConfig | None]:
        return [self.step(policy) for _ in range(steps)]


def experience(
    known: CostPrior = KNOWN, device: str = "cpu", *, with_model: bool = True, acceptance: AcceptanceModel | None = None
) -> ShapeExperience:
    """Of a pair that nobody ran."""
    shapes = ladder(device, with_model=with_model)
    found = ShapeExperience(CostModel(known, shapes), shapes)
    if acceptance is not None:
        found.acceptance = acceptance
    return found


def start(machine: str, text, bandwidth: float = 1.0, **world) -> tuple[World, ShapePolicy, ShapeExperience]:
    """A text of a pair that nobody ran, whose memory was believed to be faster by ``bandwidth`` than it is."""
    curve, device, known = MACHINES[machine]
    extra = {"level": 0.002, "step": 0.001} if device == "cuda" else {}
    pair = experience(replace(known, bandwidth=bandwidth * known.bandwidth), device)
    return World(curve, text, **{**extra, **world}), ShapePolicy(pair, prefix=200), pair
