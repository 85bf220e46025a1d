"""The few shapes that an automatic policy chooses among.

Every shape has storage of its own, on a GPU a captured graph, so there are at most eight for a pair: four lists, by
whether a draft model is there and whether rows are dear (a CPU) or nearly free (a GPU). ``bench/ladder.py`` found them
and says what they lose against 576 shapes; ``docs/policy.md`` has the table.
"""

from __future__ import annotations

from functools import cache

from gsd_kernels import GraphConfig

REUSE_DEPTH, REUSE_WIDTH = 4, 8  # levels from the history behind those of a model
LOOKUP_CONTEXT = 2  # tokens that nodes must share to be merged: the history tells longer contexts apart

_Shapes = tuple[tuple[int, int, int, int], ...]  # width, branch, depth, rows

WITH_MODEL: dict[str, tuple[_Shapes, _Shapes]] = {  # shapes with, and without the model's levels
    "cpu": (
        ((1, 1, 10, 12), (2, 2, 3, 4), (2, 2, 3, 6), (2, 2, 6, 12), (4, 3, 3, 12)),
        ((6, 4, 3, 4), (6, 4, 10, 12), (6, 4, 10, 16)),
    ),
    "cuda": (
        ((8, 4, 1, 16), (8, 4, 2, 16), (8, 4, 3, 32), (8, 4, 8, 128)),
        ((2, 2, 10, 48), (6, 4, 10, 16), (6, 4, 10, 32), (6, 4, 10, 64)),
    ),
}
WITHOUT_MODEL: dict[str, _Shapes] = {
    "cpu": (
        (2, 2, 10, 16),
        (2, 2, 10, 32),
        (6, 4, 1, 2),
        (6, 4, 3, 4),
        (6, 4, 5, 6),
        (6, 4, 6, 16),
        (6, 4, 8, 12),
        (6, 4, 10, 12),
    ),
    "cuda": (
        (2, 2, 10, 48),
        (6, 4, 3, 6),
        (6, 4, 6, 12),
        (6, 4, 6, 24),
        (6, 4, 10, 12),
        (6, 4, 10, 32),
        (6, 4, 10, 64),
        (6, 4, 10, 96),
    ),
}
BRANCH = 4  # the widest of them
ROWS = (3, 3, 20, 32)  # the shape of whose rows every step forwards those that pay: more than ever do


@cache
def ladder(device: str, *, with_model: bool, reuses: bool = True) -> dict[str, GraphConfig]:
    """At most eight shapes by name.

    Args:
        device: ``"cuda"``, or anything else for a device where rows cost time.
        with_model: whether a draft model (or the target without some layers) expands levels.
        reuses: whether a source that costs no forward is there, the history or prediction heads; without one only
            shapes with the model's levels make sense.
    """
    device = device if device in WITH_MODEL else "cpu"
    drafted, looked_up = WITH_MODEL[device] if with_model else ((), WITHOUT_MODEL[device])
    shapes = [
        GraphConfig(
            depth=depth, width=width, branch=branch, max_rows=rows, history_depth=REUSE_DEPTH, history_width=REUSE_WIDTH
        )
        for width, branch, depth, rows in drafted
    ]
    shapes += [_looked_up(*shape) for shape in (looked_up if reuses or not drafted else ())]
    return {shape_name(shape): shape for shape in shapes}


def row_shape() -> GraphConfig:
    """The shape whose rows are chosen one by one, where no draft model is there and the host may."""
    return _looked_up(*ROWS)


def every_shape(device: str, *, with_model: bool) -> dict[str, GraphConfig]:
    """All shapes by name that a pair's steps may have: the ladder's, and the one whose rows are chosen."""
    shapes = dict(ladder(device, with_model=with_model))
    if device == "cpu" and not with_model:
        shapes[shape_name(row_shape())] = row_shape()
    return shapes


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
