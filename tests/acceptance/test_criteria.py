"""Criteria: exact samples by enumeration and by counting, typical acceptance by its formula, and all of generate."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math

import models
import numpy as np
import pytest
import torch
from acceptance.distributions import P_VALUE, exact_probabilities, fit, moved
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, StoppingCriteriaList

import gsd_kernels as gsd
from gsd_kernels_hf.acceptance import criteria
from gsd_kernels_hf.acceptance.sampling import SamplingPlan
from gsd_kernels_hf.records import Sampler

VOCAB = 16
DRAWS = 6_000
CHAIN = gsd.GraphConfig.preset("chain", depth=3)
SAMPLING = [
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.9, "min_p": 0.02},
]


@functools.lru_cache
def pair(noise: float = 0.05):
    """A target without end-of-text token, and itself with noise."""
    target = models.endless(vocab_size=VOCAB, dtype=torch.float32)
    return target, models.noised(target, noise)


def generate(target, draft, criterion, prompt, **options):
    arguments = {"graph_config": CHAIN, "do_sample": True, "seed": 0, "max_new_tokens": 12, "top_k": 0}
    arguments |= {"return_dict_in_generate": True, "pad_token_id": 0, **prompt, **options}
    return gsd.generate(target, assistant_model=draft, criterion=criterion, **arguments)


def chain_rows(tokens: torch.Tensor) -> gsd.Rows:
    """The rows of a drafted chain; tokens int32 [B, depth]."""
    batch, depth = tokens.shape
    rows = torch.arange(depth + 1, dtype=torch.int32)
    return gsd.Rows(
        token_ids=torch.nn.functional.pad(tokens, (1, 0)),
        parent_rows=(rows - 1).expand(batch, -1),
        depths=rows.expand(batch, -1),
        ancestor_mask=((2 << rows) - 1).to(torch.int32).expand(batch, -1)[..., None],
        node_ids=rows.expand(batch, -1),
        scores=torch.zeros(batch, depth + 1),
        num_rows=torch.full((batch,), depth + 1, dtype=torch.int32),
    )


def sampler(seed: int, sequences: torch.Tensor) -> Sampler:
    return Sampler(torch.tensor(seed), sequences, SamplingPlan(temperature=1.0).warper_arguments, "reference")


@pytest.mark.parametrize("criterion", ["speculative", "block", "typical"])
def test_greedy_and_undrafted_output_is_exact(criterion):
    """Both rules are the exact one where p is one token or nothing is drafted, and the statistics say so."""
    target, draft = pair(0.02)
    prompt = models.prompts(2, 9, seed=2, vocab=VOCAB)
    plain = target.generate(**prompt, do_sample=False, max_new_tokens=20, pad_token_id=0)
    out = generate(target, draft, criterion, prompt, do_sample=False, max_new_tokens=20)
    assert out.sequences.tolist() == plain.tolist()
    assert len(out.stats.accepted) > 2 and out.stats.accepted[1] > 0
    assert (out.stats.criterion, out.stats.lossless) == ("exact", True)
    alone = {"do_sample": True, "seed": 4, **prompt, "max_new_tokens": 8, "pad_token_id": 0}
    expected = gsd.generate(target, graph_config="plain", **alone)
    plain = {} if criterion in criteria.DRAWN else {"graph_config": "plain"}
    assert torch.equal(gsd.generate(target, criterion=criterion, **plain, **alone), expected)


@pytest.mark.parametrize("criterion", ["speculative", "block", "typical"])
def test_a_batch_is_its_sequences(criterion):
    """Padding, end-of-text tokens, and rows that finish early: every row as if it were alone, up to its key."""
    target = models.tiny(vocab_size=VOCAB, seed=3)
    draft = models.noised(target, 0.04)
    ended, lengths = 0, set()
    for seed in range(2):
        prompt = models.prompts(4, 8, seed=seed, vocab=VOCAB)
        options = {"eos_token_id": [2, 5], "max_new_tokens": 14, "seed": seed}
        together = generate(target, draft, criterion, prompt, **options).sequences
        for row in range(4):
            # The same prompt in every row, so that this row's sequence number is its own.
            pad = int((prompt["attention_mask"][row] == 0).sum())
            alone = {name: x[row : row + 1, pad:].expand(4, -1) for name, x in prompt.items()}
            text = generate(target, draft, criterion, alone, **options).sequences[row, 8 - pad :].tolist()
            mine = together[row, 8:].tolist()
            ends = [i for i, token in enumerate(mine) if token in (2, 5)]
            length = ends[0] + 1 if ends else len(mine)
            assert mine[:length] == text[:length], (seed, row)
            assert all(token == 0 for token in mine[length:])
            ended += bool(ends)
            lengths.add(length)
    assert ended >= 3 and len(lengths) >= 3


@pytest.mark.parametrize("criterion", ["speculative", "typical"])
def test_the_host_walk_agrees_with_the_device(criterion):
    """A processor that changes nothing takes the walk, one that is called per token changes what p is.

    One of transformers' own, so that a sequence walks as far as on the device: its text depends on where steps begin.
    """
    target, draft = pair()
    prompt = models.prompts(3, 8, seed=6, vocab=VOCAB)
    options = {"max_new_tokens": 20, "eos_token_id": 2, "temperature": 0.9, "top_k": 9}
    device = generate(target, draft, criterion, prompt, **options)

    nothing = RepetitionPenaltyLogitsProcessor(1.0)

    def never(ids, scores, **_):
        return torch.zeros(len(ids), dtype=torch.bool)

    processed = {"logits_processor": LogitsProcessorList([nothing]), "stopping_criteria": StoppingCriteriaList([never])}
    walked = generate(target, draft, criterion, prompt, **options, **processed, output_scores=True)
    assert walked.sequences.tolist() == device.sequences.tolist()
    assert walked.stats.accepted == device.stats.accepted and walked.stats.tokens_per_step > 1.2
    assert (walked.stats.criterion, walked.stats.lossless) == (criterion, criterion == "speculative")
    said = device.sequences[:, 8:]
    banned = int(said[said > 2].mode().values)  # no padding
    barred = generate(target, draft, criterion, prompt, **options, bad_words_ids=[[banned]])
    assert not (barred.sequences[:, 8:] == banned).any() and len(barred.stats.accepted) > 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"criterion": "greedy"},
            "criterion: expected 'exact', 'speculative', 'block', 'typical' or a gsd_kernels.Typical",
        ),
        (
            {"criterion": "speculative", "graph_config": "tree"},
            "graph_config: .* width is 4 instead of 1; pass .*chain",
        ),
        (
            {"criterion": "speculative", "graph_config": gsd.GraphConfig(width=1, branch=2, merge_context=-1)},
            "branch is 2",
        ),
        ({"criterion": "speculative", "graph_config": gsd.GraphConfig(width=1, branch=1)}, "merge_context is 1"),
        ({"criterion": "speculative", "graph_config": CHAIN.replace(history_depth=1)}, "history_depth is 1"),
        ({"criterion": "speculative", "draft_sources": ("model", "history")}, "draft_sources: .*leave it out"),
        ({"criterion": "block", "draft_sources": ("model", "history")}, 'draft_sources: criterion="block" drafts'),
        ({"criterion": "block", "graph_config": "graph"}, 'graph_config: criterion="block" needs a chain'),
        ({"criterion": "speculative", "draft_heads": None}, "draft_heads: .*leave them out"),
        ({"criterion": "speculative", "reference_ids": torch.tensor([3, 4])}, "reference_ids: .*leave them out"),
    ],
)
def test_refusals_name_the_argument_and_the_cure(arguments, message):
    target, draft = pair()
    if "draft_heads" in arguments:
        arguments = {**arguments, "draft_heads": gsd.DraftHeads.for_model(target, 1)}
    with pytest.raises(ValueError, match=message):
        gsd.generate(target, torch.tensor([[3, 4]]), assistant_model=draft, max_new_tokens=2, **arguments)


# Block verification, by enumeration.


TOKENS, DEPTH = 3, 3


def tables(seed: int, sharpness: float = 1.0) -> tuple[dict, dict]:
    """p and q, float64 [TOKENS], after every text of fewer than DEPTH + 1 tokens; some of their tokens impossible."""
    draw = np.random.default_rng(seed)
    texts = [text for size in range(DEPTH + 1) for text in itertools.product(range(TOKENS), repeat=size)]
    found = []
    for zero in (0, 1):
        weights = draw.dirichlet(np.full(TOKENS, sharpness), len(texts))
        weights[:: 5 + zero, zero] = 0
        found.append(dict(zip(texts, weights / weights.sum(1, keepdims=True), strict=True)))
    return found[0], found[1]


def as_rows(table: dict, text: tuple[int, ...]) -> torch.Tensor:
    """What a table says after every beginning of a text, float64 [1, len + 1, TOKENS]."""
    return torch.from_numpy(np.stack([table[text[:size]] for size in range(len(text) + 1)]))[None]


def stops(keep: list[float]) -> np.ndarray:
    """The probability that so many drafted tokens are accepted: the deepest test that succeeds, and none above it."""
    beyond, found = 1.0, []
    for h in reversed(keep):
        found.append(beyond * h)
        beyond *= 1 - h
    return np.array(found[::-1])


def emitted(p: dict, q: dict, by_block: bool) -> tuple[np.ndarray, float]:
    """The joint distribution of DEPTH + 1 tokens, those of a step and plain samples, and the step's mean length."""
    joint, length = np.zeros((TOKENS,) * (DEPTH + 1)), 0.0
    for text in itertools.product(range(TOKENS), repeat=DEPTH):
        drawn = np.prod([q[text[:i]][token] for i, token in enumerate(text)])
        if drawn == 0:
            continue
        rows = as_rows(p, text), as_rows(q, text)
        if by_block:
            keep, rest = criteria.block_verification(*rows, torch.tensor([[*text, -1]], dtype=torch.int32))
            ends, after = stops([1.0, *keep[0, 1:].tolist()]), rest[0].numpy()
        else:
            ratios = [min(1, p[text[:i]][token] / q[text[:i]][token]) for i, token in enumerate(text)]
            reached = np.cumprod([1, *ratios])
            ends = reached * (1 - np.array([*ratios, 0]))
            after = np.maximum(rows[0][0].numpy() - rows[1][0].numpy(), 0)
            after[-1] = p[text]
        length += drawn * (ends * np.arange(1, DEPTH + 2)).sum()
        for accepted, probability in enumerate(ends):
            if probability > 0:
                follows = drawn * probability * after[accepted] / after[accepted].sum()
                for token in range(TOKENS):
                    add(joint, p, (*text[:accepted], token), follows[token])
    return joint, length


def add(joint: np.ndarray, p: dict, text: tuple[int, ...], probability: float) -> None:
    """Add a text's probability, continued by the target's own."""
    if len(text) == DEPTH + 1:
        joint[text] += probability
        return
    for token in range(TOKENS):
        add(joint, p, (*text, token), probability * p[text][token])


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_joint_distribution_is_the_targets_and_no_step_is_shorter(sharpness):
    """By enumeration in float64; the ratio rule beside it, whose steps are never longer and sometimes shorter."""
    gains = []
    for seed in range(8):
        p, q = tables(seed, sharpness)
        target = np.zeros((TOKENS,) * (DEPTH + 1))
        add(target, p, (), 1.0)
        (block, long), (ratio, short) = (emitted(p, q, by_block) for by_block in (True, False))
        np.testing.assert_allclose(block, target, rtol=0, atol=1e-14)
        np.testing.assert_allclose(ratio, target, rtol=0, atol=1e-14)
        assert long >= short - 1e-12
        gains.append(long / short)
    assert max(gains) > 1.005


def test_where_tokens_are_processed_one_by_one_the_ratio_decides():
    """A processor sees a token's text before the next is known, so no block can be judged."""
    target, draft = pair()
    prompt = models.prompts(2, 7, seed=3, vocab=VOCAB)
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.1)])
    blocks, ratios = (
        generate(target, draft, criterion, prompt, logits_processor=processors)
        for criterion in ("block", "speculative")
    )
    assert blocks.stats.criterion == "speculative" and blocks.sequences.tolist() == ratios.sequences.tolist()


# Speculative sampling, by counting.


def joint_counts(options, tokens: int, backend: str):
    """How often each text of so many tokens came, and how many steps said 0, 1, 2, … tokens."""
    target, draft = pair()
    prompt = models.prompts(1, 5, seed=1, vocab=VOCAB)
    counts, accepted = np.zeros((VOCAB,) * tokens), np.zeros(5, dtype=int)
    for seed in range(2):
        out = generate(
            target,
            draft,
            "speculative",
            prompt,
            seed=seed,
            backend=backend,
            graph_config=gsd.GraphConfig.preset("chain", depth=tokens),
            max_new_tokens=tokens,
            num_return_sequences=DRAWS // 2,
            **options,
        )
        assert out.stats.criterion == "speculative" and out.stats.lossless
        np.add.at(counts, tuple(out.sequences[:, 5:].T.numpy()), 1)
        accepted[: len(out.stats.accepted)] += out.stats.accepted
    assert counts.sum() == DRAWS
    return counts, accepted


@functools.lru_cache
def joint_probabilities(index: int, tokens: int) -> np.ndarray:
    """The target's own probability of every text, by plain forwards and transformers' warpers."""
    target, _ = pair()
    options = {name: value for name, value in SAMPLING[index].items() if value}
    texts = models.prompts(1, 5, seed=1, vocab=VOCAB)["input_ids"]
    probabilities = torch.ones(1, dtype=torch.float64)
    for _ in range(tokens):
        with torch.no_grad():
            after = exact_probabilities(target(texts).logits[:, -1].float(), options)
        probabilities = (probabilities[:, None] * after).flatten()
        following = torch.arange(VOCAB).repeat(len(texts))[:, None]
        texts = torch.cat([texts.repeat_interleave(VOCAB, 0), following], 1)
    return probabilities.view((VOCAB,) * tokens).numpy()


def p_values(counts: np.ndarray, probabilities: np.ndarray) -> list[float]:
    """Of the whole text, and of every token alone."""
    found = [fit(counts.flatten(), probabilities.flatten())]
    for axis in range(counts.ndim):
        others = tuple(a for a in range(counts.ndim) if a != axis)
        found.append(fit(counts.sum(others), probabilities.sum(others)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("index", "tokens", "backend"), [(0, 1, "auto"), (0, 2, "auto"), (1, 3, "reference")])
def test_speculative_samples_the_target(index, tokens, backend):
    """The joint distribution of one, two and three tokens, emitted by steps that accept and reject."""
    counts, accepted = joint_counts(SAMPLING[index], tokens, backend)
    exact = joint_probabilities(index, tokens)
    assert min(p_values(counts, exact)) > P_VALUE
    if tokens > 1:
        assert accepted[1] > 0.1 * DRAWS, "too few drafted tokens were rejected for the test to mean something"
        assert accepted[tokens] > 0.1 * DRAWS, "too few were accepted"
    first = exact.sum(tuple(range(1, tokens)))
    for wrong in moved(first, 0.05):  # the statistic sees mass that was moved
        assert fit(counts.sum(tuple(range(1, tokens))), wrong) < P_VALUE
    if index == 1:
        assert (exact == 0).mean() > 0.5, "most texts are impossible, and fit() saw that none of them came"


def one_draft(p: np.ndarray, q: np.ndarray, draws: int):
    """(drafted, picked), int [draws] each: one token is drafted from q and decided on under p, at every position."""
    own = sampler(0, torch.arange(100, dtype=torch.int32))
    proposal = criteria.ChainProposal(own)
    criterion = criteria.SpeculativeSampling(own, proposal)
    streams = own.seed, proposal.own.seed, proposal.accept_seed
    assert len({int(seed) for seed in streams}) == 3, "target, draft and test draw from streams of their own"
    drafted, picked = [], []
    for position in range(draws // 100):
        positions = torch.full((100, 2), position, dtype=torch.int32) + torch.tensor([0, 1], dtype=torch.int32)
        q_logits, p_logits = (torch.from_numpy(x).log().expand(100, 1, -1) for x in (q, p))
        tokens, _ = proposal.draw(0, q_logits, positions[:, :1])
        picks = criterion.picks(chain_rows(tokens[..., 0]), p_logits.expand(-1, 2, -1), positions)
        drafted.append(tokens.flatten())
        picked.append(picks[:, 0])
    return torch.cat(drafted).numpy(), torch.cat(picked).numpy()


def test_the_acceptance_rule_by_hand():
    """Supports that overlap in part: p > 0 where q = 0, q > 0 where p = 0, and a draft's narrower vocabulary."""
    p = np.array([0.0, 0.1, 0.4, 0.2, 0.3, 0.0])
    q = np.array([0.2, 0.3, 0.4, 0.1, 0.0])  # one token fewer
    drafted, picked = one_draft(p, q, 10_000)
    wide = np.pad(q, (0, 1))
    assert fit(np.bincount(drafted, minlength=6), wide) > P_VALUE
    assert fit(np.bincount(picked, minlength=6), p) > P_VALUE
    # Acceptance with min(1, p/q), token by token; what is drawn instead has norm(max(0, p − q)).
    for token in np.flatnonzero(wide):
        tries = int((drafted == token).sum())
        hits = int(((drafted == token) & (picked == token)).sum())
        rate = min(1.0, p[token] / wide[token])
        assert abs(hits - rate * tries) <= 4 * math.sqrt(tries * rate * (1 - rate)), token
    rejected = picked[picked != drafted]
    residual = np.maximum(0, p - wide)
    assert fit(np.bincount(rejected, minlength=6), residual / residual.sum()) > P_VALUE
    assert len(rejected) == pytest.approx(residual.sum() * 10_000, rel=0.1)


# Typical acceptance.


def typical_of(p: np.ndarray, children: list[int], thresholds: gsd.Typical) -> tuple[int, int]:
    """(the target's own pick, what the criterion picks) after a root with the given children."""
    draws, count = sampler(1, torch.zeros(1, dtype=torch.int32)), len(children)
    rows = dataclasses.replace(
        chain_rows(torch.tensor([children], dtype=torch.int32)),
        parent_rows=torch.tensor([[-1] + [0] * count], dtype=torch.int32),
    )
    logits = torch.from_numpy(p).log().expand(1, count + 1, -1)
    positions = torch.full((1, count + 1), 9, dtype=torch.int32)
    own = criteria.ExactMatch(draws).picks(rows, logits, positions)
    picked = criteria.TypicalAcceptance(draws, thresholds).picks(rows, logits, positions)
    assert torch.equal(own[:, 1:], picked[:, 1:]), "leaves have no child to pick"
    return int(own[0, 0]), int(picked[0, 0])


@settings(max_examples=100, deadline=None)
@given(data=st.data(), vocab=st.integers(2, 9), sharp=st.floats(0.1, 3.0))
def test_the_rule_of_typical_acceptance(data, vocab, sharp):
    """Against the formula, number by number."""
    p = np.random.default_rng(data.draw(st.integers(0, 2**20))).dirichlet(np.full(vocab, 1 / sharp))
    p = p.astype(np.float32).astype(np.float64)
    p /= p.sum()
    children = data.draw(st.lists(st.integers(0, vocab - 1), unique=True, min_size=1, max_size=vocab))
    thresholds = gsd.Typical(data.draw(st.floats(0.001, 1.0)), data.draw(st.none() | st.floats(0.01, 4.0)))
    delta = math.sqrt(thresholds.epsilon) if thresholds.delta is None else thresholds.delta
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    threshold = min(thresholds.epsilon, delta * math.exp(-entropy))
    if min(abs(p[c] - threshold) for c in children) < 1e-5 or len({round(x, 6) for x in p}) < vocab:
        return  # a tie that float32 decides
    own, said = typical_of(p, children, thresholds)
    likely = [c for c in children if p[c] > threshold]
    assert said == (own if own in children or not likely else max(likely, key=lambda c: p[c]))


def test_typical_is_said_once_to_be_lossy(caplog):
    target, draft = pair()
    prompt = models.prompts(1, 6, vocab=VOCAB)
    criteria._warn.cache_clear()
    with caplog.at_level(logging.WARNING, logger="gsd_kernels"):
        for criterion in ("exact", "speculative", "typical", gsd.Typical(0.2)):
            assert generate(target, draft, criterion, prompt, max_new_tokens=4).stats.lossless == isinstance(
                criteria.resolve_criterion(criterion), str
            )
    assert [r.message for r in caplog.records if "lossy" in r.message] == [
        "criterion 'typical' is lossy: the output is not the target's own (stats.lossless is False)"
    ]
