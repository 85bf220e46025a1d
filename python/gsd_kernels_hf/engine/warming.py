"""Kernels that are compiled when they are first used: launched once for every shape that a policy may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from gsd_kernels import (
    Frontier,
    GraphConfig,
    TokenGraph,
    flatten,
    merge,
    mix_candidates,
    verify,
)
from gsd_kernels.config import MAX_CONTEXT

from ..model import replay
from ..records import Verified
from ..sources.base import Level, OwnSource
from .session import Session


def warm(session: Session, shapes: Sequence[GraphConfig]) -> None:
    """Compile what steps of ``shapes`` launch, where a policy has several and the device is a GPU; once a size.

    Triton compiles merge, flatten, verify, commit and attention for their sizes, the samplers and the history's ops for
    the number of candidates. A policy that takes another shape in the middle of a text would stop there for seconds.
    The ops run here on a graph of the root alone, on logits of zeros and on cache slots that are free; they commit
    nothing and remember nothing.
    """
    if len(shapes) < 2 or not replay.is_gpu(session.state.tokens.device):
        return
    size = session.capacity, sum(rows.cache.layers[0].is_initialized for rows in session.row_models)
    if session.warmed == size:
        return
    for shape in shapes:
        _warm_graph(session, shape)
    for count in sorted({1, *(shape.max_rows for shape in shapes)}):
        session.target.launch(session.kv_len, count, count)
    session.warmed, session.compiled = size, frozenset(shapes)
    session.clock.begin_step()  # compiling is no part of it


def _warm_graph(session: Session, shape: GraphConfig) -> None:
    """Everything but the forwards: merge at every level, flatten, verify, commit, samplers, look-ups, mixing."""
    batch, device, backend = session.key.batch, session.state.tokens.device, session.backend
    graph = TokenGraph.empty(batch, shape, device)
    graph.reset(
        torch.zeros(batch, device=device, dtype=torch.float32),
        torch.full((batch, MAX_CONTEXT), -1, device=device, dtype=torch.int64),
    )
    node_ids = graph.root_frontier()
    mixer = session.mixer
    looks_up = bool(mixer.lookups) and mixer.grower is None
    for level in range(shape.depth + (shape.history_depth if looks_up else 0)):
        candidates = torch.full((*node_ids.shape, shape.branch), -1, dtype=torch.int32, device=device)
        node_ids = merge(
            graph,
            node_ids,
            candidates,
            torch.full_like(candidates, -torch.inf, dtype=torch.float32),
            level=level,
            width=shape.width if level + 1 < shape.depth else shape.history_width,
            config=shape,
            backend=backend,
        ).node_ids
    rows = flatten(graph, shape.max_rows, int(shape.max_path or 0), backend=backend)
    accepted = verify(
        rows,
        torch.zeros_like(rows.token_ids),
        eos_ids=session.eos_ids,
        remaining=torch.zeros_like(session.state.remaining),
        done=torch.ones_like(session.state.done),  # nothing is accepted
        max_path=int(shape.max_path or 0),
        backend=backend,
    )
    session.target.cache.commit(accepted.accepted_rows, accepted.num_accepted, session.kv_len.clone(), backend=backend)
    logits = session.target.no_logits(shape.max_rows).to(device)
    session.rule.criterion.picks(rows, logits, rows.depths)
    none, tail = torch.zeros_like(accepted.accepted_rows), graph.contexts[:, 0].clone()
    nothing = replace(rows, num_rows=torch.zeros_like(rows.num_rows))  # rows for shapes, none to learn from
    _warm_candidates(session, shape, Verified(graph, nothing, logits, {}, accepted, tail, none, none))


def _warm_candidates(session: Session, shape: GraphConfig, verified: Verified) -> None:
    """Launch proposals after one node and after a frontier, what sources make of a step, and the mixture."""
    batch, device = session.key.batch, session.kv_len.device
    for width in dict.fromkeys((1, shape.width, shape.history_width)):
        root = torch.zeros(batch, width, dtype=torch.int32, device=device)
        frontier = Frontier(root, root, root, root[..., None])
        level = Level(0, shape, verified.graph, frontier, session.kv_len)
        proposals = (source.warm(level, verified) for source in session.mixer.sources if isinstance(source, OwnSource))
        proposed = [proposal.candidates for proposal in proposals if proposal is not None]
        here = [tuple(tensor.to(device) for tensor in candidates) for candidates in proposed]
        for first, other in pairwise(here):
            weight = torch.zeros(batch, width, device=device, dtype=torch.float32)
            mix_candidates(*first, *other, weight, backend=session.backend)
