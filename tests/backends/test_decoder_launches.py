"""What the CUDA decoder launches, and in which order; run by tests/block_code/rows_op.cpp, without a GPU."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from block_code import rows as block_code
from decoders import CUDA_SIZES, decoder
from ops.contracts.packed import packed_matrix
from torch import Tensor

from gsd_kernels.ops.decoder_rows import cuda
from gsd_kernels.ops.packed import BY_NAME

pytestmark = [
    pytest.mark.quick,
    pytest.mark.slow,
    pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING)),
]

HALF = torch.float16
SMALL = CUDA_SIZES["llama-64"]
LAYER = ["norm", "product", "attend", "combine", "product", "norm", "product", "product"]


def test_a_layer_is_eight_launches(tmp_path_factory):
    sizes = dataclasses.replace(SMALL, layers=3)
    weights, ids = decoder(sizes, HALF), torch.zeros(2, 5, dtype=torch.int32)
    caches = [[torch.zeros(2, 2, 40, 64, dtype=HALF) for _ in range(3)] for _ in range(2)]
    graph = (ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0])

    def launched(keep, states=(), count=5):
        first = [t[:, :count] if t.dim() > 1 and t.shape[1] == 5 else t for t in graph]
        return block_code.launches(tmp_path_factory, weights, *first, *caches, keep, states)

    whole = ["embed", *(3 * LAYER), "norm", "product"]
    assert launched(5) == launched(1) == launched(1, count=1) == whole
    assert launched(5, states=(0, 2)) == whole, "hidden states are copied by launches that are there"
    assert launched(1, states=(3,)) == [*whole[:-2], "norm", "norm", "product"], "those behind the last norm are not"
    assert launched(0) == ["embed", *(2 * LAYER), *LAYER[:2]], "of a prompt the last layer's keys suffice"
    assert launched(0, states=(3,)) == whole[:-1], "unless its states are read"


@pytest.mark.parametrize(("name", "group", "count"), [*((name, "0", 5) for name in CUDA_SIZES), ("qwen3-128", "1", 32)])
def test_products_turn_heads(tmp_path_factory, name, group, count, monkeypatch):
    """But packed ones, and those of groups of warps where heads are normed: a launch does it."""
    monkeypatch.setenv(cuda.GROUP, group)
    sizes, weights = CUDA_SIZES[name], decoder(CUDA_SIZES[name], HALF)
    ids = torch.zeros(1, count, dtype=torch.int32)
    cache = torch.zeros(1, sizes.kv_heads, 40, sizes.head_dim, dtype=HALF)
    rest = ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0], *2 * [[cache] * len(weights.layers)], 1, ()
    assert "turn" not in block_code.launches(tmp_path_factory, weights, *rest)
    part = packed_matrix(BY_NAME["int8"], *weights.layers[1].v.shape)
    mixed = dataclasses.replace(weights, layers=[weights.layers[0], dataclasses.replace(weights.layers[1], v=part)])
    assert block_code.launches(tmp_path_factory, mixed, *rest).count("turn") == 1
    if sizes.head_norms and group == "1":
        many = [t.repeat(1, 2, *[1] * (t.dim() - 2)) if torch.is_tensor(t) and t.dim() > 1 else t for t in rest]
        assert block_code.launches(tmp_path_factory, weights, *many).count("turn") == 2


@pytest.mark.parametrize(("batch", "count"), [(1, 64), (1, 256), (8, 128)])
def test_memory_does_not_grow_with_the_cache_beyond_what_states_may_take(tmp_path_factory, batch, count):
    sizes = dataclasses.replace(SMALL, heads=32, kv_heads=1)
    weights, ids = decoder(sizes, HALF), torch.zeros(batch, count, dtype=torch.int32)
    taken = []
    for capacity in (256, 4096, 131_072):
        caches = [torch.empty(1, 1, capacity, 64, dtype=HALF).expand(batch, -1, -1, -1)] * len(weights.layers)
        call = (weights, ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0], caches, caches, 1, ())
        taken.append(block_code.scratch_bytes(tmp_path_factory, *call))
    splits, state = (2, 24, 64), 4 * (64 + 5) * 32 * count * batch
    rest = taken[0] - min(MOST_STATES, splits[0] * state)
    for bytes_taken, number in zip(taken, splits, strict=True):
        assert bytes_taken - rest <= min(MOST_STATES, number * state) + 256


@pytest.mark.parametrize(("batch", "count", "early"), [(1, 1, True), (2, 16, True), (1, 33, False), (2, 17, False)])
def test_launches_begin_early_where_they_gain_by_it(tmp_path_factory, batch, count, early, monkeypatch):
    ids, caches = torch.zeros(batch, count, dtype=torch.int32), torch.zeros(batch, 2, 64, 64, dtype=HALF)
    call = (decoder(SMALL, HALF), ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0], [caches] * 2, [caches] * 2)
    assert block_code.begins_early(tmp_path_factory, *call, 1, ()) is early
    monkeypatch.setenv(cuda.GROUP, "1")
    assert block_code.begins_early(tmp_path_factory, *call, 1, ()), "groups of warps ask for weights before they wait"
    monkeypatch.setenv(cuda.OVERLAP, "0")
    assert not block_code.begins_early(tmp_path_factory, *call, 1, ())


@pytest.mark.parametrize(
    ("inner", "count", "keep", "megabytes"),
    [(104, 5, 5, 24), (104, 5, 0, 24), (104, 33, 1, 24), (48_000, 1, 1, 24), (48_000, 1, 1, 16), (104, 5, 5, 0)],
)
def test_products_ask_for_the_weights_of_the_next_one(tmp_path_factory, inner, count, keep, megabytes, monkeypatch):
    """Pieces lie inside its matrices and apart; together they are all of them, or of every split as much as may be."""
    most = megabytes << 20
    if megabytes != 24:
        monkeypatch.setenv(cuda.AHEAD, str(megabytes))
    sizes = dataclasses.replace(SMALL, inner=inner, hidden=512 if inner > 1000 else 64)
    weights, ids = decoder(sizes, HALF), torch.zeros(1, count, dtype=torch.int32)
    caches = [torch.zeros(1, sizes.kv_heads, 64, sizes.head_dim, dtype=HALF)] * len(weights.layers)
    call = (weights, ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0], caches, caches, keep, ())
    products = [product for layer in weights.layers for product in products_of(layer)] + [[weights.head]]
    if not keep:
        products = products[:-4]  # the last layer ends with its keys and values
    pieces = block_code.asked_ahead(tmp_path_factory, *call)
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
    weights, ids = decoder(SMALL, HALF), torch.zeros(1, 1, dtype=torch.int32)
    shared = [dataclasses.replace(layer, k=layer.q[: len(layer.k)]) for layer in weights.layers]
    caches = [torch.zeros(1, SMALL.kv_heads, 64, SMALL.head_dim, dtype=HALF)] * len(shared)
    rest = ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0], caches, caches, 1, ()
    pieces = block_code.asked_ahead(tmp_path_factory, dataclasses.replace(weights, layers=shared), *rest)
    asked = sorted(address for product, address, _ in pieces if product == 3)  # the first layer's last
    rows = [row.data_ptr() for matrix in products_of(shared[1])[0] for row in matrix]
    assert asked == sorted(rows), "of every row its beginning"


MOST_STATES = 64 << 20  # bytes: kStateBytes


def products_of(layer) -> list[list[Tensor]]:
    return [[layer.q, layer.k, layer.v], [layer.o], [layer.gate, layer.up], [layer.down]]
