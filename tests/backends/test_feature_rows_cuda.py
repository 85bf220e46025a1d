"""The CUDA decoder of drafters that read features: what it refuses, what it launches, what it computes.

As test_decoder_rows_cuda.py, of which it has the devices.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch
from block_code import rows as block_code
from decoders import VOCAB, Sizes, Text, check_alike, decoder, random_parents, random_tokens, tree
from ops.contracts.decoder import STORED, WIRINGS, reading_features

from gsd_kernels import backends
from gsd_kernels.ops.feature_rows import FeatureWeights, cuda, feature_rows

pytestmark = pytest.mark.quick

HALF, BFLOAT16 = torch.float16, torch.bfloat16
SIZES = dict(
    zip(
        WIRINGS,
        (
            Sizes(hidden=64, inner=104, heads=4, kv_heads=2, head_dim=64),
            Sizes(hidden=72, inner=176, heads=2, kv_heads=1, head_dim=64, bias=True),
            Sizes(hidden=104, inner=40, heads=3, kv_heads=1, head_dim=128, head_norms=True),
            Sizes(hidden=48, inner=136, heads=2, kv_heads=2, head_dim=128, window=9),
        ),
        strict=True,
    )
)
LAYER = ["attend", "combine", "product", "norm", "product", "product"]  # behind q, k and v
CASES = [(wiring, (HALF, BFLOAT16)[i % 2]) for i, wiring in enumerate(WIRINGS)]


@dataclass
class FeatureText(Text):
    """A text whose rows have features, by their tokens."""

    others: list[torch.Tensor] = field(default_factory=list)  # what the calls returned beside logits

    @property
    def device(self) -> torch.device:
        return self.weights.feature_norm.device

    def forward(self, ids, *rows, keep, spoiled, backend):
        gen = torch.Generator().manual_seed(3)
        table = torch.randn(VOCAB, self.sizes.hidden, generator=gen).to(self.device, self.dtype)
        found = feature_rows(self.weights, ids, table[ids.long()], *rows, keep=keep, backend=backend)
        self.others = list(found[1:])
        return found


def text(wiring: str, dtype: torch.dtype, pads: list[int], device: str, capacity=80, backend="cuda") -> FeatureText:
    weights = reading_features(decoder(SIZES[wiring], dtype, lambda t: t.to(device)), wiring)
    return FeatureText(weights, SIZES[wiring], dtype, pads, capacity, backend)


@pytest.fixture(params=block_code.DEVICES)
def device(request, monkeypatch, tmp_path_factory):
    """Where ``backend="cuda"`` takes its tensors."""
    if request.param == "cpu":
        block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    return request.param


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"feature_norm": torch.ones(104)}, TypeError, "feature_norm: .*the embedding's bfloat16, got float32; use"),
        ({"matrix": torch.zeros(208, 104).T.bfloat16()}, ValueError, "projection: .*a contiguous tensor"),
        ({"token_norm": torch.ones(104).half()}, TypeError, "token_norm: .*the embedding's bfloat16, got float16; use"),
        ({"bias": torch.zeros(105).bfloat16()[1:]}, ValueError, "projection_bias: .*a multiple of 16 bytes"),
    ],
)
def test_weights_that_the_kernels_do_not_take_are_named(change, error, match):
    weights = reading_features(decoder(SIZES["projection"], BFLOAT16), "projection")
    cuda.check(weights)
    if "feature_norm" in change:
        weights = replace(weights, **change)
    else:
        weights = replace(weights, projection=replace(weights.projection, **change))
    with pytest.raises(error, match=match):
        cuda.check(weights)


def test_auto_never_takes_it(monkeypatch):
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, _: None if name != "cpu" else "absent")
    assert feature_rows.chosen("auto", torch.device("cuda")) is feature_rows.reference
    assert feature_rows.chosen("cuda", torch.device("cuda")) is cuda.feature_rows


@pytest.mark.slow
@pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING))
@pytest.mark.parametrize("wiring", WIRINGS)
def test_token_and_feature_are_one_launch(tmp_path_factory, wiring):
    case = text(wiring, HALF, [0, 0], "cpu", 40)
    ids = torch.zeros(2, 5, dtype=torch.int32)
    features = torch.zeros(2, 5, case.sizes.hidden, dtype=HALF)
    rows = (ids, features, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0], *case.caches)
    begin = ["pair", "product"]
    if wiring.startswith("projection"):
        begin += ["norm", "product"]
    whole = [*begin, *LAYER, "norm", "product", *LAYER, "norm", "product"]
    assert block_code.feature_launches(tmp_path_factory, case.weights, *rows, 5) == whole
    assert block_code.feature_launches(tmp_path_factory, case.weights, *rows, 0) == whole[: -len(LAYER) - 2]


@pytest.mark.parametrize(("wiring", "dtype"), CASES, ids=str)
def test_it_equals_the_reference_and_the_cpus_operator(device, wiring, dtype):
    results, (sees, depths) = [], tree(random_parents(21))
    for backend, where in (("cuda", device), ("reference", device), ("cpu", "cpu")):
        if backends.unavailable_reason(backend, torch.device(where)) is not None:
            continue
        case = text(wiring, dtype, [0, 3], where, backend=backend)
        if backend == "reference":
            for cache in (*case.caches[0], *case.caches[1]):
                cache.zero_()  # it reads every slot
        case.read(random_tokens(2, 40), 30)
        logits = case.rows(random_tokens(2, 21, 1), sees, depths, 0, 21, keep=17)
        results.append([t.cpu() for t in (logits, *case.others)])
    check_alike(results, dtype)


@pytest.mark.parametrize(("wiring", "dtype"), [(wiring, dtype) for wiring, dtype in CASES if "feature" in wiring])
def test_a_row_alone_among_others_and_committed(device, wiring, dtype):
    count, pads, parents = 35, [0, 5], random_parents(35)
    prompt, tokens, (sees, depths) = random_tokens(2, 19), random_tokens(2, count, 1), tree(parents)

    def logits(sequences: list[int], step: int, last: int = count):
        case = text(wiring, dtype, [pads[b] for b in sequences], device)
        case.read(prompt[sequences], step)
        of = [case.rows(tokens[sequences], sees, depths, i, min(last, i + step)) for i in range(0, last, step)]
        return torch.cat(of, 1), case

    whole, _ = logits([0, 1], count)
    assert whole.isfinite().all()
    assert torch.equal(logits([0, 1], 17)[0], whole)
    alone, case = logits([1], 1, 3)
    assert torch.equal(alone, whole[[1], :3])
    path = sorted(torch.nonzero(sees[int(depths.argmax())]).flatten().tolist(), key=lambda node: int(depths[node]))
    assert len(path) > 4
    assert torch.equal(case.read(tokens[[1]][:, path], 2), whole[[1]][:, path])


@pytest.mark.slow
@pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING))
@pytest.mark.parametrize(("group", "norms"), [("0", "feature"), ("0", "projection"), ("1", "projection")])
def test_a_layer_that_stores_features_is_one_launch(group, norms, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("GSD_KERNELS_ROWS_GROUP", group)
    weights, sizes = stored(norms, HALF, "cpu")
    rows = torch.zeros(2, 20, dtype=torch.int32)
    graph = rows, rows, rows[..., None], rows, rows[:, 0], rows[:, 0]
    caches = Text(weights.decoder, sizes, HALF, [0, 0], 40).caches
    found = block_code.feature_launches(
        tmp_path_factory, weights, rows, torch.zeros(2, 20, sizes.hidden, dtype=HALF), *graph, *caches, 0
    )
    own = ["product", "turn"] if group == "1" and sizes.head_norms else ["product"]
    assert found == ["embed", *own, *own]


def stored(norms: str, dtype: torch.dtype, device: str) -> tuple[FeatureWeights, Sizes]:
    """A block drafter of sizes that another wiring has."""
    sizes = SIZES[norms]
    return reading_features(decoder(sizes, dtype, lambda t: t.to(device)), STORED), sizes


@pytest.mark.parametrize(("norms", "dtype"), CASES, ids=str)
@pytest.mark.parametrize("group", ["0", "1"])
def test_features_are_stored_as_the_reference_does_and_alone(device, norms, dtype, group, monkeypatch):
    """Errors against the reference; and the same bits in one call and piece by piece."""
    monkeypatch.setenv("GSD_KERNELS_ROWS_GROUP", group)
    gen = torch.Generator().manual_seed(5)
    weights, sizes = stored(norms, dtype, device)
    count, batch = 37, 2
    features = torch.randn(batch, count, sizes.hidden, generator=gen).to(device, dtype)
    slots = torch.stack([torch.randperm(60, generator=gen)[:count] for _ in range(batch)]).int().to(device)
    found = []
    for backend, pieces in (("cuda", [count]), ("cuda", [1, 16, 20]), ("reference", [count])):
        shape = (batch, sizes.kv_heads, 60, sizes.head_dim)
        caches = [[torch.zeros(shape, dtype=dtype, device=device) for _ in weights.decoder.layers] for _ in range(2)]
        for at, feature in zip(slots.split(pieces, 1), features.split(pieces, 1), strict=True):
            at, kv = at.contiguous(), at.new_zeros(batch)
            graph = at + 3, at, at[..., None].contiguous(), at, kv, kv
            found_none = feature_rows(weights, at, feature, *graph, *caches, keep=0, backend=backend)
            assert [t.shape[1] for t in found_none] == [0, 0, 0]
        found.append([t.cpu() for t in (*caches[0], *caches[1])])
    for whole, parts, exact in zip(*found, strict=True):
        assert torch.equal(whole, parts)
        assert (whole.float() - exact.float()).norm() <= 4e-3 * exact.float().norm()
        assert (whole == 0).all(-1).sum() == (60 - count) * batch * sizes.kv_heads
