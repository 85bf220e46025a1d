"""What is drawn has the target's distribution, and the warpers are transformers'."""

from __future__ import annotations

import functools
import random

import models
import numpy as np
import pytest
import torch
from acceptance.distributions import P_VALUE, exact_probabilities, fit, moved, transformers_warpers

import gsd_kernels as gsd
from gsd_kernels.ops.sampling.reference import warp

VOCAB = 32
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


@functools.lru_cache
def pair():
    """Small: it forwards some 100,000 rows, and what is shown of distributions depends on no size."""
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    target = models.endless(vocab_size=VOCAB, head_dim=8, **sizes)
    return target, models.noised(target, 0.01)


@pytest.mark.slow
def test_two_step_distribution_through_accepted_paths():
    """Joint distribution of two tokens of 20,000 texts, both mostly emitted by one speculative step."""
    target, draft = pair()
    prompt = models.prompts(1, 5, seed=1, vocab=VOCAB)["input_ids"]
    options = WARPERS[5]
    joint, drawn, together = np.zeros((VOCAB, VOCAB)), 0, 0
    config = gsd.GraphConfig(depth=2, width=2, branch=3, max_rows=6, merge_context=0)
    for seed in range(5):
        out = gsd.generate(
            target,
            prompt,
            assistant_model=draft,
            graph_config=config,
            backend="reference",
            seed=seed,
            do_sample=True,
            max_new_tokens=2,
            num_return_sequences=DRAWS // 5,
            return_dict_in_generate=True,
            **options,
        )
        np.add.at(joint, tuple(out.sequences[:, 5:].T.numpy()), 1)
        drawn += len(out.sequences)
        together += out.stats.accepted[2]
    assert drawn == DRAWS and together > 0.3 * DRAWS
    with torch.no_grad():
        first = exact_probabilities(target(prompt).logits[0, -1].float(), {k: v for k, v in options.items() if v})
        longer = torch.cat([prompt.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], 1)
        second = exact_probabilities(target(longer).logits[:, -1].float(), {k: v for k, v in options.items() if v})
    exact = (first[:, None] * second).numpy()
    assert fit(joint.sum(1), first.numpy()) > P_VALUE
    assert fit(joint.flatten(), exact.flatten()) > P_VALUE
    for wrong in moved(first.numpy()):
        assert fit(joint.sum(1), wrong) < P_VALUE
    for wrong in moved(exact.flatten()):
        assert fit(joint.flatten(), wrong) < P_VALUE


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


def test_ties_at_a_threshold_are_all_kept():
    logits = torch.tensor([[[3.0, 2.0, 2.0, 2.0, 1.0, -torch.inf]]])
    for options in ({"top_k": 2}, {"top_p": 0.5}, {"top_p": 0.6}):
        kept = warp(logits, 1.0, options.get("top_k", 0), options.get("top_p", 1.0), 0.0)[0, 0] > -torch.inf
        assert kept.tolist() == [True, True, True, True, False, False], options


def test_parameters_may_differ_by_sequence():
    logits = torch.randn(4, 3, VOCAB, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(3, dtype=torch.int32).expand(4, -1).contiguous()
    arguments = {"seed": torch.tensor(3), "backend": "reference"}
    mixed = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0]),
        "top_k": torch.tensor([3, 0, 5, 2]),
        "top_p": torch.tensor([1.0, 0.5, 1.0, 0.9]),
        "min_p": torch.tensor([0.0, 0.1, 0.0, 0.3]),
    }
    ids = torch.arange(4, dtype=torch.int32)
    together = gsd.sample_rows(logits, positions, sequence_ids=ids, **arguments, **mixed)
    for b in range(4):
        alone = gsd.sample_rows(
            logits[b : b + 1],
            positions[:1],
            sequence_ids=ids[b : b + 1],
            **arguments,
            **{name: value[b].item() for name, value in mixed.items()},
        )
        assert torch.equal(together[b : b + 1], alone)
    assert torch.equal(together[0], logits[0].argmax(-1).int())
