from __future__ import annotations

from torch import Tensor

from ...config import GraphConfig
from ...graph import TokenGraph
from ..history import Recollection
from ..table import Op
from . import reference
from .records import RecalledLevels


def flat(
    known: Recollection,
    graph: TokenGraph,
    frontier: Tensor,
    config: GraphConfig,
    level: int,
    *noise: Tensor | None,
) -> tuple[object, ...]:
    """The operator's arguments."""
    levels = config.depth + config.history_depth - level
    rules = config.merge_context, config.log_sibling_ratio, config.log_min_prob
    given = known.tensors(), graph.tensors(), frontier, known.sizes
    return (*given, level, levels, config.history_width, *rules, *noise)


recall_levels = Op(
    "recall_levels(Tensor[] history, Tensor(a!)[] graph, Tensor frontier, int[] sizes, int level, "
    "int levels, int width, int merge_context, float log_sibling_ratio, float log_min_prob, Tensor? first_pick, "
    "Tensor? seed, Tensor? sequence_ids) -> (Tensor, Tensor, Tensor, Tensor)",
    reference.recall_levels,
    ranked=("cpu", "cuda"),
    flat=flat,
    result=RecalledLevels,
    tolerance=1e-6,
)
