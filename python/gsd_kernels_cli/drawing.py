"""A picture of one step's token graph: what was drafted, merged, checked, accepted and rejected."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from gsd_kernels_hf.extras import cure
from gsd_kernels_hf.records import Verified

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.path import Path as Curve

ROOT, ACCEPTED, REJECTED, UNCHECKED, PICKED = "root", "accepted", "rejected", "unchecked", "picked"


@dataclass(frozen=True)
class Node:
    """A drafted token. ``kind``: root, accepted, rejected (by the target) or unchecked (did not fit its rows)."""

    id: int
    token_id: int
    kind: str


@dataclass(frozen=True)
class Edge:
    """``target`` may follow ``source``; ``merged``: it had been drafted elsewhere first, and was joined."""

    source: int
    target: int
    merged: bool
    accepted: bool


@dataclass(frozen=True)
class StepPicture:
    """One sequence's graph of one step, on the host; unlike a :class:`Verified` it stays valid."""

    nodes: list[Node]
    edges: list[Edge]
    accepted: list[int]  # node ids along the accepted path, the root first
    next_token: int  # the target's own pick at the end of that path
    num_rows: int  # rows that the target checked

    @classmethod
    def of(cls, record: Verified, sequence: int = 0) -> StepPicture:
        """Copy a step's graph to the host.

        Raises:
            ValueError: plain decoding drafts no graph.
        """
        if record.graph is None:
            raise ValueError("record: plain decoding has no graph to draw")
        graph, rows = record.graph, record.rows
        size, num_rows = int(graph.num_nodes[sequence]), int(rows.num_rows[sequence])
        row_nodes = rows.node_ids[sequence, :num_rows].tolist()
        path_rows = [row for row in record.accepted.accepted_rows[sequence].tolist() if row >= 0]
        path = [row_nodes[row] for row in path_rows]
        steps = set(pairwise(path))
        checked, accepted = set(row_nodes), set(path)
        parents = graph.parents[sequence, :size].tolist()
        nodes = [
            Node(i, token, ROOT if i == 0 else ACCEPTED if i in accepted else REJECTED if i in checked else UNCHECKED)
            for i, token in enumerate(graph.token_ids[sequence, :size].tolist())
        ]
        edges = [
            Edge(source, target, parents[target] != source, (source, target) in steps)
            for source, targets in enumerate(graph.edge_targets[sequence, :size].tolist())
            for target in targets
            if target >= 0
        ]
        return cls(nodes, edges, path, int(record.accepted.next_token[sequence]), num_rows)

    @property
    def merges(self) -> list[Edge]:
        return [edge for edge in self.edges if edge.merged]

    @property
    def interest(self) -> tuple[int, int, int]:
        """Interest of the picture: accepted merges, then accepted tokens, then merges (greater is better)."""
        return sum(edge.merged and edge.accepted for edge in self.edges), len(self.accepted), len(self.merges)


NEXT = -1
"""Node id of the bonus token, which the target itself added."""

FONT_SIZE = 10.0
ADVANCE = 0.602 * FONT_SIZE  # of DejaVu Sans Mono
LINE_HEIGHT, COLUMN_GAP, PADDING = 28.0, 46.0, 5.0

# kind → (fill, outline, text), and what the legend says
COLOURS = {
    ROOT: ("#1f2937", "#1f2937", "#ffffff", "last emitted token"),
    ACCEPTED: ("#15803d", "#15803d", "#ffffff", "accepted"),
    PICKED: ("#dcfce7", "#15803d", "#14532d", "the target's own next token"),
    REJECTED: ("#ffffff", "#b91c1c", "#7f1d1d", "checked and rejected"),
    UNCHECKED: ("#ffffff", "#d1d5db", "#9ca3af", "not checked"),
}
# (colour, width, layer, dashes) of edges
ACCEPTED_EDGE, MERGE_EDGE, EDGE = ("#15803d", 2.4, 2.5), ("#7c3aed", 1.6, 2.0), ("#9ca3af", 1.0, 1.0)
DASHED = (0, (2.5, 1.2))


def visible(text: str) -> str:
    """A token's text on one line, white space shown: ``·`` space, ``↵`` line end, ``⇥`` tab, ``·×8`` a run."""
    marks = {" ": "·", "\n": "↵", "\r": "↵", "\t": "⇥"}
    result = ""
    for character, run in groupby(text):
        count = len(list(run))
        mark = marks.get(character)
        if mark is not None:
            result += mark * count if count <= 2 else f"{mark}×{count}"
        else:
            result += (character if character.isprintable() else "\ufffd") * count
    return result if len(result) <= 16 else result[:15] + "…"


def draw_step(
    picture: StepPicture, decode: Callable[[int], str], files: Sequence[Path | str], title: str = ""
) -> list[Path]:
    """Draw a step into files, whose suffixes choose the format (``.svg``, ``.png``, ``.pdf``).

    In an SVG every box is a group ``node-<id>``, every edge a group ``edge-<source>-<target>``, and ``node-next`` is
    the token that the target itself added.

    Args:
        picture: what to draw.
        decode: token id → text.
        files: where to write; folders are made.
        title: one line above the graph.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib: {cure('plot')}") from error

    nodes = [*picture.nodes, Node(NEXT, picture.next_token, PICKED)]
    edges = [*picture.edges, Edge(picture.accepted[-1], NEXT, merged=False, accepted=True)]
    labels = {node.id: visible(decode(node.token_id)) or "∅" for node in nodes}
    names = {node.id: "next" if node.id == NEXT else str(node.id) for node in nodes}
    width = {node: ADVANCE * len(label) + 2 * PADDING for node, label in labels.items()}
    x, y = _places(width, edges, {*picture.accepted, NEXT})
    right, bottom = max(x[node] + width[node] for node in x), max(y.values()) + LINE_HEIGHT
    with rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "gsd-kernels", "font.family": ["DejaVu Sans Mono", "monospace"]}
    ):
        figure = Figure(figsize=(right / 72, bottom / 72), facecolor="white")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), xlim=(0, right), ylim=(bottom, 0))  # data are points
        axes.axis("off")
        axes.set_title(title, loc="left", fontsize=1.2 * FONT_SIZE, fontweight="bold")
        for edge in edges:
            _draw_edge(axes, edge, _curve(edge, x, y, width), f"edge-{names[edge.source]}-{names[edge.target]}")
        for node in nodes:
            box = axes.text(x[node.id] + PADDING, y[node.id], labels[node.id], va="center", fontsize=FONT_SIZE)
            fill, outline, colour, _ = COLOURS[node.kind]
            style = {"boxstyle": f"round,pad={PADDING / FONT_SIZE}", "facecolor": fill, "edgecolor": outline}
            box.set(color=colour, bbox=style, gid=f"node-{names[node.id]}", zorder=4, parse_math=False)
        kinds = {node.kind for node in nodes}
        shown = [
            Patch(facecolor=fill, edgecolor=outline, label=said)
            for kind, (fill, outline, _, said) in COLOURS.items()
            if kind in kinds
        ]
        merge = Line2D([], [], color=MERGE_EDGE[0], linestyle=DASHED, label="merge edge: drafted elsewhere, joined")
        axes.legend(handles=[*shown, merge], loc="upper left", bbox_to_anchor=(0, 0), ncols=2, frameon=False)
        paths = [Path(file) for file in files]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=160, bbox_inches="tight", metadata=metadata)
    return paths


def _draw_edge(axes: Axes, edge: Edge, curve: Curve, name: str) -> None:
    from matplotlib.patches import FancyArrowPatch

    colour, thickness, layer = ACCEPTED_EDGE if edge.accepted else MERGE_EDGE if edge.merged else EDGE
    arrow = FancyArrowPatch(path=curve, arrowstyle="-|>,head_length=5,head_width=2.5", color=colour, gid=name)
    arrow.set(linewidth=thickness, linestyle=DASHED if edge.merged else "solid", zorder=layer)
    axes.add_patch(arrow)


def _places(
    width: dict[int, float], edges: Sequence[Edge], first: Collection[int]
) -> tuple[dict[int, float], dict[int, float]]:
    """Left ends and middle lines of boxes in points, y downwards.

    Columns are by longest path, so that every edge runs to the right; lines by a walk over a tree of the edges, in
    which a node hangs on its accepted edge, else on its primary one. ``first`` goes first, hence straight on.
    """
    column = dict.fromkeys(width, 0)
    for edge in sorted(edges, key=lambda e: e.source):  # edges run from smaller to larger ids
        column[edge.target] = max(column[edge.target], column[edge.source] + 1)
    x: dict[int, float] = {}
    left = 0.0
    for level in range(max(column.values()) + 1):
        members = [node for node in column if column[node] == level]
        x.update(dict.fromkeys(members, left))
        left += max(width[node] for node in members) + COLUMN_GAP
    parents: dict[int, int] = {}
    for edge in sorted(edges, key=lambda e: (not e.accepted, e.merged)):
        parents.setdefault(edge.target, edge.source)
    children: dict[int, list[int]] = {}
    for node in sorted(width, key=lambda node: node not in first):
        if node in parents:
            children.setdefault(parents[node], []).append(node)
    y: dict[int, float] = {}
    line, stack = 0, [0]
    while stack:
        node = stack.pop()
        y[node] = LINE_HEIGHT * (line + 1)
        below = children.get(node, [])
        stack += reversed(below)
        line += not below
    return x, y


def _curve(edge: Edge, x: dict[int, float], y: dict[int, float], width: dict[int, float]) -> Curve:
    """An edge's way, which changes lines in its last gap, in its first one where boxes stand on the line between."""
    from matplotlib.path import Path as Curve

    (left, line), (right, end) = (x[edge.source] + width[edge.source], y[edge.source]), (x[edge.target], y[edge.target])
    free = not any(y[node] == line and left < x[node] < right for node in x)
    begin = right - COLUMN_GAP if free else left
    middle, stop = begin + COLUMN_GAP / 2, begin + COLUMN_GAP - 5.0  # room for the arrow
    points = [(left, line), (begin, line), (middle, line), (middle, end), (stop, end), (right - 1.0, end)]
    return Curve(points, [Curve.MOVETO, Curve.LINETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.LINETO])
