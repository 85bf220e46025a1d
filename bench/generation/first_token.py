"""The time until the first token of a long prompt, in one interleaved run."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..lib.report import markdown
from .competitors import AUTO, GREEDY, PLAIN
from .generate import GenerateReport, Settings
from .generate import run as race
from .peers.race import PEERS

NAME = "first-token"
DEFAULT = (GREEDY, PLAIN, AUTO, *(name for name in PEERS if not name.endswith(("-draft", "-lookup"))))


def run(
    pair: str, target_shape: str, dtype: torch.dtype, *, tokens: int, prompts: int, names: Sequence[str]
) -> tuple[GenerateReport, str]:
    """Race ``names`` over one new token of prompts of ``tokens`` tokens; the report, and its table in Markdown."""
    settings = Settings(
        device=torch.device("cpu"),
        dtype=dtype,
        pair=pair,
        target_shape=target_shape,
        prompts=prompts,
        new_tokens=1,
        competitors=names,
        prompt_tokens=tokens,
    )
    report = race(settings)
    report.case = NAME
    return report, _table(report)


def _table(report: GenerateReport) -> str:
    """Median time of everyone, and its ratio to the fastest of the others' (below 1 is faster than that)."""
    seconds = {row["competitor"]: row["median_seconds"] for row in report.summary}
    others = {name: value for name, value in seconds.items() if name not in (PLAIN, AUTO)}
    fastest = min(others, key=lambda name: others[name]) if others else None
    rows = []
    for row in report.summary:
        name = row["competitor"]
        ratio = "–" if fastest is None else str(report.ratio(fastest, name))
        rows.append([name, f"{1e3 * seconds[name]:.0f}", ratio, f"{row['equal']} of {row['compared']}"])
    return markdown(["", "ms", f"× {fastest} (95%)", "same token"], rows)
