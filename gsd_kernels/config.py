"""How large the token graph may grow, and how it is pruned."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

from .names import fields_named, unknown

MAX_NODES = 1024
"""Largest node capacity of one token graph (the kernels keep a whole graph on chip)."""

MAX_CONTEXT = 8
"""Longest context, in tokens, that is compared when candidates are merged."""

MAX_ROWS = 128
"""Largest number of rows that one target forward verifies."""

MAX_BRANCH = 32
"""Largest number of candidates after one node."""

Preset = Literal["chain", "tree", "graph"]
"""Names of :meth:`GraphConfig.preset`."""

PRESETS: tuple[Preset, ...] = get_args(Preset)

SIZE = ("depth", "width", "branch", "max_rows")
"""What is always said of a shape."""

AUTO = "auto"
"""As ``graph_config``: a policy chooses the shape of every step."""

PLAIN = "plain"
"""As ``graph_config``: nothing is drafted."""

GraphName = Literal["auto", "plain", Preset]
"""What ``graph_config`` takes by name."""


@fields_named("graph_config: unknown field")
@dataclass(frozen=True, repr=False)
class GraphConfig:
    """Budgets and rules of one speculative step. Immutable; see :meth:`preset` for the named ones.

    Args:
        depth: drafted levels, i.e. draft forwards a step (0 … 64). 0: no draft model, only ``history_depth`` levels.
        width: nodes that one level expands, the best of all unexpanded ones (1 … 64).
        branch: candidate tokens drafted after each expanded node (1 … 32).
        max_rows: rows that the target verifies in one forward, the root included (2 … 128).
        max_path: deepest row of the unrolled graph. ``None``: ``min(2·depth + history_depth, max_rows − 1)``. Paths can
            be longer than ``depth``, because a merge edge may lead to a node whose continuation is already drafted.
        merge_context: tokens that must agree before two equal tokens when a candidate joins an existing node
            (0 … 8); −1 turns merging off, which leaves a token tree. The paper's ``repeat_threshold``
            (arXiv 2407.16207, section 3.2).
        sibling_ratio: a candidate less probable than this fraction of its best sibling is dropped (0 … 1; the
            paper's ``sibling_threshold``).
        min_prob: a node whose path probability is below this is kept but not expanded (0 … 1; the paper's
            ``prob_threshold``).
        history_depth: levels after the drafted ones whose candidates come from what followed the same tokens earlier
            (0 … 64), at no draft cost: merging across steps. Above 0 the same is mixed into the draft's candidates too.
        history_width: nodes that such a level expands (1 … 64).

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range, or the graph could exceed :data:`MAX_NODES` nodes.
    """

    depth: int = 5
    width: int = 4
    branch: int = 3
    max_rows: int = 32
    max_path: int | None = None
    merge_context: int = 1
    sibling_ratio: float = 0.0
    min_prob: float = 0.0
    history_depth: int = 0
    history_width: int = 8

    def __post_init__(self) -> None:
        _check_int("history_depth", self.history_depth, 0, 64)
        _check_int("history_width", self.history_width, 1, 64)
        _check_int("depth", self.depth, 0 if self.history_depth else 1, 64)
        _check_int("width", self.width, 1, 64)
        _check_int("branch", self.branch, 1, MAX_BRANCH)
        _check_int("max_rows", self.max_rows, 2, MAX_ROWS)
        if self.max_path is None:
            deepest = 2 * self.depth + self.history_depth
            object.__setattr__(self, "max_path", min(deepest, self.max_rows - 1))
        _check_int("max_path", self.max_path, 1, self.max_rows - 1)
        _check_int("merge_context", self.merge_context, -1, MAX_CONTEXT)
        _check_fraction("sibling_ratio", self.sibling_ratio)
        _check_fraction("min_prob", self.min_prob)
        if self.node_capacity > MAX_NODES:
            raise ValueError(
                f"depth={self.depth}, width={self.width}, branch={self.branch} give a graph of up to "
                f"{self.node_capacity} nodes, more than {MAX_NODES}: lower one of them"
            )

    def __repr__(self) -> str:
        """The size, and what differs from the defaults; it makes the same shape."""
        derived = min(2 * self.depth + self.history_depth, self.max_rows - 1)
        usual = {field.name: field.default for field in fields(self)} | {"max_path": derived}
        shown = [name for name in usual if name in SIZE or getattr(self, name) != usual[name]]
        return f"GraphConfig({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @classmethod
    def preset(cls, name: Preset, **changes: object) -> GraphConfig:
        """The named configuration ``"chain"``, ``"tree"`` or ``"graph"``, with any field replaced by keyword.

        ``chain`` is ordinary speculative decoding, with a row for each of its levels and the root, ``tree`` the best
        dynamic token tree, ``graph`` the same tree with recurring sequences merged: baselines and method run through
        the same code.
        """
        if name in (AUTO, PLAIN):
            raise ValueError(
                f'graph_config: "{name}" is no shape of its own and has no fields; pass it alone, or fields with '
                f"{', '.join(PRESETS)}"
            )
        if name not in PRESETS:
            raise ValueError(unknown("graph_config: unknown name", name, (AUTO, PLAIN, *PRESETS)))
        base: dict[str, object] = {}
        if name == "chain":
            depth, levels = changes.get("depth", cls.depth), changes.get("history_depth", cls.history_depth)
            _check_int("depth", depth, 0, 64)
            _check_int("history_depth", levels, 0, 64)
            rows = min(depth + levels + 1, MAX_ROWS)  # type: ignore[operator]
            base = {"depth": depth, "width": 1, "branch": 1, "max_rows": rows, "merge_context": -1}
        elif name == "tree":
            base = {"merge_context": -1}
        return cls(**{**base, **changes})  # type: ignore[arg-type]

    def replace(self, **changes: object) -> GraphConfig:
        """A copy with the given fields changed; ``max_path`` is derived anew unless given.

        Raises:
            TypeError, ValueError: as for the class.
        """
        return replace(self, **{"max_path": None, **changes})  # type: ignore[arg-type]

    @property
    def node_capacity(self) -> int:
        """Nodes that the graph can hold: root + branch·(1 + (depth − 1)·width + history_depth·history_width).

        Without drafted levels the first of the others expands the root alone.
        """
        reused = self.history_depth - (self.depth == 0)
        expanded = 1 + max(0, self.depth - 1) * self.width + reused * self.history_width
        return 1 + self.branch * expanded

    @property
    def draft_slots(self) -> int:
        """Cache slots that the draft needs for expanded nodes (the root lies in the prefix)."""
        return max(0, self.depth - 1) * self.width

    @property
    def chain_rows(self) -> int:
        """Rows of the draft's level 0: the most tokens that one step can emit."""
        return int(self.max_path) + 1  # type: ignore[arg-type]

    @property
    def draft_rows(self) -> int:
        """Rows that the draft computes in a step, padding included."""
        return self.chain_rows + self.draft_slots

    @property
    def cache_slots(self) -> int:
        """Cache positions that a step needs beyond the committed prefix, in either model."""
        return max(self.max_rows, self.draft_slots + 1, self.chain_rows)

    @cached_property  # asked in every step
    def log_sibling_ratio(self) -> float:
        """log(sibling_ratio), −inf for 0."""
        return _log(self.sibling_ratio)

    @cached_property  # asked in every step
    def log_min_prob(self) -> float:
        """log(min_prob), −inf for 0."""
        return _log(self.min_prob)


def resolve_graph_config(value: GraphConfig | GraphName | None) -> GraphConfig:
    """``None`` (the default preset), a preset's name, or a :class:`GraphConfig` → :class:`GraphConfig`.

    Raises:
        TypeError, ValueError: something else. The error names ``"auto"`` and ``"plain"`` too: callers take them first.
    """
    if value is None:
        return GraphConfig.preset("graph")
    if isinstance(value, GraphConfig):
        return value
    if isinstance(value, str):
        return GraphConfig.preset(value)
    raise TypeError(
        f"graph_config: expected a GraphConfig, a name ({', '.join((AUTO, PLAIN, *PRESETS))}) or None, "
        f"got {type(value).__name__}"
    )


def _log(x: float) -> float:
    return math.log(x) if x > 0.0 else -math.inf


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: expected an int, got {value!r}")
    if not low <= value <= high:
        raise ValueError(f"{name}: expected {low} … {high}, got {value}")


def _check_fraction(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: expected a number, got {value!r}")
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: expected 0 … 1, got {value}")
