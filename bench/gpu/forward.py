"""The time of a forward of rows on a GPU: as one operator, by its modules, and what has to be read for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from gsd_kernels.environment import switched
from gsd_kernels.ops.decoder_rows.cuda import OVERLAP
from gsd_kernels_hf.model.rows_proof import MOST_ROWS, row_inputs
from gsd_kernels_hf.model.runner import RowModel

from ..kernels.rows import WAYS, bytes_read, random_model
from ..lib.timing import read_bandwidth, time_call
from .right import passed
from .work import Work

SHAPES = ("llama-3-8b", "llama-3.2-1b")
ROWS = (16, 64, 128, 256)
FEWER = (8, 1, 32, 2, 4)  # 8 rows of a 1B: a level of its draft
PREFIX = 1000
#: How a forward is launched: by which way, and with which setting.
SETTINGS = {
    "operator": ("operator", {OVERLAP: "1"}),
    "operator in turn": ("operator", {OVERLAP: "0"}),
    "modules": ("modules", {}),
}


def run(work: Work) -> None:
    """Points ``bandwidth`` and ``SHAPE rows=R SETTING``."""
    small = work.rehearse
    shapes, prefix = (("tiny",), 40) if small else (SHAPES, PREFIX)
    if small:
        work.skip("launches that begin early")
    work.each(["bandwidth"], lambda _: {"read": read_bandwidth(work.device, quick=small)})
    if not work.is_done("bandwidth"):
        return
    forwards = {shape: Forward(work, shape, prefix) for shape in shapes}
    counts = ((1, 5), ()) if small else (ROWS, FEWER)
    names = {
        f"{shape} rows={rows} {setting}": (shape, rows, setting)
        for some in counts
        for setting in SETTINGS
        for shape in shapes
        for rows in some
    }
    wrong = {shape for shape in shapes if not passed(work, shape)}
    early = [name for name, (shape, _, setting) in names.items() if shape in wrong and setting != "modules"]
    work.leave(early, "not found right by the stage before")
    work.each([n for n in names if n not in early], lambda name: forwards[names[name][0]].time(*names[name][1:]))


class Forward:
    """All layers of a shape, made when the first point is measured."""

    def __init__(self, work: Work, shape: str, prefix: int) -> None:
        self.work, self.shape, self.prefix = work, shape, prefix

    @cached_property
    def model(self) -> Any:
        return random_model(self.shape, self.work.dtype, self.work.device)

    @cached_property
    def ways(self) -> dict[str, RowModel]:
        return {way: self.prefilled(way) for way in WAYS}

    def prefilled(self, way: str) -> RowModel:
        """A way to forward rows behind the same tokens."""
        device = self.work.device
        rows = WAYS[way](self.model, self.prefix + MOST_ROWS, torch.zeros(1, dtype=torch.int32, device=device), "auto")
        rows.prefill(torch.arange(self.prefix, device=device)[None] % self.model.config.vocab_size, None, None)
        return rows

    @torch.no_grad()
    def time(self, rows: int, setting: str) -> dict[str, Any]:
        """Seconds of one forward, and of reading what it reads."""
        (way, variables), work = SETTINGS[setting], self.work
        of, inputs = self.ways[way], row_inputs(rows, self.prefix, work.device)
        call: Callable[[], Any] = lambda: of.rows(*inputs, keep=rows)  # noqa: E731
        with switched(variables):
            timing = time_call(call, work.device, seconds=0.05 if work.rehearse else 0.4)
        size = bytes_read(of, rows, self.prefix)
        floor = size / work.points["bandwidth"]["read"]
        print(f"  {timing.median * 1e3:.2f} ms, {timing.median / floor:.2f} times the floor", flush=True)
        sizes = {"shape": self.shape, "rows": rows, "prefix": self.prefix, "setting": setting, "bytes": size}
        return {**vars(timing), **sizes, "floor_seconds": floor}
