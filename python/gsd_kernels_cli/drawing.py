"""A picture of one step's token graph: what was drafted, merged, checked, accepted and rejected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from gsd_kernels_hf.extras import cure
from gsd_kernels_hf.records import Verified

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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

    def checked_only(self) -> StepPicture:
        """Without what the target never saw, but for the path on which something that it did see was drafted."""
        parents = {edge.target: edge.source for edge in self.edges if not edge.merged}
        kept = {node.id for node in self.nodes if node.kind != UNCHECKED}
        for node in sorted(kept, reverse=True):
            while node in parents:
                node = parents[node]
                kept.add(node)
        return StepPicture(
            [node for node in self.nodes if node.id in kept],
            [edge for edge in self.edges if edge.source in kept and edge.target in kept],
            self.accepted,
            self.next_token,
            self.num_rows,
        )

    @property
    def interest(self) -> tuple[int, int, int]:
        """Interest of the picture: accepted merges, then accepted tokens, then merges (greater is better)."""
        drawn = self.checked_only()
        return sum(edge.merged and edge.accepted for edge in self.edges), len(self.accepted), len(drawn.merges)


NEXT = -1
"""Node id of the bonus token, which the target itself added."""

FONT_SIZE = 10.0
ADVANCE = 0.602 * FONT_SIZE  # of DejaVu Sans Mono
BOX_HEIGHT, LINE_HEIGHT, COLUMN_GAP, PADDING = 18.0, 28.0, 46.0, 5.0
MARGIN, HEADER, LEGEND_GAP, ARROW = 24.0, 66.0, 38.0, 5.0

# kind → (fill, outline, text)
COLOURS = {
    ROOT: ("#1f2937", "#1f2937", "#ffffff"),
    ACCEPTED: ("#15803d", "#15803d", "#ffffff"),
    REJECTED: ("#ffffff", "#b91c1c", "#7f1d1d"),
    UNCHECKED: ("#ffffff", "#d1d5db", "#9ca3af"),
    PICKED: ("#dcfce7", "#15803d", "#14532d"),
}
MERGE_COLOUR, EDGE_COLOUR = "#7c3aed", "#9ca3af"
LEGEND = {
    ROOT: "last emitted token",
    ACCEPTED: "accepted",
    PICKED: "the target's own next token",
    REJECTED: "checked and rejected",
    UNCHECKED: "not checked",
}
MERGE_TEXT = "merge edge: already drafted elsewhere, joined"


@dataclass
class _Layout:
    """Positions in points, y downwards: the left end of each box, its middle line and its width."""

    x: dict[int, float] = field(default_factory=dict)
    y: dict[int, float] = field(default_factory=dict)
    width: dict[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, picture: StepPicture, labels: dict[int, str]) -> _Layout:
        """Columns by longest path, so that every edge runs to the right; lines by a walk over a tree of the edges.

        A node hangs on its accepted edge, else on its primary one. The accepted path goes first, hence straight on.
        """
        layout = cls(width={i: _text_width(label) + 2 * PADDING for i, label in labels.items()})
        column = dict.fromkeys(labels, 0)
        for edge in sorted(picture.edges, key=lambda e: e.source):  # edges run from smaller to larger ids
            column[edge.target] = max(column[edge.target], column[edge.source] + 1)
        left = MARGIN
        for level in range(max(column.values()) + 1):
            members = [i for i in column if column[i] == level]
            layout.x.update(dict.fromkeys(members, left))
            left += max(layout.width[i] for i in members) + COLUMN_GAP

        first = {*picture.accepted, NEXT}
        parents: dict[int, int] = {}
        for edge in sorted(picture.edges, key=lambda e: (not e.accepted, e.merged)):
            parents.setdefault(edge.target, edge.source)
        children: dict[int, list[int]] = {}
        for node in labels:
            if node in parents:
                children.setdefault(parents[node], []).append(node)
        line, stack = 0, [0]
        while stack:
            node = stack.pop()
            layout.y[node] = HEADER + LINE_HEIGHT * (line + 0.5)
            below = sorted(children.get(node, []), key=lambda child: child not in first)
            stack += reversed(below)
            line += not below
        return layout

    def is_free(self, line: float, left: float, right: float) -> bool:
        """Return whether a horizontal stroke meets no box."""
        return not any(
            self.y[i] == line and self.x[i] < right - 1.0 and self.x[i] + self.width[i] > left + 1.0 for i in self.x
        )

    @property
    def right(self) -> float:
        return max(self.x[i] + self.width[i] for i in self.x)

    @property
    def bottom(self) -> float:
        return max(self.y.values()) + LINE_HEIGHT / 2


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
        picture: what to draw; :meth:`StepPicture.checked_only` leaves out what the target never saw.
        decode: token id → text.
        files: where to write; folders are made.
        title: one line above the graph.

    Returns:
        The files.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"drawing needs matplotlib: {cure('plot')}") from error

    end = picture.accepted[-1]
    picture = replace(
        picture,
        nodes=[*picture.nodes, Node(NEXT, picture.next_token, PICKED)],
        edges=[*picture.edges, Edge(end, NEXT, merged=False, accepted=True)],
    )
    labels = {node.id: visible(decode(node.token_id)) or "∅" for node in picture.nodes}
    layout = _Layout.of(picture, labels)
    kinds = {node.kind for node in picture.nodes}
    legend = [(text, kind) for kind, text in LEGEND.items() if kind in kinds]
    legend_width = sum(_text_width(text) + LEGEND_GAP for text, _ in legend) + _text_width(MERGE_TEXT) + LEGEND_GAP
    width = MARGIN + max(layout.right, legend_width + MARGIN, _text_width(title) * 1.2 + MARGIN)
    height = layout.bottom + MARGIN
    paths = [Path(file) for file in files]
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": "gsd-kernels", "font.family": ["DejaVu Sans Mono", "monospace"]}
    ):
        figure = Figure(figsize=(width / 72, height / 72), facecolor="white")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        axes.axis("off")
        axes.text(MARGIN, 20, title, fontsize=1.2 * FONT_SIZE, fontweight="bold", va="center")
        _draw_legend(axes, legend)
        for edge in picture.edges:
            _draw_edge(axes, layout, edge)
        for node in picture.nodes:
            name = "next" if node.id == NEXT else str(node.id)
            box = layout.x[node.id], layout.y[node.id], layout.width[node.id]
            _draw_box(axes, *box, labels[node.id], node.kind, gid=f"node-{name}")
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=160, metadata=metadata)
    return paths


def _text_width(text: str) -> float:
    return ADVANCE * len(text)


def _draw_legend(axes: Axes, entries: list[tuple[str, str]]) -> None:
    from matplotlib.lines import Line2D

    x, y = MARGIN, 46.0
    for text, kind in entries:
        _draw_box(axes, x, y, 14, "", kind, height=10)
        axes.text(x + 20, y, text, fontsize=FONT_SIZE, color="#374151", va="center")
        x += _text_width(text) + LEGEND_GAP
    axes.add_line(Line2D([x, x + 22], [y, y], color=MERGE_COLOUR, linestyle=(0, (2.5, 1.2)), linewidth=1.6))
    axes.text(x + 28, y, MERGE_TEXT, fontsize=FONT_SIZE, color="#374151", va="center")


def _draw_box(
    axes: Axes, x: float, y: float, width: float, text: str, kind: str, *, height: float = BOX_HEIGHT, gid: str = ""
) -> None:
    from matplotlib.patches import FancyBboxPatch

    fill, outline, colour = COLOURS[kind]
    style = "round,pad=0,rounding_size=4"
    box = FancyBboxPatch(
        (x, y - height / 2), width, height, boxstyle=style, facecolor=fill, edgecolor=outline, linewidth=1.1, zorder=3
    )
    if gid:
        box.set_gid(gid)
    axes.add_patch(box)
    middle = x + width / 2
    label = axes.text(middle, y, text, fontsize=FONT_SIZE, color=colour, ha="center", va="center_baseline", zorder=4)
    label.set_parse_math(False)


def _draw_edge(axes: Axes, layout: _Layout, edge: Edge) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path as Curve

    start = layout.x[edge.source] + layout.width[edge.source], layout.y[edge.source]
    end = layout.x[edge.target] - 1.0, layout.y[edge.target]
    # Change lines where no box is passed behind: in the last gap, else in the first.
    bend = min(end[0] - start[0], COLUMN_GAP)
    late = layout.is_free(start[1], start[0], end[0])
    left, right = (end[0] - bend, end[0]) if late else (start[0], start[0] + bend)
    right = min(right, end[0] - ARROW)
    middle = 0.5 * (left + right)
    points = [start, (left, start[1]), (middle, start[1]), (middle, end[1]), (right, end[1]), end]
    curve = Curve(points, [Curve.MOVETO, Curve.LINETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4, Curve.LINETO])
    if edge.accepted:
        colour, width, layer = COLOURS[ACCEPTED][0], 2.4, 2.5
    else:
        colour, width, layer = (MERGE_COLOUR, 1.6, 2.0) if edge.merged else (EDGE_COLOUR, 1.0, 1.0)
    target = "next" if edge.target == NEXT else str(edge.target)
    axes.add_patch(
        FancyArrowPatch(
            path=curve,
            arrowstyle=f"-|>,head_length={ARROW},head_width={ARROW / 2}",
            color=colour,
            linewidth=width,
            linestyle=(0, (2.5, 1.2)) if edge.merged else "solid",
            zorder=layer,
            gid=f"edge-{edge.source}-{target}",
        )
    )
