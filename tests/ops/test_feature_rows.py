"""feature_rows: the compiled drafter computes what the reference does, which is the drafter's own modules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ops.contracts.backends import needs_cpu
from ops.contracts.decoder import STORED, WIRINGS, decoder_case, feature_case

from gsd_kernels.ops.feature_rows import feature_rows

pytestmark = [pytest.mark.quick, needs_cpu]


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


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_layers_store_keys_and_values_of_features_alone(dtype, most):
    stored = []
    for backend in ("cpu", "reference"):
        weights, case = feature_case(dtype, wiring=STORED)
        before = [t.clone() for t in (*case["k_caches"], *case["v_caches"])]
        found = feature_rows(weights, **case, keep=0, backend=backend)
        assert [tuple(t.shape) for t in found] == [(2, 0, len(weights.decoder.head)), (2, 0, 32), (2, 0, 32)]
        after = [*case["k_caches"], *case["v_caches"]]
        kept = torch.ones(2, 40, dtype=torch.bool).scatter(1, case["slots"].long(), False)
        for t, was in zip(after, before, strict=True):
            assert torch.equal(t.transpose(1, 2)[kept], was.transpose(1, 2)[kept])
        stored.append(after)
        for row in range(5):  # the same bits alone
            given = "token_ids", "features", "positions", "slots", "ancestor_mask"
            one = {n: case[n][:, row : row + 1] for n in given}
            fresh = {n: [torch.zeros_like(t) for t in case[n]] for n in ("k_caches", "v_caches")}
            feature_rows(weights, **{**case, **one, **fresh}, keep=0, backend=backend)
            place = one["slots"].long()[:, None, :, None].expand(-1, 2, -1, 16)
            for alone, among in zip((*fresh["k_caches"], *fresh["v_caches"]), after, strict=True):
                assert backend == "reference" or torch.equal(alone.gather(2, place), among.gather(2, place))
    for ours, other in zip(*stored, strict=True):
        assert (ours.float() - other.float()).norm() <= most * other.float().norm()


def test_who_stores_alone_asks_for_no_rows():
    weights, case = feature_case(wiring=STORED)
    with pytest.raises(RuntimeError, match="feature_norm: without one expected no projection, and keep 0; got 2"):
        feature_rows(weights, **case, keep=2, backend="cpu")


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
