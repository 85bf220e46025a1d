from __future__ import annotations

from torch import Tensor

from ...config import GraphConfig
from ...graph import TokenGraph
from ..history import Recollection
from ..history.api import HISTORY, NOISE, SIZES
from ..merge.api import RULES
from ..table import GRAPH, Op
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
    "recall_levels",
    f"{HISTORY} {GRAPH} frontier[B,I] {SIZES} level:int=l levels:int=v {RULES} {NOISE} "
    "-> [B,P] [B,P,K] float32[B,P,K] [B,P]",  # P nodes: those of all levels
    reference.recall_levels,
    ranked=("cpu", "cuda"),
    static=False,
    flat=flat,
    result=RecalledLevels,
    tolerance=1e-6,
)
