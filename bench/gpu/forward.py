"""The forward of rows as one operator on a GPU: first that it is right, then its time beside the modules'."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gsd_kernels.backends import unavailable_reason
from gsd_kernels_hf.model.replay import replayable
from gsd_kernels_hf.model.runner import RowModel

from ..kernels.rows import MOST_ROWS, WAYS, random_model, row_inputs
from ..lib.timing import read_bandwidth, time_call
from .work import Work

SHAPES = ("llama-3-8b",)
ROWS = (1, 2, 4, 8, 16, 32, 64)
PREFIX = 1024
LAYERS = 2  # where it is compared with float32


def run(work: Work) -> None:
    """Points ``bandwidth``, ``SHAPE right`` and ``SHAPE rows=R WAY``: nothing is timed that is not right."""
    shapes, counts, prefix = (("tiny",), (1, 5), 40) if work.rehearse else (SHAPES, ROWS, PREFIX)
    if work.rehearse:
        own = unavailable_reason("cpu", work.device)
        work.skip(
            "the CUDA operator: " + ("a CPU's own takes its place" if own is None else f"the reference runs, {own}")
        )
    work.each(["bandwidth"], lambda _: {"read": read_bandwidth(work.device, quick=work.rehearse)})
    for shape in shapes:
        work.each([f"{shape} right"], lambda _, shape=shape: right(work, shape, prefix))
        if not (work.is_done("bandwidth") and work.is_done(f"{shape} right")):
            continue
        forward = Forward(work, shape, prefix)
        names = {f"{shape} rows={rows} {way}": (way, rows) for rows in counts for way in WAYS}
        work.each(names, lambda name, forward=forward, names=names: forward.time(*names[name]))


def prefilled(work: Work, model: Any, way: str, prefix: int, backend: str = "auto") -> RowModel:
    """A way to forward rows behind the same ``prefix`` tokens."""
    start = torch.zeros(1, dtype=torch.int32, device=work.device)
    rows = WAYS[way](model, prefix + MOST_ROWS, start, backend)
    ids = torch.arange(prefix, device=work.device)[None] % model.config.vocab_size
    rows.prefill(ids, None, None)
    return rows


@torch.no_grad()
def right(work: Work, shape: str, prefix: int) -> dict[str, Any]:
    """Compare a few layers with their modules in float32, and a row alone with the same row among others.

    Raises:
        RuntimeError: the error is more than twice the modules' in the same dtype, or a row's bits depend on others.
    """
    model = random_model(shape, work.dtype, work.device, LAYERS)
    inputs = row_inputs(64, prefix, work.device)

    def logits(way: str, of: Any, backend: str = "auto") -> Tensor:
        return prefilled(work, of, way, prefix, backend).rows(*inputs, keep=64).float()

    exact = logits("modules", copy.deepcopy(model).float(), "reference")
    errors = {way: float((logits(way, model) - exact).norm() / exact.norm()) for way in WAYS}
    if not errors["operator"] <= 2 * errors["modules"] + 1e-6:
        raise RuntimeError(f"the operator's error is {errors['operator']:.2e}, the modules' {errors['modules']:.2e}")
    rows = prefilled(work, model, "operator", prefix)
    whole = rows.rows(*inputs, keep=64)
    tokens, kv_len, slots, mask, depths, nodes = inputs
    compiled = unavailable_reason(work.device.type, work.device) is None  # only the reference's bits depend on the rows
    for first, last in ((0, 1), (0, 16), (5, 22), (16, 48), (63, 64)) if compiled else ():
        some = slice(first, last)
        part = (tokens[:, some], kv_len, slots[some], mask[:, some], depths[:, some], nodes)
        if not torch.equal(rows.rows(*part, keep=last - first), whole[:, some]):
            raise RuntimeError(f"rows {first} … {last - 1} alone differ from the same rows among 64")
    found: dict[str, Tensor] = {}

    def call() -> None:
        found["logits"] = rows.rows(*inputs, keep=64)

    replay = replayable(call, work.device)
    if work.device.type == "cuda" and replay is call:
        raise RuntimeError("the forward could not be captured in a CUDA graph")
    replay()
    if not torch.equal(found["logits"], whole):
        raise RuntimeError("a replayed forward differs from an ordinary one")
    return {"errors": errors, "layers": LAYERS, "rows": 64, "prefix": prefix}


class Forward:
    """All layers, made when the first point is measured."""

    def __init__(self, work: Work, shape: str, prefix: int) -> None:
        self.work, self.shape, self.prefix = work, shape, prefix

    @cached_property
    def model(self) -> Any:
        return random_model(self.shape, self.work.dtype, self.work.device)

    @cached_property
    def ways(self) -> dict[str, RowModel]:
        with torch.no_grad():
            return {way: prefilled(self.work, self.model, way, self.prefix) for way in WAYS}

    @torch.no_grad()
    def time(self, way: str, rows: int) -> dict[str, Any]:
        """Seconds of one forward, and of reading its weights and the prefix."""
        work, of = self.work, self.ways[way]
        inputs = row_inputs(rows, self.prefix, work.device)
        call: Callable[[], Any] = lambda: of.rows(*inputs, keep=rows)  # noqa: E731
        timing = time_call(call, work.device, seconds=0.05 if work.rehearse else 1.0)
        size = sum(p.nbytes for p in self.model.parameters()) + of.cache.nbytes * self.prefix // of.cache.capacity
        floor = size / work.points["bandwidth"]["read"]
        print(f"  {timing.median * 1e3:.2f} ms, {timing.median / floor:.2f} times the floor", flush=True)
        sizes = {"shape": self.shape, "rows": rows, "prefix": self.prefix, "way": way, "bytes": size}
        return {**vars(timing), **sizes, "floor_seconds": floor}
