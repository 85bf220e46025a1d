"""What a step costs on this machine: target time by rows, draft time by shape. Measured once, kept on disk."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

import gsd_kernels
from gsd_kernels import GraphConfig, flatten
from gsd_kernels.graph import pack_bits

from .. import validate
from ..model import properties
from ..model.attention import original_name, switched
from ..model.fused import draft_rows, why_not
from ..model.replay import replayable
from ..model.runner import RowModel
from ..parallel import tensor_parallel_group
from ..records import DecodeState, Sampler
from ..sources.base import DraftSource
from ..sources.draft_model import DraftModel
from ..sources.drafter import Drafter
from ..sources.history import History
from ..sources.layer_skip import LayerSkip, SkippedLayers
from ..sources.weights import SourceWeights

logger = logging.getLogger("gsd_kernels")

ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
COARSE_ROWS = (1, 4, 8, 16, 32, 64, 128)  # where a forward is slow, fewer are measured
SLOW = 0.3  # seconds of a slow forward
FAMILIES = ((1, 1), (2, 2), (4, 3), (8, 4))  # width, branch
FREE = ((2, 2), (6, 4))  # of shapes without a draft model
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 10)
REUSE = {"reuse_depth": 4, "reuse_width": 8}
TOO_SLOW = 8.0  # rows that cost this many plain forwards cannot pay, and are not measured


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the parts of a step.

    Attributes:
        target: target forward by rows.
        draft: by :func:`family_key`: seconds of level 0 and all that a step needs once, seconds of a further level.
        overhead: what a step needs besides drafting and the target forward.
    """

    target: dict[int, float]
    draft: dict[str, tuple[float, float]]
    overhead: float
    about: dict[str, Any] = field(default_factory=dict)

    def target_seconds(self, rows: int) -> float:
        """Interpolated between measured rows; a budget beyond the last one is taken to be proportional."""
        known = sorted(self.target)
        if rows >= known[-1]:
            return self.target[known[-1]] * rows / known[-1]
        above = next(r for r in known if r >= rows)
        below = max((r for r in known if r <= rows), default=above)
        if above == below:
            return self.target[above]
        share = (rows - below) / (above - below)
        return self.target[below] * (1 - share) + self.target[above] * share

    def draft_seconds(self, name: str, width: int, branch: int, depth: int) -> float:
        once, level = self.draft[family_key(name, width, branch)]
        return once + level * (depth - 1)

    @classmethod
    def load(cls, path: Path, about: dict[str, Any]) -> StepCosts:
        """What :func:`tune` kept at ``path`` of what ``about`` describes.

        Raises:
            OSError: it cannot be read.
            ValueError: it does not hold such a result, whole and sound.
        """
        try:
            data = json.loads(path.read_bytes())
            found = cls(
                target={int(rows): _seconds(value) for rows, value in data["target"].items()},
                draft={key: (_seconds(once), _seconds(level)) for key, (once, level) in data["draft"].items()},
                overhead=_seconds(data["overhead"]),
                about=data["about"],
            )
        except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"no tuning result: {error!r}") from error
        families = [("all", *family) for family in FAMILIES] if about["draft"] is not None else []
        families += [("free", *family) for family in FREE]
        if found.about != about or {family_key(*family) for family in families} != set(found.draft):
            raise ValueError("no tuning result of this pair")
        if not {1} <= set(found.target) <= set(ROWS) or not all(found.target.values()):
            raise ValueError("no tuning result: target forwards that take no time, or of other rows")
        return found


def _seconds(value: Any) -> float:
    """A duration from a file.

    Raises:
        TypeError: no number.
        ValueError: negative or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected seconds, got {value!r}")
    if not 0.0 <= value < math.inf:
        raise ValueError(f"expected seconds, got {value}")
    return float(value)


def family_key(name: str, width: int, branch: int) -> str:
    """What a family of shapes is called among the costs: ``all`` with a draft model, ``free`` without."""
    return f"{name},{width},{branch}"


def tune(
    model: PreTrainedModel,
    draft: PreTrainedModel | LayerSkip | None = None,
    *,
    batch_size: int = 1,
    prefix_length: int = 512,
    backend: str = "auto",
    refresh: bool = False,
) -> StepCosts:
    """Measure what a step of this pair costs here, once for a pair, device, dtype, batch size and prefix length.

    Runs by itself under ``graph_config="auto"``. The result is kept in
    ``$GSD_KERNELS_CACHE`` (default ``$XDG_CACHE_HOME/gsd_kernels`` or ``~/.cache/gsd_kernels``) and read from there
    unless ``refresh``.

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
    model, skip = properties.unwrap(model), draft if isinstance(draft, LayerSkip) else None
    draft = properties.unwrap(draft) if skip is None else skip.view
    validate.check_model("model", model)
    if draft is not None:
        validate.check_model("draft", draft)
        validate.check_pair(model, draft)
    models = {"model": model} if draft is None else {"model": model, "draft": draft}
    if any(tensor_parallel_group(name, m) for name, m in models.items()):
        raise ValueError("model: tensor-parallel models decode with a fixed graph_config, so there is nothing to tune")
    prefix = prefix_bucket(prefix_length)
    about = describe(model, draft, batch_size, prefix, backend, skip)
    path = cache_dir() / f"tune-{hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:20]}.json"
    if path in _known and not refresh:
        return _known[path]
    ignored = False
    if os.path.lexists(path) and not refresh:
        try:
            if not path.is_file():  # a pipe would be waited for
                raise ValueError("not a file")
            return _known.setdefault(path, StepCosts.load(path, about))
        except (OSError, ValueError) as error:
            ignored = True
            logger.warning("ignoring an unreadable tuning result: %s: %s", path, error)
    begin = time.perf_counter()
    with torch.no_grad(), switched(*models.values()):
        costs = measure(model, draft, batch_size, prefix, backend, about, skip)
    logger.info(
        "tuned %s with %s: %.1f s, kept in %s",
        type(model).__name__,
        skip or ("no draft model" if draft is None else type(draft).__name__),
        time.perf_counter() - begin,
        path,
    )
    _known[path] = costs
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(asdict(costs), indent=1))
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        logger.log(logging.DEBUG if ignored else logging.WARNING, "the tuning result could not be kept: %s", error)
    return costs


_known: dict[Path, StepCosts] = {}  # of this process


def measure(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    batch: int,
    prefix: int,
    backend: str,
    about: dict[str, Any],
    skip: LayerSkip | None = None,
) -> StepCosts:
    """Time target forwards by rows and whole drafts by shape, on caches of ``prefix`` committed tokens."""
    device = properties.device_of(model)
    shapes = [GraphConfig(depth=3, width=w, branch=b, max_rows=ROWS[-1], **REUSE) for w, b in FAMILIES]
    free = [GraphConfig(depth=0, branch=b, max_rows=ROWS[-1], reuse_depth=3, reuse_width=w) for w, b in FREE]
    capacity = prefix + max(ROWS[-1], *(c.cache_slots for c in shapes)) + 2
    state = synthetic_state(batch, prefix, capacity, device)
    text = SyntheticText(model, state, capacity, max(b for _, b in (*FAMILIES, *FREE)), backend)
    target_rows = text.target
    seconds = stopwatch(device)
    target: dict[int, float] = {}
    for rows in progress(ROWS, "tuning: target"):
        if target and target[1] > SLOW and rows not in COARSE_ROWS:
            continue
        place = torch.arange(rows, dtype=torch.int32, device=device)
        alone = pack_bits(place[:, None] == place).expand(batch, -1, -1).contiguous()
        depths = torch.zeros(batch, rows, dtype=torch.int32, device=device)
        tokens = torch.zeros(batch, rows, dtype=torch.int32, device=device)
        target[rows] = seconds(
            lambda t=tokens, p=place, a=alone, d=depths, r=rows: target_rows.rows(t, state.out_len, p, a, d, d, keep=r)
        )
        if target[rows] > TOO_SLOW * target[1]:
            break
    sources: list[DraftSource] = []
    if skip is not None:
        sources.append(SkippedLayers(skip))
    elif draft is not None:
        sources.append(DraftModel(draft))
    by_shape: dict[str, tuple[float, float]] = {}
    overhead = 0.0
    for name, shape in progress([("all", c) for c in shapes if sources] + [("free", c) for c in free], "tuning: draft"):
        used = [*(sources if name == "all" else []), History()]
        weights = {s.name: SourceWeights(s.shares, s.reliability, text.branch, device) for s in used}
        drafter = Drafter(used, weights, state, backend)
        drafter.restart(text, {}, first=True)

        def once(config: GraphConfig, drafter: Drafter = drafter) -> None:
            for source in drafter.sources:
                if isinstance(source, DraftModel):
                    source.cached.copy_(state.out_len - 1)
            flatten(drafter.draft(config), 16, 15, backend=backend)

        levels = "depth" if name == "all" else "reuse_depth"
        short, long = shape.replace(**{levels: 1}, max_rows=ROWS[-1]), shape
        times = []
        for config in (short, long):
            drafter.prepare(config)
            times.append(seconds(lambda c=config, o=once: o(c)))
        level = max(0.0, (times[1] - times[0]) / (getattr(long, levels) - 1))
        width = shape.width if name == "all" else shape.reuse_width
        by_shape[family_key(name, width, shape.branch)] = (times[0], level)
        overhead = max(overhead, 0.25 * times[0])
    return StepCosts(target, by_shape, overhead, about)


class SyntheticText:
    """A text of zeros that sources draft for while they are timed; see :class:`~gsd_kernels_hf.sources.base.Text`."""

    continues, draws, reference_ids = False, None, None

    def __init__(self, model: PreTrainedModel, state: DecodeState, capacity: int, branch: int, backend: str) -> None:
        self.state, self.capacity, self.branch, self.backend = state, capacity, branch, backend
        device = state.tokens.device
        warpers = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        ids = torch.arange(state.tokens.shape[0], dtype=torch.int32, device=device)
        self.sampler = Sampler(torch.zeros((), dtype=torch.int64, device=device), ids, warpers, backend)
        self.target = RowModel(model, capacity, state.kv_start, backend)

    def rows_of(self, model: PreTrainedModel) -> RowModel:
        """A draft with a cache of its own."""
        return draft_rows(model, self.capacity, self.state.kv_start, self.backend)

    def read_prompt(self, rows: RowModel) -> None:
        """Nothing is read: what a cache holds does not change the time."""


def synthetic_state(batch: int, prefix: int, capacity: int, device: torch.device) -> DecodeState:
    def per_sequence(value: int) -> torch.Tensor:
        return torch.full((batch,), value, dtype=torch.int32, device=device)

    return DecodeState(
        tokens=torch.zeros(batch, capacity, dtype=torch.int64, device=device),
        out_len=per_sequence(prefix),
        kv_start=per_sequence(0),
        remaining=per_sequence(capacity),
        done=torch.zeros(batch, dtype=torch.bool, device=device),
        emitted=torch.zeros(batch, 1, dtype=torch.int32, device=device),
        num_emitted=per_sequence(0),
    )


def stopwatch(device: torch.device, repeats: int = 3) -> Callable[[Callable[[], Any]], float]:
    """A function that times another: one warm-up, then the median of ``repeats``, or one run where that is slow.

    On a GPU what is timed is captured, because that is how a step runs.
    """

    def once(function: Callable[[], Any]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    def run(function: Callable[[], Any]) -> float:
        function = replayable(function, device)
        warm_up = once(function)
        return statistics.median(once(function) for _ in range(1 if warm_up > 2 * SLOW else repeats))

    return run


def prefix_bucket(length: int) -> int:
    """128, 512, 2048, …: the tuned prefix length for a text of ``length`` tokens."""
    bucket = 128
    while bucket < length:
        bucket *= 4
    return bucket


def describe(
    model: PreTrainedModel,
    draft: PreTrainedModel | None,
    batch: int,
    prefix: int,
    backend: str,
    skip: LayerSkip | None = None,
) -> dict[str, Any]:
    """Everything that the cost of a step depends on; the identity of a tuning result."""
    device = properties.device_of(model)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()

    def identity(m: PreTrainedModel) -> dict[str, Any]:
        config = m.config.get_text_config(decoder=True)
        size = {
            key: getattr(config, key, None)
            for key in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "vocab_size",
            )
        }
        return {"class": type(m).__name__, "dtype": str(m.dtype), "device": str(properties.device_of(m)), **size}

    return {
        "target": identity(model),
        "draft": str(skip) if skip is not None else None if draft is None else identity(draft),
        "device": name,
        "threads": torch.get_num_threads() if device.type == "cpu" else None,
        "batch": batch,
        "prefix": prefix,
        "backend": backend,
        "draft_forward": "operator" if draft and not skip and why_not(draft, backend) is None else "modules",
        "compiled": gsd_kernels.backends.unavailable_reason("cpu", torch.device("cpu")) is None,
        "attention": original_name(str(model.config._attn_implementation)),
        "versions": [gsd_kernels.__version__, torch.__version__, transformers.__version__],
    }


def cache_dir() -> Path:
    """``$GSD_KERNELS_CACHE``, else ``$XDG_CACHE_HOME/gsd_kernels``, else ``~/.cache/gsd_kernels``."""
    if os.environ.get("GSD_KERNELS_CACHE"):
        return Path(os.environ["GSD_KERNELS_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gsd_kernels"


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
