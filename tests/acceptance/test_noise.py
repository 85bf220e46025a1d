"""The generator of the noise: known answers, tail mass, independence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gsd_kernels.ops.sampling import philox

# Random123's kat_vectors, philox4x32 with 10 rounds: counter, key, output (zeros, ones, digits of pi).
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(int(word, 16)) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, output):
    assert philox.philox4x32(words(key), words(counter)) == words(output)


def test_the_noise_is_that_generator():
    """Key: the 64-bit seed; counter: (token >> 2, position, sequence, 0); word: token & 3."""
    seed, position, sequence = -(2**63) + 12345, 77, 5
    noise = philox.gumbel_noise(torch.tensor(seed), torch.tensor([position]), torch.tensor([sequence]), 10)
    key = (torch.tensor(seed & 0xFFFFFFFF), torch.tensor((seed >> 32) & 0xFFFFFFFF))
    for token in range(10):
        counter = tuple(torch.tensor(c) for c in (token >> 2, position, sequence, 0))
        u = ((int(philox.philox4x32(key, counter)[token & 3]) >> 1) + 0.5) * 2.0**-31
        assert float(noise[0, token]) == pytest.approx(-np.log(-np.log1p(-u)), abs=1e-5)
        single = philox.gumbel_of(
            torch.tensor(seed), torch.tensor([position]), torch.tensor([sequence]), torch.tensor([[token]])
        )
        assert float(single) == float(noise[0, token])
