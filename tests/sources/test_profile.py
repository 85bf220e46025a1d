"""What a step tells a policy of the candidates after accepted nodes."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gsd_kernels.ops.learn import Asked
from gsd_kernels_hf.sources.figures import Figures, as_one, picks, side_by_side


def levels_of(rng, batch: int, widths: list[int], branch: int):
    """Levels whose nodes are numbered through, some of them padding, in any order."""
    order = np.stack([rng.permutation(sum(widths)) for _ in range(batch)]).astype(np.int32)
    order[rng.random(order.shape) < 0.2] = -1
    return [
        (
            torch.from_numpy(ids),
            torch.from_numpy(rng.integers(-1, 3, (batch, ids.shape[1], branch)).astype(np.int32)),
            torch.from_numpy(rng.normal(size=(batch, ids.shape[1], branch)).astype(np.float32)),
        )
        for ids in np.split(order, np.cumsum(widths)[:-1], axis=1)
    ]


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 3), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 4))
def test_accepted_nodes_are_found_in_their_levels(seed, batch, widths, branch):
    """By sequence and place of the path; nodes that no level expanded, and places beyond the path, are left out."""
    rng = np.random.default_rng(seed)
    levels = levels_of(rng, batch, widths, branch)
    paths = np.full((batch, 5), -2, np.int32)
    for row in paths:
        some = rng.permutation(sum(widths) + 2)[: rng.integers(0, 6)]
        row[: len(some)] = some
    picked = rng.integers(0, 3, (batch, 5)).astype(np.int32)
    expected = []
    for path, tokens in zip(enumerate(paths), picked, strict=True):
        b, nodes = path
        for node, token in zip(nodes, tokens, strict=True):
            for ids, candidates, scores in levels:
                for w in np.nonzero((ids[b].numpy() == node) & (node >= 0))[0]:
                    expected.append((scores[b, w].exp().numpy(), candidates[b, w].numpy() == token))
    probs, hits = picks(levels, paths.tolist(), picked.tolist())
    assert probs.shape == hits.shape == (len(expected), branch) and probs.dtype == np.float32 and hits.dtype == bool
    for (p, h), got_p, got_h in zip(expected, probs, hits, strict=True):
        np.testing.assert_allclose(got_p, p, rtol=1e-6)
        np.testing.assert_array_equal(got_h, h)


def test_figures_come_back_out_of_one_tensor():
    level = (
        torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([[[5, -1]]], dtype=torch.int32),
        torch.randn(1, 1, 4)[..., ::2],
    )
    none = (torch.ones(1, 0, dtype=torch.int32), *(torch.zeros(1, 0, 2, dtype=t) for t in (torch.int32, torch.float32)))
    path = torch.tensor([[0, 1, -2]], dtype=torch.int32)
    figures = Figures(path, path + 4, {"model": [level, none], "lookup": [level]})
    back = figures.read_from(as_one(figures.tensors()))
    for got, want in zip(back.tensors(), figures.tensors(), strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    probs, hits = back.profiles()["model"]
    assert hits.tolist() == [[True, False]] and torch.equal(torch.from_numpy(probs), level[2][0].exp())


def test_levels_of_a_source_side_by_side_keep_their_index():
    def level(width: int, index: int | None) -> Asked:
        shape = (1, width, 2)
        at = None if index is None else torch.full((1, width), index, dtype=torch.int32)
        return Asked(
            torch.zeros(1, width, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32), torch.zeros(shape), at
        )

    assert side_by_side([level(1, 2), level(3, None), level(2, 5)]).index.tolist() == [[2, 0, 0, 0, 5, 5]]
    assert side_by_side([level(1, None), level(2, None)]).tokens.shape == (1, 3, 2)
