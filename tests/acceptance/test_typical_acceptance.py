"""Typical acceptance: the rule number by number, and what is said of its loss."""

from __future__ import annotations

import dataclasses
import logging
import math

import models
import numpy as np
import torch
from acceptance.chains import VOCAB, chain_rows, generate, pair, sampler
from hypothesis import given, settings
from hypothesis import strategies as st

import gsd_kernels as gsd
from gsd_kernels_hf.acceptance import criteria


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
