"""The time of a forward of rows and of a prompt on a GPU: operator and modules, by how its launches begin."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from gsd_kernels.ops.decoder_rows.cuda import AHEAD, GROUP, OVERLAP

from ..kernels.rows import WAYS, measure, random_model, table
from .right import passed_by_groups, right_shapes
from .work import Work, points, switched

ROWS = (16, 64, 128, 256, 8, 1, 32, 2, 4)  # 8 rows of a 1B: a level of its draft
PROMPT = 2000
GROUPS = "groups"
SETTINGS = {"early": {OVERLAP: "1"}, "in turn": {OVERLAP: "0"}, GROUPS: {GROUP: "1"}}
AHEAD_SETTINGS = {f"ahead={megabytes}": {AHEAD: str(megabytes)} for megabytes in (24, 0, 6, 12)}
AHEAD_ROWS = (1, 16, 32)  # whose launches begin early


def run(work: Work) -> None:
    """Points ``SHAPE SETTING``; of ``ahead`` by how many of the next product's weights are asked for."""
    if work.rehearse:
        work.skip("launches that begin early, and weights that are asked for ahead: a CPU's operator has its own")
    settings, rows = (AHEAD_SETTINGS, AHEAD_ROWS) if work.stage.name == "ahead" else (SETTINGS, ROWS)
    wanted = [name for name in settings if name != GROUPS or passed_by_groups(work)]
    model = lru_cache(maxsize=1)(lambda shape: random_model(shape, work.dtype, work.device))
    cases = points("{shape} {setting}", shape=right_shapes(work), setting=wanted)
    work.each(cases, lambda shape, setting: timed(work, shape, model(shape), rows, settings[setting]))


def timed(
    work: Work, shape: str, model: Any, rows: Iterable[int], variables: Mapping[str, str], ways: Iterable[str] = WAYS
) -> dict[str, Any]:
    """Milliseconds of all numbers of rows and of a prompt, with variables of the environment; see :func:`measure`."""
    rows, seconds = ((1, 5), 0.05) if work.rehearse else (tuple(rows), 0.4)
    with switched(variables):
        found = measure(shape, model, rows, work.prefix, min(PROMPT, 50 * work.prefix), seconds, ways=ways)
    print(table({"results": [found]}), flush=True)
    return {**found, "variables": dict(variables)}
