"""feature_rows: the compiled drafter computes what the reference does, which is the drafter's own modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.contracts.backends import backend_param
from ops.contracts.decoder import WIRINGS, decoder_case, feature_case

from gsd_kernels.ops.feature_rows import feature_rows

pytestmark = [pytest.mark.quick, *backend_param("cpu").marks]


# Relative. In bfloat16 some levels round the weights of attention too, as PyTorch's attention does.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("layers", [1, 2])
def test_feature_rows_equal_the_reference(dtype, most, wiring, layers):
    for keep in (0, 3, 5):
        results = []
        for backend in ("cpu", "reference"):
            weights, case = feature_case(dtype, layers, wiring)
            found = feature_rows(weights, **case, keep=keep, backend=backend)
            results.append((*found, *case["k_caches"], *case["v_caches"]))
        assert [tuple(t.shape) for t in results[0][:3]] == [(2, keep, 63), (2, keep, 32), (2, keep, 32)]
        for ours, other in zip(*results, strict=True):
            assert (ours.float() - other.float()).norm() <= most * other.float().norm()


@pytest.mark.parametrize("wiring", WIRINGS)
def test_a_row_has_the_same_bits_alone(wiring):
    weights, case = feature_case(torch.bfloat16, 1, wiring)
    together = feature_rows(weights, **case, keep=5, backend="cpu")
    rows = {"token_ids", "features", "positions", "slots", "ancestor_mask"}
    for row in range(5):  # behind its ancestors, which lie in the caches by now
        one = {name: value[:, row : row + 1] if name in rows else value for name, value in case.items()}
        for alone, among in zip(feature_rows(weights, **one, keep=1, backend="cpu"), together, strict=True):
            assert torch.equal(alone[:, 0], among[:, row])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"matrix": torch.zeros(32, 32)}, "projection: expected rows of 64, got 32"),
        ({"matrix": torch.zeros(16, 64)}, "projection: expected 32 contiguous rows"),
        ({"token_norm": torch.ones(31)}, "token norm: expected .32."),
        ({"bias": torch.ones(31)}, "projection bias: expected .32."),
    ],
    ids=str,
)
def test_a_wrong_projection_is_refused(change, match):
    weights, case = feature_case(layers=1, wiring="projection")
    weights = replace(weights, projection=replace(weights.projection, **change))
    with pytest.raises(RuntimeError, match=match):
        feature_rows(weights, **case, keep=1, backend="cpu")


def test_a_first_layer_that_reads_no_features_is_refused():
    weights, case = feature_case(layers=1)
    narrow, _ = decoder_case()
    weights = replace(weights, decoder=replace(weights.decoder, layers=narrow.layers[:1]))
    with pytest.raises(RuntimeError, match="q: expected rows of 64, got 32"):
        feature_rows(weights, **case, keep=1, backend="cpu")
