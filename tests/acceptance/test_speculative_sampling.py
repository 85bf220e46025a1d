"""Speculative sampling is an exact sample of the target: distributions, the rule by hand, wrong rules seen."""

from __future__ import annotations

import functools
import math

import models
import numpy as np
import pytest
import torch
from acceptance.chains import DRAWS, SAMPLING, VOCAB, chain_rows, generate, pair, sampler
from acceptance.distributions import P_VALUE, exact_probabilities, fit, moved

import gsd_kernels as gsd
from gsd_kernels_hf.acceptance import criteria


def joint_counts(options, tokens: int, backend: str = "auto", criterion: str = "speculative"):
    """How often each text of so many tokens came, and how many steps said 0, 1, 2, … tokens."""
    target, draft = pair()
    prompt = models.prompts(1, 5, seed=1, vocab=VOCAB)
    counts, accepted = np.zeros((VOCAB,) * tokens), np.zeros(5, dtype=int)
    for seed in range(2):
        out = generate(
            target,
            draft,
            criterion,
            prompt,
            seed=seed,
            backend=backend,
            graph_config=gsd.GraphConfig.preset("chain", depth=tokens),
            max_new_tokens=tokens,
            num_return_sequences=DRAWS // 2,
            **options,
        )
        assert out.stats.criterion == criterion and out.stats.lossless
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


def one_draft(
    p: np.ndarray,
    q: np.ndarray,
    draws: int,
    seed: int = 0,
    claimed: np.ndarray | None = None,
    **warpers: float,
):
    """(drafted, picked), int [draws] each: one token is drafted from q and decided on under p, at every position.

    ``claimed`` is what the criterion takes for q.
    """
    own = sampler(seed, torch.arange(100, dtype=torch.int32), **warpers)
    proposal = criteria.ChainProposal(own)
    criterion = criteria.SpeculativeSampling(own, proposal)
    drafted, picked = [], []
    for position in range(draws // 100):
        positions = torch.full((100, 2), position, dtype=torch.int32) + torch.tensor([0, 1], dtype=torch.int32)
        q_logits, p_logits = (torch.from_numpy(x).log().expand(100, 1, -1) for x in (q, p))
        tokens, _ = proposal.draw(0, q_logits, positions[:, :1])
        if claimed is not None:
            proposal.distributions = [torch.from_numpy(claimed).float().expand(100, 1, -1)]
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
