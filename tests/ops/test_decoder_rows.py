"""decoder_rows: the compiled decoder computes what the reference does, and stays inside its tensors."""

from __future__ import annotations

import pytest
import torch
from ops.contracts.backends import needs_cpu
from ops.contracts.decoder import decoder_case

from gsd_kernels.ops.decoder_rows import decoder_rows

pytestmark = [pytest.mark.quick, needs_cpu]


def test_states_are_what_the_layers_read():
    """In the order that was asked for; of layer 0 the embeddings, of layer 1 what the reference passes on."""
    results = []
    for backend in ("cpu", "reference"):
        weights, case = decoder_case()
        results.append(decoder_rows(weights, **case, keep=0, states=(1, 0, 1), backend=backend))
        assert torch.equal(results[-1][2][1], weights.embedding[case["token_ids"].long()])
    (logits, hidden, states), (_, _, expected) = results
    assert states.shape == (3, 2, 5, 32) and logits.shape[1] == hidden.shape[1] == 0
    assert torch.equal(states[0], states[2]) and not torch.equal(states[0], states[1])
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
