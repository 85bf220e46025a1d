"""What a step costs here: known without measuring, corrected by every step that is decoded.

The prior is arithmetic: bytes that a forward reads over the memory's bandwidth, multiplications over the processor's
speed, each hidden behind the other as the legs of a triangle are by its hypotenuse, and a little for every layer. What
steps really take corrects its logarithm: a Gaussian estimate at a few numbers of rows, smooth between them, with one
slope over the cached tokens; likewise for what a step needs besides the target, shape by shape. A machine is slow now
and then and never fast by accident, so a step that takes longer than expected counts less the further it is out, and
one that takes less counts in full.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig

from ..model.properties import size_in
from ..packed.modules import Packed, packed_in

# Rows of all sequences together, 1, 2, 3 … 16, 24, 32, 48 … 16384: kernels take several rows at a time, so 11 may cost
# what 8 do, and 12 more.
KNOTS = np.union1d(np.arange(1.0, 17.0), np.append(2.0 ** np.arange(15), 3.0 * 2.0 ** np.arange(13)))
OCTAVE = np.log2(KNOTS)
PLAIN = "plain"  # among the shapes: no speculation

SCALE = 1.2  # spread of the prior's logarithm, common to all rows: a factor of three
BEND = 0.45  # spread of its shape over rows
OCTAVES = 4.0  # over which that bends
LONE = 0.04  # spread of one number of rows alone
PREFIX = 0.15  # spread of the slope over doublings of the cached tokens beyond PREFIX_UNIT
PREFIX_UNIT = 1024.0
MOST_FREE_ROWS = 1024.0
BELIEVABLE = (1e-7, 1e4)  # seconds of a step's part
NOISE = 0.1  # of one step
FASTER = 3.0  # standard deviations below the expected time, from which on the whole machine is faster
SLOWER, LASTING = 2.0, 6  # standard deviations above it, and steps one after the other, from which on it is slower
COLD = 0.7  # of the first step of a shape in a process: storage is made, code is loaded
WANDER = 0.01  # by which the whole machine, and
LONE_WANDER = 0.004  # by which every number of rows drifts from step to step
ROWS_WANDER = 0.02  # where rows vary: by which a forward drifts; what has half or twice its rows says little of that

TODAY = 0.2  # by which the whole machine may differ from what another process saw

BATCH = 0.2  # spread of the slope over doublings of the batch, of what a step needs besides the target
STEP = 0.6  # spread of what all shapes have in common of it
KIND = 1.0  # spread of what shapes with and without a draft model have in common
SHAPE = 0.4  # spread of one shape


@dataclass(frozen=True)
class Known:
    """What is known of a pair without running it.

    Attributes:
        target_bytes, draft_bytes: of weights that a forward reads; 0 without a draft model.
        target_layers, draft_layers: how many.
        cache_bytes: keys and values of one token in the target.
        bandwidth: bytes a second that the device reads.
        free_rows: rows whose arithmetic takes as long as reading the weights does, which it hides behind.
        layer_seconds, draft_layer_seconds: calling a layer's operators.
        forward_seconds: calling a draft forward's operators besides its layers'.
        level_seconds, step_seconds: calling a level's and a step's other operators.
    """

    target_bytes: float
    target_layers: int
    draft_bytes: float = 0.0
    draft_layers: int = 0
    cache_bytes: float = 0.0
    bandwidth: float = 1.5e10
    free_rows: float = 32.0
    layer_seconds: float = 2e-4
    draft_layer_seconds: float = 2e-4
    forward_seconds: float = 0.0
    level_seconds: float = 4e-4
    step_seconds: float = 1.5e-3

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        draft: nn.Module | None,
        bandwidth: float,
        *,
        products: float | None = None,
        one_op: bool,
        compiled: bool = False,
    ) -> Known:
        """Of two models as they lie in memory.

        Args:
            model, draft: target and draft.
            bandwidth: bytes a second that the device reads.
            products: multiplications of weights a second; ``None``: not known.
            one_op: whether the draft's forward is one operator.
            compiled: whether a step's other operators are compiled ones of the CPU.
        """
        on_gpu = next(model.parameters()).device.type == "cuda"
        config = model.config.get_text_config(decoder=True)
        layers = int(config.num_hidden_layers)
        heads, size = (_largest(size_in(config, key)) for key in ("num_key_value_heads", "head_dim"))
        heads = heads or config.num_attention_heads
        size = size or config.hidden_size // config.num_attention_heads
        speeds = {"free_rows": 128.0, "layer_seconds": 1e-4, "draft_layer_seconds": 1e-4} if on_gpu else {}
        if products is not None:
            speeds["free_rows"] = min(max(model.dtype.itemsize * products / bandwidth, 1.0), MOST_FREE_ROWS)
        if one_op:
            speeds["draft_layer_seconds"] = 5e-5
        if compiled and not on_gpu:
            speeds.update(forward_seconds=6e-4, level_seconds=1e-4, step_seconds=1e-3)
        return cls(
            target_bytes=weight_bytes(model),
            target_layers=layers,
            draft_bytes=0.0 if draft is None else weight_bytes(draft),
            draft_layers=layers_of(draft),
            cache_bytes=2.0 * layers * heads * size * model.dtype.itemsize,
            bandwidth=bandwidth,
            **speeds,
        )

    def target_seconds(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """One target forward of ``rows`` rows behind ``cached`` tokens, all sequences together."""
        reading = self.target_bytes * np.hypot(1.0, (rows - 1.0) / self.free_rows) + self.cache_bytes * cached
        return self.target_layers * self.layer_seconds + reading / self.bandwidth

    def other_seconds(self, config: GraphConfig | None) -> float:
        """All that a step of one sequence needs besides."""
        if config is None:
            return 0.25 * self.step_seconds
        rows = config.chain_rows + max(0, config.depth - 1) * config.width
        reading = self.draft_bytes * (config.depth + rows / self.free_rows if config.depth else 0.0)
        levels = (config.depth + config.history_depth) * self.level_seconds
        return (
            self.step_seconds
            + levels
            + config.depth * (self.forward_seconds + self.draft_layers * self.draft_layer_seconds)
            + (reading / self.bandwidth)
        )


class Correction:
    """Logarithm of observed over known seconds: a Gaussian over a few values, conditioned on one step at a time.

    Args:
        covariance: of the values before anything was seen, [n, n]; the last one is a slope.
        wander: what a step adds to it, [n, n].
    """

    def __init__(self, covariance: np.ndarray, wander: np.ndarray) -> None:
        self.mean = np.zeros(len(covariance))
        self.slow: list[float] = []  # surprises of the last steps, as long as all were slow
        self.common = np.append(np.ones(len(covariance) - 1), 0.0)
        self.covariance, self.wander = covariance, wander
        self.certain = covariance.diagonal()  # variances before anything was seen

    def observe(self, weights: np.ndarray, residual: float, noise: float = NOISE) -> None:
        """One step whose logarithm is ``residual`` above the known one, where ``weights`` [n] say what it is of."""
        covariance = self.covariance + self.wander
        # Nothing grows less certain than it was before anything was seen.
        diagonal = covariance.diagonal()
        if (diagonal > self.certain).any():
            excess = np.sqrt(np.maximum(diagonal / self.certain, 1.0))
            covariance = covariance / (excess[:, None] * excess)
        spread = covariance @ weights
        variance = float(weights @ spread)
        surprise = residual - float(weights @ self.mean)
        surprise -= self._lasting(surprise, math.sqrt(variance + noise * noise))
        if surprise < -FASTER * math.sqrt(variance + noise * noise):
            # The machine was busy and is no longer: all else was seen too slow as well.
            covariance = covariance + surprise**2 * np.outer(self.common, self.common)
            spread = covariance @ weights
            variance = float(weights @ spread)
        variance += noise * noise + 0.5 * max(surprise, 0.0) ** 2
        self.mean = self.mean + spread * (surprise / variance)
        part = spread / math.sqrt(variance)
        self.covariance = covariance - part[:, None] * part

    def _lasting(self, surprise: float, deviation: float) -> float:
        """How much slower the machine is if step after step was slow; all that did not run is then taken to be so."""
        self.slow = [*self.slow, surprise] if surprise > SLOWER * deviation else []
        if len(self.slow) < LASTING:
            return 0.0
        least, self.slow = min(self.slow), []
        self.mean = self.mean + least * self.common
        return least

    def spread(self, weights: np.ndarray) -> np.ndarray:
        """Standard deviation of linear combinations, weights [S, n] → [S]."""
        return np.sqrt(np.maximum(((weights @ self.covariance) * weights).sum(1), 0.0))

    def as_dict(self) -> dict[str, Any]:
        return {"mean": _rounded(self.mean), "covariance": [_rounded(row) for row in self.covariance]}

    def load(self, data: Mapping[str, Any]) -> None:
        """What :meth:`as_dict` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        mean, covariance = np.array(data["mean"], dtype=float), np.array(data["covariance"], dtype=float)
        if mean.shape != self.mean.shape or covariance.shape != self.covariance.shape:
            raise ValueError("costs: another number of values")
        if not (np.isfinite(mean).all() and np.isfinite(covariance).all() and (abs(mean) < 20).all()):
            raise ValueError("costs: values that no machine has")
        if (covariance.diagonal() < 0).any() or (covariance.diagonal() > 2 * self.certain + 1).any():
            raise ValueError("costs: not a covariance")
        self.mean, self.covariance = mean, covariance


class CostModel:
    """Seconds of a step's parts by rows, cached tokens and shape.

    Args:
        known: the prior.
        shapes: by name, those that steps can have.
        rows_vary: whether steps of one shape have more rows or fewer. As many counts of them are then seen as can be,
            so memory and arithmetic are taken to become slow and fast each on its own.
    """

    def __init__(self, known: Known, shapes: Mapping[str, GraphConfig], *, rows_vary: bool = False) -> None:
        self.known = known
        self.names = (PLAIN, *shapes)
        self.index = {name: i for i, name in enumerate(self.names)}
        self.known_other = np.array([known.other_seconds(None), *(known.other_seconds(s) for s in shapes.values())])
        apart = (OCTAVE[:, None] - OCTAVE) / OCTAVES
        knots = SCALE**2 + BEND**2 * np.exp(-np.abs(apart)) + LONE**2 * np.eye(len(KNOTS))
        common = ROWS_WANDER**2 * np.exp(-np.abs(OCTAVE[:, None] - OCTAVE)) if rows_vary else WANDER**2
        drift = common + LONE_WANDER**2 * np.eye(len(KNOTS))
        self.target = Correction(_with_slope(knots, PREFIX), _with_slope(drift, 0.0))
        has_model = np.array([0, *(1 if s.depth else 2 for s in shapes.values())])
        same_kind = has_model[:, None] == has_model
        other = STEP**2 + KIND**2 * same_kind + SHAPE**2 * np.eye(len(self.names))
        drift = WANDER**2 + LONE_WANDER**2 * np.eye(len(self.names))
        self.other = Correction(_with_slope(other, BATCH), _with_slope(drift, 0.0))
        self.latest: tuple[Any, ...] = None, None, -1.0, None  # mean, covariance, cached tokens, and what they give
        self.steps = 0  # whose times were known
        self.tried: dict[str, int] = {}  # of them, by shape

    def target_weights(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """[S] → [S, knots + 1]: which values a forward's time is of."""
        octave = np.minimum(np.log2(np.maximum(rows, 1.0)), OCTAVE[-1])
        below = np.minimum(np.searchsorted(OCTAVE, octave, side="right") - 1, len(KNOTS) - 2)
        share = (octave - OCTAVE[below]) / (OCTAVE[below + 1] - OCTAVE[below])
        weights = np.zeros((len(rows), len(KNOTS) + 1))
        place = np.arange(len(rows))
        weights[place, below] = 1.0 - share
        weights[place, below + 1] = share
        weights[:, -1] = _doublings(cached)
        return weights

    def other_weights(self, names: Sequence[int] | np.ndarray, batch: int) -> np.ndarray:
        """[S, shapes + 1]"""
        weights = np.zeros((len(names), len(self.names) + 1))
        weights[np.arange(len(names)), names] = 1.0
        weights[:, -1] = np.log2(batch)
        return weights

    def target_seconds(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """Seconds of target forwards, rows [S] of all sequences together; never less for more rows."""
        return np.exp(np.interp(np.log2(np.maximum(rows, 1.0)), OCTAVE, self._at_knots(cached)))

    def _at_knots(self, cached: float) -> np.ndarray:
        """Logarithms of seconds, never falling; asked for several times between two observations."""
        mean, covariance = self.target.mean, self.target.covariance
        known_mean, known_covariance, about, found = self.latest
        if known_mean is not mean or known_covariance is not covariance or about != cached:
            at_knots = self.known.target_seconds(KNOTS, cached) * np.exp(mean[:-1] + mean[-1] * _doublings(cached))
            certain = 1.0 / np.maximum(covariance.diagonal()[:-1], 1e-6)
            found = np.log(increasing(at_knots, certain))
            self.latest = mean, covariance, cached, found
        return found

    def other_seconds(self, batch: int) -> np.ndarray:
        """What a step needs besides the target: of plain decoding and of every shape, [1 + shapes]."""
        return self.known_other * np.exp(self.other.mean[:-1] + self.other.mean[-1] * np.log2(batch))

    def observe(
        self, name: str, rows: int, cached: float, batch: int, target: float, other: float, *, noise: float = NOISE
    ) -> None:
        """One step: rows of all sequences together, and its seconds (0: unknown)."""
        if target > 0:
            self.observe_forwards(name, [rows], cached, [target], [noise], steps=1)
        if other > 0:
            place = self.index[name]
            weights = np.zeros(len(self.names) + 1)
            weights[place], weights[-1] = 1.0, math.log2(batch)
            residual = math.log(_believable(other) / self.known_other[place])
            self.other.observe(weights, residual, max(noise, 2.0 * NOISE))

    def observe_forwards(
        self,
        name: str,
        rows: Sequence[int],
        cached: float,
        seconds: Sequence[float],
        noises: Sequence[float],
        *,
        steps: int,
    ) -> None:
        """Several forwards of the target behind about as many tokens; asked for once, what they share costs less.

        Args:
            name: of the steps' shape.
            rows: of all sequences together, by forward.
            cached: tokens of all sequences together.
            seconds, noises: by forward.
            steps: that they stand for.
        """
        weights = self.target_weights(np.array(rows, dtype=float), cached)
        # Between knots the known seconds are interpolated as they are when asked for.
        near = weights[:, :-1].any(0).nonzero()[0]
        expected = weights[:, near] @ np.log(self.known.target_seconds(KNOTS[near], cached))
        for part, known, taken, noise in zip(weights, expected.tolist(), seconds, noises, strict=True):
            self.target.observe(part, math.log(_believable(taken)) - known, noise)
        self.steps += steps
        self.tried[name] = self.tried.get(name, 0) + steps

    def as_dict(self) -> dict[str, Any]:
        """All that was learned, for the disk."""
        return {
            "names": list(self.names),
            "target": self.target.as_dict(),
            "other": self.other.as_dict(),
            "steps": self.steps,
            "tried": dict(self.tried),
        }

    def load(self, data: Mapping[str, Any]) -> None:
        """What :meth:`as_dict` gave, of the same shapes.

        Raises:
            ValueError, KeyError, TypeError: it is not that; nothing was taken over.
        """
        if tuple(data["names"]) != self.names:
            raise ValueError("costs: of other shapes")
        steps, tried = int(data["steps"]), {str(name): int(n) for name, n in data["tried"].items()}
        before = self.target.mean, self.target.covariance
        self.target.load(data["target"])
        try:
            self.other.load(data["other"])
        except (ValueError, KeyError, TypeError):
            self.target.mean, self.target.covariance = before
            raise
        self.steps, self.tried = steps, tried
        for part in (self.target, self.other):  # the machine may be faster or slower today, for all shapes alike
            part.covariance = part.covariance.copy()
            part.covariance[:-1, :-1] += TODAY**2


def increasing(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The closest never falling sequence: isotonic regression by pooling adjacent violators, weights [n]."""
    blocks: list[tuple[float, float, int]] = []
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        count = 1
        while blocks and blocks[-1][0] > value:
            v, w, c = blocks.pop()
            value, weight, count = (v * w + value * weight) / (w + weight), w + weight, c + count
        blocks.append((value, weight, count))
    return np.concatenate([np.full(count, value) for value, _, count in blocks])


def layers_of(draft: nn.Module | None) -> int:
    """Decoder layers of a draft."""
    if draft is None:
        return 0
    if isinstance(draft, PreTrainedModel):
        return int(draft.config.get_text_config(decoder=True).num_hidden_layers)
    return max((len(m) for m in draft.modules() if isinstance(m, nn.ModuleList)), default=1)


def weight_bytes(model: nn.Module) -> float:
    """Bytes of the weights that a forward of few rows reads: all but the input embedding, of which it reads rows."""
    if not isinstance(model, PreTrainedModel):
        return float(sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("embed_tokens")))
    read = {id(p): p.nbytes for p in model.parameters()}
    read |= {module.packed.data_ptr(): module.matrix.nbytes for module in packed_in(model)}
    embedding, output = (_place(m) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    return float(sum(size for place, size in read.items() if place != embedding or embedding == output))


def _largest(size: Any) -> int | None:
    """Of the layers."""
    return max((n for n in size if n), default=None) if isinstance(size, list) else size


def _place(module: nn.Module | None) -> int | None:
    """What tells whether two modules have the same weights."""
    return module.packed.data_ptr() if isinstance(module, Packed) else id(getattr(module, "weight", None))


def _doublings(cached: float) -> float:
    return math.log2(1.0 + cached / PREFIX_UNIT)


def _believable(seconds: float) -> float:
    return min(max(seconds, BELIEVABLE[0]), BELIEVABLE[1])


def _with_slope(covariance: np.ndarray, spread: float) -> np.ndarray:
    """One more value, of no relation to the others."""
    out = np.zeros((len(covariance) + 1,) * 2)
    out[:-1, :-1] = covariance
    out[-1, -1] = spread**2
    return out


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.7g}") for value in values]
