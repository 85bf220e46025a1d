"""The duel of an op's Triton and CUDA C++ forms: each small op, tree attention, and whole captured steps with either.

What goes is what the verdict names: two forms of one op are two places for a fault. A Triton form stays only where CUDA
C++ takes much longer, since it is compiled at its first use; CUDA's tree attention stays only where it is faster.

The stage ``attention`` times tree attention alone, beside other people's kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from gsd_kernels.backends import FIRST, compiled_first, unavailable_reason
from gsd_kernels_hf.model.fused import SWITCH

from ..generation.competitors import fixed_configs
from ..kernels import attention, commit, merge, ngram, sample
from ..kernels.peers import ATTENTION as PEERS
from ..lib.compilations import compilations, summary
from ..lib.runner import Entry, Settings, measure
from ..lib.timing import copy_bandwidth
from . import pair
from .right import passed
from .work import Work, points, switched

FORMS = ("triton", "cuda")
OPS: tuple[ModuleType, ...] = (merge, sample, commit, ngram)
SHAPE = "llama-3-8b"
ROWS = {merge: (16, 64), sample: (16, 64), commit: (8,), ngram: (16, 64)}
ATTENTION = (("llama-3-8b", 1024), ("llama-3-8b", 4096), ("llama-3.2-1b", 1024))
ATTENTION_ROWS = (16, 64)
ATTENDS = "dag_attention"
BESIDE = {"shape": ("llama-3-8b", "llama-2-70b"), "prefix": (1024, 4096, 32768), "rows": (16, 32, 64)}  # peers
SMALL = {"shape": ("tiny",), "prefix": (64,), "rows": (8,)}
WORTH = 1.3  # times as long CUDA C++ may take, before Triton's form is worth its compilation
STEPS = dict(zip(FORMS, FIRST, strict=True))  # what GSD_KERNELS_CUDA_FIRST says


def run(work: Work) -> None:
    """The points of ``attention`` or of ``duel``."""
    own = "cpu" if unavailable_reason("cpu", work.device) is None else "reference"
    backends = {"triton": "reference", "cuda": own} if work.rehearse else dict(zip(FORMS, FORMS, strict=True))
    if work.rehearse:
        work.skip(f"backends triton and cuda, FlashInfer: {' and '.join(backends.values())} take their places")
    if work.knows_bandwidth(lambda device, quick: {"copy": copy_bandwidth(device, quick=quick)}):
        (beside_peers if work.stage.name == "attention" else forms)(work, backends)


def beside_peers(work: Work, backends: dict[str, str]) -> None:
    """Points ``SHAPE prefix=P rows=R CONTESTANT``; those that compile for minutes come last."""
    who = (*dict.fromkeys(backends.values()), *PEERS)
    names = points("{shape} prefix={prefix} rows={rows} {who}", who=who, **(SMALL if work.rehearse else BESIDE))
    work.each(names, lambda name: attend(work, *names[name]))


def forms(work: Work, backends: dict[str, str]) -> None:
    """Points ``step FORM``, ``OP ROWS FORM``, ``dag_attention SHAPE PREFIX ROWS FORM``, and ``verdict``."""
    ops = {f"{name} {form}": (name, backends[form]) for name, _ in entries(work, "reference") for form in FORMS}

    def operation(name: str) -> dict[str, Any]:
        op, backend = ops[name]
        return timed(work, next(entry for found, entry in entries(work, backend) if found == op))

    work.each(ops, operation)
    sizes, rows = ((("tiny", 64),), (8,)) if work.rehearse else (ATTENTION, ATTENTION_ROWS)
    pattern = ATTENDS + " {size[0]} prefix={size[1]} rows={rows} {form}"
    attends = points(pattern, form=FORMS, size=sizes, rows=rows)
    work.each(attends, lambda name: attend(work, backends[attends[name][0]], *attends[name][1], attends[name][2]))
    steps(work)
    if all(work.is_done(name) for name in (*ops, *attends)):
        work.each(["verdict"], lambda _: verdict(work.points))


def entries(work: Work, backend: str) -> Iterator[tuple[str, Entry]]:
    """The small ops that have both forms, with one backend, by operation and rows."""
    shape = "tiny" if work.rehearse else SHAPE
    for module in OPS:
        rows = ROWS[module][:1] if work.rehearse else ROWS[module]
        for entry in module.entries(settings_of(work, shape, rows, [backend])):
            yield f"{entry.operation.replace(',', '')} rows={next(iter(entry.parameters.values()))}", entry


def settings_of(work: Work, shape: str, rows: Sequence[int], backends: Sequence[str], **more: Any) -> Settings:
    """Points of one shape, with ours by name and no peers unless they are given."""
    given = {"peers": [], "quick": work.rehearse, "seconds": 0.02 if work.rehearse else 0.15, **more}
    return Settings(work.device, work.dtype, (shape,), rows, backends=backends, **given)


def attend(work: Work, who: str, shape: str, prefix: int, rows: int) -> dict[str, Any]:
    """Tree attention by one contestant, its keys and values in no cache; see :func:`timed`."""
    ours, peers = ([], [who]) if who in PEERS else ([who], [])
    return timed(
        work, next(attention.entries(settings_of(work, shape, (rows,), ours, prefixes=(prefix,), peers=peers)))
    )


@torch.no_grad()
def timed(work: Work, entry: Entry) -> dict[str, Any]:
    """Time the one contestant of an entry, after comparing what it computes; and what was compiled for it.

    Raises:
        RuntimeError: ours is wrong, or cannot run.
    """
    (contestant,) = entry.contestants
    with compilations() as compiled:
        row = measure(entry, contestant, settings_of(work, entry.shape, (), []), work.points["bandwidth"]["copy"])
    if row.median is None:
        if not contestant.peer:
            raise RuntimeError(f"{contestant.name} cannot run: {contestant.missing}")
        return {"missing": row.missing}
    print(f"  {row.median * 1e6:.1f} µs", flush=True)
    return {**vars(row), "compilations": summary(compiled)}


def steps(work: Work) -> None:
    """A captured graph step of the pair by either form: seconds of the first call and of a replay, and its kernels."""
    names = {f"step {form}": setting for form, setting in STEPS.items()}
    if all(work.is_done(name) for name in names):
        return
    models = pair.models(work)
    way = "cuda" if passed(work, *pair.shapes(work)) else "0"
    config = fixed_configs(work.device)["graph"]

    def measure(name: str) -> dict[str, Any]:
        with switched({"GSD_KERNELS_CUDA_FIRST": names[name], SWITCH: way}):
            compiled_first.cache_clear()
            try:
                found = pair.twice(work, *models, config)
            finally:
                compiled_first.cache_clear()
        others = [work.points[other] for other in names if other != name and work.is_done(other)]
        if any(other["text"] != found["text"] for other in others):
            raise RuntimeError(f"the forms wrote two texts: {found['text']}, {others[0]['text']}")
        return found

    work.each(names, measure)
    compiled_first.cache_clear()


def verdict(points: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The seconds of every op's forms, and which of them goes; of several sizes the geometric mean counts."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, point in points.items():
        operation, _, form = name.rpartition(" ")
        if form in FORMS and "median" in point:
            op = ATTENDS if operation.startswith(ATTENDS) else operation.partition(" rows=")[0]
            found.setdefault(op, {}).setdefault(form, []).append(point["median"])
    forms: dict[str, dict[str, Any]] = {}
    for op, seconds in found.items():
        pairs = list(zip(seconds["triton"], seconds["cuda"], strict=True))
        ratio = math.exp(sum(math.log(cuda / triton) for triton, cuda in pairs) / len(pairs))
        goes = "triton" if ratio <= WORTH else "cuda"
        if op == ATTENDS:  # Triton's serves heads and dtypes that CUDA's does not
            goes = "neither" if ratio < 1.0 else "cuda"
        print(f"  {op}: CUDA C++ takes {ratio:.2f} times as long; goes: {goes}", flush=True)
        forms[op] = {**seconds, "cuda_over_triton": ratio, "goes": goes}
    return {"ops": forms, "worth": WORTH}
