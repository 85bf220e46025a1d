"""The forward of rows as one operator: as accurate as the modules, and a row's bits are its own.

Cases of a level run the operator of the CPU. Those of ``blocks`` run the source of the CUDA kernels on a CPU, blocks in
any order, their threads as fibers (tests/block_code/rows_op.cpp); those of ``gpu`` run on one. The operators are
decoder_rows and, by the name of what its layers begin with, feature_rows; test_cuda.py has what they refuse and launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from block_code import rows as block_code
from decoders import CUDA_SIZES, SIZES, VOCAB, Sizes, Text, check_alike, decoder, random_parents, random_tokens, tree
from ops.contracts.backends import LEVELS, assert_bit_equal, needs_cpu
from ops.contracts.decoder import STORED, WIRINGS, packed_matrix, reading_features
from torch import Tensor

from gsd_kernels import cpu_levels
from gsd_kernels.ops.decoder_rows import DecoderWeights, cuda, decoder_rows
from gsd_kernels.ops.decoder_rows.weights import MATRICES
from gsd_kernels.ops.feature_rows import feature_rows
from gsd_kernels.ops.packed import BY_NAME, PackedMatrix

pytestmark = [pytest.mark.quick, needs_cpu]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOAT, BFLOAT16, HALF = DTYPES
BLOCKS, GPU = block_code.BLOCKS.id, block_code.GPU.id
KEPT = pytest.mark.kept("csrc", "gsd_kernels", "tests/block_code", "tests/ops/contracts", "tests/decoders.py")
ON_CUDA = {BLOCKS: [*block_code.BLOCKS.marks, KEPT], GPU: block_code.GPU.marks}
ON_CPU = {getattr(level, "values", (level,))[0]: getattr(level, "marks", ()) for level in LEVELS}
OF_CUDA = CUDA_SIZES | dict(zip(WIRINGS, CUDA_SIZES.values(), strict=True))
CUT = Sizes(hidden=320, inner=272, heads=2, kv_heads=1, head_dim=64, layers=1)  # so that products are cut into splits


@dataclass
class FeatureText(Text):
    """A text whose rows have features, by their tokens."""

    @property
    def device(self) -> torch.device:
        return self.weights.feature_norm.device

    def forward(self, ids, *rows, spoiled, **options):
        gen = torch.Generator().manual_seed(3)
        table = torch.randn(VOCAB, self.sizes.hidden, generator=gen).to(self.device, self.dtype)
        return feature_rows(self.weights, ids, table[ids.long()], *rows, **options)


@dataclass(frozen=True)
class Case:
    """Where an operator runs, and a decoder for it."""

    place: str
    name: str
    dtype: torch.dtype

    @property
    def backend(self) -> str:
        return "cpu" if self.place in ON_CPU else "cuda"

    @property
    def device(self) -> str:
        return "cuda" if self.place == GPU else "cpu"

    @property
    def sizes(self) -> Sizes:
        return (SIZES if self.place in ON_CPU else OF_CUDA)[self.name]

    def text(
        self,
        pads: list[int],
        capacity: int = 80,
        *,
        sizes: Sizes | None = None,
        backend: str | None = None,
        weights: DecoderWeights | None = None,
    ) -> Text:
        sizes, backend = sizes or self.sizes, backend or self.backend
        device = "cpu" if backend == "cpu" else self.device
        weights = weights or decoder(sizes, self.dtype, lambda t: t.to(device))
        if self.name in WIRINGS:
            return FeatureText(reading_features(weights, self.name), sizes, self.dtype, pads, capacity, backend)
        return Text(weights, sizes, self.dtype, pads, capacity, backend)


def cases(
    of_cpu: Sequence[str] = tuple(SIZES),
    of_cuda: Sequence[str] = tuple(OF_CUDA),
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> pytest.MarkDecorator:
    """Parametrise ``case``: on a CPU every dtype of a name, two of three among many; on CUDA one of each name."""
    listed, halves = [], [dtype for dtype in (HALF, BFLOAT16) if dtype in dtypes]
    for place, marks in (ON_CPU | ON_CUDA).items():
        names = of_cpu if place in ON_CPU else of_cuda
        for (i, name), (j, dtype) in itertools.product(enumerate(names), enumerate(dtypes)):
            if place in ON_CPU or dtype is halves[i % len(halves)]:
                many = [pytest.mark.many] if place in ON_CPU and len(names) > 1 and (i + j) % 3 else []
                case = Case(place, name, dtype)
                listed.append(pytest.param(case, id=f"{place}-{name}-{dtype}", marks=[*marks, *many]))
    return pytest.mark.parametrize("case", listed, indirect=True)


@pytest.fixture
def case(request, monkeypatch, tmp_path_factory):
    place = request.param.place
    if place == BLOCKS:
        block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    with cpu_levels.forced(place) if place in ON_CPU else contextlib.nullcontext():
        yield request.param


ONE = ("llama-odd",), ("llama-64",)
"""One decoder for each operator."""
NO_LEVEL = (), ("llama-64",)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@cases()
def test_it_equals_the_reference_and_the_cpus_operator(case):
    results = []
    for backend in dict.fromkeys((case.backend, "reference", "cpu")):
        text = case.text([0, 3], backend=backend)
        if backend == "reference":
            for cache in (*text.caches[0], *text.caches[1]):
                cache.zero_()  # it reads every slot
        text.read(random_tokens(2, 40), 30)
        text.states = (1, 0, 2, 1)
        text.rows(random_tokens(2, 21, 1), *tree(random_parents(21)), 0, 21, keep=17)
        results.append([t.cpu() for t in text.found])
    check_alike(results, case.dtype, slack=1 if case.place in ON_CPU else 3)
    if case.name not in WIRINGS:
        assert torch.equal(results[0][2][1], results[1][2][1]), "of layer 0 the embeddings"
        assert torch.equal(results[0][2][2][:, 4:], results[0][1]), "behind the last norm every row's, kept or not"


# A row's bits are its own.


@cases(of_cuda=(*CUDA_SIZES, *WIRINGS[1::2]))
def test_a_row_has_its_bits_in_any_company_and_place(case):
    """In pieces, in another batch, behind other padding, in a larger cache, by other slots, kept alone, committed."""
    on_cpu, count, parents = case.place in ON_CPU, 37, random_parents(37)
    prefix = (19, 250, 256, 270)[([*SIZES].index(case.name) + DTYPES.index(case.dtype)) % 4] if on_cpu else 19
    prompt, tokens, (sees, depths) = random_tokens(3, prefix), random_tokens(3, count, 1), tree(parents)
    everyone, pads = ([0, 1, 2], [0, 5, 2]) if on_cpu else ([0, 1], [0, 5])

    def text(sequences: list[int], step: int, pads: list[int], capacity: int = 400) -> Text:
        text = case.text(pads, capacity)
        text.read(prompt[sequences], step + prefix // 10)
        return text

    among = text(everyone, count, pads)
    whole = among.rows(tokens[everyone], sees, depths, 0, count)
    assert whole.isfinite().all()
    pieces = [([everyone[-1], 0], 7, [1, 16], 21), ([1], 1, [7], 3)] + [(everyone, 17, pads, count)] * on_cpu
    for sequences, step, behind, last in pieces:
        other = text(sequences, step, behind, 400 + 100 * len(behind))
        for first in range(0, count if on_cpu else last, step):
            end = min(count, first + step)
            assert torch.equal(other.rows(tokens[sequences], sees, depths, first, end), whole[sequences, first:end])
    for keep in (0, 8, count - 1) if on_cpu else (8,):
        other = text(everyone, count, pads)
        assert torch.equal(other.rows(tokens[everyone], sees, depths, 0, count, keep), whole[:, count - keep :])
        assert_bit_equal(other.caches[0] + other.caches[1], among.caches[0] + among.caches[1])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(5))  # children before parents too
    place = order.argsort()
    moved = tree([-1 if parents[old] < 0 else int(place[parents[old]]) for old in order.tolist()])
    other = text([1], count, [3])
    assert torch.equal(other.rows(tokens[[1]][:, order], *moved, 0, count), whole[[1]][:, order])
    path = sorted(torch.nonzero(sees[int(depths.argmax())]).flatten().tolist(), key=lambda node: int(depths[node]))
    assert len(path) > 4
    for step in (1, 3):
        assert torch.equal(text([1], 9, [5]).read(tokens[[1]][:, path], step), whole[[1]][:, path])


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [5, 300])
@cases(*ONE)
def test_many_rows_have_the_bits_of_each(case, prefix, threads):
    """128 rows of two texts, which threads share, and whose products are cut."""
    tokens, (sees, depths) = random_tokens(2, 128, 1), tree(random_parents(128))
    sizes, on_cpu = SIZES["qwen2-64"] if case.place in ON_CPU else CUT, case.place in ON_CPU

    def text(sequences: list[int]) -> Text:
        text = case.text([(1, 4)[b] for b in sequences], 448, sizes=sizes)
        text.read(random_tokens(2, prefix)[sequences], 128)
        return text

    threads(2)
    both, alone = text([0, 1][: 1 + on_cpu]), text([0])
    whole = both.rows(tokens[: 1 + on_cpu], sees, depths, 0, 128)
    alone.rows(tokens[:1], sees, depths, 0, 128)
    for of in (1, 2) if on_cpu else (1,):
        threads(of)
        for first, last in ((0, 1), (0, 16), (16, 33), (40, 104), (127, 128)):
            assert torch.equal(alone.rows(tokens[:1], sees, depths, first, last), whole[:1, first:last])


# What is not finite, and what lies outside.


@cases(("llama-odd",), (), [FLOAT])
def test_what_overflows_in_one_row_stays_there(case):
    sees, depths = tree([-1, 0, 0, 1, 2])
    weights, found = decoder(case.sizes, FLOAT), []
    for token in (7, 8):
        text = case.text([0], 40, weights=weights)
        text.read(random_tokens(1, 6), 6)
        weights.embedding[8] = 1e38
        found.append(text.rows(torch.tensor([[1, 2, token, 3, 4]]), sees, depths, 0, 5))
    assert torch.equal(found[0][:, [0, 1, 3]], found[1][:, [0, 1, 3]])
    assert not torch.equal(found[0][:, 4], found[1][:, 4])


@cases(ONE[0], ("llama-64", "qwen2-64"))
def test_rows_whose_keys_or_values_are_not_finite_are_marked(case):
    """In the last layer, too, and no others are."""
    text = case.text([0, 3])
    text.read(torch.full((2, 5), 6), 5)
    tokens, alone = torch.tensor([[1, 7, 2, 6, 3], [8, 4, 5, 1, 7]]), tree([-1] * 5)
    text.weights.embedding[7] = float("nan")
    for expected in (tokens == 7, torch.ones(2, 5, dtype=torch.bool)):
        text.spoiled = torch.full((2, 5), 3.0, device=text.device)
        text.rows(tokens, *alone, 0, 5, keep=0)
        assert torch.equal(text.spoiled.isnan().cpu(), expected)
        assert (text.spoiled[~text.spoiled.isnan()] == 3.0).all()
        values = text.weights.layers[-1].v
        values.copy_(torch.randn(values.shape).sign() * torch.finfo(text.dtype).max)


@cases(*NO_LEVEL)
def test_logits_of_a_marked_row_are_none(case):
    """Marked by an earlier step, by its keys in this one, or not at all; also of the last rows alone."""
    text, tokens, alone = case.text([0, 3]), random_tokens(2, 5), tree([-1] * 5)
    text.read(random_tokens(2, 9), 9)
    right = text.rows(tokens, *alone, 0, 5)
    for keep in (5, 2):
        text.spoiled = torch.zeros(2, 5, device=case.device)
        text.spoiled[1, 3] = float("nan")
        found = text.rows(tokens, *alone, 0, 5, keep)
        expected = right.clone()
        expected[1, 3] = float("nan")
        assert torch.equal(found.nan_to_num(7.0), expected[:, -keep:].nan_to_num(7.0))
    text.weights.embedding[tokens[0, 2]] = float("nan")
    text.spoiled = torch.zeros(2, 5, device=case.device)
    assert text.rows(tokens, *alone, 0, 5)[0, 2].isnan().all() and text.spoiled[0, 2].isnan()


@cases(*NO_LEVEL)
def test_what_lies_outside_is_not_touched(case):
    """Tokens outside the vocabulary, slots outside the cache: nothing is read back, so nothing is refused."""
    inside = case.text([0], 24)
    inside.read(random_tokens(1, 20), 20)
    before = [cache.clone() for caches in inside.caches for cache in caches]
    inside.kv_len = inside.kv_len + 2  # row 2 lies behind the cache's end
    inside.rows(torch.tensor([[1, 2**30, -(2**30)]]), *tree([-1, 0, 1]), 0, 3)
    after = [cache for caches in inside.caches for cache in caches]
    for old, new in zip(before, after, strict=True):
        changed = (old.view(torch.int16) != new.view(torch.int16)).any(-1).any(0).any(0)
        assert torch.nonzero(changed).flatten().tolist() == [22, 23]


@pytest.mark.slow
def test_nothing_outside_a_tensor_is_touched():
    here = Path(__file__).resolve().parents[1]
    run = subprocess.run(
        [sys.executable, str(here / "decoders.py")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(here.parent), os.environ.get("PYTHONPATH", "")))},
    )
    assert run.returncode == 0 and run.stdout.endswith("done\n"), run.stdout + run.stderr[-2000:]


# The ways of the CUDA kernels have the same bits.


def graph_rows(text: Text, count: int) -> tuple[Tensor, ...]:
    """Arguments of ``count`` rows of a tree behind what was read."""
    return text.graph(random_tokens(len(text.pads), count, 1), *tree(random_parents(count)), 0, count)


@pytest.mark.slow
@cases((), ("mistral-128",))
def test_rows_attend_piece_by_piece_where_memory_ends(case, monkeypatch, tmp_path_factory):
    """All at once, a sequence at a time, 16 rows at a time: the same bits."""
    if case.place == GPU:
        pytest.skip("what memory there is, is said to the CPU's stand-in alone")
    sizes, found, text = case.sizes, [], case.text([0, 3], 200)
    text.read(random_tokens(2, 150), 64)
    row, given = 2 * 4 * sizes.heads * (sizes.head_dim + 5), graph_rows(text, 37)  # bytes, of two splits
    for limit, pieces in ((1000 * row, 1), (50 * row, 2), (30 * row, 6), (1, 6)):
        monkeypatch.setenv("GSD_BLOCK_STATE_BYTES", str(limit))
        launched = block_code.launches(tmp_path_factory, text.weights, *given, 37, ())
        assert launched.count("attend") == launched.count("combine") == pieces * sizes.layers
        found.append(decoder_rows(text.weights, *given, keep=37, states=(1, 2), backend="cuda"))
    for others in found[1:]:
        assert_bit_equal(found[0], others)


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


@cases((), ("llama-64", "qwen2-64"))
def test_packed_matrices_have_the_bits_of_their_dense_ones(case):
    """Mixed within a model and a launch, in tiles of 16, 32 and 64 rows: all outputs, and the caches."""
    sizes = Sizes(hidden=192, inner=160, heads=2, kv_heads=1, head_dim=64, bias=True)
    mixed = packed(decoder(sizes, case.dtype, lambda t: t.to(case.device)), case.device)
    assert {matrix.kind.name for matrix in mixed.matrices if isinstance(matrix, PackedMatrix)} == set(cuda.PACKED)
    results = []
    for weights in (mixed, mixed.dense()):
        text = case.text([0, 3], sizes=sizes, weights=weights)
        found = [text.read(random_tokens(2, 40), 40)]
        for count in (5, 12):
            found += decoder_rows(weights, *graph_rows(text, count), keep=4, states=(0, 1), backend="cuda")
        results.append([*found, *text.caches[0], *text.caches[1]])
    assert results[0][0].isfinite().all() and len(results[0][0].unique()) > 1000
    assert_bit_equal(*results)


@pytest.mark.parametrize("count", [40, 140])
@cases(*NO_LEVEL, [BFLOAT16])
def test_the_operator_has_the_same_bits_by_groups(case, count, monkeypatch):
    """All layers, in blocks of 64, 128 and 256 rows, with splits and without; caches as well."""
    sizes, results = dataclasses.replace(CUT, bias=True), []
    tokens, (sees, depths) = random_tokens(1, count, 1), tree(random_parents(count))
    for group in "01":
        monkeypatch.setenv(cuda.GROUP, group)
        text = case.text([1], 200, sizes=sizes)
        text.read(random_tokens(1, 45), 40)
        logits = text.rows(tokens, sees, depths, 0, count)
        results.append([logits, *text.caches[0], *text.caches[1]])
    assert results[0][0].isfinite().all()
    assert_bit_equal(*results)


@cases(*NO_LEVEL)
def test_settings_change_no_bits_and_say_what_they_take(case, monkeypatch):
    text, found = case.text([0], 24), []
    text.read(random_tokens(1, 9), 9)

    def rows(name: str, value: str) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            return text.rows(random_tokens(1, 3, 1), *tree([-1, 0, 1]), 0, 3)

    found = [rows(name, value) for name in (cuda.OVERLAP, cuda.AHEAD) for value in "10"]
    assert all(torch.equal(found[0], others) for others in found[1:])
    for name, bad, expected in (
        (cuda.AHEAD, "65", "0 ... 64"),
        (cuda.OVERLAP, "off", "0 or 1"),
        (cuda.GROUP, "yes", "0 or 1"),
    ):
        with pytest.raises(RuntimeError, match=f"{name}: expected {expected}, got '{bad}'; or unset it"):
            rows(name, bad)


@pytest.mark.parametrize("group", ["0", "1"])
@cases((), WIRINGS)
def test_features_are_stored_as_the_reference_does_and_alone(case, group, monkeypatch):
    """A block drafter's: errors against the reference; and the same bits in one call and piece by piece."""
    monkeypatch.setenv(cuda.GROUP, group)
    gen, sizes = torch.Generator().manual_seed(5), case.sizes
    weights = reading_features(decoder(sizes, case.dtype, lambda t: t.to(case.device)), STORED)
    count, batch = 37, 2
    features = torch.randn(batch, count, sizes.hidden, generator=gen).to(case.device, case.dtype)
    slots = torch.stack([torch.randperm(60, generator=gen)[:count] for _ in range(batch)]).int().to(case.device)
    found = []
    for backend, pieces in (("cuda", [count]), ("cuda", [1, 16, 20]), ("reference", [count])):
        caches = Text(weights.decoder, sizes, case.dtype, [0] * batch, 60).caches
        for cache in (*caches[0], *caches[1]):
            cache.zero_()
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


# On a GPU only.

on_gpu = pytest.mark.parametrize(
    "case", [pytest.param(Case(GPU, "llama-64", d), id=f"gpu-{d}", marks=ON_CUDA[GPU]) for d in (HALF, BFLOAT16)]
)


def captured(forward):
    """A forward's results in a CUDA graph, and what replays it."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = forward()
    return static, graph.replay


@on_gpu
def test_one_captured_forward_serves_every_text(case):
    """Replays equal ordinary calls, bit for bit, at other lengths and after other rows, and leave no counter behind."""
    text = case.text([0, 3], 400, sizes=Sizes(hidden=2048, inner=4096, heads=16, kv_heads=4, head_dim=128))
    text.read(random_tokens(2, 300), 128)
    rows = graph_rows(text, 33)

    def forward():
        return decoder_rows(text.weights, *rows, keep=33, states=(1,), backend="cuda")

    forward()
    static, replay = captured(forward)
    for step, length in enumerate((300, 299, 257, 256, 31)):
        rows[0].copy_(random_tokens(2, 33, step).int())
        for place in (rows[1], rows[2], rows[5]):
            place.add_(length - int(rows[5][0]))
        for _ in range(2):
            replay()
        for replayed, called in zip(static, forward(), strict=True):
            assert torch.equal(replayed, called)


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_another_gpu_than_the_current_one(case):
    found = []
    for where in ("cuda:0", "cuda:1"):
        text = case.text([0, 3], weights=decoder(case.sizes, case.dtype, lambda t, where=where: t.to(where)))
        text.read(random_tokens(2, 19), 19)
        found.append(decoder_rows(text.weights, *graph_rows(text, 9), keep=9, backend="cuda")[0].cpu())
    assert torch.cuda.current_device() == 0 and torch.equal(*found)


def captured_at_first() -> None:
    """A forward whose first call of all is recorded, in a process that has loaded none of its kernels."""
    text = Case(GPU, "llama-64", BFLOAT16).text([0])
    rows = graph_rows(text, 5)

    def forward():
        return decoder_rows(text.weights, *rows, keep=5, backend="cuda")

    static, replay = captured(forward)
    replay()
    for replayed, called in zip(static, forward(), strict=True):
        assert torch.equal(replayed, called) and replayed.isfinite().all()


@on_gpu
def test_kernels_are_captured_that_were_never_called(case):
    code = "from backends.test_decoder import captured_at_first; captured_at_first()"
    environment = {**os.environ, "CUDA_MODULE_LOADING": "LAZY", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


# Levels.


@pytest.mark.parametrize("level", LEVELS)
def test_levels_are_named_with_their_reasons(level):
    with cpu_levels.forced(level):
        found = cpu_levels.levels()
        assert list(found) == ["portable", "avx2", "avx512", "avx512_bf16", "amx"]
        assert found["portable"] is None and all(reason is None or len(reason) > 10 for reason in found.values())
        assert cpu_levels.active() == level
    with pytest.raises(ValueError, match=r"expected one of portable, avx2, .* got sse"), cpu_levels.forced("sse"):
        pass


def test_an_unknown_level_of_the_environment_is_refused():
    code, environment = "from gsd_kernels import cpu_levels; cpu_levels.active()", {"GSD_KERNELS_CPU_LEVEL": "sse"}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | environment)
    assert "ValueError" in run.stderr and "GSD_KERNELS_CPU_LEVEL: expected one of portable" in run.stderr
