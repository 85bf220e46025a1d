"""Large answers: their JSON, and who makes it."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.slow

ROWS = [{"token": "\u044f", "top": [{"a": -1.5, "bytes": [1, 2]}]}, {}, []]
VALUE = {"choices": [{"logprobs": {"content": ROWS, "refusal": None}, "n": 1}, None], "text": 'x"\u2028', "none": []}


@pytest.mark.parametrize("depth", range(8))
@pytest.mark.parametrize("ascii", [True, False])
def test_spelled_in_parts_it_is_the_same_json(depth, ascii):
    from gsd_kernels_serve.spelling import Spelled, spelled

    found = spelled(VALUE, depth, ascii=ascii)
    assert found == json.dumps(VALUE, ensure_ascii=ascii, separators=(",", ":"))
    within = {"a": [{"b": Spelled(found)}]}
    assert json.loads(spelled(within, 4, ascii=ascii)) == {"a": [{"b": VALUE}]}
    with pytest.raises(ValueError):
        spelled({"a": float("nan")}, depth)


def test_a_token_that_is_ruled_out_has_a_number():
    import torch

    from gsd_kernels_serve.logprobs import entries_of

    log_probs = torch.tensor([[0.0, -torch.inf, -torch.inf]], dtype=torch.float32, device="cpu")
    (entry,) = entries_of(log_probs, torch.tensor([1], dtype=torch.int64, device="cpu"), 2)
    assert entry.log_prob == -9999.0 and [log_prob for _, log_prob in entry.top] == [0.0, -9999.0]
