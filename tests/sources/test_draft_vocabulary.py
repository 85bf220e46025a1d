"""Draft tokens ranked among themselves, or among the target's, are the same candidates."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from gsd_kernels_hf.records import Sampler
from gsd_kernels_hf.sources.draft_vocabulary import DraftVocabulary

SIZE = 61


def sampler_of(temperature: float) -> Sampler:
    off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    return Sampler(torch.tensor(3), torch.arange(2, dtype=torch.int32), {"temperature": temperature, **off})


def ids_of(count: int, seed: int, order: str) -> torch.Tensor:
    ids = torch.randperm(SIZE, generator=torch.Generator().manual_seed(seed))[:count]
    return ids.sort().values if order == "ascending" else ids


@given(
    count=st.integers(1, SIZE),
    branch=st.integers(1, 8),
    seed=st.integers(0, 99),
    order=st.sampled_from(["ascending", "shuffled"]),
    target=st.sampled_from([SIZE, 40]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    temperature=st.sampled_from([0.0, 0.8]),
)
def test_candidates_are_those_of_the_whole_vocabulary(count, branch, seed, order, target, dtype, temperature):
    ids, sampler = ids_of(count, seed, order), sampler_of(temperature)
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randint(-4, 5, (2, 3, count), generator=gen).to(dtype)  # many are equal
    positions = torch.randint(0, 99, (2, 3), generator=gen, dtype=torch.int32)
    vocabulary = DraftVocabulary(ids, SIZE, target)
    whole = torch.full((2, 3, SIZE), -torch.inf, dtype=dtype)
    for column, token in enumerate(ids.tolist()):
        whole[..., token] = logits[..., column]
    assert torch.equal(vocabulary.whole(logits), whole[..., :target])
    tokens, log_probs = vocabulary.ranked(sampler, logits, positions, branch)
    expected, expected_log_probs = sampler.candidates(whole[..., :target], positions, branch)
    found = expected_log_probs.isfinite()
    assert torch.equal(tokens[found], expected[found]) and tokens.dtype == torch.int32
    assert not log_probs[~found].isfinite().any()
    torch.testing.assert_close(log_probs[found], expected_log_probs[found], atol=1e-5, rtol=1e-5)
