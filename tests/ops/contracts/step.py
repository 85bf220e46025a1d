"""Problems for the ops of a step, commit_kv, write_kv and learn_source, shared by their tests on every backend."""

from __future__ import annotations

import math
from typing import Any

import torch
from graphs import drafted
from ops.contracts.backends import Backend, check_equal
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops import step
from gsd_kernels.ops.learn import Asked, Mixture, learn_source

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


def slots_of(seed: int, shape: torch.Size) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).argsort(1).int()


def check_start(seed: int, on: Backend) -> None:
    """The root alone, whatever the graph held."""
    text = texts(seed)
    first, _ = check_equal(step.start_graph, on, graph_of(seed), **text)
    assert first.tolist() == (text["out_len"] - text["kv_start"]).tolist()


def check_feed(seed: int, on: Backend) -> None:
    """With slots one after the other and given, of both widths; node depths written in place."""
    case = fed(seed)
    shape = case["token_ids"].shape
    written = {"first_slot": 2, "shift": 1, "node_depths": torch.full((BATCH, shape[1] + 3), -9, dtype=torch.int32)}
    for dtype in (torch.int64, torch.int32):
        for more in ({"slots": slots_of(seed, shape)}, written):
            check_equal(step.feed_rows, on, **case, **more, dtype=dtype)


def check_chain(seed: int, on: Backend) -> None:
    check_equal(step.feed_chain, on, **chained(seed))


def check_path(seed: int, on: Backend) -> None:
    path, rows, _ = accepted(seed)
    check_equal(step.accepted_path, on, path, rows)


def check_commit(seed: int, on: Backend) -> None:
    """With and without a graph; twice, so that the second finds what the first wrote."""
    path, rows, graph = accepted(seed)
    tokens, nodes = step.accepted_path(path, rows, backend="reference")
    for more in ((nodes, graph), ()):
        texts_of = tuple(state(seed).values())
        for _ in range(2):
            _, (_, _, _, *after) = check_equal(step.commit_text, on, tokens, path, int32(5, 3), *texts_of, *more)
            texts_of = after[: len(texts_of)]
        assert texts_of[-1].tolist() == [100, 10, 1] or more


NAN = math.nan
WRITES = {
    "float32-D80": (torch.float32, (80, 80), 2, 9),
    "float16-one-row": (torch.float16, (64, 64), 8, 1),
    "bfloat16-D128": (torch.bfloat16, (128, 128), 4, 33),
    "float64-odd": (torch.float64, (7, 1), 3, 5),
    "values-narrower": (torch.bfloat16, (96, 24), 5, 6),
    "values-wider": (torch.float16, (17, 200), 1, 10),
    "one-head-per-program": (torch.float32, (1500, 3), 2, 2),
}


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def check_write(dtype: torch.dtype, dims: tuple[int, int], heads: int, rows: int, on: Backend) -> None:
    """Every bit of the caches, whatever they held; values that are not finite, the smallest and both zeros."""
    gen = torch.Generator().manual_seed(rows)
    batch, capacity = 3, rows + 5
    info = torch.finfo(dtype)
    rare = torch.tensor([NAN, -NAN, math.inf, -math.inf, info.max, info.min, info.smallest_normal, 0.0, -0.0])
    rare = torch.cat([rare.to(dtype), torch.tensor([info.tiny / 2, -info.tiny / 2], dtype=dtype)])

    plain = (torch.arange(rows) % 3 > 0)[None, :, None, None]  # other rows are finite

    def rows_of(dim: int, spare: int) -> Tensor:
        values = torch.randn(batch, rows, heads, dim + spare, generator=gen).to(dtype)
        picked = torch.randint(0, 2 * len(rare), values.shape, generator=gen)
        return torch.where((picked < len(rare)) & plain, rare[picked % len(rare)], values)

    k, v = rows_of(dims[0], 3)[..., 3:].transpose(1, 2), rows_of(dims[1], 0).transpose(1, 2)
    v = v.mT.contiguous().mT if rows % 2 else v  # dimensions need not be next to each other
    order = torch.stack([torch.randperm(capacity, generator=gen)[:rows] for _ in range(batch)])
    positions = order.T.contiguous().T
    caches = {
        "k_cache": torch.full((batch, heads, capacity, dims[0]), NAN, dtype=dtype),
        "v_cache": torch.full((batch, capacity, heads, dims[1] + 2), 7.0, dtype=dtype).transpose(1, 2),
    }
    spoiled = torch.arange(batch * rows).float().view(batch, rows)

    def write(k_cache: Tensor, v_cache: Tensor, *rows: Tensor, **named: Any) -> None:
        gsd.write_kv(k_cache[..., : dims[0]], v_cache[..., : dims[1]], *rows, **named)

    for more in ({"spoiled": spoiled}, {}):
        check_equal(write, on, *caches.values(), k, v, positions, **more)


ENTRIES, PATH = 4, 7
COUNTS = {"prior_count": 8.0, "memory": 40.0}


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


def check_learning(seed: int, on: Backend, **sizes: int) -> bool:
    """Three steps in a row: every table within 1e-5 of the reference's. Whether anything was learned."""
    known = mixture(seed)
    for number in range(3):
        asked = questions(100 * seed + number, **sizes)
        _, (*_, known) = check_equal(learn_source, on, *asked, known, **COUNTS, most=learn_source.tolerance)
    return not torch.equal(known.weights, mixture(seed).weights)
