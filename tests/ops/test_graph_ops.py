"""merge, flatten, verify, select_rows and recall_levels: sequential oracles, invariants, and bits of every backend."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from graphs import STYLES, drafted
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.backends import ALL, assert_bit_equal, backends, cases, check_equal, needs_cpu, poisoned
from ops.contracts.graph import (
    CUDA_GRAPHS,
    GRAPHS,
    agreeing_target,
    check_flatten_of_any_graph,
    check_graph,
    check_merge_into_arbitrary_graph,
    configs,
    rows_case,
)
from ops.contracts.inputs import merge_arguments
from ops.contracts.ngram import Known, noise, tail_of
from ops.contracts.select_rows import CONFIG, path, posterior, problem
from shared import program
from torch import Tensor
from torch.nn.functional import pad

import gsd_kernels as gsd
from gsd_kernels.graph import unpack_bits
from gsd_kernels.ops.history import Recollection, history_recall
from gsd_kernels.ops.recall_levels import RecalledLevels, recall_levels
from gsd_kernels.ops.select_rows import FEATURES, LogisticPosterior, select_rows, update_edge_model

pytestmark = pytest.mark.quick

oracle = program("gsd_in_100_lines")


def oracle_graphs(graph, config, frontiers):
    tails = graph.contexts[:, 0].tolist()
    graphs = [oracle.Graph([int(graph.token_ids[b, 0])], tails[b]) for b in range(graph.token_ids.shape[0])]
    for frontier, tokens, log_probs, _ in frontiers:
        for b, g in enumerate(graphs):
            nxt = oracle.merge(
                g,
                frontier[b].tolist(),
                tokens[b].tolist(),
                log_probs[b].numpy(),
                config.width,
                config.merge_context,
                config.log_sibling_ratio,
                config.log_min_prob,
            )
            yield b, g, nxt


@settings(max_examples=120, deadline=None)
@given(configs(), st.sampled_from(STYLES), st.integers(2, 12), st.integers(0, 10**6))
def test_graph_and_rows_equal_the_sequential_oracles(config, style, vocab, seed):
    levels = []
    graph = drafted(
        config,
        vocab=vocab,
        style=style,
        seed=seed,
        on_level=lambda _g, _l, f, t, lp, nxt: levels.append((f.clone(), t, lp, nxt)),
    )
    batch = graph.token_ids.shape[0]
    steps = list(oracle_graphs(graph, config, levels))
    for index, (b, _, expected) in enumerate(steps):
        assert levels[index // batch][3].node_ids[b].tolist() == expected
    rows = gsd.flatten(graph, config.max_rows, config.max_path, backend="reference")
    for b, expected, _ in steps[-batch:]:
        count = int(graph.num_nodes[b])
        assert graph.token_ids[b, :count].tolist() == expected.tokens
        assert graph.parents[b, :count].tolist() == expected.parents
        assert graph.scores[b, :count].tolist() == [float(s) for s in expected.scores]
        assert int(graph.num_merges[b]) == expected.merges
        for node in range(count):
            edges = expected.edges.get(node, [None] * config.branch)
            assert graph.edge_targets[b, node].tolist() == [-1 if e is None else e[0] for e in edges]
        flat = oracle.flatten(expected, config.max_rows, config.max_path)
        n = int(rows.num_rows[b])
        assert n == len(flat)
        got = zip(rows.node_ids[b], rows.parent_rows[b], rows.depths[b], rows.scores[b], strict=True)
        assert [tuple(x.item() for x in r) for r in got][:n] == [(a, p, d, float(s)) for a, p, d, s in flat]
        assert (rows.node_ids[b, n:] == -1).all() and (rows.parent_rows[b, n:] == -1).all()
    check_invariants(graph, rows, config)


def check_invariants(graph, rows, config):
    targets = graph.edge_targets
    ids = torch.arange(graph.capacity)[None, :, None]
    assert ((targets == -1) | (targets > ids)).all(), "an edge runs backwards"
    assert (graph.num_nodes <= config.node_capacity).all()
    for b in range(targets.shape[0]):
        incoming = targets[b][targets[b] >= 0]
        count = int(graph.num_nodes[b])
        assert set(incoming.tolist()) == set(range(1, count)), "a node is unreachable, or an edge leads nowhere"
        if config.merge_context == -1:
            assert len(incoming) == count - 1 and int(graph.num_merges[b]) == 0, "a tree has a merge edge"
        if config.width == config.branch == 1:
            assert (graph.parents[b, :count] == torch.arange(count) - 1).all(), "a chain branches"
        for node in range(count):
            children = graph.token_ids[b][targets[b, node][targets[b, node] >= 0].long()].tolist()
            assert len(children) == len(set(children)), "two children of a node have the same token"
        n = int(rows.num_rows[b])
        mask = unpack_bits(rows.ancestor_mask[b], config.max_rows)
        seen = set()
        for row in range(config.max_rows):
            path, up = set(), row
            while up >= 0:
                path.add(up)
                up = int(rows.parent_rows[b, up]) if row < n else -1
            assert set(mask[row].nonzero().flatten().tolist()) == path
            if row < n:
                assert int(rows.depths[b, row]) == len(path) - 1 <= config.max_path
                assert row == 0 or 0 <= int(rows.parent_rows[b, row]) < row
                key = (int(rows.parent_rows[b, row]), int(rows.token_ids[b, row]))
                assert key not in seen, "two children of a row have the same token"
                seen.add(key)
        assert n <= config.max_rows


def test_frontier_masks_name_the_slots_of_the_primary_path():
    config = gsd.GraphConfig(depth=5, width=9, branch=3, merge_context=1)  # 36 slots: two mask words
    slots = {}

    def check(graph, level, frontier, tokens, log_probs, nxt):
        for b in range(nxt.node_ids.shape[0]):
            for i, node in enumerate(nxt.node_ids[b].tolist()):
                bits = set(unpack_bits(nxt.ancestor_mask[b, i], 64).nonzero().flatten().tolist())
                own = level * config.width + i
                if node < 0:
                    assert bits == {own}
                    continue
                if own < 64:
                    slots[b, node] = own
                path, up = set(), node
                while up > 0:
                    path |= {slots[b, up]} if (b, up) in slots else set()
                    up = int(graph.parents[b, up])
                assert bits == path

    drafted(config, vocab=40, on_level=check)


def test_merging_happens_where_the_context_agrees():
    """Hand-drawn: after a and b the draft proposes the same x; context 0 joins them, context 1 does not."""
    for merge_context, nodes in ((0, 4), (1, 5)):
        config = gsd.GraphConfig(depth=2, width=2, branch=2, merge_context=merge_context)
        graph = gsd.TokenGraph.empty(1, config, "cpu")
        graph.reset(torch.tensor([9], dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
        step = {"width": 2, "merge_context": merge_context, "backend": "reference"}
        a_b = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[-0.5, -1.0]]])
        frontier = gsd.merge(graph, graph.root_frontier(), *a_b, level=0, **step)
        x = torch.tensor([[[7, -1], [7, -1]]], dtype=torch.int32), torch.full((1, 2, 2), -0.1)
        gsd.merge(graph, frontier.node_ids, *x, level=1, **step)
        assert graph.num_nodes.item() == nodes and graph.num_merges.item() == 5 - nodes


EVERY = [(f"{name}-{style}", (name, style)) for name, style in itertools.product(GRAPHS, STYLES)]
FEW = [  # by name, one or two styles, and all of them once
    (f"{name}-{style}", (name, style))
    for name in GRAPHS
    for style in (STYLES if name == "graph" else STYLES[len(name) % 3 :: 3])
]


@cases("case", {"cpu": EVERY, "interpreter": FEW, "triton": EVERY, "cuda": EVERY})
def test_levels_and_rows(on, case):
    (config, vocab), style = GRAPHS[case[0]], case[1]
    batch = 5 if not on.interpreted else 2 if case[0] == "graph" else 1  # interpreted programs run one after another
    graph, _ = check_graph(config, style, vocab, STYLES.index(style), on, batch=batch)
    assert int(graph.num_merges.sum()) == 0 or case[0] not in ("tree", "chain")


@pytest.mark.parametrize("name", ["graph", "context-0", "context-3"])
def test_the_cases_merge(name):
    config, vocab = GRAPHS[name]
    styles = [style for _, (at, style) in FEW if at == name]
    graphs = [drafted(config, vocab=vocab, style=s, seed=STYLES.index(s)) for s in styles]
    assert sum(int(graph.num_merges.sum()) for graph in graphs) > 0


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("config", CUDA_GRAPHS, ids=str)
@backends("triton", "cuda")
def test_a_step(on, config, style, batch):
    _, rows = check_graph(config, style, 7, batch, on, batch)
    rows = gsd.Rows(*(t.cpu() for t in rows.tensors()))
    sampled, arguments = agreeing_target(rows, 7, batch)
    arguments["done"] = torch.arange(batch) == 1
    check_equal(gsd.verify, on, rows, sampled, **arguments, max_path=config.max_path)


@needs_cpu
@settings(max_examples=100, deadline=None)
@given(configs(), st.sampled_from(STYLES), st.integers(2, 12), st.integers(0, 10**6))
def test_any_compiled_step(config, style, vocab, seed):
    _, rows = check_graph(config, style, vocab, seed, ALL["cpu"])
    sampled, arguments = agreeing_target(rows, vocab, seed)
    for done in (torch.tensor([False, False]), torch.tensor([True, False])):
        check_equal(gsd.verify, ALL["cpu"], rows, sampled, **arguments, done=done, max_path=config.max_path)


SEEDS = {"cpu": range(20), "interpreter": range(3), "triton": range(20), "cuda": range(20)}


@pytest.mark.parametrize("merge_context", [-1, 0, 1, 3])
@cases("seed", {name: [(str(seed), seed) for seed in seeds] for name, seeds in SEEDS.items()})
def test_merge_into_arbitrary_graphs(on, seed, merge_context):
    check_merge_into_arbitrary_graph(seed, merge_context, on)


@cases("seed", {name: [(str(seed), seed) for seed in seeds] for name, seeds in SEEDS.items()})
def test_any_graph_is_flattened_by_kernels(on, seed):
    check_flatten_of_any_graph(seed, 24, 6, on)


@needs_cpu
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(0, 12))
def test_any_graph_is_flattened(seed, max_rows, max_path):
    check_flatten_of_any_graph(seed, max_rows, min(max_path, max_rows - 1), ALL["cpu"])


MANY = gsd.GraphConfig(depth=4, width=26, branch=5, max_rows=128, merge_context=1)
LARGEST = gsd.GraphConfig(depth=3, width=63, branch=8, max_rows=128, merge_context=1)
WIDEST = gsd.GraphConfig(depth=2, width=30, branch=32, max_rows=128, merge_context=0)
THREADS = gsd.GraphConfig(depth=5, width=8, branch=4, max_rows=64)
#: Config, style, vocabulary, batch: several blocks of rows and columns, then what takes several threads.
BLOCKS = {"many candidates": (MANY, "random", 6, 1), **{f"largest {style}": (LARGEST, style, 6, 2) for style in STYLES}}
LARGE = {**BLOCKS, "widest branch": (WIDEST, "ties", 64, 2), "large batch": (THREADS, "ties", 9, 67)}


@cases(
    "case",
    {
        **{name: LARGE.items() for name in ("cpu", "cuda")},
        "triton": BLOCKS.items(),
        "interpreter": [("many candidates", BLOCKS["many candidates"])],
    },
)
def test_large_graphs(on, case):
    config, style, vocab, batch = case
    graph, _ = check_graph(config, style, vocab, 0, on, batch=batch)
    assert config != MANY or int(graph.num_merges.sum()) > 50


@backends("reference", "cpu", "interpreter", "triton", "cuda")
def test_a_candidate_joins_the_best_node_and_at_ties_the_oldest(on):
    """Hand-drawn: three nodes hold the candidate's token after the same context; two of them share the best score."""
    config = gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=8, merge_context=1)
    graph = gsd.TokenGraph.empty(1, config, on.device)
    graph.reset(*on.to((torch.tensor([9], dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))))
    graph.token_ids[0, 1:4] = 5
    graph.contexts[0, 1:4, 0] = 9
    graph.scores[0, 1:4] = torch.tensor([-2.0, -1.0, -1.0])
    graph.parents[0, 1:4] = 0
    graph.num_nodes[0] = 4
    candidates = torch.tensor([[[5, 6]]], dtype=torch.int32), torch.tensor([[[-0.5, -0.7]]])
    step = {"level": 0, "width": 2, "merge_context": 1, "backend": on.name}
    nxt = gsd.merge(graph, graph.root_frontier(), *on.to(candidates), **step)
    assert graph.edge_targets[0, 0].tolist() == [2, 4] and graph.num_merges.item() == 1
    assert nxt.node_ids[0].tolist() == [4, 2]


def test_a_config_is_its_rules_and_one_of_both_is_needed():
    found = []
    config = gsd.GraphConfig(merge_context=0, sibling_ratio=0.4, min_prob=0.3)
    rules = {"log_sibling_ratio": config.log_sibling_ratio, "log_min_prob": config.log_min_prob}
    for said in ({"config": config}, {"merge_context": 0, **rules}):
        arguments = {**merge_arguments(), "merge_context": None, **said}
        arguments["cand_log_probs"] = torch.tensor([0.5, 0.25, 0.1]).log().expand(2, 1, 3).contiguous()
        frontier = gsd.merge(**arguments)
        found.append((*arguments["graph"].tensors(), *frontier.tensors()))
    assert_bit_equal(*found)
    assert frontier.node_ids.tolist() == [[1, -1]] * 2 and arguments["graph"].num_nodes.tolist() == [3, 3]
    with pytest.raises(TypeError, match="merge_context: expected a number of tokens, or a config"):
        gsd.merge(**{**merge_arguments(), "merge_context": None})


@pytest.mark.parametrize("seed", range(24))
@backends("reference", "cpu", "interpreter", "triton", "cuda")
def test_verify_equals_the_walk(on, seed):
    rows, config, picked, limits = rows_case(seed)
    done, (eos, remaining) = torch.arange(4) == 3, limits.values()
    limits["done"] = done
    got = gsd.verify(on.to(rows), on.to(picked), **on.to(limits), max_path=config.max_path, backend=on.name)
    lengths = []
    for b in range(4):
        path = []
        if not done[b]:
            path = [0]
            while len(path) < remaining[b]:
                token = int(picked[b, path[-1]])
                children = [
                    r
                    for r in range(1, int(rows.num_rows[b]))
                    if rows.parent_rows[b, r] == path[-1] and rows.token_ids[b, r] == token
                ]
                if token in eos.tolist() or not children:
                    break
                path += children
            assert int(got.next_token[b]) == int(picked[b, path[-1]])
        assert got.accepted_rows[b].tolist() == path + [-1] * (config.max_path + 1 - len(path))
        assert int(got.num_accepted[b]) == len(path)
        lengths.append(len(path))
    assert got.accepted_rows.dtype == got.num_accepted.dtype == got.next_token.dtype == torch.int32
    assert lengths[3] == 0 and min(lengths[:3]) >= 1


def test_verify_cases_are_not_trivial():
    paths = []
    for seed in range(24):
        rows, config, picked, _ = rows_case(seed)
        accepted = gsd.verify(
            rows,
            picked,
            eos_ids=torch.zeros(0, dtype=torch.int32),
            remaining=torch.full((4,), 99, dtype=torch.int32),
            done=torch.zeros(4, dtype=torch.bool),
            max_path=config.max_path,
            backend="reference",
        )
        paths += accepted.num_accepted.tolist()
    assert {1, 2, 3, 4} <= set(paths), set(paths)


LIMITS = {"max_rows": CONFIG.max_rows, "max_path": CONFIG.max_path}
AS_CLAIMED = LogisticPosterior(
    torch.tensor([0.0, 1.0, *[0.0] * (FEATURES - 2)], dtype=torch.float64),
    torch.eye(FEATURES, dtype=torch.float64),
    torch.ones(FEATURES, dtype=torch.float64),
)
"""By which an edge is right as often as its source says."""


def pair_graph(first: float, second: float) -> gsd.TokenGraph:
    """The root with two children, tokens 5 and 6, of these probabilities."""
    config = gsd.GraphConfig(depth=1, width=2, branch=2, max_rows=3)
    graph = gsd.TokenGraph.empty(1, config, "cpu")
    graph.reset(torch.ones(1, dtype=torch.int32), torch.full((1, 8), -1, dtype=torch.int32))
    tokens, log_probs = torch.tensor([[[5, 6]]], dtype=torch.int32), torch.tensor([[[first, second]]]).log()
    gsd.merge(graph, graph.root_frontier(), tokens, log_probs, level=0, width=2, merge_context=-1, backend="reference")
    return graph


ONE = torch.ones(1, dtype=torch.int32)


@pytest.mark.parametrize("style", STYLES)
@backends("cpu")
def test_rows_equal_the_reference(on, style):
    for seed in range(12):
        graph, before = problem(seed, style, batch=1 + seed % 4)
        seconds = None if seed % 3 == 0 else 1.0 + 0.05 * torch.arange(1 + 2 * seed, dtype=torch.float64)
        check_equal(select_rows, on, graph, before, posterior(seed), seconds, **LIMITS, row_bonus=0.03)


@backends("cpu")
def test_beliefs_equal_the_reference(on):
    for seed in range(24):
        graph, before = problem(seed, batch=1 + seed % 4)
        arguments = graph, before, *path(graph, seed), posterior(seed)
        check_equal(update_edge_model, on, *arguments, process_noise=0.01, most=1e-9)


@backends("reference", "cpu")
def test_probabilities_are_what_the_sources_claim_where_the_model_says_so(on):
    rows = select_rows(pair_graph(0.5, 0.3), ONE, AS_CLAIMED, None, max_rows=3, max_path=2, backend=on.name)
    assert rows.token_ids.tolist() == [[1, 5, 6]]
    assert rows.scores.exp().tolist()[0] == pytest.approx([1.0, 0.5, 0.3], rel=1e-5)
    fewer = select_rows(pair_graph(0.5, 0.3), ONE, AS_CLAIMED, None, max_rows=2, max_path=1, backend=on.name)
    assert fewer.token_ids.tolist() == [[1, 5]]


@backends("reference", "cpu")
def test_rows_are_in_the_order_of_their_probabilities(on):
    """Weights that favour second candidates put them first."""
    second = AS_CLAIMED._replace(weights=torch.tensor([-3.0, 0.0, 6.0, 0.0, 0.0, 0.0, 0.0], dtype=torch.float64))
    rows = select_rows(pair_graph(0.5, 0.3), ONE, second, None, max_rows=3, max_path=1, backend=on.name)
    assert rows.token_ids.tolist() == [[1, 6, 5]] and rows.parent_rows.tolist() == [[-1, 0, 0]]


@given(st.integers(0, 10_000), st.sampled_from(STYLES), st.data())
@settings(max_examples=40, deadline=None)
def test_the_count_with_most_tokens_a_second(seed, style, data):
    """Probabilities fall along paths, siblings sum to their parent at most, and nothing but the count is cut."""
    graph, before = problem(seed, style)
    every = select_rows(graph, before, posterior(seed), None, **LIMITS)
    probs = every.scores.double().exp()
    for row, parents in zip(probs.tolist(), every.parent_rows.tolist(), strict=True):
        for parent, some in enumerate(row):
            assert sum(p for p, of in zip(row, parents, strict=True) if of == parent) <= some + 1e-5
    parts = data.draw(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=30))
    seconds = 0.1 + torch.tensor(parts, dtype=torch.float64).cumsum(0)
    chosen = select_rows(graph, before, posterior(seed), seconds, **LIMITS, row_bonus=0.02)
    count = chosen.token_ids.shape[1]
    assert_bit_equal(chosen, every.first(count))
    rates = ((probs.mean(0) + 0.02).cumsum(0)[: len(seconds)] / seconds[: probs.shape[1]]).tolist()
    assert count <= len(rates) and rates[count - 1] == pytest.approx(max(rates))


@backends("reference", "cpu")
def test_of_equal_counts_the_fewest_rows(on):
    nothing = AS_CLAIMED._replace(weights=torch.tensor([-200.0, *[0.0] * 6], dtype=torch.float64))
    flat = torch.ones(3, dtype=torch.float64)
    arguments = {"max_rows": 3, "max_path": 1, "backend": on.name}
    assert select_rows(pair_graph(0.5, 0.3), ONE, nothing, flat, **arguments).num_rows.tolist() == [1]
    assert select_rows(pair_graph(0.5, 0.3), ONE, nothing, flat, row_bonus=0.01, **arguments).num_rows.tolist() == [3]


@backends("reference", "cpu")
def test_what_is_learned(on):
    """Edges up to the right one, whether they had a row or not; nothing of finished sequences."""
    graph = pair_graph(0.5, 0.3)

    def learned(node: int, token: int, graph: gsd.TokenGraph = graph) -> LogisticPosterior:
        steps = torch.tensor([[node, -2]], dtype=torch.int32), torch.tensor([[token, 0]], dtype=torch.int32)
        return update_edge_model(graph, ONE, *steps, AS_CLAIMED, backend=on.name)

    def probs(found: LogisticPosterior) -> list[float]:
        return select_rows(graph, ONE, found, None, max_rows=3, max_path=1).scores.exp().sort(-1).values[0].tolist()

    assert probs(learned(0, 5))[1] > 0.5 > probs(learned(0, 7))[1]
    assert torch.equal(learned(-2, 5).weights, AS_CLAIMED.weights)
    # Behind the right one nothing is learned: whatever the second edge is, it is the same.
    other = replace(graph, edge_log_probs=torch.where(graph.edge_log_probs < math.log(0.4), -5.0, graph.edge_log_probs))
    assert torch.equal(learned(0, 5, other).weights, learned(0, 5).weights)
    assert not torch.equal(learned(0, 6, other).weights, learned(0, 6).weights)
    assert learned(0, 6).weights[2] > 0 > learned(0, 7).weights[2], "the second one was right, or none"


def test_often_right_is_believed_and_becomes_certain():
    graph, found = pair_graph(0.2, 0.1), AS_CLAIMED
    steps = torch.tensor([[0]], dtype=torch.int32), torch.tensor([[5]], dtype=torch.int32)
    for _ in range(300):
        found = update_edge_model(graph, ONE, *steps, found, process_noise=1e-4)
    assert select_rows(graph, ONE, found, None, max_rows=2, max_path=1).scores.exp()[0, 1] > 0.9
    variances = found.covariance.diagonal()
    assert (variances <= found.prior + 1e-12).all() and torch.linalg.eigvalsh(found.covariance)[0] > 0
    assert variances.sum() < 0.9 * found.prior.sum()


@dataclass(frozen=True)
class Case:
    """A history that has read random texts of few tokens, so that look-ups go on for several levels, and a graph."""

    batch: int = 2
    vocab: int = 4
    text: int = 60  # tokens read
    branch: int = 3
    remembered: int = 3
    width: int = 4
    levels: int = 5
    merge_context: int = 2
    opened: bool = False  # a level of another source comes before
    padded: int = 0  # absent nodes of the given frontier
    min_prob: float = 0.0
    sibling_ratio: float = 0.0

    def build(self) -> tuple[Recollection, gsd.TokenGraph, Tensor]:
        """History, graph and frontier."""
        given = {name: getattr(self, name) for name in ("batch", "vocab", "text", "branch", "remembered")}
        known, text = Known(**given, runners=min(self.text, 8)).build()
        graph = gsd.TokenGraph.empty(self.batch, self.config.replace(history_width=8), "cpu")
        graph.reset(text[:, -1].contiguous(), tail_of(text))
        frontier = graph.root_frontier()
        if self.opened:
            first = torch.arange(self.branch, dtype=torch.int32).expand(self.batch, 1, -1).contiguous()
            chances = torch.linspace(-0.5, -1.5, self.branch).expand(self.batch, 1, -1).contiguous()
            level = {"level": 0, "width": self.width, "merge_context": self.merge_context, "backend": "reference"}
            frontier = gsd.merge(graph, frontier, first, chances, **level).node_ids
        if self.padded:
            frontier = frontier.clone()
            frontier[0, -self.padded :] = -1
        return known, graph, frontier

    @property
    def config(self) -> gsd.GraphConfig:
        return gsd.GraphConfig(
            depth=int(self.opened),
            width=self.width,
            branch=self.branch,
            max_rows=24,
            merge_context=self.merge_context,
            sibling_ratio=self.sibling_ratio,
            min_prob=self.min_prob,
            history_depth=self.levels,
            history_width=self.width,
        )

    def options(self, sampled: bool) -> dict[str, object]:
        options = {"level": int(self.opened), "config": self.config}
        return options | (noise(self.batch) if sampled else {})


CASES = {
    "from the root": Case(),
    "behind a level": Case(opened=True),
    "padded frontier": Case(opened=True, padded=2),
    "none given": Case(opened=True, padded=4, batch=1),  # the next level takes what the graph holds
    "nothing known": Case(text=0),
    "few tokens again": Case(vocab=40, text=50, levels=9),
    "runs dry": Case(min_prob=math.exp(-2.0), sibling_ratio=0.5),
    "no merging": Case(merge_context=-1),
    "merged by token": Case(merge_context=0, levels=8),
    "few candidates": Case(branch=2, remembered=4),
    "one of each": Case(branch=1, remembered=1, width=1, levels=1, batch=1),
    "many sequences": Case(batch=19, opened=True, levels=2),  # several threads
    "trimmed": Case(min_prob=math.exp(-20.0), sibling_ratio=0.5),
}


def one_by_one(case: Case, sampled: bool, backend: str) -> tuple[gsd.TokenGraph, RecalledLevels]:
    """The levels by the ops that they are made of."""
    known, graph, frontier = case.build()
    options = case.options(sampled)
    asked = {name: options[name] for name in noise(1)} if sampled else {}
    merged = {"width": case.width, "config": case.config}
    nodes, found = pad(frontier, (0, case.width - frontier.shape[1]), value=-1), []
    for number in range(options["level"], options["level"] + case.levels):
        tokens, log_probs, matched = history_recall(known, graph, nodes, **asked, backend=backend)
        absent = nodes < 0
        tokens = tokens.masked_fill(absent[..., None], -1)
        log_probs = log_probs.masked_fill(absent[..., None], -torch.inf)
        matched = matched.masked_fill(absent, 0)
        found.append(RecalledLevels(nodes, tokens, log_probs, matched))
        nodes = gsd.merge(graph, nodes, tokens, log_probs, level=number, **merged, backend=backend).node_ids
    return graph, RecalledLevels(*(torch.cat(parts, 1) for parts in zip(*found, strict=True)))


FEW_CASES = ("behind a level", "none given", "runs dry", "nothing known")


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@cases("name", {"cpu": zip(CASES, CASES, strict=True), "reference": zip(FEW_CASES, FEW_CASES, strict=True)})
def test_levels_are_those_of_recall_and_merge(on, name, sampled):
    case = CASES[name]
    expected_graph, expected = one_by_one(case, sampled, on.name)
    known, graph, frontier = case.build()
    with poisoned():
        found = recall_levels(known, graph, frontier, **case.options(sampled), backend=on.name)
    assert_bit_equal(found, expected)
    assert_bit_equal(graph, expected_graph)
    first = int(case.opened)
    grown = graph.depths.max() - first
    if name == "nothing known":
        assert grown == 0 and (found.tokens < 0).all()
    elif name == "runs dry":
        assert (found.node_ids >= 0).sum() > 0 and (found.node_ids[:, -case.width :] < 0).all(1).any()
    else:
        assert grown >= min(case.levels, 5) - 1


@pytest.mark.parametrize("name", CASES)
@backends("cpu", "cuda")
def test_without_noise_the_compiled_levels_are_the_references(on, name):
    case = CASES[name]
    check_equal(recall_levels, on, *case.build(), **case.options(False), most=recall_levels.tolerance)


@backends("cpu")
def test_levels_beyond_the_graph_are_refused(on):
    case = CASES["no merging"]
    known, graph, frontier = case.build()
    with pytest.raises(RuntimeError, match=r"the levels need .* nodes, the graph holds 100"):
        recall_levels(known, graph, frontier, config=case.config.replace(history_depth=40), level=0, backend=on.name)
