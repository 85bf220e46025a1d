"""What the mixer makes of its sources' proposals: mixed by each source's own weights, corrected, merged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gsd_kernels import GraphConfig
from gsd_kernels_hf.records import DecodeState
from gsd_kernels_hf.sources.base import DraftSource, Proposal
from gsd_kernels_hf.sources.mixer import Mixer

CPU = torch.device("cpu")
SHAPE = GraphConfig(depth=1, width=2, branch=2, max_rows=8, history_depth=0)


class Fixed(DraftSource):
    """The same two candidates after every node."""

    def __init__(self, name: str, costs_forward: bool, tokens: list[int], probs: list[float]) -> None:
        self.name, self.forwards = name, (nn.Identity(),) if costs_forward else ()
        self.tokens, self.probs = torch.tensor(tokens, dtype=torch.int32), torch.tensor(probs)

    def propose(self, level):
        shape = (*level.frontier.node_ids.shape, 2)
        return Proposal(self.tokens.expand(shape), self.probs.log().expand(shape))


MODEL = Fixed("model", True, [3, 4], [0.6, 0.2])
LOOKUP = Fixed("lookup", False, [4, 5], [0.5, 0.25])
THIRD = Fixed("third", False, [6, 5], [0.4, 0.1])


def drafted(sources, shares, reliability=None):
    """What follows the root: probability by token."""
    state = DecodeState.empty(1, 16, SHAPE.max_path + 1, CPU)
    state.restart(torch.tensor([[7, 8, 9]]), torch.zeros(1, dtype=torch.int32), 8, 0)
    for source, share in zip(sources, shares, strict=True):
        source.shares, source.reliability = (share,), reliability if source is sources[0] else None
    mixer = Mixer(sources, state, "reference", vocab_size=10)
    mixer.prepare(SHAPE)
    graph = mixer.draft(SHAPE)
    after = graph.edge_targets[0, 0].tolist()
    return dict(zip(graph.token_ids[0, after].tolist(), graph.edge_log_probs[0, 0].exp().tolist(), strict=True))


def test_each_source_is_mixed_in_by_its_own_weight():
    """P = (1 − w) · P(sources so far) + w · P(next source), the best two of them."""
    assert drafted([MODEL, LOOKUP], (0.9, 0.25)) == pytest.approx({3: 0.45, 4: 0.75 * 0.2 + 0.25 * 0.5})
    assert drafted([MODEL, LOOKUP], (0.25, 0.9)) == pytest.approx({4: 0.1 * 0.2 + 0.9 * 0.5, 5: 0.9 * 0.25})
    three = drafted([MODEL, LOOKUP, THIRD], (0.0, 0.25, 0.5))
    assert three == pytest.approx({3: 0.225, 6: 0.2}), "the second weight is not the third's"


def test_a_source_that_is_alone_is_corrected_by_its_reliability():
    assert drafted([LOOKUP], (0.0,), reliability=(0.5,)) == pytest.approx({4: 0.25, 5: 0.125})
    assert drafted([LOOKUP], (0.0,)) == pytest.approx({4: 0.5, 5: 0.25})


class AtOnce(Fixed):
    """Notes at which levels it is asked for all that follow."""

    __module__ = DraftSource.__module__  # only those of the package are

    def __init__(self, name: str) -> None:
        super().__init__(name, False, [4, 5], [0.5, 0.25])
        self.asked: list[int] = []

    def at_once(self):
        return True

    def propose_rest(self, level):
        self.asked.append(level.number)


@pytest.mark.parametrize(
    ("trims", "others", "asked"),
    [(True, [MODEL], [1, 2]), (True, [], [1, 2]), (False, [MODEL], [1, 2]), (True, [LOOKUP], [])],
    ids=["beside a model", "alone", "captured", "beside a look-up"],
)
def test_a_source_is_asked_for_all_levels_where_no_other_proposes(trims, others, asked):
    source, state = AtOnce("history"), DecodeState.empty(1, 16, 8, CPU)
    state.restart(torch.tensor([[7, 8, 9]]), torch.zeros(1, dtype=torch.int32), 8, 0)
    sources = [source, *others]
    mixer = Mixer(sources, state, "reference", vocab_size=10)
    config = GraphConfig(depth=1, width=2, branch=2, max_rows=8, history_depth=2)
    mixer.prepare(config)
    mixer.draft(config, trims=trims)
    assert source.asked == asked
