"""The process of one stage: ``python -m gsd_kernels_bench.gpu.work STAGE CALL SECONDS``, started by ``stages.py``."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch

from gsd_kernels_hf.model.replay import lost

from ..lib.environment import environment
from .stages import Call, Stage, stage_named, write

SHAPES = ("llama-3-8b", "llama-3.2-1b")
PREFIX = 1000


def points(pattern: str, **axes: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
    """Names of points, and of each the values of all axes, in the order of the pattern's last one."""
    values = itertools.product(*axes.values())
    return {pattern.format(**dict(zip(axes, of, strict=True))): of for of in values}


def switched(variables: Mapping[str, str]) -> Any:
    """Set variables of this process while a ``with`` block runs: no other thread reads them meanwhile."""
    return patch.dict(os.environ, variables)


class Work:
    """A stage's points: measured one by one, written after each, and not measured again by a later call.

    Args:
        stage: whose points they are.
        call: where they are written, and where earlier calls' are.
        seconds: after which none is begun.

    Attributes:
        points: results by name. A point with ``error`` counts as not measured.
        not_run: what a rehearsal leaves out.
        shapes, prefix: of models, and tokens before their rows.
    """

    def __init__(self, stage: Stage, call: Call, seconds: float) -> None:
        self.stage, self.call = stage, call
        self.end = time.monotonic() + seconds
        self.rehearse = call.rehearse
        self.device = torch.device("cpu" if call.rehearse else "cuda")
        self.dtype = torch.float32 if call.rehearse else torch.bfloat16
        self.environment = environment(self.device)
        self.points: dict[str, dict[str, Any]] = {} if call.again else self.points_of(stage)
        self.waiting: list[str] = []
        self.not_run: list[str] = []
        self.shapes, self.prefix = (("tiny",), 40) if call.rehearse else (SHAPES, PREFIX)
        self.slowest = 0.0
        self.finished = False

    def points_of(self, stage: Stage) -> dict[str, dict[str, Any]]:
        """The points of any stage on this device, with these versions."""
        former = self.call.record(stage)
        same = _place(former.get("environment")) == _place(self.environment)
        return former.get("points", {}) if same else {}

    def left(self) -> float:
        """Seconds in which something may still be begun."""
        return self.end - time.monotonic()

    def is_done(self, name: str) -> bool:
        return name in self.points and "error" not in self.points[name]

    def each(self, cases: Mapping[str, tuple[Any, ...]], measure: Callable[..., dict[str, Any]]) -> None:
        """Measure every point that is not done, unless it would end too late if it took as long as the slowest.

        Args:
            cases: by the points' names what ``measure`` is called with.
            measure: gives a point's result.

        A point that raises is recorded with its error; after an error that leaves the GPU unusable nothing follows.
        """
        due = [name for name in cases if not self.is_done(name)]
        for place, name in enumerate(due):
            if self.left() < self.slowest:
                self.waiting += due[place:]
                break
            print(f"{self.stage.name}: {name}", flush=True)
            begin, fatal = time.monotonic(), False
            try:
                record = measure(*cases[name])
            except Exception as error:
                traceback.print_exc()
                record = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:1000]}
                fatal = isinstance(error, torch.AcceleratorError) or lost(self.device) is not None
            self.slowest = max(self.slowest, time.monotonic() - begin)
            self.keep(name, record)
            if fatal:
                raise SystemExit(f"{name}: the GPU is unusable after this error")

    def keep(self, name: str, record: dict[str, Any]) -> None:
        """Keep a point's result."""
        self.points[name] = record
        self.write()

    def leave(self, names: Iterable[str], why: str) -> None:
        """Leave points for a later call, and say why."""
        due = [name for name in names if not self.is_done(name)]
        if due:
            self.waiting += due
            print(f"{self.stage.name}: left, {why}: {', '.join(due)}", flush=True)

    def skip(self, what: str) -> None:
        """Say what a rehearsal does not run."""
        self.not_run.append(what)
        print(f"not run: {what}", flush=True)

    @property
    def failed(self) -> list[str]:
        return [name for name, point in self.points.items() if "error" in point]

    def write(self) -> None:
        """Write everything so far."""
        record = {
            "schema": 1,
            "stage": self.stage.name,
            "rehearsal": self.rehearse,
            "environment": self.environment,
            "dtype": str(self.dtype).removeprefix("torch."),
            "complete": self.finished and not self.waiting and not self.failed,
            "waiting": self.waiting,
            "failed_points": self.failed,
            "not_run": self.not_run,
            "points": self.points,
        }
        write(self.call.out / f"{self.stage.name}.json", record)


def _place(found: dict[str, Any] | None) -> object:
    """The values that two results must share to stand in one table."""
    return found and (found["device"], {k: v for k, v in found["versions"].items() if k != "driver"})


def main(name: str, call: str, seconds: str) -> int:
    """Do a stage's work; ``call``: JSON of this :class:`Call`."""
    given = json.loads(call)
    if not given["rehearse"] and not torch.cuda.is_available():
        print("no CUDA GPU: --rehearse runs the stages on a CPU", file=sys.stderr)
        return 1
    given |= {key: Path(given[key]) for key in ("out", "former")}
    work = Work(stage_named(name), Call(**given), float(seconds))
    perform(work)
    return 1 if work.failed else 0


def perform(work: Work) -> None:
    """Run a stage's module."""
    work.write()
    resolve_name(f"{__package__}.{work.stage.work}")(work)
    work.finished = True
    work.write()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
