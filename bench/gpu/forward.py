"""The time of a forward of rows, and of a prompt, on a GPU: as one operator, by its modules, and of reading alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch

from gsd_kernels.ops.decoder_rows.cuda import AHEAD, GROUP, OVERLAP
from gsd_kernels_hf.model.gpu_proof import MOST_ROWS, row_inputs
from gsd_kernels_hf.model.runner import RowModel

from ..kernels.rows import WAYS, again, bytes_read, in_turns, random_model
from ..lib.timing import time_call
from .right import GROUPED, MOST_EARLY_ROWS, passed, passed_by_groups, right_shapes
from .work import Work, points, switched

ROWS = (16, 64, 128, 256)
FEWER = (8, 1, 32, 2, 4)  # 8 rows of a 1B: a level of its draft
PROMPT = 2000
Settings = Mapping[str, tuple[str, dict[str, str]]]
"""How a forward is launched: by which way, and with which variables of the environment."""
SETTINGS: Settings = {
    "operator": ("operator", {OVERLAP: "1"}),
    "operator in turn": ("operator", {OVERLAP: "0"}),
    "modules": ("modules", {}),
    f"operator{GROUPED}": ("operator", {GROUP: "1"}),
}


MEGABYTES = (24, 0, 6, 12)
AHEAD_SETTINGS: Settings = {f"ahead={size}": ("operator", {AHEAD: str(size)}) for size in MEGABYTES}
AHEAD_ROWS = (1, 16, 32)  # whose launches begin early


def run(work: Work) -> None:
    """The points of ``ahead`` or of ``rows``."""
    if work.rehearse:
        work.skip("launches that begin early, and weights that are asked for ahead: a CPU's operator has its own")
    if work.knows_bandwidth():
        (by_megabytes if work.stage.name == "ahead" else by_rows)(work)


def by_megabytes(work: Work) -> None:
    """Points ``SHAPE rows=R ahead=MEGABYTES``: how many of the next product's weights to ask for ahead, in turns."""
    for shape in right_shapes(work):
        forward, rows = Forward(work, shape), (5,) if work.rehearse else AHEAD_ROWS
        names = points(shape + " rows={rows} {setting}", rows=rows, setting=AHEAD_SETTINGS)
        work.each(names, lambda name, of=forward, names=names: of.time(*names[name], AHEAD_SETTINGS))


def by_rows(work: Work) -> None:
    """Points ``SHAPE rows=R SETTING`` and ``SHAPE prompt``."""
    small, shapes = work.rehearse, work.shapes
    forwards = {shape: Forward(work, shape) for shape in shapes}
    counts = ((1, 5), ()) if small else (ROWS, FEWER)
    settings = list(SETTINGS) if passed_by_groups(work) else list(SETTINGS)[:-1]
    names = {}
    for some in counts:
        names |= points("{shape} rows={rows} {setting}", setting=settings, shape=shapes, rows=some)
    names = {n: of for n, of in names.items() if of[2] > MOST_EARLY_ROWS or not of[0].endswith(GROUPED)}
    wrong = {shape for shape in shapes if not passed(work, shape)}
    early = [name for name, (setting, shape, _) in names.items() if shape in wrong and setting != "modules"]
    work.leave([*early, *(f"{shape} prompt" for shape in wrong)], "not found right by the stage before")

    def time(name: str) -> dict[str, Any]:
        setting, shape, rows = names[name]
        return forwards[shape].time(rows, setting)

    work.each([n for n in names if n not in early], time)
    prompts = {f"{shape} prompt": shape for shape in shapes if shape not in wrong}
    ways = [setting for setting in settings if "in turn" not in setting]
    work.each(prompts, lambda name: forwards[prompts[name]].read(min(PROMPT, 50 * work.prefix), ways))


class Forward:
    """All layers of a shape, made when the first point is measured."""

    def __init__(self, work: Work, shape: str) -> None:
        self.work, self.shape, self.prefix = work, shape, work.prefix

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
    def read(self, tokens: int, settings: list[str]) -> dict[str, Any]:
        """Seconds of a prompt of so many tokens by setting, the host's launches counted: nobody captures a prompt."""
        device = self.work.device
        start = torch.zeros(1, dtype=torch.int32, device=device)
        ids = torch.arange(tokens, device=device)[None] % self.model.config.vocab_size
        models = {way: WAYS[way](self.model, tokens, start, "auto") for way in WAYS}

        def prompt(setting: str) -> None:
            way, variables = SETTINGS[setting]
            with switched(variables):
                again(models[way], ids)

        calls = {setting: (lambda setting=setting: prompt(setting)) for setting in settings}
        found = in_turns(calls, 0.1 if self.work.rehearse else 2.0, 0)
        print("  " + ", ".join(f"{setting} {1e3 * value:.1f} ms" for setting, value in found.items()), flush=True)
        return {"shape": self.shape, "prompt": tokens, "seconds": found}

    @torch.no_grad()
    def time(self, rows: int, setting: str, settings: Settings = SETTINGS) -> dict[str, Any]:
        """Seconds of one forward, and of reading what it reads."""
        (way, variables), work = settings[setting], self.work
        of, inputs = self.ways[way], row_inputs(rows, self.prefix, work.device)
        call: Callable[[], Any] = lambda: of.rows(*inputs, keep=rows)  # noqa: E731
        with switched(variables):
            timing = time_call(call, work.device, seconds=0.05 if work.rehearse else 0.4)
        size = bytes_read(of, rows, self.prefix)
        floor = size / work.points["bandwidth"]["read"]
        print(f"  {timing.median * 1e3:.2f} ms, {timing.median / floor:.2f} times the floor", flush=True)
        sizes = {"shape": self.shape, "rows": rows, "prefix": self.prefix, "setting": setting, "bytes": size}
        return {**vars(timing), **sizes, "floor_seconds": floor}
