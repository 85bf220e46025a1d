"""decoder_rows: the compiled decoder computes what the reference does, and stays inside its tensors."""

from __future__ import annotations

import pytest
import torch
from ops.contracts.backends import backend_param
from ops.contracts.decoder import decoder_case

from gsd_kernels.ops.decoder_rows import decoder_rows

pytestmark = [pytest.mark.quick, *backend_param("cpu").marks]


# Relative. In bfloat16 some levels round the weights of attention too, as PyTorch's attention does.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_decoder_rows_equal_the_reference(dtype, most, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        results = []
        for backend in ("cpu", "reference"):
            weights, case = decoder_case(dtype)
            results.append(
                (decoder_rows(weights, **case, keep=3, backend=backend)[0], case["k_caches"] + case["v_caches"])
            )
    finally:
        torch.set_num_threads(before)
    (logits, caches), (expected, expected_caches) = results
    assert logits.shape == (2, 3, 53) and logits.dtype == dtype
    for ours, other in zip((logits, *caches), (expected, *expected_caches), strict=True):
        assert (ours.float() - other.float()).norm() <= most * other.float().norm()


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
    with pytest.raises(RuntimeError, match=r"states: expected layers 0 \.\.\. 2"):
        decoder_rows(weights, **case, keep=0, states=(3,))


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("token_ids", 50, "token_ids: 50 is outside the vocabulary of 50"),
        ("slots", 40, "slots: 40 is outside the cache's 40"),
        ("kv_len", 41, "kv_len: the prefix"),
    ],
)
def test_decoder_rows_outside_a_tensor_are_refused(name, value, match):
    weights, case = decoder_case()
    case[name] = case[name].clone()
    case[name][-1] = value
    with pytest.raises(RuntimeError, match=match):
        decoder_rows(weights, **case, keep=1, backend="cpu")
