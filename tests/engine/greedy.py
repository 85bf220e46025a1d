"""A policy that switches shapes at random."""

from __future__ import annotations

import contextlib
import random

import pytest

import gsd_kernels as gsd
from gsd_kernels_hf.policy.base import Plan
from gsd_kernels_hf.policy.row_selector import EdgeModel, RowSelector
from gsd_kernels_hf.policy.shapes import ladder


class SomeRows(RowSelector):
    """Any number of rows, and what became of them is observed as ever."""

    def __init__(self, edges: EdgeModel, seed: int):
        super().__init__(edges)
        self.counts = random.Random(seed)

    def __call__(self, *arguments):
        rows = super().__call__(*arguments)
        return rows.first(self.counts.randint(1, rows.token_ids.shape[1]))


class Switching(contextlib.AbstractContextManager):
    """Stands in for the automatic policy: another shape, or none, every few steps; where the seed is odd, some rows."""

    def __init__(self, config: gsd.GraphConfig, seed: int):
        on_ladders = [s for device in ("cpu", "cuda") for s in ladder(device, with_model=True).values()]
        largest = [s.replace(depth=s.depth and 10, max_rows=128) for s in on_ladders]
        self.shapes = [None, config.replace(depth=1), *on_ladders, *largest]
        self.rng = random.Random(seed)
        self.rows = SomeRows(EdgeModel(), seed) if seed % 2 else None
        self.current = self.rng.choice(self.shapes)

    def largest_shapes(self):
        return self.shapes[1:]

    def plan(self):
        return Plan(self.current, self.rows)

    def end(self):
        pass

    def observe(self, seen):
        if self.rows is not None:
            self.rows.observe(seen.verified)
        if self.rng.random() < 0.6:
            self.current = self.rng.choice(self.shapes)

    def __enter__(self):
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(gsd.GraphDecoder, "policy", lambda *_, **__: self)

    def __exit__(self, *_):
        self.patch.undo()
