"""Settings of the automatic policies that a user may turn: ``graph_config=Automatic(…)``."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from gsd_kernels.names import fields_named


@fields_named("Automatic: unknown setting")
@dataclass(frozen=True)
class Automatic:
    """``graph_config="auto"`` with settings of one's own: ``graph_config=Automatic(min_gain=1.05)``.

    They change which steps are tried and taken, never the text. Costs, and what is on disk, serve all settings.

    Args:
        min_gain: tokens a second of another shape, or of plain decoding, over those of the current choice, at least, to
            be taken.
        first_choice_steps: steps of an unknown pair until the first choice.
        retry_steps: length of a trial of what was switched off.
        payback_tokens: a shape of uncertain cost is tried where so many tokens are expected to pay for it.
        long_prompt_tokens: prompts behind which the first step is plain where a draft model has to read them too: even
            a small one reads for longer than a plain step takes.

    Raises:
        TypeError, ValueError: a setting of another type, or below 1.
    """

    min_gain: float = 1.02
    first_choice_steps: int = 2
    retry_steps: int = 5
    payback_tokens: int = 96
    long_prompt_tokens: int = 512

    def __post_init__(self) -> None:
        for one in fields(self):
            value, whole = getattr(self, one.name), isinstance(one.default, int)
            what = f"Automatic: {one.name}: expected"
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise TypeError(f"{what} {'an int' if whole else 'a number'} like {one.default}, got {value!r}")
            if not 1 <= value < math.inf:
                raise ValueError(f"{what} a finite number of at least 1, like {one.default}, got {value!r}")
