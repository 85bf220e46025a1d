"""Rows of recurrent layers: right by a recurrence that walks every path, and bits that nothing beside a row changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.backends import backends

from gsd_kernels.ops.state_rows import StateWindow, state_commit, state_rows

pytestmark = pytest.mark.quick

CASES = {  # heads, groups, key, value, decays, whether the rule is the delta rule
    "gated-delta": (4, 2, 24, 19, 1, True),
    "state-space": (4, 1, 16, 32, 1, False),
    "kimi": (2, 2, 20, 16, 20, True),
}
BLOCK = 4


def tokens(batch: int, count: int, case: str, seed: int = 0) -> dict[str, torch.Tensor]:
    heads, groups, key, value, decays, delta = CASES[case]
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, count, *shape, generator=gen)

    return {
        "query": torch.nn.functional.normalize(normal(groups, key), dim=-1),
        "key": torch.nn.functional.normalize(normal(groups, key), dim=-1),
        "value": normal(heads, value),
        "decay": -torch.rand(batch, count, heads, decays, generator=gen),
        "beta": torch.rand(batch, count, heads, generator=gen) if delta else None,
    }


def recurrence(given: dict[str, torch.Tensor], path: list[int], state: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output of the last token of ``path`` and the state behind it, in float64, one token after the other."""
    out, state = None, state.double()
    for t in path:
        q, k, v, g = (given[name][:, t].double() for name in ("query", "key", "value", "decay"))
        q, k = (x.repeat_interleave(v.shape[1] // k.shape[1], 1) for x in (q, k))
        state = state * g.exp()[..., None]
        read = (state * k[..., None]).sum(2)
        u = v if given["beta"] is None else given["beta"][:, t].double()[..., None] * (v - read)
        state = state + k[..., None] * u[:, :, None]
        out = (state * q[..., None]).sum(2)
    return out, state


def window_of(case: str, batch: int, block: int = BLOCK) -> StateWindow:
    heads, groups, key, value, decays, _ = CASES[case]
    return StateWindow.empty(batch, heads, groups, key, value, decays, torch.device("cpu"), block)


def take(given: dict[str, torch.Tensor], at: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tokens ``at`` [B, R] as rows."""
    sequence = torch.arange(at.shape[0])[:, None]
    return {name: None if t is None else t[sequence, at].contiguous() for name, t in given.items()}


def depths_of(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths


class Text:
    """Texts that grow by steps of rows: ``path`` of all tokens each of which is drawn once."""

    def __init__(self, case: str, batch: int, backend: str, given: dict[str, torch.Tensor]) -> None:
        self.window, self.backend, self.given = window_of(case, batch), backend, given
        self.window.state.normal_(generator=torch.Generator().manual_seed(5))
        self.start = self.window.state[0].clone()
        self.lengths = torch.zeros(batch, dtype=torch.int32)

    def rows(self, at: torch.Tensor, parents: list[list[int]], depths: list[list[int]] | None = None) -> torch.Tensor:
        depths = depths or list(map(depths_of, parents))
        self.window.reserve(len(parents[0]))
        tree = (torch.tensor(x, dtype=torch.int32) for x in (parents, depths))
        return state_rows(**take(self.given, at), **dict(zip(("parents", "depths"), tree, strict=True)),
                          lengths=self.lengths, window=self.window, backend=self.backend)  # fmt: skip

    def commit(self, rows: list[list[int]]) -> None:
        path = max(len(r) for r in rows)
        accepted = torch.tensor([r + [-1] * (path - len(r)) for r in rows], dtype=torch.int32)
        count = torch.tensor([len(r) for r in rows], dtype=torch.int32)
        state_commit(accepted, count, self.lengths, self.window, backend=self.backend)
        self.lengths += count


def plain(case: str, backend: str, given: dict[str, torch.Tensor], count: int) -> torch.Tensor:
    """Outputs of tokens 0 … count − 1, one at a time: [B, count, H, V]."""
    batch = given["key"].shape[0]
    text, out = Text(case, batch, backend, given), []
    for t in range(count):
        out.append(text.rows(torch.full((batch, 1), t), [[-1]] * batch))
        text.commit([[0]] * batch)
    return torch.cat(out, 1)


@backends("reference", "cpu")
@pytest.mark.parametrize("case", CASES)
def test_rows_and_states_are_those_of_the_recurrence(case, on):
    """Lengths that differ: one text in its first block, one at a boundary, one that accepts nothing."""
    given = tokens(3, 40, case)
    text, done = Text(case, 3, on.name, given), [0, 0, 0]
    for counts in ((1, 4, 0), (2, 3, 1), (1, 5, 0), (5, 1, 3), (1, 2, 0)):
        out = text.rows(torch.stack([torch.arange(n, n + 5) for n in done]), [[-1, 0, 1, 2, 3]] * 3)
        text.commit([list(range(c)) for c in counts])
        for b in range(3):
            one = {n: None if t is None else t[b : b + 1] for n, t in given.items()}
            state = text.start[b : b + 1]
            for i in range(5):
                right, after = recurrence(one, list(range(done[b] + i + 1)), text.start[b : b + 1])
                state = after if i < counts[b] else state
                assert torch.allclose(out[b, i].double(), right[0], atol=2e-5, rtol=1e-4)
            if counts[b]:
                found = text.window.end(text.lengths)[b : b + 1].double()
                assert torch.allclose(found, state, atol=2e-5, rtol=1e-4)
        done = [n + c for n, c in zip(done, counts, strict=True)]


@st.composite
def steps(draw):
    """Steps of a text of 14 tokens: how many are a step's path, rows beside it (what each follows), and accepted."""
    done, found = 0, []
    while done < 14:
        path = draw(st.integers(1, min(BLOCK + 1, 14 - done)))
        beside = draw(st.lists(st.integers(-1, 20), max_size=6))
        found.append((path, beside, draw(st.integers(1, path))))
        done += found[-1][2]
    return found


@backends("reference", "cpu")
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=8, deadline=None)
@given(steps=steps(), batch=st.integers(1, 2))
def test_bits_of_a_row_are_its_own(case, on, steps, batch):
    """Whatever lies beside a token's row, and wherever commits fall, it has the bits of the token decoded alone."""
    spare = tokens(2, 60, case)
    given = {n: None if t is None else t[:batch].contiguous() for n, t in spare.items()}
    alone = plain(case, on.name, {n: None if t is None else t[:1].contiguous() for n, t in given.items()}, 19)
    text, done = Text(case, batch, on.name, given), 0
    for path, beside, accepted in steps:
        # The path's rows, then rows of other tokens after any of them that is not too deep.
        parents, at = list(range(-1, path - 1)), list(range(done, done + path))
        for i, after in enumerate(beside):
            parent = after % (len(parents) + 1) - 1
            if depths_of([*parents, parent])[-1] <= BLOCK:
                parents, at = [*parents, parent], [*at, 20 + (7 * done + i) % 40]
        out = text.rows(torch.tensor([at] * batch), [parents] * batch)
        for i in range(path):
            assert torch.equal(out[0, i], alone[0, done + i]), (done, i)
        text.commit([list(range(accepted))] * batch)
        done += accepted


@backends("cpu")
@pytest.mark.parametrize("case", CASES)
def test_many_rows_have_the_bits_of_few(case, on):
    given = tokens(3, 64, case)
    text, few = Text(case, 3, on.name, given), Text(case, 3, on.name, given)
    parents = [[-1, *(max(-1, r // 3 - 1) for r in range(1, 64))]] * 3
    at = torch.arange(64).expand(3, -1)
    whole = text.rows(at, parents)
    for rows in (1, 2, 7, 33):
        assert torch.equal(few.rows(at[:, :rows], [p[:rows] for p in parents]), whole[:, :rows])
    poisoned = {n: None if t is None else t.clone() for n, t in given.items()}
    poisoned["value"][:, 63], poisoned["key"][1] = float("nan"), float("nan")
    few.given = poisoned
    found = few.rows(at, parents)
    assert torch.equal(found[0, :63], whole[0, :63]) and torch.equal(found[2, :63], whole[2, :63])
    assert found[1].isnan().any()


@backends("reference", "cpu")
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=2, max_size=4), st.lists(st.integers(0, 20), min_size=16, max_size=16))
def test_rows_may_follow_those_of_earlier_calls(case, on, calls, after):
    """Level by level as all at once: the bits of a row do not tell which call it came by."""
    given, count = tokens(2, 30, case), sum(calls)
    whole, parts = Text(case, 2, on.name, given), Text(case, 2, on.name, given)
    for text in (whole, parts):
        text.rows(torch.arange(3).expand(2, -1), [[-1, 0, 1]] * 2)
        text.commit([[0, 1, 2]] * 2)
    parents: list[int] = []
    for row in range(count):
        parent = after[row] % (row + 1) - 1
        parents.append(parent if depths_of([*parents, parent])[-1] <= BLOCK else -1)
    at = torch.arange(3, 3 + count).expand(2, -1)
    right, done = whole.rows(at, [parents] * 2), 0
    for rows in calls:
        found = parts.rows(at[:, done : done + rows], [parents[: done + rows]] * 2)
        assert torch.equal(found, right[:, done : done + rows])
        done += rows
    depths = depths_of(parents)
    path = [depths.index(max(depths))]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    for text in (whole, parts):
        text.commit([path] * 2)
    assert torch.equal(whole.window.end(whole.lengths), parts.window.end(parts.lengths))


@backends("reference", "cpu")
def test_trees_that_are_none_are_refused(on):
    text = Text("gated-delta", 1, on.name, tokens(1, 8, "gated-delta"))
    at = torch.arange(7)[None]
    text.rows(at, [[-1, 0, 1, 2, 3, 0, -1]], [[0, 1, 2, 3, 4, 1, 0]])
    for parents, depths in (
        ([-1, 0, 2, 2, 3, 0, -1], [0, 1, 2, 3, 4, 1, 0]),
        ([-1, 0, 1, 2, 3, 0, -1], [0, 1, 2, 3, 4, 2, 0]),
        ([-2, 0, 1, 2, 3, 0, -1], [0, 1, 2, 3, 4, 1, 0]),
        ([-1, 0, 1, 2, 3, 4, -1], [0, 1, 2, 3, 4, 5, 0]),
    ):
        with pytest.raises((ValueError, RuntimeError), match=r"parents|depths"):
            text.rows(at, [parents], [depths])
