"""Seconds of a step's parts: a prior known without measuring, corrected by running medians of what steps took.

The prior is arithmetic: bytes that a forward reads over the memory's bandwidth, multiplications of more rows than hide
behind that, and a little for every layer. What steps really take corrects its logarithm: of the target's forward by row
counts, of all else in a step by shapes. A median of the latest steps shrugs off single slow ones. Other programs slow
all steps down whatever those forward, so each step is held against the *pace* of the machine, that of the quickest
quarter of the last few steps of all kinds. What lasts moves the pace alone, and slower steps are left out: neither says
how row counts compare.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import nn
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig
from gsd_kernels.config import PLAIN

from ..model.properties import size_in
from ..packed.modules import Packed, stored_in

# Row counts, of all sequences together, at which seconds are known: 1, 2, 3 … 16, 24, 32, 48 … 16384. Kernels take
# several rows at a time, so 11 may cost what 8 do, and 12 more.
ROW_COUNTS = np.union1d(np.arange(1.0, 17.0), np.append(2.0 ** np.arange(15), 3.0 * 2.0 ** np.arange(13)))
LOG2_ROWS = np.log2(ROW_COUNTS)
REMEMBERED_STEPS = 15  # of a row count, or of a shape
PACE_STEPS = 12  # by which the machine's pace is known
QUICK_SHARE = 0.25  # of them, at least, that other programs do not disturb
# Log seconds: steps slower by more than SLOW and what is uncertain, or by MAX_SLOW, were disturbed.
SLOW, MAX_SLOW = 0.25, 0.8
MIN_ALIKE = 4  # such steps with as many rows, all of which are slow, are not by chance
SURE_STD = 0.1  # steps of what is known better say what the machine's pace is
# Standard deviations of log seconds against what was timed: of a forward, per square root of a doubling of its rows
# from the closest row count that was; of all else in steps of a shape that was not.
ROWS_STD, SHAPE_STD = 0.3, 0.4
MIN_SECONDS, MAX_SECONDS = 1e-7, 1e4  # of a part of a step, as it is observed
# What differs on a GPU, with compiled CPU ops, and where the draft's forward is one operator.
GPU = {"bandwidth": 1.5e12, "free_rows": 128.0, "layer_seconds": 1e-4, "draft_layer_seconds": 1e-4}
COMPILED = {"forward_seconds": 6e-4, "level_seconds": 1e-4, "step_seconds": 1e-3}
ONE_OP = {"draft_layer_seconds": 5e-5}


@dataclass(frozen=True)
class CostPrior:
    """Costs of a pair that are known without running it. Seconds are of calls alone, without reading and arithmetic.

    Attributes:
        target_bytes, draft_bytes: of weights that a forward reads; 0 without a draft model.
        target_layers, draft_layers: number of decoder layers.
        cache_bytes: keys and values of one token in the target.
        bandwidth: bytes a second that the device reads, to an order of magnitude: steps correct it.
        free_rows: number of rows whose arithmetic takes as long as reading the weights, which hides it.
        layer_seconds, draft_layer_seconds: calling the operators of a layer.
        forward_seconds: calling the operators of a draft forward besides its layers'.
        level_seconds, step_seconds: calling the other operators of a level, of a step.
    """

    target_bytes: float
    target_layers: int
    draft_bytes: float = 0.0
    draft_layers: int = 0
    cache_bytes: float = 0.0
    bandwidth: float = 1.5e10
    free_rows: float = 24.0
    layer_seconds: float = 2e-4
    draft_layer_seconds: float = 2e-4
    forward_seconds: float = 0.0
    level_seconds: float = 4e-4
    step_seconds: float = 1.5e-3

    @classmethod
    def of(
        cls,
        model: PreTrainedModel,
        *drafts: nn.Module,
        one_op: bool,
        compiled: bool = False,
    ) -> CostPrior:
        """Of models as they lie in memory.

        Args:
            model, drafts: target and draft, if there is one.
            one_op: whether the draft's forward is one operator.
            compiled: whether a step's other operators are compiled ones of the CPU.
        """
        on_gpu = next(model.parameters()).device.type == "cuda"
        config = model.config.get_text_config(decoder=True)
        layers = layers_of(model)
        heads = size_in(config, "num_key_value_heads") or config.num_attention_heads
        size = size_in(config, "head_dim") or config.hidden_size // config.num_attention_heads
        speeds = GPU if on_gpu else COMPILED if compiled else {}
        return cls(
            target_bytes=weight_bytes(model),
            target_layers=layers,
            draft_bytes=sum(map(weight_bytes, drafts)),
            draft_layers=sum(map(layers_of, drafts)),
            cache_bytes=2.0 * layers * heads * size * model.dtype.itemsize,
            **speeds | (ONE_OP if one_op else {}),
        )

    def target_seconds(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """One target forward of ``rows`` [S] rows behind ``cached`` tokens, all sequences together: [S]."""
        reading = self.target_bytes * np.hypot(1.0, (rows - 1.0) / self.free_rows) + self.cache_bytes * cached
        return self.target_layers * self.layer_seconds + reading / self.bandwidth

    def other_seconds(self, config: GraphConfig | None) -> float:
        """All else in a step of one sequence: drafting, merging, flattening, verification, commit."""
        if config is None:
            return 0.25 * self.step_seconds
        rows = config.chain_rows + max(0, config.depth - 1) * config.width
        reading = self.draft_bytes * (config.depth + rows / self.free_rows if config.depth else 0.0)
        levels = (config.depth + config.history_depth) * self.level_seconds
        calls = config.depth * (self.forward_seconds + self.draft_layers * self.draft_layer_seconds)
        return self.step_seconds + levels + calls + reading / self.bandwidth


def layers_of(model: nn.Module) -> int:
    """Number of decoder layers of a model or a drafter."""
    if isinstance(model, PreTrainedModel):
        return int(model.config.get_text_config(decoder=True).num_hidden_layers)
    return max((len(m) for m in model.modules() if isinstance(m, nn.ModuleList)), default=1)


def weight_bytes(model: nn.Module) -> float:
    """Bytes of the weights that a forward of few rows reads: all but the input embedding, of which it reads rows."""
    if not isinstance(model, PreTrainedModel):
        return float(sum(p.nbytes for name, p in model.named_parameters() if not name.startswith("embed_tokens")))
    read = {id(p): p.nbytes for p in model.parameters()}
    for module in model.modules():
        if (stored := stored_in(module)) is not None:
            place = _place(module) if isinstance(module, Packed) else id(module._parameters.get("weight", module))
            read[place] = stored.nbytes
    embedding, output = (_place(m) for m in (model.get_input_embeddings(), model.get_output_embeddings()))
    return float(sum(size for place, size in read.items() if place != embedding or embedding == output))


def _place(module: nn.Module | None) -> int | None:
    """A key that tells whether two modules have the same weights."""
    return module.packed.data_ptr() if isinstance(module, Packed) else id(getattr(module, "weight", None))


def lower_quartile(latest: np.ndarray) -> np.ndarray:
    """The lower quartile of the latest observations, [..., n] with NaN where there is none yet: [...]."""
    known = (~np.isnan(latest)).sum(-1, keepdims=True)
    place = (QUICK_SHARE * np.maximum(known - 1, 0)).astype(int)
    return np.take_along_axis(np.sort(latest), place, -1)[..., 0]  # NaN is last


class CostModel:
    """Seconds of a step's parts by rows, cached tokens and shape. Threads share it without a lock.

    Args:
        prior: of the pair.
        shapes: by name, those that steps can have.

    Attributes:
        names, configs: of plain decoding, which has no shape, and of the shapes.
        target, other: log(seconds / prior) beside the pace, of the latest steps [n, REMEMBERED_STEPS], the newest last,
            NaN where there was none yet: of the target's forward by row count, of all else by name.
        timed: number of timed steps, as ``other`` by name, int [1 + shapes].
    """

    def __init__(self, prior: CostPrior, shapes: Mapping[str, GraphConfig]) -> None:
        self.prior = prior
        self.names, self.configs = (PLAIN, *shapes), (None, *shapes.values())
        self.prior_other = np.array([prior.other_seconds(shape) for shape in self.configs])
        self.kinds = np.array([0, *(1 if shape.depth else 2 for shape in shapes.values())])
        self.target, self.other = (np.full((n, REMEMBERED_STEPS), np.nan) for n in (len(ROW_COUNTS), len(self.names)))
        self.paces = np.zeros(0)  # log(seconds / predicted without a pace) of the latest steps
        self.pace = 0.0
        self.timed = np.zeros(len(self.names), dtype=np.int64)

    @property
    def steps(self) -> int:
        """Number of timed steps."""
        return int(self.timed.sum())

    def target_seconds(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """Seconds of target forwards, rows [S] of all sequences together; never less for more rows."""
        return np.exp(self.pace) * self._forwards(rows, cached)

    def other_seconds(self) -> np.ndarray:
        """All else in a step, by name: of plain decoding and of every shape, [1 + shapes]."""
        return np.exp(self.pace) * self._besides()

    def target_std(self, rows: np.ndarray) -> np.ndarray:
        """Standard deviations of forwards' log seconds against those of the closest row count that was timed: [S]."""
        seen = ~np.isnan(lower_quartile(self.target))
        if not seen.any():
            return np.full(len(rows), ROWS_STD)
        apart = np.abs(np.log2(np.maximum(rows, 1.0))[:, None] - LOG2_ROWS[seen]).min(1)
        return ROWS_STD * np.sqrt(np.maximum(apart - 0.05, 0.0))

    def other_std(self) -> np.ndarray:
        """Standard deviations of the log seconds of all else, by name: 0 of what was timed, [1 + shapes]."""
        return np.where(np.isnan(lower_quartile(self.other)), SHAPE_STD, 0.0)

    def observe(self, name: str, cached: float, steps: Sequence[tuple[int, float, float]]) -> None:
        """Learn from successive steps.

        Args:
            name: of their shape.
            cached: tokens in the target's cache, of all sequences together.
            steps: rows of all sequences together, seconds of the target's forward, and of all else.
        """
        if not steps:
            return
        rows, target, other = np.clip(np.array(steps, dtype=float), MIN_SECONDS, MAX_SECONDS).T  # [n] each
        place = self.names.index(name)
        self.timed[place] += len(steps)
        unsure = self.target_std(rows) + self.other_std()[place]  # [n]
        paces = np.log((target + other) / (self._forwards(rows, cached) + self._besides()[place]))
        sure = (unsure < SURE_STD) | (self.paces.size == 0)
        if sure.any():
            self.paces = np.append(self.paces, paces[sure])[-PACE_STEPS:]
            self.pace = float(lower_quartile(self.paces))
        # A step that is slow beyond what is uncertain was disturbed; quick by accident is none.
        quick = paces - self.pace < np.minimum(SLOW + 2.0 * unsure, MAX_SLOW)
        forward = np.log(target / self.prior.target_seconds(rows, cached)) - self.pace
        counts = np.abs(LOG2_ROWS - np.log2(rows)[:, None]).argmin(1)
        for count in set(counts.tolist()):
            alike = counts == count
            if alike.sum() >= MIN_ALIKE and not (quick & alike).any():  # so much slower they are
                quick |= alike
            _append(self.target[count], forward[quick & alike])
        _append(self.other[place], np.log(other[quick] / self.prior_other[place]) - self.pace)

    def _forwards(self, rows: np.ndarray, cached: float) -> np.ndarray:
        """Seconds of forwards at the usual pace."""
        found = lower_quartile(self.target)
        seen = ~np.isnan(found)
        correction = np.interp(LOG2_ROWS, LOG2_ROWS[seen], found[seen]) if seen.any() else 0.0
        logs = np.log(self.prior.target_seconds(ROW_COUNTS, cached)) + correction
        # Errors can make more rows look cheaper: halfway between the closest rising curves above and below.
        logs = (np.maximum.accumulate(logs) + np.minimum.accumulate(logs[::-1])[::-1]) / 2
        return np.exp(np.interp(np.log2(np.maximum(rows, 1.0)), LOG2_ROWS, logs))

    def _besides(self) -> np.ndarray:
        """Seconds of all else at the usual pace, by name; what was not timed is corrected as others of its kind."""
        found = lower_quartile(self.other)
        for kind in set(self.kinds.tolist()):
            alike = self.kinds == kind
            known = found[alike & ~np.isnan(found)]
            found[alike & np.isnan(found)] = known.mean() if known.size else 0.0
        return self.prior_other * np.exp(found)

    def arrays(self) -> dict[str, np.ndarray]:
        """All that is kept on disk, in place; the machine may have another pace another day."""
        return {"target": self.target, "other": self.other, "timed": self.timed}


def _append(latest: np.ndarray, values: np.ndarray) -> None:
    latest[:] = np.append(latest, values)[-REMEMBERED_STEPS:]
