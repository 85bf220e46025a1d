"""Settings of the automatic policies that a user may turn: ``graph_config=Automatic(…)``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from gsd_kernels.names import fields_named

from .row_policy import RowSettings
from .shape_policy import ShapeSettings


@fields_named("Automatic: unknown setting")
@dataclass(frozen=True)
class Automatic:
    """``graph_config="auto"`` with settings of one's own: ``graph_config=Automatic(rows=RowSettings(min_gain=1.05))``.

    They change which steps are tried and taken, never the text. Costs, and what is on disk, serve all settings.

    Args:
        rows: where rows are chosen one by one: on a CPU, without a draft model.
        shapes: where shapes are chosen.

    Raises:
        TypeError, ValueError: a setting of another type, or out of range.
    """

    rows: RowSettings = field(default_factory=RowSettings)
    shapes: ShapeSettings = field(default_factory=ShapeSettings)

    def __post_init__(self) -> None:
        for name, kind in (("rows", RowSettings), ("shapes", ShapeSettings)):
            settings = getattr(self, name)
            if not isinstance(settings, kind):
                raise TypeError(f"Automatic: {name}: expected {kind.__name__}, got {type(settings).__name__}")
            for one in fields(kind):
                _check(f"{kind.__name__}: {one.name}", getattr(settings, one.name), one.default)


def _check(what: str, value: object, default: Any) -> None:
    """Steps and counts are whole numbers from 1, all else is finite and not negative, shares and decays at most 1."""
    whole = isinstance(default, int)
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        raise TypeError(f"{what}: expected {'an int' if whole else 'a number'} like {default}, got {value!r}")
    least, most = 1 if whole else 0, 1 if what.endswith("_share") or "decay" in what else math.inf
    if not (least <= value <= most and math.isfinite(value)):
        limit = f"from {least} to {most}" if most == 1 else f"of at least {least}"
        raise ValueError(f"{what}: expected a finite number {limit}, like {default}, got {value!r}")
