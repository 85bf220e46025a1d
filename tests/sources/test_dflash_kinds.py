"""Drafts of whole blocks: DFlash; JetSpec, DSpark and DFlash 2, whose edges know the token before or rows look back."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from models import prompts, tiny
from sources.drafters import (
    dflash_config,
    fit_dflash,
    generate,
    random_dflash,
    random_tensors,
    started,
)

from gsd_kernels import DFlash, GraphConfig
from gsd_kernels_hf.sources.dflash import DFlashDrafts
from gsd_kernels_hf.sources.edges import DynamicConvolution, MarkovHead, RecurrentHead, Selector, along

VOCAB = 41
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
LATTICE = GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=0, history_depth=1, history_width=4)
TREE = GraphConfig(depth=3, width=3, branch=3, max_rows=24, merge_context=-1)
SECOND = {"selector_rank": 6, "selector_top_k": 8, "conv_kernel_size": 2, "conv_group_size": 8, "block_size": 5}
KINDS = {
    "dflash shared": {},
    "dflash reduced": {"draft_vocab_size": 31, "block_size": 4},
    "dflash window": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "inner": {"sample_from_anchor": True},
    },
    "JetSpec": {"inner": {"causal_head": True}},
    "DSpark": {"inner": {"markov_rank": 6, "sample_from_anchor": True}},
    "DSpark gated": {"inner": {"markov_rank": 6, "markov_head_type": "gated"}},
    "DSpark recurrent": {"inner": {"markov_rank": 6, "markov_head_type": "rnn"}},
    "DSpark confident": {"inner": {"markov_rank": 6, "sample_from_anchor": True}},
    "DSpark reduced": {"inner": {"markov_rank": 6}, "draft_vocab_size": 31},
    "DFlash 2": {"inner": SECOND, "architectures": ["DFlash2DraftModel"], "block_size": None},
}


@functools.cache
def target_of():
    return tiny(num_hidden_layers=3, vocab_size=VOCAB)


@functools.cache
def drafter_of(kind: str) -> DFlash:
    confidence = (1, 38) if kind == "DSpark confident" else None
    config = dflash_config(target_of(), **KINDS[kind])
    module = random_dflash(config, own=kind.endswith("reduced"), confidence=confidence)
    return fit_dflash(module, target_of(), steps=80 if kind.startswith("dflash") else 50)


def graphs_of(drafter: DFlash, shape: GraphConfig) -> list[tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Of every step the graph that a drafter alone gave, and its block: all states, those of what it drafts, logits."""
    graphs, blocks = [], []

    def keep(verified):
        names = ("token_ids", "depths", "parents", "edge_targets", "edge_log_probs")
        graphs.append({name: getattr(verified.graph, name)[0].clone() for name in names})

    honest, whole = DFlashDrafts.keep, DFlashDrafts.forward_block

    def states(self):
        found = whole(self)
        blocks.append([found[0][0].clone()])
        return found

    def noted(self, hidden, logits, level):
        blocks[-1] += [hidden[0].clone(), logits[0].clone()]
        honest(self, hidden, logits, level)

    options = {"do_sample": False, "drafter": drafter, "draft_sources": ("drafter",), "observer": keep}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashDrafts, "keep", noted)
        patch.setattr(DFlashDrafts, "forward_block", states)
        generate(target_of(), **prompts(1, 14, vocab=VOCAB), **options, graph_config=shape)
    return [(graph, *block) for graph, block in zip(graphs, blocks, strict=True)]


def edges_in(graph: dict):
    """Node, what follows it, and the log-probability of that."""
    for node, (targets, log_probs) in enumerate(zip(graph["edge_targets"], graph["edge_log_probs"], strict=True)):
        for after, found in zip(targets.tolist(), log_probs, strict=True):
            if after >= 0:
                yield node, after, found.double()


@pytest.mark.parametrize("kind", ["dflash shared", "DSpark", "DFlash 2"])
def test_every_merged_node_has_what_the_head_says_of_it(kind):
    """An edge's probability is that of its depth and its two tokens, whatever path was first to reach its node."""
    drafter, merged, steps = drafter_of(kind), 0, 0
    shape = GraphConfig(depth=4, width=4, branch=3, max_rows=32, merge_context=0)
    for graph, _, hidden, logits in graphs_of(drafter, shape):
        steps, parents = steps + 1, {}
        for node, after, found in edges_in(graph):
            parents.setdefault(after, set()).add(node)
            at, before = slice(int(graph["depths"][node]), int(graph["depths"][node]) + 1), graph["token_ids"][node]
            scored = logits[None, at]
            if drafter.edges is not None:
                scored = drafter.edges(scored, hidden[None, at], before.long()[None, None])
            expected = scored.log_softmax(-1)[0, 0, graph["token_ids"][after]]
            torch.testing.assert_close(found, expected, **CLOSE)
        merged += sum(len(found) > 1 for found in parents.values())
    assert merged > 10 and steps > 4


@pytest.mark.parametrize("sampled", [False, True])
def test_confidence_counts_where_tokens_are_drawn(sampled, monkeypatch):
    """Candidates after a node lose what the head says of its depth and token; greedily nothing."""
    drafter, seen = drafter_of("DSpark confident"), 0
    head, markov, honest = drafter.confidence_head.proj, drafter.markov_head.markov_w1, DFlashDrafts.at_depths

    def compared(self, level):
        nonlocal seen
        found = honest(self, level)
        drafter.confidence_head = None
        without = honest(self, level)
        drafter.confidence_head = kept
        assert torch.equal(found.tokens, without.tokens)
        for node, (depth, token) in enumerate(zip(level.frontier.depths[0], level.frontier.token_ids[0], strict=True)):
            if depth < drafter.config.num_drafted:
                said = head(torch.cat([self.hidden[0, depth], markov(token.long())])).sigmoid().log()
                lost = (without.log_probs - found.log_probs)[0, node]
                lost = lost[without.tokens[0, node] >= 0].double()
                torch.testing.assert_close(lost, (-said if sampled else 0 * said).expand_as(lost), **CLOSE)
                seen += len(lost)
        return found

    kept = drafter.confidence_head
    monkeypatch.setattr(DFlashDrafts, "at_depths", compared)
    options = {"do_sample": sampled, "drafter": drafter, "draft_sources": ("drafter",), **prompts(1, 9, vocab=VOCAB)}
    generate(target_of(), **options, graph_config=LATTICE)
    assert seen > 50


def test_a_recurrent_heads_state_goes_along_the_path():
    """In a tree every node has one; the root's row, which does not draft here, is its first step."""
    drafter, steps, longest = drafter_of("DSpark recurrent"), 0, 0
    assert not drafter.config.sample_from_anchor
    for graph, whole, hidden, logits in graphs_of(drafter, TREE):
        steps += 1
        for node, after, found in edges_in(graph):
            path = [node]
            while path[0] != 0:
                path.insert(0, int(graph["parents"][path[0]]))
            tokens = graph["token_ids"][torch.tensor(path)].long()
            longest = max(longest, len(path))
            before, count = torch.cat([tokens[:1], tokens]), len(path)  # the root's row and the first mask's: one token
            rows = torch.cat([torch.zeros_like(logits[:1]), logits[:count]])
            along_it = along(drafter.edges, rows[None], whole[None, : count + 1], before[None])
            assert torch.equal(whole[1 : count + 1], hidden[:count])
            expected = along_it[0, -1].log_softmax(-1)[graph["token_ids"][after]]
            torch.testing.assert_close(found, expected, **CLOSE)
    assert steps > 4 and longest == 3


def markov(head, logits, hidden, before):
    e = head.markov_w1.weight[before]
    if head.gate_proj is not None:
        e = e * torch.sigmoid(head.gate_proj.weight @ torch.cat([hidden, e]) + head.gate_proj.bias)
    return logits + head.markov_w2.weight @ e


def selector(head, logits, hidden, before):
    context = head.predecessor_codebook[before] * (head.hidden_projection.weight @ hidden)
    best = logits.topk(head.top_k).indices
    return logits.index_add(0, best, head.successor_codebook[best] @ context)


HEADS = {
    "markov": (lambda: MarkovHead(11, 9, 3, 4, gated=False), markov),
    "gated": (lambda: MarkovHead(11, 9, 3, 4, gated=True), markov),
    "selector": (lambda: Selector(11, 3, 4, 5), selector),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_its_formula(name):
    (made, formula), gen = HEADS[name], torch.Generator().manual_seed(1)
    head = made()
    random_tensors(head)
    vocab = 11 if name == "selector" else 9
    logits, hidden = torch.randn(2, 3, vocab, generator=gen), torch.randn(2, 3, 4, generator=gen)
    before = torch.randint(0, 11, (2, 3), generator=gen)
    found = head(logits, hidden, before)
    for at in itertools.product(range(2), range(3)):
        torch.testing.assert_close(found[at], formula(head, logits[at], hidden[at], before[at]))


def test_recurrent_head_is_its_formula():
    head, gen = RecurrentHead(11, 9, 3, 4), torch.Generator().manual_seed(1)
    random_tensors(head)
    logits, hidden = torch.randn(2, 5, 9, generator=gen), torch.randn(2, 5, 4, generator=gen)
    before = torch.randint(0, 11, (2, 5), generator=gen)
    found = along(head, logits, hidden, before)
    for b in range(2):
        state = torch.zeros(3)
        for k in range(5):
            read = torch.cat([state, head.markov_w1.weight[before[b, k]], hidden[b, k]])
            gate, candidate, output = (head.joint_proj.weight @ read + head.joint_proj.bias).split(3)
            torch.testing.assert_close(found[b, k], logits[b, k] + head.markov_w2.weight @ output.tanh())
            state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()


def test_convolution_is_its_formula():
    taps, group, size = 3, 2, 6
    part, gen = DynamicConvolution(size, taps, group), torch.Generator().manual_seed(1)
    random_tensors(part)
    hidden, output = torch.randn(2, 5, size, generator=gen), torch.randn(2, 5, size, generator=gen)
    read, delta = part.before(hidden)
    found = part.after(output, delta)
    kernels = (hidden @ part.kernel_projection.weight.T).view(2, 5, 2, taps, size // group)
    for side, (x, y) in enumerate(((hidden, read), (output, found))):
        for b in range(2):
            for t in range(5):
                for channel in range(size):
                    total = sum(
                        (part.base_kernel[side, tap, channel] + kernels[b, t, side, tap, channel // group])
                        * x[b, t - tap, channel]
                        for tap in range(taps)
                        if t >= tap
                    )
                    torch.testing.assert_close(y[b, t, channel], total)


def test_rows_of_a_causal_head_do_not_see_later_ones():
    """A block's rows are those of a shorter block; without the setting they are not."""
    tokens = prompts(1, 12, vocab=VOCAB)["input_ids"]
    for causal in (True, False):
        long, short = (
            random_dflash(dflash_config(target_of(), block_size=size, inner={"causal_head": causal})) for size in (6, 3)
        )
        with torch.no_grad():
            a, b = (started(module, target_of(), tokens).forward_block()[0][:, :3] for module in (long, short))
        assert torch.allclose(a, b) == causal
