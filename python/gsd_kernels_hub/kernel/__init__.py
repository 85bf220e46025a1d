"""Attention and products of rows that do not depend on their batch, and the operations of graph-structured speculation.

``attention`` is an attention function of transformers: ``attn_implementation="<repository>:attention"``. The rest are
operations on tensors, documented at the project.
"""

from . import layers
from .attention import attention
from .backends import BackendUnavailableError
from .config import GraphConfig
from .graph import Acceptance, Frontier, Rows, TokenGraph
from .ops.commit_kv import commit_kv
from .ops.dag_attention import dag_attention
from .ops.flatten import flatten
from .ops.merge import merge
from .ops.row_linear import row_linear
from .ops.sampling import draft_candidates, sample_rows
from .ops.verify import verify
from .ops.write_kv import write_kv

flash_attn_forward = attention  # transformers 5.24 looks for it, then takes the function that was named

__all__ = [
    "Acceptance",
    "BackendUnavailableError",
    "Frontier",
    "GraphConfig",
    "Rows",
    "TokenGraph",
    "attention",
    "commit_kv",
    "dag_attention",
    "draft_candidates",
    "flatten",
    "layers",
    "merge",
    "row_linear",
    "sample_rows",
    "verify",
    "write_kv",
]
