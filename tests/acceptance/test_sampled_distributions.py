"""What is drawn has the target's distribution, and the warpers are transformers'."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from acceptance.distributions import P_VALUE, exact_probabilities, fit, moved, transformers_warpers

import gsd_kernels as gsd
from gsd_kernels.ops.sampling.reference import warp

DRAWS = 20_000

WARPERS = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.15},
    {"temperature": 0.8, "top_k": 9, "top_p": 0.95, "min_p": 0.05},
]


def one_step(logits: torch.Tensor, options: dict[str, float], seed: int) -> np.ndarray:
    """Counts of DRAWS picks after one distribution: 100 positions of 200 sequences."""
    picked = gsd.sample_rows(
        logits.expand(200, 100, -1),
        torch.arange(100, dtype=torch.int32).expand(200, -1).contiguous(),
        seed=torch.tensor(seed),
        sequence_ids=torch.arange(200, dtype=torch.int32),
        backend="reference",
        **options,
    )
    return np.bincount(picked.flatten().numpy(), minlength=logits.shape[-1])


@pytest.mark.parametrize("options", WARPERS, ids=str)
def test_one_step_distribution(options):
    logits = 1.5 * torch.randn(24, generator=torch.Generator().manual_seed(3))
    probabilities = exact_probabilities(logits, options).numpy()
    counts = one_step(logits, options, seed=2024)
    assert counts.sum() == DRAWS
    assert fit(counts, probabilities) > P_VALUE
    # This statistic sees 0.02 of the mass moved between two likely tokens: by a false expectation and a false sampler.
    assert (probabilities >= 0.05).sum() >= 2
    for wrong in moved(probabilities):
        assert fit(counts, wrong) < P_VALUE
        drawn = one_step(torch.from_numpy(wrong).log().float(), {"temperature": 1.0}, seed=7)
        assert fit(drawn, probabilities) < P_VALUE


@pytest.mark.parametrize("vocabulary", [7, 97, 1000])
def test_warpers_keep_what_transformers_keeps(vocabulary):
    gen = torch.Generator().manual_seed(vocabulary)
    for case in range(60):
        rng = random.Random(case)
        options = {
            "temperature": rng.choice([0.3, 0.7, 1.0, 1.7]),
            "top_k": rng.choice([0, 1, 5, 50, vocabulary, 10 * vocabulary]),
            "top_p": rng.choice([0.0, 0.1, 0.5, 0.9, 0.99, 1.0]),
            "min_p": rng.choice([0.0, 0.02, 0.2, 1.0]),
        }
        logits = rng.choice([0.5, 2.0, 8.0]) * torch.randn(4, 1, vocabulary, generator=gen)
        ours = warp(logits, **options)[:, 0]
        used = {k: v for k, v in options.items() if v and not (k == "top_p" and v == 1.0)}
        if options["top_p"] == 0.0:
            used["top_p"] = 0.0
        theirs = transformers_warpers(used)(torch.zeros(4, 1, dtype=torch.long), logits[:, 0].clone())
        assert torch.equal(ours > -torch.inf, theirs > -torch.inf), options
        kept = theirs > -torch.inf
        torch.testing.assert_close(ours[kept], theirs[kept], rtol=1e-6, atol=1e-6)
