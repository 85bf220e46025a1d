"""Measuring the seconds of a step's parts ahead of time, for who wants to: it happens by itself while decoding."""

from __future__ import annotations

import copy
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from gsd_kernels import GraphConfig, flatten
from gsd_kernels.graph import pack_bits

from .. import numbers, validate
from ..costs.model import PLAIN, ROW_COUNTS, CostModel
from ..costs.pair import COSTS, describe
from ..model import properties
from ..model.fused import rows_of
from ..model.replay import replayable, wait
from ..model.runner import RowModel
from ..parallel import tensor_parallel_group
from ..records import DecodeState, Sampler
from ..sources.base import DraftSource
from ..sources.draft_model import DraftModel
from ..sources.history import History
from ..sources.layer_skip import LayerSkip
from ..sources.mixer import Mixer
from ..sources.weights import SourceWeights
from .automatic import own_pair
from .shapes import ladder, row_shape

logger = logging.getLogger("gsd_kernels")

SLOW_SECONDS = 0.3  # twice this in a warm-up: one run is enough
MAX_FORWARDS = 8.0  # row counts behind the first that costs this many plain forwards are not measured
OTHER_FACTOR = 1.25  # all else in a step over its draft alone: verification, commit and the loop come on top
CHOSEN_ROWS = (2, 4, 6, 12, 16)  # row counts measured as well, where rows are chosen one by one
SECONDS = 1e-9, 1e5  # of a step's part, at least and at most
WEIGHT_STEPS = 2  # a tuned measurement, which is a median, is weighted as this many observed steps


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step, as :func:`tune` measured them.

    Attributes:
        target: target forward by rows of a sequence.
        draft: drafting and flattening, by name of the shape, see :mod:`gsd_kernels_hf.policy.shapes`.
        about: what it was measured on.
    """

    target: dict[int, float]
    draft: dict[str, float]
    about: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, data: dict[str, Any]) -> StepCosts:
        """From JSON."""
        target, draft = (
            {name: numbers.number("seconds", n, *SECONDS) for name, n in numbers.table(part, data[part], float).items()}
            for part in ("target", "draft")
        )
        if not target or not all(rows.isdecimal() and 0 < int(rows) <= ROW_COUNTS[-1] for rows in target):
            raise ValueError("target: expected seconds by rows")
        if type(data["about"]) is not dict:
            raise ValueError("about: expected what was measured")
        return cls({int(rows): seconds for rows, seconds in target.items()}, draft, data["about"])

    def teach(self, costs: CostModel, batch: int, prefix: int) -> None:
        """Let the cost model learn it, as if steps had taken this."""
        for _ in range(WEIGHT_STEPS):
            for rows, seconds in self.target.items():
                costs.observe(PLAIN, batch * rows, batch * prefix, batch, seconds, 0.0)
            for name, seconds in self.draft.items():
                costs.observe(name, batch, batch * prefix, batch, 0.0, OTHER_FACTOR * seconds)


def tune(
    model: PreTrainedModel,
    draft: PreTrainedModel | LayerSkip | None = None,
    *,
    batch_size: int = 1,
    prefix_length: int = 512,
    backend: str = "auto",
    refresh: bool = False,
) -> StepCosts:
    """Measure now what a step of this pair costs here, rather than while decoding.

    ``graph_config="auto"`` needs it not: it begins with what is known of the weights' bytes and learns from every step.
    What is measured here it knows from the first step on. The result is kept in ``$GSD_KERNELS_CACHE`` (default: the
    user's cache folder, on Linux ``~/.cache/gsd_kernels``) and read from there unless ``refresh``.

    Args:
        model: the target.
        draft: the draft model, or a :class:`~gsd_kernels.LayerSkip` of the target; ``None``: sources that cost no
            forward.
        batch_size: sequences.
        prefix_length: tokens before the step, rounded up to a power of four times 128.
        backend: see :mod:`gsd_kernels.backends`.
        refresh: measure anew.

    Raises:
        TypeError, ValueError: the pair cannot be served.
    """
    model, source = properties.unwrap(model), draft if isinstance(draft, DraftSource) else None
    draft = properties.unwrap(draft) if source is None else source.forwards[0]
    validate.check_model("model", model)
    if draft is not None:
        validate.check_model("draft", draft)
        validate.check_pair(model, draft, cure="costs are measured ahead for drafts of the same tokenizer")
    models = {"model": model} if draft is None else {"model": model, "draft": draft}
    if any(tensor_parallel_group(name, m) for name, m in models.items()):
        raise ValueError("model: tensor-parallel models decode with a fixed graph_config, so there is nothing to tune")
    prefix = prefix_bucket(prefix_length)
    pair = own_pair(model, draft, backend)
    section = f"tuned {json.dumps([batch_size, prefix])}"
    if not refresh and section in pair.sections:
        try:
            return StepCosts.of(pair.sections[section])
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            pair.document.ignore(error)
    begin = time.perf_counter()
    about = {**describe(model, draft, backend), "batch": batch_size, "prefix": prefix}
    with torch.no_grad():
        costs = measure(model, draft, batch_size, prefix, backend, about, source)
    logger.info("tuned in %.1f s, kept in %s", time.perf_counter() - begin, pair.document.path)
    costs.teach(pair.costs, batch_size, prefix)
    pair.sections[section] = json.loads(json.dumps(asdict(costs)))
    pair.document.write({section: pair.sections[section], COSTS: pair.costs.as_dict()})
    return costs


def measure(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    batch: int,
    prefix: int,
    backend: str,
    about: dict[str, Any],
    source: DraftSource | None = None,
) -> StepCosts:
    """Time target forwards by rows and whole drafts by shape, on caches of ``prefix`` committed tokens."""
    device = properties.device_of(model)
    shapes = ladder(device.type, with_model=draft is not None)
    capacity = prefix + max(shape.cache_slots for shape in shapes.values()) + 2
    state = synthetic_state(batch, prefix, capacity, device)
    text = SyntheticText(model, state, capacity, max(shape.branch for shape in shapes.values()), backend)
    target_rows = text.target
    seconds = stopwatch(device)
    target: dict[int, float] = {}
    chosen = CHOSEN_ROWS if row_shape() in shapes.values() else ()
    for rows in progress(sorted({1, *chosen, *(shape.max_rows for shape in shapes.values())}), "tuning: target"):
        place = torch.arange(rows, dtype=torch.int32, device=device)
        alone = pack_bits(place[:, None] == place).expand(batch, -1, -1).contiguous()
        depths = torch.zeros(batch, rows, dtype=torch.int32, device=device)
        tokens = torch.zeros(batch, rows, dtype=torch.int32, device=device)
        target[rows] = seconds(
            lambda t=tokens, p=place, a=alone, d=depths, r=rows: target_rows.rows(t, state.out_len, p, a, d, d, keep=r)
        )
        if target[rows] > MAX_FORWARDS * target[1]:
            break
    forwarded: list[DraftSource] = []
    if source is not None:
        forwarded.append(copy.copy(source))
    elif draft is not None:
        forwarded.append(DraftModel(draft))
    by_shape: dict[str, float] = {}
    for name, shape in progress(list(shapes.items()), "tuning: draft"):
        sources = [*(forwarded if shape.depth else []), History()]
        weights = {s.name: SourceWeights(s.shares, s.reliability, text.branch, device) for s in sources}
        mixer = Mixer(sources, weights, state, backend, vocab_size=text.target.vocab_size)
        mixer.restart(text, {})
        mixer.prepare(shape)

        def once(config: GraphConfig = shape, mixer: Mixer = mixer) -> None:
            for source in mixer.sources:
                if isinstance(source, DraftModel):
                    source.cached.copy_(state.out_len - 1)
            flatten(mixer.draft(config), config.max_rows, int(config.max_path or 0), backend=backend)

        by_shape[name] = seconds(once)
    return StepCosts(target, by_shape, about)


class SyntheticText:
    """A text of zeros that sources draft for while they are timed; see :class:`~gsd_kernels_hf.sources.base.Text`."""

    first, continues, draws, reference_ids, memory = True, False, None, None, None

    def __init__(self, model: PreTrainedModel, state: DecodeState, capacity: int, branch: int, backend: str) -> None:
        self.state, self.capacity, self.branch, self.backend = state, capacity, branch, backend
        device = state.tokens.device
        warpers = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        ids = torch.arange(state.tokens.shape[0], dtype=torch.int32, device=device)
        self.sampler = Sampler(torch.zeros((), dtype=torch.int64, device=device), ids, warpers, backend)
        self.target = rows_of(model, capacity, state.kv_start, backend)

    def rows_of(self, model: PreTrainedModel) -> RowModel:
        """A draft with a cache of its own."""
        return rows_of(model, self.capacity, self.state.kv_start, self.backend)

    def read_prompt(self, rows: RowModel) -> None:
        """Nothing is read: what a cache holds does not change the time."""


def synthetic_state(batch: int, prefix: int, capacity: int, device: torch.device) -> DecodeState:
    """The state of texts of ``prefix`` zeros, int64 [batch, capacity]."""
    state = DecodeState.empty(batch, capacity, 1, device)
    state.out_len.fill_(prefix)
    state.remaining.fill_(capacity)
    return state


def stopwatch(device: torch.device, repeats: int = 3) -> Callable[[Callable[[], Any]], float]:
    """A function that times another: one warm-up, then the median of ``repeats``, or one run where that is slow.

    On a GPU what is timed is captured, because that is how a step runs.
    """

    def once(function: Callable[[], Any]) -> float:
        wait(device)
        begin = time.perf_counter()
        function()
        wait(device)
        return time.perf_counter() - begin

    def run(function: Callable[[], Any]) -> float:
        function = replayable(function, device)
        warm_up = once(function)
        return statistics.median(once(function) for _ in range(1 if warm_up > 2 * SLOW_SECONDS else repeats))

    return run


def prefix_bucket(length: int) -> int:
    """128, 512, 2048, …: the tuned prefix length for a text of ``length`` tokens."""
    bucket = 128
    while bucket < length:
        bucket *= 4
    return bucket


@contextmanager
def _bar(total: int, title: str) -> Iterator[Callable[[], None]]:
    from tqdm.auto import tqdm

    with tqdm(total=total, desc=title, leave=False, delay=2.0) as bar:
        yield lambda: bar.update(1)


def progress(items: Sequence[Any], title: str) -> Iterator[Any]:
    """The items, with a progress bar on stderr once it takes longer than two seconds."""
    with _bar(len(items), title) as advance:
        for item in items:
            yield item
            advance()
