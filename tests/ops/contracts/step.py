"""Graphs, rows and texts for the ops of gsd_kernels/ops/step, shared by their tests on every backend."""

from __future__ import annotations

from typing import Any

import torch
from graphs import drafted
from ops.contracts.backends import Backend, assert_bit_equal
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels.ops import step

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


def check_start(seed: int, on: Backend) -> None:
    """The root alone, whatever the graph held: bit for bit."""
    ours, theirs, text = on.to(graph_of(seed)), graph_of(seed), texts(seed)
    got = step.start_graph(ours, **on.to(text), backend=on.name)
    expected = step.start_graph(theirs, **text, backend="reference")
    assert_bit_equal([*ours.tensors(), got], [*theirs.tensors(), expected])
    assert got.tolist() == (text["out_len"] - text["kv_start"]).tolist()


def check_feed(seed: int, on: Backend) -> None:
    """With slots one after the other and given, of both widths; node depths written in place."""
    case = fed(seed)
    rows = case["token_ids"].shape[1]
    gen = torch.Generator().manual_seed(seed)
    slots = torch.rand(BATCH, rows, generator=gen).argsort(1).int()
    for dtype in (torch.int64, torch.int32):
        for more in ({"slots": slots}, {"first_slot": 2, "shift": 1, "node_depths": torch.full((BATCH, rows + 3), -9)}):
            ours, theirs = (
                {n: t.int().clone() if n != "first_slot" and n != "shift" else t for n, t in more.items()}
                for _ in range(2)
            )
            ours = on.to(ours)
            got = step.feed_rows(**on.to(case), **ours, dtype=dtype, backend=on.name)
            expected = step.feed_rows(**case, **theirs, dtype=dtype, backend="reference")
            written = [t for t in (ours.get("node_depths"), theirs.get("node_depths")) if t is not None]
            assert_bit_equal([*got, *written[:1]], [*expected, *written[1:]])


def check_chain(seed: int, on: Backend) -> None:
    ours, theirs = on.to(chained(seed)), chained(seed)
    ours["cached"] = ours["cached"].clone()
    got = step.feed_chain(**ours, backend=on.name)
    expected = step.feed_chain(**theirs, backend="reference")
    assert_bit_equal([*got, ours["cached"]], [*expected, theirs["cached"]])


def check_path(seed: int, on: Backend) -> None:
    path, rows, _ = accepted(seed)
    got = step.accepted_path(on.to(path), on.to(rows), backend=on.name)
    assert_bit_equal(got, step.accepted_path(path, rows, backend="reference"))


def check_commit(seed: int, on: Backend) -> None:
    """With and without a graph; twice, so that the second finds what the first wrote."""
    path, rows, graph = accepted(seed)
    tokens, nodes = step.accepted_path(path, rows, backend="reference")
    for drafted_too in (True, False):
        more = {"nodes": nodes, "graph": graph} if drafted_too else {}
        mine, theirs = ({n: t.clone() for n, t in state(seed).items()} for _ in range(2))
        ours = on.to(mine)
        for _ in range(2):
            for texts_of, where in ((ours, on), (theirs, None)):
                move = (lambda x: x) if where is None else where.to
                step.commit_text(
                    *move((tokens, path)),
                    eos_ids=move(int32(5, 3)),
                    **texts_of,
                    **move(more),
                    backend="reference" if where is None else where.name,
                )
        assert_bit_equal(ours.values(), theirs.values())
        assert theirs["counts"].tolist() == [100, 10, 1] or drafted_too
