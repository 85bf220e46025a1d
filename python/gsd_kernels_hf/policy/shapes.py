"""The few shapes that an automatic policy chooses among.

Every shape has storage of its own, on a GPU a captured graph, so there are at most eight for a pair: lists by whether
rows are expensive (a CPU) or nearly free (a GPU), and on a GPU by whether a draft model is there. On a CPU without a
draft model there is one wide shape, whose rows are chosen one by one. A search over recorded profiles found the lists;
``bench/results/ladder.json`` has what they lose against 576 shapes.
"""

from __future__ import annotations

from functools import cache

from gsd_kernels import GraphConfig

# Levels of sources without a forward behind those of a model, and their nodes.
REUSE_DEPTH, REUSE_WIDTH = 4, 8
LOOKUP_CONTEXT = 2  # tokens that nodes must share to be merged: the history tells longer contexts apart

_Shapes = tuple[tuple[int, int, int, int], ...]  # width, branch, depth, rows

WITH_MODEL: dict[str, tuple[_Shapes, _Shapes]] = {  # shapes with, and without the model's levels
    "cpu": (
        ((1, 1, 10, 12), (2, 2, 3, 4), (2, 2, 3, 6), (2, 2, 6, 12), (4, 3, 3, 12)),
        ((6, 4, 3, 4), (6, 4, 10, 12), (6, 4, 10, 16)),
    ),
    "cuda": (
        ((8, 4, 1, 16), (8, 4, 2, 16), (8, 4, 3, 32), (8, 4, 8, 128)),
        ((6, 4, 10, 16), (6, 4, 10, 32), (6, 4, 10, 64), (6, 4, 18, 40)),
    ),
}
WITHOUT_MODEL: _Shapes = (  # on a GPU
    (6, 4, 3, 6),
    (6, 4, 6, 12),
    (6, 4, 6, 24),
    (6, 4, 10, 12),
    (6, 4, 10, 32),
    (6, 4, 10, 64),
    (6, 4, 10, 96),
    (6, 4, 18, 40),
)
BRANCH = 4  # the widest of them
ROWS = (3, 3, 20, 32)  # the shape whose rows are chosen: more of them than a step ever forwards
# Nodes of it that are less likely are not expanded: no row after them pays, and drafting ends early in a hard text.
MIN_PROB = 0.01


@cache
def ladder(device: str, *, with_model: bool, reuses: bool = True) -> dict[str, GraphConfig]:
    """All shapes that steps of a pair may have, by name: at most eight.

    Args:
        device: ``"cuda"``, or anything else for a device where rows are expensive.
        with_model: whether a draft model (or the target without some layers) expands levels.
        reuses: whether a source that costs no forward is there, the history or prediction heads; without one there
            are the model's levels alone.
    """
    if not with_model:
        shapes = [_looked_up(*sizes) for sizes in WITHOUT_MODEL] if device == "cuda" else [row_shape()]
        return {shape_name(shape): shape for shape in shapes}
    drafted, looked_up = WITH_MODEL.get(device, WITH_MODEL["cpu"])
    reuse = {"history_depth": REUSE_DEPTH, "history_width": REUSE_WIDTH} if reuses else {}
    shapes = [
        GraphConfig(depth=depth, width=width, branch=branch, max_rows=rows, **reuse)
        for width, branch, depth, rows in drafted
    ]
    shapes += [_looked_up(*sizes) for sizes in (looked_up if reuses else ())]
    return {shape_name(shape): shape for shape in shapes}


def row_shape() -> GraphConfig:
    """The shape whose rows are chosen one by one, where no draft model is there and the host may."""
    return _looked_up(*ROWS).replace(min_prob=MIN_PROB)


def _looked_up(width: int, branch: int, depth: int, rows: int) -> GraphConfig:
    return GraphConfig(
        depth=0,
        width=width,
        branch=branch,
        max_rows=rows,
        merge_context=LOOKUP_CONTEXT,
        history_depth=depth,
        history_width=width,
    )


def shape_name(config: GraphConfig) -> str:
    """``depth·width·branch·rows`` of a shape of the ladder, with ``lookup-`` before it where no model drafts."""
    if config.depth:
        return f"{config.depth}x{config.width}x{config.branch}x{config.max_rows}"
    return f"lookup-{config.history_depth}x{config.history_width}x{config.branch}x{config.max_rows}"
