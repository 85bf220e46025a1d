"""The duel of an op's Triton and CUDA C++ forms: each small op, tree attention, and whole captured steps with either.

What goes is what the verdict names: two forms of one op are two places for a fault. A Triton form stays only where CUDA
C++ takes much longer, since it is compiled at its first use; CUDA's tree attention stays only where it is faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from gsd_kernels.backends import FIRST, compiled_first, unavailable_reason
from gsd_kernels_hf.model.fused import SWITCH

from ..generation.competitors import fixed_configs
from ..kernels import commit, merge, ngram, sample
from ..kernels.rows import random_model
from ..lib.compilations import compilations, summary
from ..lib.runner import Entry, Settings
from ..lib.timing import time_call
from . import attention_cold, pair
from .right import passed
from .work import Work, points, switched

FORMS = ("triton", "cuda")
OPS: tuple[ModuleType, ...] = (merge, sample, commit, ngram)
SHAPE = "llama-3-8b"
ROWS = {merge: (16, 64), sample: (16, 64), commit: (8,), ngram: (16, 64)}
ATTENTION = (("llama-3-8b", 1024), ("llama-3-8b", 4096), ("llama-3.2-1b", 1024))
ATTENTION_ROWS = (16, 64)
ATTENDS = "dag_attention"
WORTH = 1.3  # times as long CUDA C++ may take, before Triton's form is worth its compilation
STEPS = dict(zip(FORMS, FIRST, strict=True))  # what GSD_KERNELS_CUDA_FIRST says


def run(work: Work) -> None:
    """Points ``step FORM``, ``OP ROWS FORM``, ``dag_attention SHAPE PREFIX ROWS FORM``, and ``verdict``."""
    small = work.rehearse
    backends = dict(zip(FORMS, FORMS, strict=True))
    if small:
        own = unavailable_reason("cpu", work.device)
        backends = {"triton": "reference", "cuda": "cpu" if own is None else "reference"}
        work.skip(f"backends triton and cuda: {' and '.join(backends.values())} take their places")
    ops = {f"{name} {form}": (name, backends[form]) for name, _ in entries(work, "reference") for form in FORMS}
    work.each(ops, lambda name: timed(work, *ops[name]))
    sizes, rows = (("tiny", 64),) if small else ATTENTION, (8,) if small else ATTENTION_ROWS
    pattern = ATTENDS + " {size[0]} prefix={size[1]} rows={rows} {form}"
    attention = points(pattern, size=sizes, rows=rows, form=FORMS)

    def attend(name: str) -> dict[str, Any]:
        size, count, form = attention[name]
        return attention_cold.measure(work, backends[form], *size, count)

    work.each(attention, attend)
    steps(work)
    if all(work.is_done(name) for name in (*ops, *attention)):
        work.each(["verdict"], lambda _: verdict(work.points))


def entries(work: Work, backend: str) -> Iterator[tuple[str, Entry]]:
    """The small ops that have both forms, with one backend, by operation and rows."""
    shape = "tiny" if work.rehearse else SHAPE
    for module in OPS:
        rows = ROWS[module][:1] if work.rehearse else ROWS[module]
        settings = Settings(work.device, work.dtype, (shape,), rows, backends=[backend], peers=[], quick=work.rehearse)
        for entry in module.entries(settings):
            yield f"{entry.operation.replace(',', '')} rows={next(iter(entry.parameters.values()))}", entry


@torch.no_grad()
def timed(work: Work, op: str, backend: str) -> dict[str, Any]:
    """Time one form, after comparing what it computes with the reference; and what was compiled for it.

    Raises:
        RuntimeError: it is wrong, or cannot run.
    """
    entry = next(entry for name, entry in entries(work, backend) if name == op)
    (contestant,) = entry.contestants
    if contestant.call is None:
        raise RuntimeError(f"{backend} cannot run: {contestant.missing}")
    with compilations() as compiled:
        attention_cold.held(entry, contestant.check or contestant.call)
        timing = time_call(contestant.call, work.device, seconds=0.02 if work.rehearse else 0.15)
    print(f"  {timing.median * 1e6:.1f} µs", flush=True)
    return {**vars(timing), "compilations": summary(compiled)}


def steps(work: Work) -> None:
    """A captured graph step of the pair by either form: seconds of the first call and of a replay, and its kernels."""
    shapes = ("tiny", "tiny") if work.rehearse else (pair.TARGET, pair.DRAFT)
    names = {f"step {form}": setting for form, setting in STEPS.items()}
    if all(work.is_done(name) for name in names):
        return
    torch.manual_seed(0)
    models = [random_model(shape, work.dtype, work.device.type) for shape in shapes]
    for model in models:
        model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    way = "cuda" if passed(work, *shapes) else "0"
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
