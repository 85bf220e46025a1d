"""A picture of one step's token graph: what was drafted, merged, checked, accepted and rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from gsd_kernels_hf.extras import cure
from gsd_kernels_hf.records import Verified

ROOT, ACCEPTED, PICKED, REJECTED, UNCHECKED = "root", "accepted", "picked", "rejected", "unchecked"
COLOURS = {
    ROOT: ("#1f2937", "#1f2937", "#ffffff", "last emitted token"),
    ACCEPTED: ("#15803d", "#15803d", "#ffffff", "accepted"),
    PICKED: ("#dcfce7", "#15803d", "#14532d", "the target's own next token"),
    REJECTED: ("#ffffff", "#b91c1c", "#7f1d1d", "checked and rejected"),
    UNCHECKED: ("#ffffff", "#d1d5db", "#9ca3af", "not checked"),
}
"""Of each kind of node: fill, outline, text, and what the legend says."""
MARKS = {" ": "·", "\n": "↵", "\r": "↵", "\t": "⇥"}
MOST_CHARACTERS = 16  # of a token's text
COLUMN_GAP, PADDING = 8.0, 0.8  # between boxes and around their texts, in characters of the font
CHARACTER, LINE = 0.084, 0.4  # inches: the width of a character of 10 points, the distance of lines


class Edge(NamedTuple):
    """``target`` may follow ``source``; ``merged``: it had been drafted elsewhere first, and was joined."""

    source: int
    target: int
    merged: bool
    accepted: bool


@dataclass(frozen=True)
class StepPicture:
    """One sequence's graph of one step, on the host; unlike a :class:`Verified` it stays valid."""

    tokens: list[int]  # by node id, the root first
    kinds: list[str]  # root, accepted, rejected (by the target) or unchecked (did not fit its rows)
    edges: list[Edge]
    accepted: list[int]  # node ids along the accepted path, the root first
    next_token: int  # the target's own pick at the end of that path
    num_rows: int  # rows that the target checked

    @classmethod
    def of(cls, record: Verified, sequence: int = 0) -> StepPicture:
        """Copy to the host the graph of a step that drafted one."""
        graph, rows = record.graph, record.rows
        assert graph is not None
        size, num_rows = int(graph.num_nodes[sequence]), int(rows.num_rows[sequence])
        checked = rows.node_ids[sequence, :num_rows].tolist()
        path = [checked[row] for row in record.accepted.accepted_rows[sequence].tolist() if row >= 0]
        kinds = [ACCEPTED if i in path else REJECTED if i in checked else UNCHECKED for i in range(size)]
        parents, steps = graph.parents[sequence].tolist(), set(pairwise(path))
        edges = [
            Edge(source, target, parents[target] != source, (source, target) in steps)
            for source, targets in enumerate(graph.edge_targets[sequence, :size].tolist())
            for target in targets
            if target >= 0
        ]
        tokens = graph.token_ids[sequence, :size].tolist()
        return cls(tokens, [ROOT, *kinds[1:]], edges, path, int(record.accepted.next_token[sequence]), num_rows)

    @property
    def merges(self) -> list[Edge]:
        return [edge for edge in self.edges if edge.merged]

    @property
    def interest(self) -> tuple[int, int, int]:
        """Interest of the picture: accepted merges, then accepted tokens, then merges (greater is better)."""
        return sum(edge.accepted for edge in self.merges), len(self.accepted), len(self.merges)


def visible(text: str) -> str:
    """A token's text on one line, white space shown."""
    shown = "".join(MARKS.get(character, character if character.isprintable() else "\ufffd") for character in text)
    return shown if len(shown) <= MOST_CHARACTERS else shown[: MOST_CHARACTERS - 1] + "…"


def draw_step(picture: StepPicture, decode: Callable[[int], str], files: Sequence[Path], title: str = "") -> None:
    """Draw a step into files, whose suffixes choose the format.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.patches import FancyArrowPatch, Patch
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib: {cure('plot')}") from error

    bonus = Edge(picture.accepted[-1], len(picture.tokens), merged=False, accepted=True)
    edges, kinds = [*picture.edges, bonus], [*picture.kinds, PICKED]
    labels = [visible(decode(token)) or "∅" for token in (*picture.tokens, picture.next_token)]
    x, y = _places([len(label) for label in labels], edges)
    right, bottom = max(x) + MOST_CHARACTERS, max(y) + 1
    with rc_context({"svg.fonttype": "none", "font.family": ["DejaVu Sans Mono", "monospace"]}):
        figure = Figure(figsize=(right * CHARACTER, bottom * LINE))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, right), ylim=(bottom, -1))
        axes.axis("off")
        axes.set_title(title, loc="left", fontweight="bold")
        for source, target, merged, accepted in edges:
            ends = (x[source] + len(labels[source]) + PADDING, y[source]), (x[target] - PADDING, y[target])
            style = {
                "color": "#15803d" if accepted else "#7c3aed" if merged else "#9ca3af",
                "linestyle": "dashed" if merged else "solid",
                "linewidth": 2 if accepted else 1,
            }
            axes.add_patch(FancyArrowPatch(*ends, arrowstyle="-|>", mutation_scale=10, **style))
        for node, label in enumerate(labels):
            fill, outline, colour, _ = COLOURS[kinds[node]]
            box = {"boxstyle": "round,pad=0.5", "facecolor": fill, "edgecolor": outline}
            place = {"va": "center", "fontsize": 10, "parse_math": False}
            axes.text(x[node], y[node], label, color=colour, bbox=box, **place)
        shown = [
            Patch(facecolor=fill, edgecolor=outline, label=said)
            for kind, (fill, outline, _, said) in COLOURS.items()
            if kind in kinds
        ]
        merge = Patch(
            facecolor="none", edgecolor="#7c3aed", linestyle="dashed", label="merge edge: drafted elsewhere, joined"
        )
        axes.legend(handles=[*shown, merge], loc="upper left", bbox_to_anchor=(0, 0), ncols=2, frameon=False)
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(file, dpi=160, bbox_inches="tight")


def _places(widths: Sequence[int], edges: Sequence[Edge]) -> tuple[list[float], list[int]]:
    """Left ends of boxes, in characters, and their lines.

    Columns are by longest path, so that every edge runs to the right; in a column a node stands by its parent's line,
    which is the one of its accepted edge, else of its primary one. The accepted path is the first line.
    """
    column, line, x = [0] * len(widths), [0] * len(widths), [0.0] * len(widths)
    for edge in sorted(edges):  # they run from smaller to larger ids
        column[edge.target] = max(column[edge.target], column[edge.source] + 1)
    parent = {edge.target: edge for edge in sorted(edges, key=lambda edge: (edge.accepted, not edge.merged))}
    left = widths[0] + COLUMN_GAP
    for level in range(1, max(column) + 1):
        members = [node for node, at in enumerate(column) if at == level]
        members.sort(key=lambda node: (not parent[node].accepted, line[parent[node].source], node))
        for place, node in enumerate(members):
            x[node], line[node] = left, place
        left += max(widths[node] for node in members) + COLUMN_GAP
    return x, line
