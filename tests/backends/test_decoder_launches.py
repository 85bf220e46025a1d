"""What the CUDA decoders launch, and in which order; run by tests/block_code/rows_op.cpp, without a GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from block_code import rows as block_code
from decoders import CUDA_SIZES, Sizes, decoder
from ops.contracts.decoder import STORED, WIRINGS, reading_features
from ops.contracts.packed import packed_matrix
from torch import Tensor

from gsd_kernels.ops.decoder_rows import DecoderWeights, cuda
from gsd_kernels.ops.packed import BY_NAME

pytestmark = [
    pytest.mark.quick,
    pytest.mark.slow,
    pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING)),
]

HALF = torch.float16
SMALL = CUDA_SIZES["llama-64"]


def call(
    of: DecoderWeights, batch: int, count: int, cache: Tensor, keep: int = 1, states: tuple[int, ...] = ()
) -> tuple:
    """Arguments of ``decoder_rows``: rows of no meaning, and one cache that all layers have."""
    ids = torch.zeros(batch, count, dtype=torch.int32)
    rows = ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0]
    return (of, *rows, *2 * [[cache] * len(of.layers)], keep, states)


def empty(sizes: Sizes, batch: int = 1, capacity: int = 64) -> Tensor:
    return torch.zeros(batch, sizes.kv_heads, capacity, sizes.head_dim, dtype=HALF)


def test_a_layer_is_eight_launches(tmp_path_factory):
    sizes = dataclasses.replace(SMALL, layers=3)
    of, cache = decoder(sizes, HALF), empty(SMALL, 2)

    def launched(keep, states=(), count=5):
        return block_code.launches(tmp_path_factory, *call(of, 2, count, cache, keep, states))

    layer = ["norm", "product", "attend", "combine", "product", "norm", "product", "product"]
    whole = ["embed", *(3 * layer), "norm", "product"]
    assert launched(5) == launched(1) == launched(1, count=1) == whole
    assert launched(5, states=(0, 2)) == whole, "hidden states are copied by launches that are there"
    assert launched(1, states=(3,)) == [*whole[:-2], "norm", "norm", "product"], "those behind the last norm are not"
    assert launched(0) == ["embed", *(2 * layer), *layer[:2]], "of a prompt the last layer's keys suffice"
    assert launched(0, states=(3,)) == whole[:-1], "unless its states are read"


@pytest.mark.parametrize("wiring", WIRINGS)
def test_token_and_feature_are_one_launch(tmp_path_factory, wiring):
    of = reading_features(decoder(SMALL, HALF), wiring)
    _, ids, *rest, _, _ = call(of.decoder, 2, 5, empty(SMALL, 2))
    rows = (ids, torch.zeros(2, 5, SMALL.hidden, dtype=HALF), *rest)
    begin = ["pair", "product", *["norm", "product"] * wiring.startswith("projection")]
    layer = ["attend", "combine", "product", "norm", "product", "product"]  # behind q, k and v
    whole = [*begin, *layer, "norm", "product", *layer, "norm", "product"]
    assert block_code.feature_launches(tmp_path_factory, of, *rows, 5) == whole
    assert block_code.feature_launches(tmp_path_factory, of, *rows, 0) == whole[: -len(layer) - 2]


@pytest.mark.parametrize(("group", "name"), [("0", "llama-64"), ("0", "qwen3-128"), ("1", "qwen3-128")])
def test_a_layer_that_stores_features_is_one_launch(group, name, tmp_path_factory, monkeypatch):
    monkeypatch.setenv(cuda.GROUP, group)
    sizes = CUDA_SIZES[name]
    of = reading_features(decoder(sizes, HALF), STORED)
    _, ids, *rest, _, _ = call(of.decoder, 2, 20, empty(sizes, 2))
    features = torch.zeros(2, 20, sizes.hidden, dtype=HALF)
    found = block_code.feature_launches(tmp_path_factory, of, ids, features, *rest, 0)
    own = ["product", "turn"] if group == "1" and sizes.head_norms else ["product"]
    assert found == ["embed", *own, *own]


@pytest.mark.parametrize(("name", "group", "count"), [*((name, "0", 5) for name in CUDA_SIZES), ("qwen3-128", "1", 32)])
def test_products_turn_heads(tmp_path_factory, name, group, count, monkeypatch):
    """But packed ones, and those of groups of warps where heads are normed: a launch does it."""
    monkeypatch.setenv(cuda.GROUP, group)
    sizes, of = CUDA_SIZES[name], decoder(CUDA_SIZES[name], HALF)

    def turns(of: DecoderWeights, count: int = count) -> int:
        return block_code.launches(tmp_path_factory, *call(of, 1, count, empty(sizes))).count("turn")

    first, last = of.layers
    part = dataclasses.replace(last, v=packed_matrix(BY_NAME["int8"], *last.v.shape))
    assert turns(of) == 0 and turns(dataclasses.replace(of, layers=[first, part])) == 1
    if sizes.head_norms and group == "1":
        assert turns(of, 2 * count) == 2


@pytest.mark.parametrize(("batch", "count"), [(1, 64), (1, 256), (8, 128)])
def test_memory_does_not_grow_with_the_cache_beyond_what_states_may_take(tmp_path_factory, batch, count):
    of, taken = decoder(dataclasses.replace(SMALL, heads=32, kv_heads=1), HALF), []
    for capacity in (256, 4096, 131_072):
        cache = torch.empty(1, 1, capacity, 64, dtype=HALF).expand(batch, -1, -1, -1)
        taken.append(block_code.scratch_bytes(tmp_path_factory, *call(of, batch, count, cache)))
    splits, state, most = (2, 24, 64), 4 * (64 + 5) * 32 * count * batch, 64 << 20  # bytes: kStateBytes
    rest = taken[0] - min(most, splits[0] * state)
    for bytes_taken, number in zip(taken, splits, strict=True):
        assert bytes_taken - rest <= min(most, number * state) + 256


@pytest.mark.parametrize(("batch", "count", "early"), [(1, 1, True), (2, 16, True), (1, 33, False), (2, 17, False)])
def test_launches_begin_early_where_they_gain_by_it(tmp_path_factory, batch, count, early, monkeypatch):
    given = call(decoder(SMALL, HALF), batch, count, empty(SMALL, batch))
    assert block_code.begins_early(tmp_path_factory, *given) is early
    monkeypatch.setenv(cuda.GROUP, "1")
    assert block_code.begins_early(tmp_path_factory, *given), "groups of warps ask for weights before they wait"
    monkeypatch.setenv(cuda.OVERLAP, "0")
    assert not block_code.begins_early(tmp_path_factory, *given)


@pytest.mark.parametrize(
    ("inner", "count", "keep", "megabytes"),
    [(104, 5, 5, 24), (104, 5, 0, 24), (104, 33, 1, 24), (48_000, 1, 1, 24), (48_000, 1, 1, 16), (104, 5, 5, 0)],
)
def test_products_ask_for_the_weights_of_the_next_one(tmp_path_factory, inner, count, keep, megabytes, monkeypatch):
    """Pieces lie inside its matrices and apart; together they are all of them, or of every split what may be."""
    most = megabytes << 20
    if megabytes != 24:
        monkeypatch.setenv(cuda.AHEAD, str(megabytes))
    of = decoder(dataclasses.replace(SMALL, inner=inner, hidden=512 if inner > 1000 else 64), HALF)
    products = [product for layer in of.layers for product in products_of(layer)] + [[of.head]]
    if not keep:
        products = products[:-4]  # the last layer ends with its keys and values
    pieces = block_code.asked_ahead(tmp_path_factory, *call(of, 1, count, empty(SMALL), keep))
    if count > 32 or not megabytes:
        assert not pieces
        return
    for number, next_one in enumerate(products[1:]):
        asked = sorted((address, address + size) for product, address, size in pieces if product == number)
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(asked))
        places = [(matrix.data_ptr(), matrix.data_ptr() + matrix.nbytes) for matrix in next_one]
        assert all(any(first <= begin and end <= last for first, last in places) for begin, end in asked)
        assert all(begin % 16 == end % 16 == 0 for begin, end in asked)
        total, whole = sum(end - begin for begin, end in asked), sum(matrix.nbytes for matrix in next_one)
        assert total == whole if whole < most else most / 2 < total <= most
    assert max(product for product, *_ in pieces) == len(products) - 2, "nothing comes behind the last one"


def test_what_is_asked_ahead_of_matrices_that_share_memory_lies_inside_of_them(tmp_path_factory):
    of = decoder(SMALL, HALF)
    shared = [dataclasses.replace(layer, k=layer.q[: len(layer.k)]) for layer in of.layers]
    given = call(dataclasses.replace(of, layers=shared), 1, 1, empty(SMALL))
    pieces = block_code.asked_ahead(tmp_path_factory, *given)
    asked = sorted(address for product, address, _ in pieces if product == 3)  # the first layer's last
    rows = [row.data_ptr() for matrix in products_of(shared[1])[0] for row in matrix]
    assert asked == sorted(rows), "of every row its beginning"


def test_steps_that_nobody_takes_may_be_odd(tmp_path_factory):
    """Of the only sequence, or the only head."""
    of = decoder(Sizes(hidden=64, inner=64, heads=1, kv_heads=1, head_dim=64, layers=1), HALF)
    cache = torch.zeros(40 * 64, dtype=HALF).as_strided((1, 1, 40, 64), (2563, 2561, 64, 1))
    cuda.check_caches(of, [cache], [cache])
    assert block_code.launches(tmp_path_factory, *call(of, 1, 1, cache))


def products_of(layer) -> list[list[Tensor]]:
    return [[layer.q, layer.k, layer.v], [layer.o], [layer.gate, layer.up], [layer.down]]
