"""Block verification: the paper's algorithm, exact by enumeration, more tokens than the ratio rule, whole texts."""

from __future__ import annotations

import itertools

import models
import numpy as np
import pytest
import torch
from acceptance.chains import VOCAB, generate, pair
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from gsd_kernels_hf.acceptance import criteria

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
