"""Numbers of answers that JSON has not."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_a_token_that_is_ruled_out_has_a_number():
    import torch

    from gsd_kernels_serve.logprobs import entries_of

    log_probs = torch.tensor([[0.0, -torch.inf, -torch.inf]], dtype=torch.float32, device="cpu")
    (entry,) = entries_of(log_probs, torch.tensor([1], dtype=torch.int64, device="cpu"), 2)
    assert entry.log_prob == -9999.0 and [log_prob for _, log_prob in entry.top] == [0.0, -9999.0]
