"""Calls that overlap in time share what their policies learn, without a lock: no thread sees half of a change."""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from simulated import KNOWN

from gsd_kernels import GraphConfig
from gsd_kernels_hf.costs import disturbance, model
from gsd_kernels_hf.costs.model import PLAIN, SLOWER_STEPS, CostModel
from gsd_kernels_hf.policy import acceptance
from gsd_kernels_hf.policy.acceptance import MIN_PROFILES, AcceptanceModel, TreeForecast

SHAPES = {
    "deep": GraphConfig(depth=2, width=1, branch=2, max_rows=4, history_depth=1),
    "wide": GraphConfig(depth=0, width=1, branch=2, max_rows=3, history_depth=2),
}
FORECAST = TreeForecast(list(SHAPES.values()), 2)
SHARING = tuple(module.__file__ for module in (acceptance, disturbance, model))
OWN = ("<listcomp>", "<genexpr>", "increasing", "_rounded")  # functions that see nothing shared
STRIDE = 4  # instructions between two moments


def interrupted(work: Callable[[], None], at: int, other: Callable[[], None]) -> bool:
    """Run ``work``, and ``other`` as in another thread's turn before its instruction ``at``; whether it has so many."""
    left = at

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in SHARING or frame.f_code.co_name in OWN:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == -1:
                other()  # which is not traced
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return left < 0


def some_acceptance() -> AcceptanceModel:
    known = AcceptanceModel(2)
    accept(known, "model")
    return known


def accept(known: AcceptanceModel, kind: str) -> None:
    known.observe(kind, np.full((MIN_PROFILES, 2), 0.4), np.tile([True, False], (MIN_PROFILES, 1)))
    known.observe_accepted(kind, 2.0, 2.5)


def use_acceptance(known: AcceptanceModel) -> None:
    accept(known, "model")
    known.tokens(FORECAST)
    assert all(len(profiles) == len(picks) for profiles, picks in known.as_dict()["pools"].values())


def change_acceptance(known: AcceptanceModel) -> None:
    accept(known, "lookup")
    known.assume_easy("model")


def some_costs() -> CostModel:
    known = CostModel(KNOWN, SHAPES)
    for _ in range(SLOWER_STEPS - 1):
        known.observe(PLAIN, 4, 100.0, 1, 900.0, 0.0)
    return known


def use_costs(known: CostModel) -> None:
    known.observe(PLAIN, 4, 100.0, 1, 900.0, 0.1)
    known.observe_period("deep", [(4, 0.1), (4, 0.5), (8, 0.1)], 100.0, 0.1)
    found = known.as_dict()
    assert found["steps"] == sum(found["timed"].values()), "else the file is refused"


def change_costs(known: CostModel) -> None:
    known.observe("wide", 4, 100.0, 1, 1e-4, 1e-4)


SHARED: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], None]]] = {
    "acceptance": (some_acceptance, use_acceptance, change_acceptance),
    "costs": (some_costs, use_costs, change_costs),
}


@pytest.mark.parametrize("what", SHARED)
def test_another_threads_turn_may_come_at_any_moment(what):
    make, use, change = SHARED[what]
    begin = make()
    for moment in itertools.count(step=STRIDE):
        known = copy.deepcopy(begin)
        if not interrupted(lambda known=known: use(known), moment, lambda known=known: change(known)):
            break
    assert moment > 100
