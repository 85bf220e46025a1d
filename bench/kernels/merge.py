"""The graph ops of one step: all levels of merging, unrolling, and walking the target's picks. No model takes part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gsd_kernels import GraphConfig, Rows, TokenGraph, flatten, merge, verify
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.ops.flatten.api import FLATTEN
from gsd_kernels.ops.merge.api import MERGE
from gsd_kernels.ops.verify.api import VERIFY

from ..lib.runner import Op, Settings, lacking

NAME = "merge"
TOKENS = 200  # candidates come from this many tokens, so that some merge
NO_PEER = "no other library has this operation"

#: rows → the drafted shape whose best rows they are
CONFIGS = {
    16: GraphConfig(depth=5, width=4, branch=3, max_rows=16),
    32: GraphConfig(depth=6, width=8, branch=4, max_rows=32),
    64: GraphConfig(depth=6, width=16, branch=4, max_rows=64),
    128: GraphConfig(depth=8, width=16, branch=8, max_rows=128),
}


class Step:
    """One step's graph ops on fixed random candidates."""

    def __init__(self, config: GraphConfig, device: torch.device, batch: int = 1) -> None:
        gen = torch.Generator().manual_seed(0)
        self.config, self.device = config, device
        self.graph = TokenGraph.empty(batch, config, device)
        self.root = torch.zeros(batch, dtype=torch.int32, device=device)
        self.tail = torch.full((batch, MAX_CONTEXT), -1, dtype=torch.int32, device=device)
        self.levels = []
        for width in [1] + [config.width] * (config.depth - 1):
            scores = torch.randn(batch, width, TOKENS, generator=gen).mul(2).log_softmax(-1)
            log_probs, tokens = scores.topk(config.branch)
            self.levels.append((tokens.to(device, torch.int32), log_probs.to(device)))
        self.picks = torch.randint(0, TOKENS, (batch, config.max_rows), generator=gen).to(device, torch.int32)
        self.eos = torch.zeros(0, dtype=torch.int32, device=device)
        self.remaining = torch.full((batch,), 1000, dtype=torch.int32, device=device)
        self.done = torch.zeros(batch, dtype=torch.bool, device=device)

    def merge(self, backend: str) -> tuple[Tensor, ...]:
        """All levels, from an empty graph."""
        self.graph.reset(self.root, self.tail)
        frontier = self.graph.root_frontier()
        for level, (tokens, log_probs) in enumerate(self.levels):
            frontier = merge(
                self.graph,
                frontier,
                tokens,
                log_probs,
                level=level,
                width=self.config.width,
                config=self.config,
                backend=backend,
            ).node_ids
        return self.graph.token_ids, self.graph.parents, self.graph.edge_targets, self.graph.num_merges

    def flatten(self, backend: str) -> Rows:
        return flatten(self.graph, self.config.max_rows, self.max_path, backend=backend)

    def verify(self, rows: Rows, backend: str) -> tuple[Tensor, ...]:
        return verify(
            rows,
            self.picks,
            eos_ids=self.eos,
            remaining=self.remaining,
            done=self.done,
            max_path=self.max_path,
            backend=backend,
        ).tensors()

    @property
    def max_path(self) -> int:
        return int(self.config.max_path or 0)

    def ops(self) -> list[Op]:
        """The ops of a step after one another."""
        self.merge("reference")
        rows = self.flatten("reference")
        graph, row_bytes = self.graph, sum(t.nbytes for t in rows.tensors())
        merged = sum(t.nbytes for t in (*graph.tensors(), *(t for level in self.levels for t in level)))
        edges = graph.edge_targets.nbytes + graph.edge_log_probs.nbytes + graph.token_ids.nbytes
        about: dict[str, Any] = {
            "shape": "token graph",
            "parameters": {"rows": self.config.max_rows},
            "peers": {"others": lacking(NO_PEER)},
        }
        return [
            Op(MERGE, self.merge, operation="merge, all levels", bytes_moved=merged, **about),
            Op(FLATTEN, lambda backend: self.flatten(backend).tensors(), bytes_moved=edges + row_bytes, **about),
            Op(VERIFY, lambda backend: self.verify(rows, backend), bytes_moved=row_bytes + self.picks.nbytes, **about),
        ]


def entries(settings: Settings) -> Iterator[Op]:
    """Merging of a whole draft, unrolling and verification, by the rows that are kept."""
    for rows_kept in settings.pick(settings.rows, (16, 64), tuple(CONFIGS), tuple(CONFIGS)):
        if rows_kept not in CONFIGS:
            raise ValueError(f"--rows: merge has graphs for {', '.join(map(str, CONFIGS))} rows, not {rows_kept}")
        yield from Step(CONFIGS[rows_kept], settings.device).ops()
