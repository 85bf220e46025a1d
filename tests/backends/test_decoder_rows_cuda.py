"""The CUDA decoder: what it refuses and what it computes; test_decoder_launches.py has what it launches.

Cases of ``blocks`` run the kernels' source on a CPU, blocks in any order, their threads as fibers
(tests/block_code/rows_op.cpp); those of ``gpu`` run on one.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys

import pytest
import torch
from block_code import rows as block_code
from decoders import CUDA_SIZES, Sizes, Text, check_alike, check_marks, decoder, random_parents, random_tokens, tree
from ops.contracts.packed import packed_matrix
from torch import Tensor

from gsd_kernels import backends
from gsd_kernels.graph import pack_bits
from gsd_kernels.ops.decoder_rows import DecoderWeights, cuda, decoder_rows
from gsd_kernels.ops.decoder_rows.weights import MATRICES
from gsd_kernels.ops.packed import BY_NAME, PackedMatrix

pytestmark = pytest.mark.quick

HALF, BFLOAT16 = torch.float16, torch.bfloat16
DTYPES = (HALF, BFLOAT16)
SMALL = CUDA_SIZES["llama-64"]


# What is refused, and how it is chosen.


@pytest.mark.parametrize(
    ("sizes", "dtype", "change", "error", "match"),
    [
        (SMALL, torch.float32, {}, TypeError, "embedding: .*expects float16 or bfloat16, got float32; use backend="),
        (Sizes(hidden=64, inner=64, head_dim=80), HALF, {}, ValueError, "q: .*heads of 64 or 128, got 80; use"),
        (Sizes(hidden=68, head_dim=64), HALF, {}, ValueError, "embedding: .*rows of a multiple of 8, got 68; use"),
        (Sizes(hidden=64, inner=77, head_dim=64), HALF, {}, ValueError, r"layers\[0\].down: .*multiple of 8, got 77"),
        (SMALL, HALF, {"final_norm": torch.ones(64)}, TypeError, "final_norm: .*the embedding's float16, got float32"),
        (
            SMALL,
            HALF,
            {"head": torch.zeros(63 * 64 + 1, dtype=HALF)[1:].view(63, 64)},
            ValueError,
            r"head: .*a multiple of 16 bytes; pass its .clone\(\)",
        ),
        (SMALL, HALF, {"head": torch.zeros(64, 64, dtype=HALF).T}, ValueError, "head: .*a contiguous tensor"),
    ],
)
def test_weights_that_the_kernels_do_not_take_are_named(sizes, dtype, change, error, match):
    with pytest.raises(error, match=match):
        cuda.check(dataclasses.replace(decoder(sizes, dtype), **change))


@pytest.mark.parametrize(
    ("matrix", "error", "match"),
    [
        (
            packed_matrix(BY_NAME["q4_0"], 63, 64),
            TypeError,
            "head: .*dense matrices or packed ones of q8_0, int8, uint8, int4, int4_offset, got q4_0; use backend=",
        ),
        (
            PackedMatrix(BY_NAME["int8"], torch.zeros(63, 64, dtype=torch.int8), 64, torch.ones(63, 16)),
            ValueError,
            "head: .*groups of a multiple of 8 weights, got 4; use backend=",
        ),
        (
            PackedMatrix(
                BY_NAME["int8"], torch.zeros(63 * 64 + 8, dtype=torch.int8)[8:].view(63, 64), 64, torch.ones(63, 1)
            ),
            ValueError,
            r"head: .*a multiple of 16 bytes; pass its .clone\(\)",
        ),
    ],
)
def test_packed_matrices_that_the_kernels_do_not_take_are_named(matrix, error, match):
    weights = decoder(SMALL, HALF)
    cuda.check(dataclasses.replace(weights, head=packed_matrix(BY_NAME["q8_0"], 63, 64)))
    with pytest.raises(error, match=match):
        cuda.check(dataclasses.replace(weights, head=matrix))


@pytest.mark.parametrize(
    ("cache", "error", "match"),
    [
        (torch.zeros(1, 2, 40, 64), TypeError, r"v_caches\[1\]: .*the weights' float16, got float32"),
        (torch.zeros(5121, dtype=HALF)[1:].view(1, 2, 40, 64), ValueError, r"v_caches\[1\]: .*multiples of 16 bytes"),
        (
            torch.zeros(1, 2, 40, 65, dtype=HALF)[..., :64],
            ValueError,
            r"v_caches\[1\]: .*strides \[5200, 26",
        ),
    ],
)
def test_caches_that_the_kernels_do_not_take_are_named(cache, error, match):
    weights, fine = decoder(SMALL, HALF), torch.zeros(1, 2, 40, 64, dtype=HALF)
    cuda.check_caches(weights, [fine] * 2, [fine.transpose(1, 2).contiguous().transpose(1, 2)] * 2)
    with pytest.raises(error, match=match):
        cuda.check_caches(weights, [fine] * 2, [fine, cache])


@pytest.mark.slow
@pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING))
def test_steps_that_nobody_takes_may_be_odd(tmp_path_factory):
    """Of the only sequence, or the only head."""
    sizes = Sizes(hidden=64, inner=64, heads=1, kv_heads=1, head_dim=64, layers=1)
    weights, ids = decoder(sizes, HALF), torch.zeros(1, 1, dtype=torch.int32)
    caches = [torch.zeros(40 * 64, dtype=HALF).as_strided((1, 1, 40, 64), (2563, 2561, 64, 1))]
    cuda.check_caches(weights, caches, caches)
    call = (weights, ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0], caches, caches, 1, ())
    assert block_code.launches(tmp_path_factory, *call)


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or newer, got 7\.5; use backend='reference'"):
        cuda.check_device(torch.device("cuda", 0))
    cuda.check_device(torch.device("cpu"))


def test_auto_never_takes_it(monkeypatch):
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, _: None if name != "cpu" else "absent")
    for first in ("triton", "compiled"):
        monkeypatch.setattr(backends, "compiled_first", lambda first=first: first == "compiled")
        assert decoder_rows.chosen("auto", torch.device("cuda")) is decoder_rows.reference
    assert decoder_rows.chosen("cuda", torch.device("cuda")) is cuda.decoder_rows


# What it computes.


@pytest.fixture(params=block_code.DEVICES)
def device(request, monkeypatch, tmp_path_factory):
    """Where ``backend="cuda"`` takes its tensors."""
    if request.param == "cpu":
        block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    return request.param


def text(sizes: Sizes, dtype: torch.dtype, pads: list[int], device: str, capacity: int = 80, backend="cuda") -> Text:
    weights = decoder(sizes, dtype, lambda t: t.to(device))
    return Text(weights, sizes, dtype, pads, capacity, backend)


def graph_rows(case: Text, count: int) -> tuple[Tensor, ...]:
    """Arguments of ``count`` rows of a tree behind what was read."""
    sees, depths = (t.to(case.device) for t in tree(random_parents(count)))
    batch = len(case.pads)
    return (
        random_tokens(batch, count, 1).int().to(case.device),
        (case.kv_len - case.kv_start)[:, None] + depths,
        case.kv_len[:, None] + torch.arange(count, dtype=torch.int32, device=case.device),
        pack_bits(sees).expand(batch, -1, -1).contiguous(),
        depths.expand(batch, -1),
        case.kv_len,
        case.kv_start,
        *case.caches,
    )


@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[i % 2 - 1]) for i, name in enumerate(CUDA_SIZES)], ids=str)
def test_it_equals_the_reference_and_the_cpus_operator(device, name, dtype):
    results = []
    for backend, where in (("cuda", device), ("reference", device), ("cpu", "cpu")):
        if backends.unavailable_reason(backend, torch.device(where)) is not None:
            continue
        case = text(CUDA_SIZES[name], dtype, [0, 3], where, backend=backend)
        if backend == "reference":
            for cache in (*case.caches[0], *case.caches[1]):
                cache.zero_()  # it reads every slot
        case.read(random_tokens(2, 40), 30)
        found = decoder_rows(case.weights, *graph_rows(case, 21), keep=17, states=(1, 0, 2, 1), backend=backend)
        results.append([t.cpu() for t in found])
    check_alike(results, dtype)
    assert torch.equal(results[0][2][1], results[1][2][1]), "of layer 0 the embeddings"
    assert torch.equal(results[0][2][2][:, 4:], results[0][1]), "behind the last norm every row's, kept or not"


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_whose_keys_or_values_are_not_finite_are_marked(device, dtype):
    check_marks(text(next(iter(CUDA_SIZES.values())), dtype, [0, 3], device))


def test_logits_of_a_marked_row_are_none(device):
    """Marked by an earlier step, by its keys in this one, or not at all; also of the last rows alone."""
    case, tokens, alone = text(SMALL, HALF, [0, 3], device), random_tokens(2, 5), tree([-1] * 5)
    case.read(random_tokens(2, 9), 9)
    right = case.rows(tokens, *alone, 0, 5)
    for keep in (5, 2):
        case.spoiled = torch.zeros(2, 5, device=device)
        case.spoiled[1, 3] = float("nan")
        found = case.rows(tokens, *alone, 0, 5, keep)
        expected = right.clone()
        expected[1, 3] = float("nan")
        assert torch.equal(found.nan_to_num(7.0), expected[:, -keep:].nan_to_num(7.0))
    case.weights = dataclasses.replace(case.weights, embedding=case.weights.embedding.clone())
    case.weights.embedding[tokens[0, 2]] = float("nan")
    case.spoiled = torch.zeros(2, 5, device=device)
    assert case.rows(tokens, *alone, 0, 5)[0, 2].isnan().all() and case.spoiled[0, 2].isnan()


@pytest.mark.parametrize(("name", "dtype"), [(name, DTYPES[i % 2]) for i, name in enumerate(CUDA_SIZES)], ids=str)
def test_a_row_alone_among_others_and_committed(device, name, dtype):
    """Also in another batch, behind other padding, in a larger cache, and cut into other blocks."""
    count, pads, parents = 35, [0, 5, 2], random_parents(35)
    prompt, tokens, (sees, depths) = random_tokens(3, 19), random_tokens(3, count, 1), tree(parents)

    def logits(sequences: list[int], step: int, last: int = count, capacity: int = 80):
        case = text(CUDA_SIZES[name], dtype, [pads[b] for b in sequences], device, capacity)
        case.read(prompt[sequences], step)
        of = [case.rows(tokens[sequences], sees, depths, i, min(last, i + step)) for i in range(0, last, step)]
        return torch.cat(of, 1), case

    whole, _ = logits([0, 1, 2], count)
    assert whole.isfinite().all()
    assert torch.equal(logits([0, 1, 2], 17)[0], whole)
    assert torch.equal(logits([2, 0], 7, 21, capacity=300)[0], whole[[2, 0], :21])
    alone, case = logits([1], 1, 3)
    assert torch.equal(alone, whole[[1], :3])
    path = sorted(torch.nonzero(sees[int(depths.argmax())]).flatten().tolist(), key=lambda node: int(depths[node]))
    assert len(path) > 4
    assert torch.equal(case.read(tokens[[1]][:, path], 2), whole[[1]][:, path])


def test_a_row_has_its_bits_in_every_tile_and_split(device):
    """1 … 128 rows of sizes whose products are cut; behind prefixes on both sides of what one split holds."""
    sizes = Sizes(hidden=320, inner=272, heads=2, kv_heads=1, head_dim=64, layers=1)
    tokens, (sees, depths) = random_tokens(1, 128, 1), tree(random_parents(128))
    for prefix in (5, 300):
        case = text(sizes, BFLOAT16, [1], device, 448)
        case.read(random_tokens(1, prefix), 128)
        whole = case.rows(tokens, sees, depths, 0, 128)
        for first, last in ((0, 1), (0, 16), (16, 33), (40, 104), (127, 128)):
            assert torch.equal(case.rows(tokens, sees, depths, first, last), whole[:, first:last])


@pytest.mark.slow
@pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING))
@pytest.mark.parametrize(("name", "dtype"), [("llama-64", HALF), ("mistral-128", BFLOAT16)], ids=str)
def test_rows_attend_piece_by_piece_where_memory_ends(name, dtype, monkeypatch, tmp_path_factory):
    """All at once, a sequence at a time, 16 rows at a time: the same bits."""
    block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    sizes, found = CUDA_SIZES[name], []
    case = text(sizes, dtype, [0, 3], "cpu", 200)
    case.read(random_tokens(2, 150), 64)
    row = 2 * 4 * sizes.heads * (sizes.head_dim + 5)  # bytes, of two splits
    for limit, pieces in ((None, 1), (50 * row, 2), (30 * row, 6), (1, 6)):
        if limit is not None:
            monkeypatch.setenv("GSD_BLOCK_STATE_BYTES", str(limit))
        rows = graph_rows(case, 37)
        launched = block_code.launches(tmp_path_factory, case.weights, *rows, 37, ())
        assert launched.count("attend") == launched.count("combine") == pieces * sizes.layers
        found.append(decoder_rows(case.weights, *rows, keep=37, states=(1, 2), backend="cuda"))
    for others in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], others, strict=True))


def packed(weights: DecoderWeights, device: str) -> DecoderWeights:
    """Other weights of the same sizes: packed of every kind in turn, now and then dense."""
    kinds = itertools.cycle([*cuda.PACKED, None])

    def of(matrix: Tensor) -> Tensor | PackedMatrix:
        if (kind := next(kinds)) is None:
            return matrix
        made = packed_matrix(BY_NAME[kind], *matrix.shape, seed=matrix.shape[0])
        scales = None if made.scales is None else made.scales.to(device)
        return dataclasses.replace(made, data=made.data.to(device), scales=scales)

    layers = [
        dataclasses.replace(layer, **{name: of(getattr(layer, name)) for name in MATRICES}) for layer in weights.layers
    ]
    return dataclasses.replace(weights, embedding=of(weights.embedding), head=of(weights.head), layers=layers)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_packed_matrices_have_the_bits_of_their_dense_ones(device, dtype):
    """Mixed within a model and a launch, in tiles of 16, 32 and 64 rows: all outputs, and the caches."""
    sizes = Sizes(hidden=192, inner=160, heads=2, kv_heads=1, head_dim=64, bias=True)
    mixed = packed(decoder(sizes, dtype, lambda t: t.to(device)), device)
    assert {matrix.kind.name for matrix in mixed.matrices if isinstance(matrix, PackedMatrix)} == set(cuda.PACKED)
    results = []
    for weights in (mixed, mixed.dense()):
        case = Text(weights, sizes, dtype, [0, 3], 80, "cuda")
        found = [case.read(random_tokens(2, 40), 40)]
        for count in (5, 12):
            found += decoder_rows(weights, *graph_rows(case, count), keep=4, states=(0, 1), backend="cuda")
        results.append([*found, *(cache.nan_to_num(7.0) for caches in case.caches for cache in caches)])
    assert results[0][0].isfinite().all() and len(results[0][0].unique()) > 1000
    for ours, dense in zip(*results, strict=True):
        assert torch.equal(ours, dense)


@pytest.mark.parametrize("count", [40, 140])
def test_the_operator_has_the_same_bits_by_groups(device, count, monkeypatch):
    """All layers, in blocks of 64, 128 and 256 rows, with splits and without; caches as well."""
    sizes = Sizes(hidden=320, inner=272, heads=2, kv_heads=1, head_dim=64, layers=1, bias=True)
    tokens, (sees, depths) = random_tokens(1, count, 1), tree(random_parents(count))
    results = []
    for group in "01":
        monkeypatch.setenv(cuda.GROUP, group)
        case = Text(decoder(sizes, BFLOAT16, lambda t: t.to(device)), sizes, BFLOAT16, [1], 200, "cuda")
        case.read(random_tokens(1, 45), 40)
        logits = case.rows(tokens, sees, depths, 0, count)
        results.append([logits, *(cache.nan_to_num(7.0) for caches in case.caches for cache in caches)])
    assert results[0][0].isfinite().all()
    for ours, others in zip(*results, strict=True):
        assert torch.equal(ours, others)
    monkeypatch.setenv(cuda.GROUP, "yes")
    with pytest.raises(RuntimeError, match=f"{cuda.GROUP}: expected 0 or 1, got 'yes'; or unset it"):
        case.rows(tokens[:, :1], sees, depths, 0, 1)


def test_whether_launches_begin_early_is_a_setting(device, monkeypatch):
    case = text(SMALL, HALF, [0], device, 24)
    case.read(random_tokens(1, 9), 9)
    found = []
    for value in (None, "1", "0"):
        if value is not None:
            monkeypatch.setenv(cuda.OVERLAP, value)
        found.append(case.rows(random_tokens(1, 3, 1), *tree([-1, 0, 1]), 0, 3))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    for name, bad, expected in ((cuda.AHEAD, "65", "0 ... 64"), (cuda.OVERLAP, "off", "0 or 1")):
        monkeypatch.setenv(name, bad)
        with pytest.raises(RuntimeError, match=f"{name}: expected {expected}, got '{bad}'; or unset it"):
            case.rows(random_tokens(1, 3, 1), *tree([-1, 0, 1]), 0, 3)
        monkeypatch.delenv(name)


def test_caches_are_looked_at_where_the_operator_refuses_them(device, monkeypatch):
    """Two tensors a layer at every call would cost the host more than the operator's own look at them."""
    case, looked, check = text(SMALL, HALF, [0], device, 24), [], cuda.check_caches
    monkeypatch.setattr(cuda, "check_caches", lambda *caches: looked.append(caches) or check(*caches))
    call = random_tokens(1, 3, 1), *tree([-1, 0, 1]), 0, 3
    case.read(random_tokens(1, 9), 9)
    case.rows(*call)
    assert not looked
    case.caches[1][1] = case.caches[1][1].float()
    with pytest.raises(TypeError, match=r"v_caches\[1\]: .*the weights' float16, got float32"):
        case.rows(*call)
    monkeypatch.setenv(cuda.OVERLAP, "off")
    case.caches[1][1] = case.caches[1][1].half()
    with pytest.raises(RuntimeError, match="expected 0 or 1"):
        case.rows(*call)


def test_what_lies_outside_is_not_touched(device):
    """Tokens outside the vocabulary, slots outside the cache: nothing is read back, so nothing is refused."""
    inside = text(SMALL, HALF, [0], device, 24)
    inside.read(random_tokens(1, 20), 20)
    before = [cache.clone() for caches in inside.caches for cache in caches]
    inside.kv_len = inside.kv_len + 2  # row 2 lies behind the cache's end
    inside.rows(torch.tensor([[1, 2**30, -(2**30)]]), *tree([-1, 0, 1]), 0, 3)
    after = [cache for caches in inside.caches for cache in caches]
    for old, new in zip(before, after, strict=True):
        changed = (old.view(torch.int16) != new.view(torch.int16)).any(-1).any(0).any(0)
        assert torch.nonzero(changed).flatten().tolist() == [22, 23]


# On a GPU only.


def on_gpu(function):
    for mark in block_code.GPU.marks:
        function = mark(function)
    return function


@on_gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_captured_forward_serves_every_text(dtype):
    """Replays equal ordinary calls, bit for bit, at other lengths and after other rows, and leave no counter behind."""
    sizes = Sizes(hidden=2048, inner=4096, heads=16, kv_heads=4, head_dim=128)
    case = text(sizes, dtype, [0, 3], "cuda", 400)
    case.read(random_tokens(2, 300), 128)
    rows = graph_rows(case, 33)

    def forward():
        return decoder_rows(case.weights, *rows, keep=33, states=(1,), backend="cuda")

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = forward()
    for step, length in enumerate((300, 299, 257, 256, 31)):
        rows[0].copy_(random_tokens(2, 33, step).int())
        for place in (rows[1], rows[2], rows[5]):
            place.add_(length - int(rows[5][0]))
        for _ in range(2):
            graph.replay()
        for replayed, called in zip(static, forward(), strict=True):
            assert torch.equal(replayed, called)


@on_gpu
def test_opcheck_and_mixed_devices():
    case = text(SMALL, HALF, [0, 3], "cuda")
    case.read(random_tokens(2, 9), 9)
    given = decoder_rows.operands(case.weights, *graph_rows(case, 5), 3, (1,), None)
    given = tuple([t.nan_to_num(0.0) for t in g] if g is case.caches[0] or g is case.caches[1] else g for g in given)
    results = torch.library.opcheck(torch.ops.gsd_kernels.decoder_rows.default, given, test_utils="test_schema")
    assert set(results.values()) == {"SUCCESS"}, results
    with pytest.raises(RuntimeError, match="same CUDA device"):
        torch.ops.gsd_kernels.decoder_rows(given[0].cpu(), *given[1:])


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_gpu_than_the_current_one():
    found = []
    for where in ("cuda:0", "cuda:1"):
        case = text(SMALL, HALF, [0, 3], where)
        case.read(random_tokens(2, 19), 19)
        found.append(decoder_rows(case.weights, *graph_rows(case, 9), keep=9, backend="cuda")[0].cpu())
    assert torch.cuda.current_device() == 0 and torch.equal(*found)


def captured_at_first() -> None:
    """A forward whose first call of all is recorded, in a process that has loaded none of its kernels."""
    case = text(SMALL, BFLOAT16, [0], "cuda")
    rows = graph_rows(case, 5)

    def forward():
        return decoder_rows(case.weights, *rows, keep=5, backend="cuda")

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = forward()
    graph.replay()
    for replayed, called in zip(static, forward(), strict=True):
        assert torch.equal(replayed, called) and replayed.isfinite().all()


@on_gpu
def test_kernels_are_captured_that_were_never_called():
    code = "from backends.test_decoder_rows_cuda import captured_at_first; captured_at_first()"
    environment = {**os.environ, "CUDA_MODULE_LOADING": "LAZY", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
