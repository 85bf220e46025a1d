"""What a user may set that SGLang has no flag for, from one environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

from gsd_kernels import GraphConfig
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.names import fields_named

VARIABLE = "GSD_KERNELS_SGLANG_OPTIONS"
ROWS_FLAG, BRANCH_FLAG = "--speculative-num-draft-tokens", "--speculative-eagle-topk"
BOUNDS = {
    "levels": (1, 64),
    "width": (1, 64),
    "merge_context": (-1, MAX_CONTEXT),
    "context": (1, MAX_CONTEXT - 1),
    "capacity": (1 << 10, 1 << 26),
    "batch_rows": (1, 1 << 20),
    "log_steps": (0, 1 << 31),
}


@fields_named(f"{VARIABLE}: unknown option")
@dataclass(frozen=True)
class Options:
    """How drafts are grown and remembered.

    Args:
        levels: of the graph: how often its leaves are looked up in the history in a step (1 … 64).
        width: nodes that a level looks up (1 … 64).
        merge_context: tokens before two equal ones that must agree for them to become one node (0 … 8); −1: a tree.
        context: longest context, in tokens, that the history knows (1 … 7).
        shared: whether requests draft from what the target answered to others, too.
        capacity: contexts that each of the two histories holds; a power of two.
        batch_rows: rows of all requests together that a step aims at. ``None``: 32 on a CPU, 256 elsewhere.
        log_steps: steps between two lines of statistics in SGLang's log; 0 for none.

    Raises:
        TypeError, ValueError: an option has the wrong type or is out of range.
    """

    levels: int = 10
    width: int = 4
    merge_context: int = 1
    context: int = 4
    shared: bool = True
    capacity: int = 1 << 18
    batch_rows: int | None = None
    log_steps: int = 500

    def __post_init__(self) -> None:
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            if value is None and name == "batch_rows":
                continue
            if type(value) is not int:
                raise TypeError(f"{VARIABLE}: {name}: expected a whole number, got {value!r}")
            if not low <= value <= high:
                raise ValueError(f"{VARIABLE}: {name}: expected {low} … {high}, got {value}")
        if type(self.shared) is not bool:
            raise TypeError(f"{VARIABLE}: shared: expected true or false, got {self.shared!r}")
        if self.capacity & (self.capacity - 1):
            raise ValueError(f"{VARIABLE}: capacity: expected a power of two, got {self.capacity}")

    @classmethod
    def read(cls, environment: Mapping[str, str] | None = None) -> Options:
        """The options in the environment: a JSON object in ``GSD_KERNELS_SGLANG_OPTIONS``, all of them optional."""
        text = (os.environ if environment is None else environment).get(VARIABLE, "")
        if not text.strip():
            return cls()
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f'{VARIABLE}: expected a JSON object such as {{"levels": 10}}: {error}') from error
        if not isinstance(given, dict):
            raise TypeError(f'{VARIABLE}: expected a JSON object such as {{"levels": 10}}, got {text}')
        return cls(**given)

    def graph_config(self, rows: int, branch: int) -> GraphConfig:
        """Budgets of the graph behind ``rows`` rows of a request, ``branch`` candidates after a token.

        Raises:
            ValueError: the two do not fit what the operators take, or the graph would be too large.
        """
        check_flags(rows, branch)
        levels = min(self.levels, rows - 1)
        try:
            return GraphConfig(
                depth=0,
                width=1,
                branch=branch,
                max_rows=rows,
                max_path=min(2 * levels, rows - 1),  # a merge edge leads to what is drafted already
                merge_context=self.merge_context,
                history_depth=levels,
                history_width=self.width,
            )
        except ValueError as error:
            raise ValueError(f"{VARIABLE}: lower levels or width: {error}") from error


def check_flags(rows: int | None, branch: int | None) -> None:
    """Refuse what the operators do not take of SGLang's two numbers, ``None`` where the user left them open.

    Raises:
        ValueError: with the flag.
    """
    for flag, value, low, high in ((ROWS_FLAG, rows, 2, 128), (BRANCH_FLAG, branch, 1, 32)):
        if value is not None and not low <= value <= high:
            raise ValueError(f"{flag}: expected {low} … {high} with --speculative-algorithm GSD, got {value}")
