"""Products, packed weights, rounded rows, decoders of them: the dense matrices' bits at every level of instructions."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from guards import guarded
from ops.contracts.backends import backends, levels, needs_cpu
from ops.contracts.decoder import (
    FLOATS,
    KINDS,
    STORED,
    WIRINGS,
    decoder_case,
    feature_case,
    packed_matrix,
    width_of,
)

from gsd_kernels import cpu_levels
from gsd_kernels.ops.decoder_rows import decoder_rows
from gsd_kernels.ops.decoder_rows.weights import MATRICES
from gsd_kernels.ops.feature_rows import feature_rows
from gsd_kernels.ops.packed import BY_NAME, CODE_KINDS, ROUNDED_KINDS, PackedMatrix, codes, unpack_rows
from gsd_kernels.ops.packed.matrix import MOST_CODES
from gsd_kernels.ops.row_linear import row_linear

pytestmark = [pytest.mark.quick, needs_cpu]


def named(kinds):
    return pytest.mark.parametrize("kind", kinds, ids=lambda kind: kind.name)


dtypes = pytest.mark.parametrize("dtype", FLOATS)


@named(KINDS)
def test_the_gguf_package_unpacks_the_same_bits(kind):
    gguf = pytest.importorskip("gguf")
    if kind.name.upper() not in gguf.GGMLQuantizationType.__members__:
        pytest.skip("GGUF has no such kind")
    matrix = packed_matrix(kind, 5, width_of(kind, 300))
    theirs = gguf.quants.dequantize(matrix.data.numpy(), gguf.GGMLQuantizationType[kind.name.upper()])
    assert torch.equal(unpack_rows(matrix, dtype=torch.float32, backend="reference"), torch.from_numpy(theirs))


@named(KINDS)
@levels
def test_weights_and_products_have_the_bits_of_the_reference_and_of_the_dense_matrix(level, kind):
    """Nothing outside of the tensors is read."""
    gen = torch.Generator().manual_seed(2)
    with cpu_levels.forced(level):
        for outputs, least in ((1, 1), (37, 200), (70, 1100)):
            matrix = packed_matrix(kind, outputs, width_of(kind, least), seed=outputs)
            scales = None if matrix.scales is None else guarded(matrix.scales)
            inside = PackedMatrix(kind, guarded(matrix.data), matrix.inputs, scales)
            some = torch.tensor([outputs - 1, 0, outputs - 1])
            for dtype in FLOATS if outputs == 37 else FLOATS[:2]:
                dense = unpack_rows(matrix, dtype=dtype, backend="reference")
                assert torch.equal(unpack_rows(inside, dtype=dtype), dense)
                for chosen in (some, some[:0]):
                    assert torch.equal(unpack_rows(matrix, chosen, dtype=dtype), dense[chosen])
                x = torch.randn(33, matrix.inputs, generator=gen).to(dtype)
                for rows in (1, 2, 5, 17, 33):
                    assert torch.equal(row_linear(guarded(x[:rows]), inside), row_linear(x[:rows], dense))


@named([kind for kind in KINDS if kind.beside])
@levels
def test_groups_and_scales_of_any_size_have_the_bits_of_the_dense_matrix(level, kind):
    gen = torch.Generator().manual_seed(4)
    for inputs, groups in ((192, 6), (256, 4), (320, 1), (1536, 3), (36, 3)):
        matrix = packed_matrix(kind, 23, inputs, seed=groups, groups=groups)
        factor = torch.tensor([1e-36, 1e-30, 1e30]).repeat(8)[:23].view(23, *[1] * (matrix.scales.dim() - 1))
        if kind.name in ("uint8", "int4"):  # whose second number is an integer
            factor = torch.cat([factor, torch.ones_like(factor)], -1)
        small = replace(matrix, scales=matrix.scales.clone())
        small.scales[11] = 2.0**-126 - 2.0**-146  # a subnormal number, but not in bfloat16
        x = torch.randn(17, inputs, generator=gen).bfloat16() * 2.0**100
        with cpu_levels.forced(level):
            for dtype in FLOATS:
                scaled = replace(matrix, scales=matrix.scales * factor)
                assert torch.equal(
                    unpack_rows(scaled, dtype=dtype), unpack_rows(scaled, dtype=dtype, backend="reference")
                )
            for one in (matrix, small):
                dense = unpack_rows(one, dtype=torch.bfloat16)
                for rows in (1, 3, 6, 17):
                    assert torch.equal(row_linear(x[:rows], one), row_linear(x[:rows], dense))


@dtypes
@levels
def test_a_decoder_of_mixed_kinds_has_the_dense_decoders_bits(level, dtype):
    weights, case = decoder_case(dtype)
    names = iter([k.name for k in KINDS if k.weights <= 32] * 4)

    def packed(matrix):
        kind = BY_NAME[next(names)]
        if matrix.shape[1] % kind.weights:
            kind = BY_NAME["uint8"]
        return packed_matrix(kind, *matrix.shape, seed=matrix.shape[0])

    layers = [
        replace(layer, **{n: packed(getattr(layer, n)) for n in MATRICES if n != "v"}) for layer in weights.layers
    ]
    mixed = replace(weights, embedding=packed(weights.embedding), head=packed(weights.head), layers=layers)
    caches = {name: [cache.clone() for cache in case[name]] for name in ("k_caches", "v_caches")}
    with cpu_levels.forced(level):
        found = decoder_rows(mixed, **case, keep=3, states=(0, 1), backend="cpu")
        exact = decoder_rows(mixed.dense(), **(case | caches), keep=3, states=(0, 1), backend="cpu")
    for mine, theirs in zip((found, *map(case.get, caches)), (exact, *caches.values()), strict=True):
        assert all(map(torch.equal, mine, theirs))


WRONG = {
    "a dtype": (lambda m: PackedMatrix(m.kind, m.data.char(), m.inputs), TypeError, "data: q4_0 lies in torch.uint8"),
    "a width": (lambda m: PackedMatrix(m.kind, m.data, m.inputs + 32), ValueError, "rows of 54 bytes"),
    "no whole blocks": (lambda m: PackedMatrix(m.kind, m.data, m.inputs + 1), ValueError, "packs 32 weights a block"),
    "scales": (lambda m: PackedMatrix(m.kind, m.data, m.inputs, torch.ones(3, 1)), ValueError, "scales: those of q4_0"),
    "no zero points": (
        lambda m: PackedMatrix(BY_NAME["int4"], m.data, 72, torch.ones(3, 2)),
        ValueError,
        r"divide 72, 2\], contig",
    ),
    "more than a scale a row": (
        lambda m: PackedMatrix(CODE_KINDS[0], torch.zeros(2, 64).char(), 64, torch.ones(2, 2)),
        ValueError,
        f"has one for a row of at most {MOST_CODES} inputs",
    ),
    "scales of the operator": (
        lambda m: torch.ops.gsd_kernels.row_linear(
            torch.ones(1, 64), torch.zeros(2, 64).char(), CODE_KINDS[0].number, torch.ones(2, 2)
        ),
        RuntimeError,
        "one scale a row",
    ),
    "no scales": (lambda m: PackedMatrix(BY_NAME["int8"], m.data.char(), 36), TypeError, "scales: int8 needs float32"),
    "a row": (lambda m: unpack_rows(m, torch.tensor([3]), dtype=torch.float32), (RuntimeError, IndexError), "3"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong):
    call, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        call(packed_matrix(BY_NAME["q4_0"], 3, 64))


def rows_of(count, inputs, dtype, seed=1):
    """Rows of all sizes, one of zeros."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=gen) * 10.0 ** torch.randint(-7, 4, (count, 1), generator=gen)
    x[count // 2] = 0
    return x.to(dtype)


@named((*CODE_KINDS, *ROUNDED_KINDS))
@levels
def test_products_of_rounded_rows(level, kind):
    """The reference's bits, or for kinds that put floats in the place of codes again those of the dense matrix."""
    with cpu_levels.forced(level):
        for outputs, inputs in ((1, 1), (37, 200), (70, 1100)):
            matrix = packed_matrix(kind, outputs, inputs, groups=1)
            inside = replace(matrix, data=guarded(matrix.data), scales=guarded(matrix.scales))
            for dtype in FLOATS:
                x = rows_of(50, inputs, dtype)
                exact = row_linear(x, matrix, backend="reference")
                if kind in ROUNDED_KINDS:
                    rounded, approximate = codes.rounded_rows(x), exact
                    exact = row_linear(rounded, unpack_rows(matrix, dtype=dtype))
                    assert not torch.equal(rounded, x)
                    assert ((exact.double() - approximate.double()).norm() / exact.double().norm()) < 0.01
                for rows in (1, 2, 5, 17, 50):
                    assert torch.equal(row_linear(guarded(x[:rows]), inside), exact[:rows])


@named(CODE_KINDS)
@levels
def test_sums_of_the_largest_codes_do_not_overflow(level, kind):
    matrix = packed_matrix(kind, 2, MOST_CODES, groups=1)
    matrix.data.fill_(-128)
    x = torch.tensor([[-1.0], [1.0]]).expand(2, MOST_CODES).contiguous()
    with cpu_levels.forced(level):
        assert torch.equal(row_linear(x, matrix), row_linear(x, matrix, backend="reference"))


@named((*CODE_KINDS, *ROUNDED_KINDS))
def test_codes_stand_for_bytes_under_a_scale_and_what_is_not_finite_stays_so(kind):
    matrix, x = packed_matrix(kind, 5, 70, groups=1), torch.randn(4, 70)
    weights = matrix.data * matrix.scales
    if kind.name == "int8_vectorwise":  # which 127 stands for
        weights *= 7.874015718698502e-3
    for dtype in FLOATS:
        for backend in ("cpu", "reference"):
            assert torch.equal(unpack_rows(matrix, dtype=dtype, backend=backend), weights.to(dtype))
    x[1, 3], x[2, 7] = torch.nan, torch.inf
    out = row_linear(x, matrix)
    assert not out[1:3].isfinite().any() and out[[0, 3]].isfinite().all()


@backends("reference", "cpu")
@dtypes
@pytest.mark.parametrize(("rows", "k", "n"), [(1, 16, 1), (2, 48, 63), (5, 1008, 111), (17, 256, 1000), (13, 1037, 6)])
def test_the_error_is_at_most_twice_pytorchs_and_a_row_does_not_depend_on_the_others(rows, k, n, dtype, on):
    gen = torch.Generator().manual_seed(rows * 1000 + n)
    x, weight = torch.randn(rows, k, generator=gen).to(dtype), torch.randn(n, k, generator=gen).to(dtype)
    exact = x.double() @ weight.double().T
    theirs = (torch.nn.functional.linear(x, weight).double() - exact).norm()
    whole = row_linear(x, weight, backend=on.name)
    assert (whole.double() - exact).norm() <= 2 * theirs + 1e-7 * exact.norm()
    if on.name == "reference":
        return
    for few in {1, 2, 3, 4, 7, rows} & set(range(rows + 1)):
        assert torch.equal(row_linear(x[:few].contiguous(), weight, backend=on.name), whole[:few])
    x[1::2] = float("nan")
    found = row_linear(x, weight, backend=on.name)
    assert torch.equal(found[::2], whole[::2]) and found[1::2].isnan().all()


# Relative. In bfloat16 some levels round the weights of attention too, as PyTorch's attention does.
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
@pytest.mark.parametrize("wiring", (*WIRINGS, STORED))
def test_feature_rows_equal_the_reference_and_have_the_same_bits_alone(dtype, most, wiring):
    """Layers that store keys and values of features alone have no rows to keep."""
    layers, keep = 1 + (wiring == STORED), 5 * (wiring != STORED)
    weights, case = feature_case(dtype, layers, wiring)
    results = []
    for backend in ("cpu", "reference"):
        given = deepcopy(case)
        found = feature_rows(weights, **given, keep=keep, backend=backend)
        results.append((*found, *given["k_caches"], *given["v_caches"]))
    assert [tuple(t.shape) for t in results[0][:3]] == [(2, keep, 63), (2, keep, 32), (2, keep, 32)]
    for ours, other in zip(*results, strict=True):
        assert (ours.float() - other.float()).norm() <= most * other.float().norm()
    rows = {"token_ids", "features", "positions", "slots", "ancestor_mask"}
    for row in range(5):  # behind its ancestors, which lie in the caches by now
        one = {name: value[:, row : row + 1] if name in rows else value for name, value in case.items()}
        for alone, among in zip(feature_rows(weights, **one, keep=keep // 5), results[0], strict=False):
            assert torch.equal(alone, among[:, row : row + keep // 5])
    assert all(map(torch.equal, (*case["k_caches"], *case["v_caches"]), results[0][3:]))


@pytest.mark.parametrize(
    ("wiring", "change", "match"),
    [
        (STORED, {}, "feature_norm: without one expected no projection, and keep 0; got 2"),
        ("projection", {"matrix": torch.zeros(16, 64)}, "projection: expected 32 contiguous rows"),
        ("projection", {"bias": torch.ones(31)}, "projection bias: expected .32."),
    ],
    ids=["stored", "outputs", "bias"],
)
def test_a_wrong_wiring_is_refused(wiring, change, match):
    weights, case = feature_case(layers=1, wiring=wiring)
    if change:
        weights = replace(weights, projection=replace(weights.projection, **change))
    with pytest.raises(RuntimeError, match=match):
        feature_rows(weights, **case, keep=2, backend="cpu")
