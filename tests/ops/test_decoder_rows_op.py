"""decoder_rows: the compiled decoder computes what the reference does, and stays inside its tensors."""

from __future__ import annotations

import pytest
import torch
from ops.contracts.backends import backend_param
from ops.contracts.decoder import decoder_case

from gsd_kernels.ops.decoder_rows import decoder_rows

pytestmark = backend_param("cpu").marks


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("threads", [1, 2])
def test_decoder_rows_equal_the_reference(dtype, atol, threads):
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
    assert logits.shape == (2, 3, 53) and logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, atol=atol, rtol=atol)
    for cache, other in zip(caches, expected_caches, strict=True):
        torch.testing.assert_close(cache, other, atol=atol, rtol=atol)


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
