"""Problems for the ops of a step, from growing the graph to committing what was accepted."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from graphs import candidates, drafted, tails, wild
from hypothesis import strategies as st
from ops.contracts.backends import Backend, assert_bit_equal
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.config import MAX_CONTEXT
from gsd_kernels.ops import step
from gsd_kernels.ops.learn import Asked, Mixture, learn_source
from gsd_kernels.ops.learn.api import MAX_LEVELS
from gsd_kernels.ops.select_rows import FEATURES, LogisticPosterior, select_rows, update_edge_model

Case = tuple[tuple[Any, ...], dict[str, Any]]
"""What an op is given: by position, by name."""

GRAPHS = {
    "graph": (gsd.GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=1), 6),
    "context-0": (gsd.GraphConfig(depth=4, width=5, branch=3, max_rows=33, merge_context=0), 6),
    "context-3": (gsd.GraphConfig(depth=5, width=3, branch=2, max_rows=17, merge_context=3), 2),
    "tree": (gsd.GraphConfig(depth=3, width=7, branch=5, max_rows=63, merge_context=-1), 9),
    "chain": (gsd.GraphConfig.preset("chain", depth=7), 3),
    "pruned": (gsd.GraphConfig(depth=4, width=6, branch=4, max_rows=40, sibling_ratio=0.3, min_prob=0.02), 12),
    "one-level": (gsd.GraphConfig(depth=1, width=1, branch=1, max_rows=2), 3),
    "rows-left-over": (gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=100), 4),
    "shallow-path": (gsd.GraphConfig(depth=5, width=4, branch=2, max_rows=30, max_path=3), 4),
}
"""Configs, and how many tokens are drafted from."""


@st.composite
def configs(draw):
    depth, width, branch = draw(st.integers(1, 6)), draw(st.integers(1, 6)), draw(st.integers(1, 5))
    max_rows = draw(st.integers(2, 40))
    return gsd.GraphConfig(
        depth=depth,
        width=width,
        branch=branch,
        max_rows=max_rows,
        max_path=draw(st.none() | st.integers(1, max_rows - 1)),
        merge_context=draw(st.integers(-1, 3)),
        sibling_ratio=draw(st.sampled_from([0.0, 0.0, 0.2, 1.0])),
        min_prob=draw(st.sampled_from([0.0, 0.0, 0.05])),
    )


def check_graph(
    config: gsd.GraphConfig, style: str, vocab: int, seed: int, on: Backend, batch: int = 2
) -> tuple[gsd.TokenGraph, gsd.Rows]:
    """Every level's graph and frontier, then the rows, bit for bit. Returns the reference's graph and rows."""

    def levels(backend: str, device: str) -> tuple[gsd.TokenGraph, list[Any]]:
        seen: list[Any] = []
        options = {"batch": batch, "vocab": vocab, "style": style, "seed": seed, "backend": backend, "device": device}
        graph = drafted(config, **options, on_level=lambda g, _l, _f, _t, _p, nxt: seen.append((g.clone(), nxt)))
        return graph, seen

    ours, got = levels(on.name, on.device)
    theirs, expected = levels("reference", on.reference_device)
    assert_bit_equal(got, expected)
    rows = gsd.flatten(theirs, config.max_rows, config.max_path, backend="reference")
    assert_bit_equal(gsd.flatten(ours, config.max_rows, config.max_path, backend=on.name), rows)
    return theirs, rows


def flatten_cases() -> Iterator[Case]:
    """Edges from anywhere to anywhere, circles and nodes that do not exist among them, of any log-probability."""
    for seed in range(60):
        gen = torch.Generator().manual_seed(seed)
        graph = gsd.TokenGraph.empty(2, gsd.GraphConfig(depth=3, width=3, branch=3), "cpu")
        batch, nodes, branch = graph.edge_targets.shape
        graph.token_ids[:] = torch.randint(-2, 9, (batch, nodes), generator=gen, dtype=torch.int32)
        graph.edge_targets[:] = torch.randint(-2, nodes + 3, (batch, nodes, branch), generator=gen, dtype=torch.int32)
        graph.edge_log_probs[:] = wild((batch, nodes, branch), gen)
        max_rows = (24, 40, 33, 7, 1)[seed % 5]
        yield (graph, max_rows, min(6 + seed % 7, max_rows - 1)), {}


def agreeing_target(rows: gsd.Rows, vocab: int, seed: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Target picks that often equal the drafted tokens, and verify's other arguments."""
    gen = torch.Generator().manual_seed(seed)
    batch, num_rows = rows.token_ids.shape
    sampled = torch.randint(0, vocab, (batch, num_rows), generator=gen, dtype=torch.int32)
    for b in range(batch):
        for row in range(1, int(rows.num_rows[b])):
            if torch.rand((), generator=gen) < 0.7:
                sampled[b, rows.parent_rows[b, row]] = rows.token_ids[b, row]
    return sampled, {
        "eos_ids": torch.arange(seed % 3, dtype=torch.int32),
        "remaining": torch.randint(1, 9, (batch,), generator=gen, dtype=torch.int32),
    }


def rows_case(seed: int) -> tuple[gsd.Rows, gsd.GraphConfig, Tensor, dict[str, Tensor]]:
    """Rows of a random graph, how it was drafted, and what :func:`agreeing_target` gives for them."""
    max_rows = (2, 7, 31, 32, 33, 100)[seed // 4 % 6]
    config = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=max_rows, merge_context=seed % 4 - 1)
    graph = drafted(config, batch=4, vocab=6, seed=seed, style=("random", "repeat", "sparse")[seed % 3])
    rows = gsd.flatten(graph, config.max_rows, config.max_path, backend="reference")
    return rows, config, *agreeing_target(rows, 6, seed)


def verify_cases() -> Iterator[Case]:
    for seed in (0, 13, 22, *range(1, 24, 2)):
        rows, config, picked, limits = rows_case(seed)
        yield (rows, picked), {**limits, "done": torch.arange(4) == 3, "max_path": config.max_path}


def merge_cases() -> Iterator[Case]:
    """Many nodes of one token whose contexts agree to all lengths, tied scores: what drafting reaches rarely."""
    for seed in range(24):
        gen = torch.Generator().manual_seed(seed // 4)
        config = gsd.GraphConfig(depth=4, width=6, branch=4)
        graph = gsd.TokenGraph.empty(2, config, "cpu")
        graph.reset(torch.tensor([1, 0], dtype=torch.int32), tails(2, 2, gen))
        count = 45

        def integers(high: int, *shape: int, gen: torch.Generator = gen) -> Tensor:
            return torch.randint(0, high, (2, *shape), generator=gen, dtype=torch.int32)

        graph.token_ids[:, :count] = integers(2, count)
        lengths = integers(12, count, 1)
        contexts = torch.where(torch.arange(MAX_CONTEXT) < lengths, integers(2, count, MAX_CONTEXT), -1)
        graph.contexts[:, :count] = contexts.int()
        graph.scores[:, :count] = -(integers(6, count) / 2)
        graph.parents[:, 1:count] = torch.minimum(integers(count, count - 1), torch.arange(count - 1)).int()
        graph.depths[:, :count] = integers(5, count)
        graph.expanded[:, :count] = integers(2, count).bool()
        graph.expanded.scatter_(1, graph.parents[:, 1:count].long(), True)  # as drafting does
        graph.num_nodes[:] = torch.tensor([count, count // 2])
        frontier = torch.stack([torch.randperm(count // 2, generator=gen)[:6] for _ in range(2)]).int()
        frontier[:, 4] = -1
        level = (frontier, *candidates("ties", 4, (2, 6, config.branch), gen))
        rules = {"level": 2, "width": 6, "merge_context": (-1, 0, 1, 3)[seed % 4], "log_min_prob": -3.0}
        yield (graph, *level), rules


CONFIG = gsd.GraphConfig(depth=4, width=4, branch=3, max_rows=24, merge_context=1)


def posterior(seed: int = 0) -> LogisticPosterior:
    """Some way into a text."""
    gen = torch.Generator().manual_seed(seed)
    prior = 0.1 + torch.rand(FEATURES, generator=gen, dtype=torch.float64)
    root = torch.randn(FEATURES, FEATURES, generator=gen, dtype=torch.float64)
    covariance = root @ root.T
    scale = (0.5 * prior / covariance.diagonal()).sqrt()
    weights = torch.randn(FEATURES, generator=gen, dtype=torch.float64)
    return LogisticPosterior(weights, covariance * scale[:, None] * scale, prior)


def problem(seed: int, style: str = "random", batch: int = 3) -> tuple[gsd.TokenGraph, Tensor]:
    """A graph, and what the step before brought: nothing, one token or several."""
    graph = drafted(CONFIG, batch=batch, style=style, seed=seed)
    return graph, torch.arange(batch, dtype=torch.int32) * (1 + seed % 4)


def path(graph: gsd.TokenGraph, seed: int) -> tuple[Tensor, Tensor]:
    """Nodes of accepted paths of any length, none among them, and the picks after them: int32 [B, 5] each."""
    gen = torch.Generator().manual_seed(seed)
    batch = graph.token_ids.shape[0]
    nodes, picked = torch.full((batch, 5), -2, dtype=torch.int32), torch.zeros(batch, 5, dtype=torch.int32)
    for b in range(batch):
        node = 0
        for place in range((seed + b) % 6):
            nodes[b, place] = node
            targets = [t for t in graph.edge_targets[b, node].tolist() if t >= 0]
            picked[b, place] = torch.randint(0, 8, (1,), generator=gen)
            if not targets:
                break
            node = targets[int(torch.randint(0, len(targets), (1,), generator=gen))]
            picked[b, place] = graph.token_ids[b, node]
    return nodes, picked


def select_cases() -> Iterator[Case]:
    limits = {"max_rows": CONFIG.max_rows, "max_path": CONFIG.max_path, "row_bonus": 0.03}
    for seed in range(12):
        style = ("random", "alternating", "repeat", "ties", "sparse", "wild")[seed // 2]
        seconds = None if seed % 3 == 0 else 1.0 + 0.05 * torch.arange(1 + 2 * seed, dtype=torch.float64)
        yield (*problem(seed, style, batch=1 + seed % 4), posterior(seed), seconds), limits


def update_cases() -> Iterator[Case]:
    for seed in range(24):
        graph, before = problem(seed, batch=1 + seed % 4)
        yield (graph, before, *path(graph, seed), posterior(seed)), {"process_noise": 0.01}


BATCH, LENGTH, VOCAB = 3, 40, 50


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def texts(seed: int) -> dict[str, Tensor]:
    """Texts of different lengths, one of them nothing but its root behind padding."""
    gen = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=gen)
    kv_start = torch.randint(0, 5, (BATCH,), generator=gen, dtype=torch.int32)
    out_len = kv_start + torch.randint(1, 20, (BATCH,), generator=gen, dtype=torch.int32)
    out_len[0] = kv_start[0] + 1
    return {"tokens": tokens, "out_len": out_len, "kv_start": kv_start}


def graph_of(seed: int) -> gsd.TokenGraph:
    """A graph that was drafted, with merges."""
    config = gsd.GraphConfig(depth=3, width=4, branch=3, max_rows=16, merge_context=0)
    return drafted(config, vocab=4, batch=BATCH, seed=seed)


def fed(seed: int) -> dict[str, Any]:
    """Arguments of feed_rows: ids beyond the vocabulary, depths that were counted from another node."""
    gen = torch.Generator().manual_seed(seed)
    rows = (1, 4, 33)[seed % 3]
    text = texts(seed)
    return {
        "token_ids": torch.randint(0, 2 * VOCAB, (BATCH, rows), generator=gen, dtype=torch.int32),
        "depths": torch.randint(1, 7, (BATCH, rows), generator=gen, dtype=torch.int32),
        "kv_len": text["out_len"],
        "kv_start": text["kv_start"],
        "vocab": VOCAB,
    }


def feed_cases() -> Iterator[Case]:
    """With slots one after the other and given, of both widths; node depths written in place."""
    for seed in range(12):
        case = fed(seed)
        shape = case["token_ids"].shape
        slots = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).argsort(1).int()
        written = {"first_slot": 2, "shift": 1, "node_depths": torch.full((BATCH, shape[1] + 3), -9).int()}
        yield (), case | (written if seed % 2 else {"slots": slots}) | {"dtype": (torch.int64, torch.int32)[seed // 6]}


def chained(seed: int) -> dict[str, Any]:
    """Arguments of feed_chain: caches that lack nothing, a little, or more than fits."""
    text, width = texts(seed), (1, 5, 34)[seed % 3]
    gen = torch.Generator().manual_seed(seed)
    cached = (text["out_len"] * torch.rand(BATCH, generator=gen)).int()
    cached[seed % BATCH] = text["out_len"][seed % BATCH]
    return {"tokens": text["tokens"], "end": text["out_len"], "cached": cached, "width": width}


def accepted(seed: int) -> tuple[gsd.Acceptance, gsd.Rows, gsd.TokenGraph]:
    """Paths of different lengths, one sequence finished; paths over merge edges among them."""
    graph = graph_of(seed)
    rows = gsd.flatten(graph, 16, 6, backend="reference")
    paths = torch.full((BATCH, 7), -1, dtype=torch.int32)
    for b in range(BATCH - 1):
        deepest = int(rows.depths[b].argmax()) if b == 0 else int(rows.num_rows[b]) - 1
        path = []
        while deepest >= 0:
            path.insert(0, deepest)
            deepest = int(rows.parent_rows[b, deepest])
        paths[b, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return gsd.Acceptance(paths, (paths >= 0).sum(1).int(), int32(7, 3, 0)), rows, graph


def state(seed: int) -> dict[str, Tensor]:
    """What commit_text writes: one text at the end of its room, one that was done."""
    text = texts(seed)
    return {
        "tokens": text["tokens"],
        "out_len": text["out_len"],
        "remaining": int32(30, 2, 30) if seed % 2 else int32(30, 30, 0),
        "done": torch.tensor([False, False, True]),
        "emitted": torch.full((BATCH, 9), -5, dtype=torch.int32),
        "num_emitted": int32(9, 9, 9),
        "counts": torch.tensor([100, 10, 1]),
    }


def commit_cases() -> Iterator[Case]:
    """With and without a graph; twice, so that the second finds what the first wrote."""
    for seed in range(12):
        path, rows, graph = accepted(seed)
        tokens, nodes = step.accepted_path(path, rows, backend="reference")
        given = (tokens, path, int32(5, 3), *state(seed).values(), *((nodes, graph) if seed % 3 else ()))
        for _ in range(2):
            yield given, {}
            step.commit_text(*given, backend="reference")


WRITES = [
    (torch.float32, (80, 80), 2, 9),
    (torch.float16, (64, 64), 8, 1),
    (torch.bfloat16, (128, 128), 4, 33),
    (torch.float64, (7, 1), 3, 5),
    (torch.float16, (17, 200), 1, 10),
    (torch.float32, (1500, 3), 2, 2),  # one head a program
    (torch.float32, (64, 64), 1, 64),
    (torch.bfloat16, (256, 256), 8, 1),
]
"""dtype, widths of keys and values, heads, rows."""


def write(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **named: Any) -> None:
    """write_kv into the first numbers of caches that are wider."""
    gsd.write_kv(k_cache[..., : k.shape[3]], v_cache[..., : v.shape[3]], k, v, *rest, **named)


def write_cases() -> Iterator[Case]:
    """Every bit of the caches, whatever they held; values that are not finite, the smallest and both zeros."""
    for dtype, (k_dim, v_dim), heads, rows in WRITES:
        gen = torch.Generator().manual_seed(rows)
        batch, capacity, info = 3, rows + 5, torch.finfo(dtype)
        rare = torch.tensor([math.nan, math.inf, -math.inf, info.max, info.min, info.smallest_normal, 0.0, -0.0])
        rare = torch.cat([rare.to(dtype), torch.tensor([info.tiny / 2, -info.tiny / 2], dtype=dtype)])
        values = torch.randn(batch, rows, heads, k_dim + v_dim + 3, generator=gen).to(dtype)
        picked = torch.randint(0, 2 * len(rare), values.shape, generator=gen)
        plain = (torch.arange(rows) % 3 > 0)[None, :, None, None]  # other rows are finite
        values = torch.where((picked < len(rare)) & plain, rare[picked % len(rare)], values).transpose(1, 2)
        k, v = values[..., 3 : k_dim + 3], values[..., k_dim + 3 :]
        v = v.mT.contiguous().mT if rows % 2 else v  # dimensions need not be next to each other
        positions = torch.stack([torch.randperm(capacity, generator=gen)[:rows] for _ in range(batch)])
        k_cache = torch.full((batch, heads, capacity, k_dim), math.nan, dtype=dtype)
        v_cache = torch.full((batch, capacity, heads, v_dim + 2), 7.0, dtype=dtype).transpose(1, 2)
        spoiled = torch.arange(batch * rows).float().view(batch, rows)
        for more in ({"spoiled": spoiled}, {}):
            yield (k_cache, v_cache, k, v, positions.T.contiguous().T), more


EACH = {
    "temperature": torch.tensor([0.0, 0.5, 1.0]),
    "top_k": torch.tensor([3, 0, 7]),
    "top_p": torch.tensor([0.9, 0.5, 1.0]),
    "min_p": torch.tensor([0.0, 0.05, 0.01]),
}
"""Settings of three sequences."""


def sampling_inputs(
    vocab: int, dtype: torch.dtype, seed: int, spread: float = 3.0, rows: tuple[int, int] = (2, 5)
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Logits [*rows, V], positions, and the keys of the noise, of which both words are in use."""
    gen = torch.Generator().manual_seed(seed)
    logits = (torch.randn(*rows, vocab, generator=gen) * spread).to(dtype)
    positions = torch.randint(0, 10**6, rows, generator=gen, dtype=torch.int32)
    key = torch.randint(-(2**62), 2**62, (), generator=gen)
    return logits, positions, {"seed": key, "sequence_ids": torch.tensor([3, 11, 7], dtype=torch.int32)[: rows[0]]}


def caches_of(layout: str, dtype: torch.dtype, dim: int, slots: int, gen: torch.Generator) -> list[Tensor]:
    """Layers of four sequences, some numbers NaN: parts of one tensor, once of many, or of several sizes."""
    if layout == "stacked":
        stacked = torch.randn(200 if dim == 1 else 3, 4, 2, slots, dim, generator=gen).to(dtype)
        return list(stacked.masked_fill_(stacked.abs() < 0.01, math.nan))
    caches = [torch.randn(4, heads, slots, size, generator=gen).to(dtype) for heads, size in ((1, dim), (2, 7), (3, 9))]
    caches[1][:, :, 12:] = math.nan
    return caches if layout == "separate" else [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]


def commit_kv_cases() -> Iterator[Case]:
    """Rows in any order, sources that are also destinations, finished sequences, several layers of several sizes."""
    kinds = (torch.float32, 64), (torch.float16, 80), (torch.bfloat16, 256), (torch.bfloat16, 1), (torch.float64, 7)
    for (dtype, dim), layout in itertools.product(kinds, ("stacked", "separate", "positions first")):
        gen = torch.Generator().manual_seed(dim)
        batch, rows, prefix, width = 4, 60, 31, 6
        kv_len = torch.randint(0, prefix + 1, (batch,), generator=gen, dtype=torch.int32)
        count = torch.randint(1, width + 1, (batch,), generator=gen, dtype=torch.int32)
        count[3] = 0  # finished
        accepted = torch.rand(batch, rows, generator=gen).argsort(-1)[:, :width].int()
        accepted[0] = accepted[0].sort().values
        accepted[1] %= 7  # close to each other, some of them twice
        accepted = torch.where(torch.arange(width) < count[:, None], accepted, -1)
        caches = [caches_of(layout, dtype, dim, prefix + rows + 2, gen) for _ in range(2)]
        if dtype == torch.float64:  # numbers of any type are only moved
            caches = [[cache.view(torch.int64) for cache in layers] for layers in caches]
        yield (*caches, accepted, count, kv_len), {}


ENTRIES, PATH = 4, 7


def mixture(seed: int) -> Mixture:
    """Some way into a text."""
    gen = torch.Generator().manual_seed(seed)
    start = torch.tensor([0.0, 0.3, 0.5, 0.7])
    counts = 8 + 5 * torch.rand(ENTRIES, generator=gen)
    shares = counts * torch.rand(ENTRIES, generator=gen) * (start > 0)
    return Mixture(start, shares, counts, shares / counts)


def questions(seed: int, batch: int = 3, branch: int = 4, levels: int = 5) -> tuple[list[Asked], Tensor, Tensor]:
    """Levels of several widths, some without an index; picks that are candidates half of the time."""
    gen = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=gen, dtype=torch.int32)

    def log_probs(*shape: int) -> Tensor:
        scores = (torch.rand(shape, generator=gen) / draw(1, 3, *shape[:-1], 1) / shape[-1]).log()  # some leave a rest
        return torch.where(torch.rand(shape, generator=gen) < 0.15, -torch.inf, scores)

    asked, first = [], 0
    for level in range(levels):
        width = (1, 3, 5)[level % 3]
        ids = (first + torch.arange(width, dtype=torch.int32)).repeat(batch, 1)
        first += width
        ids[:, -1] = torch.where(draw(0, 4, batch) == 0, -1, ids[:, -1])  # padding
        shape = (batch, width, branch)
        index = None if level == 3 else draw(0, ENTRIES, batch, width)
        asked.append(Asked(ids, draw(-1, 8, *shape), log_probs(*shape), index, draw(-1, 8, *shape), log_probs(*shape)))
    nodes = torch.stack([torch.randperm(first + 4, generator=gen)[:PATH] for _ in range(batch)]).int()
    nodes[:, PATH - 2 :] = -2  # the path is shorter
    return asked, nodes, draw(0, 8, batch, PATH)


def learn_cases() -> Iterator[Case]:
    """Three steps in a row; once of more levels than the compiled op takes."""
    for seed in range(7):
        known, levels = mixture(seed), MAX_LEVELS + 3 if seed == 6 else 5
        for number in range(3):
            asked = questions(100 * seed + number, 1 + seed % 4, 1 + seed % 5, levels)
            yield (*asked, known), {"prior_count": 8.0, "memory": 40.0}
            learn_source(*asked, known, 8.0, 40.0, backend="reference")


EQUAL = {
    "merge": (gsd.merge, "cpu interpreter triton cuda", merge_cases),
    "flatten": (gsd.flatten, "cpu interpreter triton cuda", flatten_cases),
    "verify": (gsd.verify, "cpu interpreter triton cuda", verify_cases),
    "commit_kv": (gsd.commit_kv, "cpu interpreter triton cuda", commit_kv_cases),
    "write_kv": (write, "cpu interpreter triton", write_cases),
    "select_rows": (select_rows, "cpu", select_cases),
    "update_edge_model": (update_edge_model, "cpu", update_cases),
    "start_graph": (step.start_graph, "cpu cuda", lambda: (((graph_of(seed),), texts(seed)) for seed in range(12))),
    "feed_rows": (step.feed_rows, "cpu cuda", feed_cases),
    "feed_chain": (step.feed_chain, "cpu cuda", lambda: (((), chained(seed)) for seed in range(12))),
    "accepted_path": (step.accepted_path, "cpu cuda", lambda: ((accepted(seed)[:2], {}) for seed in range(12))),
    "commit_text": (step.commit_text, "cpu cuda", commit_cases),
    "learn_source": (learn_source, "cpu cuda", learn_cases),
}
"""By operator: the op, where it is held against the reference, and on what."""
