"""What the ladder of shapes loses against the full set, simulated over recorded acceptance.

Profiles (what the sources thought of the candidates after every accepted node, and which one the target picked) were
recorded with the demo pair on three kinds of text, greedy and sampled. The simulation takes windows of them, predicts
the tokens of a step of all 576 shapes as the automatic policy does, divides by the seconds of a cost curve, and
compares the best shape of all with the best of the ladder. Recording, and the search for a ladder, are in commit
b32da8d, ``bench/generation/ladder.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gsd_kernels import GraphConfig
from gsd_kernels_hf.policy.acceptance import MAX_PROFILES, MISS, AcceptanceModel, Pool, TreeForecast
from gsd_kernels_hf.policy.shapes import LOOKUP_CONTEXT, ladder

PROFILES = Path(__file__).parents[2] / "bench" / "results" / "profiles.npz"
PROMPTS = 6
KINDS = tuple(f"{text}, {how}" for text in ("code", "copy", "prose") for how in ("greedy", "sampled"))
WINDOWS = (0.25, 1.0)  # where in a text the windows of profiles end

ROWS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10)
FAMILIES = ((1, 1), (2, 2), (4, 3), (8, 4))  # width, branch
FREE = ((2, 2), (6, 4))


def full_set() -> list[GraphConfig]:
    """576 shapes: four families with a draft model, two without, by depth and rows; and a GPU's deepest."""
    reuse = {"history_depth": 4, "history_width": 8}
    with_model = [
        GraphConfig(depth=d, width=w, branch=b, max_rows=r, **reuse) for w, b in FAMILIES for d in DEPTHS for r in ROWS
    ]
    without = [
        GraphConfig(
            depth=0, width=w, branch=b, max_rows=r, merge_context=LOOKUP_CONTEXT, history_depth=d, history_width=w
        )
        for w, b in FREE
        for d in DEPTHS
        for r in ROWS
    ]
    deepest = max(ladder("cuda", with_model=False).values(), key=lambda shape: shape.history_depth)
    return [*with_model, *without, deepest]


@dataclass(frozen=True)
class Curve:
    """Seconds of a step.

    Attributes:
        target: of a forward, by rows; between them in proportion.
        level: of a draft forward; ``wide`` of it more for every further row.
        step, other_level: of what a step and a level need besides.
        batch: sequences.
        device: whose ladder.
        weight: in the search for a ladder; 1 for those that it is held to.
    """

    target: dict[int, float]
    level: float
    wide: float
    step: float
    other_level: float
    device: str
    batch: int = 1
    weight: float = 0.25

    def seconds(self, shapes: Sequence[GraphConfig], rows: np.ndarray) -> np.ndarray:
        """Of every shape with ``rows`` [..., S] of a sequence, and of a plain step last: [..., S + 1]."""
        rows = self.batch * np.concatenate([rows, np.ones_like(rows[..., :1])], -1)
        return self._target(rows) + np.array([self._other(shape) for shape in (*shapes, None)])

    def _target(self, rows: np.ndarray) -> np.ndarray:
        seconds = np.interp(rows, list(self.target), list(self.target.values()))
        return seconds * np.maximum(rows / max(self.target), 1.0)

    def _other(self, shape: GraphConfig | None) -> float:
        if shape is None:
            return 0.2 * self.step
        drafting = shape.depth * self.level * (1.0 + self.wide * shape.width)
        return self.step + drafting + (shape.depth + shape.history_depth) * self.other_level


def doubling(*seconds: float) -> dict[int, float]:
    """Seconds at 1, 2, 4, … rows."""
    return {1 << i: value for i, value in enumerate(seconds)}


# One operator over a 250M target, 2 threads with AVX-512 and its bfloat16 products, prefix 256: steps of six rows.
FLOAT32 = {1: 0.0326, 6: 0.0362, 7: 0.0392, 12: 0.0393, 13: 0.0495, 18: 0.0495, 24: 0.0678, 32: 0.0935, 128: 0.370}
BFLOAT16 = {1: 0.0165, 6: 0.0178, 7: 0.0202, 12: 0.0205, 13: 0.0242, 18: 0.0275, 24: 0.037, 32: 0.0475, 128: 0.185}
# The same on a host with busy neighbours: memory as fast as before, arithmetic at two thirds.
BUSY = {1: 0.0350, 6: 0.0351, 8: 0.0382, 12: 0.0493, 16: 0.0677, 32: 0.135, 128: 0.540}
# The same from bytes and arithmetic, where it has not run: tiles of sixteen rows, and two rows at a time.
TILES = {1: 0.0160, 16: 0.0175, 17: 0.0205, 32: 0.0220, 48: 0.029, 64: 0.036, 128: 0.070}
AVX2 = {1: 0.033, 2: 0.034, 4: 0.045, 8: 0.080, 16: 0.150, 32: 0.290, 128: 1.150}
# The modules of a 260M target, 2 cores of another CPU.
MODULES_FLOAT32 = doubling(0.077, 0.127, 0.127, 0.127, 0.156, 0.211, 0.298, 0.550)
MODULES_BFLOAT16 = doubling(0.052, 0.052, 0.055, 0.060, 0.068, 0.097, 0.150, 0.280)
H200 = {1 << i: 0.0056 + 0.001 * (1 << i) / 64 for i in range(8)}  # 8B by bytes, launches included

DRAFT = {"level": 0.00027, "wide": 0.15, "step": 0.0015, "other_level": 0.00015, "device": "cpu"}
EXPENSIVE = {**DRAFT, "level": 0.004}
MODULES = {"level": 0.0011, "wide": 0.03, "step": 0.003, "other_level": 0.0003, "device": "cpu"}
#: The three curves of the table, then others that a ladder should serve as well.
CURVES = {
    "CPU float32": Curve(FLOAT32, **DRAFT, weight=1.0),
    "CPU bfloat16": Curve(BFLOAT16, **DRAFT, weight=1.0),
    "H200 by bytes": Curve(H200, 0.0020, 0.002, 0.001, 0.00005, "cuda", weight=1.0),
    "CPU float32, expensive draft": Curve(FLOAT32, **EXPENSIVE),
    "CPU bfloat16, expensive draft": Curve(BFLOAT16, **EXPENSIVE),
    "CPU float32, busy host": Curve(BUSY, **DRAFT, weight=0.75),
    "CPU float32, batch 4": Curve(FLOAT32, **DRAFT, batch=4),
    "CPU bfloat16, tiles": Curve(TILES, **DRAFT, weight=0.75),
    "CPU float32, AVX2": Curve(AVX2, **DRAFT, weight=0.5),
    "CPU float32, modules": Curve(MODULES_FLOAT32, **MODULES),
    "CPU bfloat16, modules": Curve(MODULES_BFLOAT16, **MODULES),
    "H200, 70B + 1B": Curve({r: 0.034 + t for r, t in H200.items()}, 0.0020, 0.002, 0.001, 0.00005, "cuda"),
    "H200, batch 8": Curve(H200, 0.0020, 0.002, 0.001, 0.00005, "cuda", 8),
}
ASKED = tuple(name for name, curve in CURVES.items() if curve.weight == 1.0)


def windows(file: Path = PROFILES) -> dict[str, list[dict[str, Pool]]]:
    """By kind of text: pools of calibrated profiles, as the policy would have them at some place of a text."""
    arrays = np.load(file)
    found: dict[str, list[dict[str, Pool]]] = {}
    for kind in KINDS:
        whole = {}
        for name in ("model", "lookup"):
            probs, hits = arrays[f"{kind}/{name}/probs"].astype(float), arrays[f"{kind}/{name}/hits"]
            model = AcceptanceModel(probs.shape[1])
            model.observe(name, probs, hits)
            whole[name] = model.calibrated(name, probs), np.where(hits.any(1), hits.argmax(1), MISS)
        found[kind] = []
        for number in range(PROMPTS):
            own = {n: [part[arrays[f"{kind}/{n}/prompt"] == number] for part in parts] for n, parts in whole.items()}
            for share in WINDOWS:
                pools = {}
                for name, (profiles, picks) in own.items():
                    end = max(8, int(share * len(picks)))
                    begin = max(0, end - MAX_PROFILES)
                    pools[name] = Pool(profiles[begin:end], picks[begin:end])
                found[kind].append(pools)
    return found


@dataclass(frozen=True)
class Simulation:
    """Tokens and rows of a step by kind of text, [windows, S] each."""

    shapes: list[GraphConfig]
    steps: dict[str, tuple[np.ndarray, np.ndarray]]

    @classmethod
    def of(cls, shapes: list[GraphConfig], pools: dict[str, list[dict[str, Pool]]]) -> Simulation:
        plans = [TreeForecast(shapes[i : i + 32], 4) for i in range(0, len(shapes), 32)]

        def predict(found: list[dict[str, Pool]]) -> tuple[np.ndarray, np.ndarray]:
            parts = [[plan.predict(window) for plan in plans] for window in found]
            return tuple(np.stack([np.concatenate([p[i] for p in part]) for part in parts]) for i in (0, 1))

        return cls(shapes, {kind: predict(found) for kind, found in pools.items()})

    def rates(self, curve: Curve, kind: str) -> np.ndarray:
        """Tokens a second by window and shape, plain decoding last: [windows, S + 1]."""
        tokens, rows = self.steps[kind]
        return np.concatenate([tokens, np.ones((len(tokens), 1))], 1) / curve.seconds(self.shapes, rows)


def loss(rates: np.ndarray, some: Sequence[int], among: Sequence[int]) -> float:
    """Share of the tokens a second that the best of ``among`` have and the best of ``some`` lack; both have plain."""
    plain = rates.shape[1] - 1
    best, own = rates[:, [*among, plain]].max(1).sum(), rates[:, [*some, plain]].max(1).sum()
    return float(1.0 - own / best)


def table(simulation: Simulation) -> list[dict[str, Any]]:
    """Rows of the result: loss in percent by curve, kind of text and set."""
    rows = []
    for name, curve in CURVES.items():
        for with_model in (True, False) if curve.device == "cuda" else (True,):  # a CPU chooses rows without a model
            deepest = 10 if curve.device == "cpu" else 64
            among = [
                i for i, s in enumerate(simulation.shapes) if (with_model or not s.depth) and s.history_depth <= deepest
            ]
            some = [simulation.shapes.index(s) for s in ladder(curve.device, with_model=with_model).values()]
            row: dict[str, Any] = {"curve": name, "sources": "model, history" if with_model else "history"}
            row |= {k: round(100 * loss(simulation.rates(curve, k), some, among), 2) for k in KINDS}
            rows.append(row)
    return rows
