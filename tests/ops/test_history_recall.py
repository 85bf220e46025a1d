"""The history's mixture: the compiled op is the reference, and what the reference says is right."""

from __future__ import annotations

import pytest
import torch
from ops.contracts.backends import assert_bit_equal, backends
from ops.contracts.history import KNOWN, Known, changed, close_candidates, noise, on_device, tail_of
from ops.contracts.ngram import Memory, poisoned, tree_of

import gsd_kernels as gsd
from gsd_kernels.ops.history import WEIGHTS, Recollection, Seen, history_append, history_recall
from gsd_kernels.ops.history import records as r

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", KNOWN)
@backends("cpu", "cuda")
def test_the_compiled_mixture_is_the_references(on, name, sampled):
    case = KNOWN[name]
    (known, text), (theirs, _) = case.build("reference" if on.device == "cuda" else on.name), case.build()
    assert_bit_equal(known.tensors(), theirs.tensors())
    known = on_device(known, on.device)
    graph = case.graph(text)
    nodes = torch.arange(-1, min(12, graph.capacity), dtype=torch.int32).repeat(case.batch, 1)
    draws = noise(case.batch) if sampled else {}
    with poisoned():
        got = history_recall(known, *on.to((graph, nodes)), **on.to(draws), backend=on.name)
    got = tuple(t.cpu() for t in got)
    expected = history_recall(theirs, graph, nodes, **draws, backend="reference")
    close_candidates(got, expected, 2e-5 if sampled else 1e-6)
    assert torch.equal(got[2], expected[2])
    if name == "nothing read":
        assert (got[2] == 0).all() and (got[0] < 0).all()
    elif case.text:
        assert (got[0] >= 0).any() and got[2].max() == r.COPIED
    total = torch.where(got[0] >= 0, got[1].double().exp(), 0.0).sum(-1)
    assert (total <= 1.0 + 1e-6).all()


def history_of(texts, **weights):
    """One sequence that has read texts, each apart from the last, with no weights but those named."""
    table = gsd.NgramTable.empty(1, 8, "cpu", capacity=64, max_context=4, ways=8)
    values = torch.zeros(WEIGHTS, dtype=torch.float64)
    for place, value in weights.items():
        values[int(place.removeprefix("w"))] = value
    known = Recollection.empty(table, values, room=200)
    for text in texts:
        tokens = torch.tensor([[-1, *text]], dtype=torch.int32)
        history_append(known, tokens, torch.tensor([len(text) + 1], dtype=torch.int32))
    return known


def graph_behind(text, drafted=()):
    """A graph of the root that a text ends with, and a path of drafted tokens."""
    graph = gsd.TokenGraph.empty(1, gsd.GraphConfig(depth=12, width=1, branch=4, max_rows=16), "cpu")
    tokens = torch.tensor([text], dtype=torch.int32)
    graph.reset(tokens[:, -1].contiguous(), tail_of(tokens))
    frontier = graph.root_frontier()
    for level, token in enumerate(drafted):
        candidates = torch.tensor([[[token, -1, -1, -1]]], dtype=torch.int32)
        chances = torch.tensor([[[-0.1, *[-torch.inf] * 3]]])
        frontier = gsd.merge(graph, frontier, candidates, chances, level=level, width=1, merge_context=-1).node_ids
    return graph


@pytest.mark.parametrize("length", [5, 9, 30, 60])
@pytest.mark.parametrize("drafted", [0, 1, 3])
@backends("cpu", "reference")
def test_a_match_has_no_longest_length_and_runs_on_through_the_draft(on, length, drafted):
    """Of two places that end alike the longer match wins, though the other is newer; drafted tokens count."""
    run = list(range(10, 10 + length))
    before = [*run, 7, 1, *run[-5:], 8, 2, *run]
    known = history_of([before[: len(before) - drafted]])
    graph = graph_behind(before[: len(before) - drafted], before[len(before) - drafted :])
    nodes = torch.tensor([[drafted]], dtype=torch.int32)
    tokens, log_probs, matched = history_recall(known, graph, nodes, backend=on.name)
    first = [8, 7] if length == 5 else [7, 8]  # of equal lengths the newest
    assert tokens[0, 0].tolist() == [*first, -1, -1] and matched.tolist() == [[r.COPIED]]
    assert log_probs[0, 0, :2].tolist() == pytest.approx([-1.0986] * 2, abs=1e-3)  # all scores are 0: a third each


@backends("cpu", "reference")
def test_no_match_goes_from_one_text_into_the_next(on):
    known = history_of([[3, 4], [5, 6, 7, 9], [3, 4, 5, 6, 7]])
    nodes = torch.zeros(1, 1, dtype=torch.int32)
    found = history_recall(known, graph_behind([3, 4, 5, 6, 7]), nodes, backend=on.name)
    assert found[2].tolist() == [[0]] and (found[0] < 0).all()


@pytest.mark.parametrize("drafted", [False, True])
def test_what_nearly_was_the_root_is_proposed_behind_it_alone(drafted):
    known = history_of([[3, 4]], **{f"w{(r.LISTS - 1) * r.LIST_FEATURES + 1}": 1.0})
    known.runners[0, :3] = torch.tensor([4, 6, 5], dtype=torch.int32)  # the root itself first
    known.runner_log_probs[0, :3] = torch.tensor([-0.1, -2.5, -3.0])
    graph = graph_behind([3, 4], [9] if drafted else [])
    tokens, log_probs, matched = history_recall(known, graph, torch.tensor([[int(drafted)]], dtype=torch.int32))
    if drafted:
        assert matched.tolist() == [[0]]
        return
    assert tokens[0, 0].tolist() == [6, 5, -1, -1] and matched.tolist() == [[r.ELSEWHERE]]
    assert (log_probs[0, 0, 0] - log_probs[0, 0, 1]).item() == pytest.approx(0.5, abs=1e-5)


@backends("cpu", "reference")
def test_a_text_in_pieces_is_the_text_at_once_as_far_as_there_is_room(on):
    text = torch.randint(-1, 3, (2, 300), generator=torch.Generator().manual_seed(0)).int()
    case, pieces = Known(text=0, runners=0), []
    for size in (300, 7):
        known = Recollection.empty(*(getattr(case.build()[0], name) for name in ("table", "weights")), room=16)
        assert known.reserve(290) and not known.reserve(289)
        for piece in text.split(size, 1):
            counts = torch.full((2,), piece.shape[1], dtype=torch.int32)
            history_append(known, piece, counts, backend=on.name)
        pieces.append([known.text, known.length, known.heads, known.previous])
        assert known.length.tolist() == [290, 290] and torch.equal(known.text, text[:, :290])
    assert_bit_equal(*pieces)
    known.clear()
    assert known.length.tolist() == [0, 0] and not known.heads.any()


@backends("cpu", "reference")
def test_of_each_sequence_as_many_tokens_are_appended_as_it_says(on):
    known = changed(KNOWN["nothing read"], batch=3).build()[0]
    known.clear()
    tokens = torch.arange(12, dtype=torch.int32).view(3, 4)
    history_append(known, tokens, torch.tensor([4, 0, 2], dtype=torch.int32), backend=on.name)
    assert known.length.tolist() == [4, 0, 2] and known.text[2, :2].tolist() == [8, 9]


def step_of(case, known, number):
    """A step's tokens, how many of them, and what the target found likely at its rows."""
    _, rows, tail = tree_of(Memory(batch=case.batch, vocab=case.vocab), number)
    gen = torch.Generator().manual_seed(number)
    shape = (*rows.token_ids.shape, known.table.tokens.shape[2])
    best = torch.randint(-1, case.vocab, shape, generator=gen).int()
    chances = torch.rand(shape, generator=gen).log()
    tokens = torch.randint(0, case.vocab, (case.batch, 6), generator=gen).int()
    accepted = torch.randint(-1, shape[1], (case.batch, 6), generator=gen).int()
    counts = torch.randint(0, 7, (case.batch,), generator=gen).int()
    return tokens, counts, Seen(rows, tail, accepted, best, chances)


@pytest.mark.parametrize("name", KNOWN)
@backends("cpu", "cuda")
def test_what_a_step_leaves_is_the_references(on, name):
    case = KNOWN[name]
    theirs, _ = case.build()
    known = on_device(theirs, on.device)
    for number in range(4):
        tokens, counts, seen = step_of(case, theirs, number)
        seen = None if number == 2 else seen  # nothing was drafted
        history_append(theirs, tokens, counts, seen, backend="reference")
        history_append(known, *on.to((tokens, counts)), None if seen is None else on.to(seen), backend=on.name)
        assert_bit_equal(known.tensors(), theirs.tensors())
    assert theirs.length.min() > case.text


@backends("cpu", "reference")
def test_a_sequence_that_emits_nothing_keeps_its_runners_up(on):
    known = KNOWN["usual"].build()[0]
    before = [t.clone() for t in known.tensors()[3:]]
    tokens, _, seen = step_of(KNOWN["usual"], known, 0)
    history_append(known, tokens, torch.zeros(2, dtype=torch.int32), seen, backend=on.name)
    assert_bit_equal(known.tensors()[3:], before)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"weights": torch.zeros(3, dtype=torch.float64)}, "weights: expected shape"),
        ({"weights": torch.zeros(WEIGHTS)}, "weights: expected float64"),
        ({"hashes": 12}, "hashes: expected a power of two, got 12"),
        ({"learned": gsd.NgramTable.empty(2, 4, "cpu")}, "learned.keys: expected shape"),
    ],
)
def test_a_history_of_other_sizes_is_refused(wrong, match):
    given = {"weights": torch.zeros(WEIGHTS, dtype=torch.float64)} | wrong
    with pytest.raises((TypeError, ValueError), match=match):
        Recollection.empty(gsd.NgramTable.empty(2, 4, "cpu"), **given)


@backends("cpu")
def test_a_graph_of_more_candidates_than_are_remembered_is_refused(on):
    case = changed(KNOWN["usual"], branch=3, remembered=2)
    known, text = case.build()
    with pytest.raises(RuntimeError, match="branch: expected at most 2, got 3"):
        history_recall(known, case.graph(text), torch.zeros(2, 1, dtype=torch.int32), backend=on.name)
