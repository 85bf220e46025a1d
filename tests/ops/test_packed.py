"""Packed weights: the bits of the dense matrices that their formats define, at every level of instructions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from guards import guarded
from ops.contracts.backends import backend_param, backends, levels
from ops.contracts.decoder import decoder_case
from ops.contracts.packed import KINDS, packed_matrix, width_of

from gsd_kernels import cpu_levels
from gsd_kernels.ops.decoder_rows import decoder_rows
from gsd_kernels.ops.decoder_rows.weights import MATRICES
from gsd_kernels.ops.packed import BY_NAME, PackedMatrix, unpack_rows
from gsd_kernels.ops.row_linear import row_linear

pytestmark = pytest.mark.quick

DTYPES = (torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.many))
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@kinds
def test_the_gguf_package_unpacks_the_same_bits(kind):
    gguf = pytest.importorskip("gguf")
    if kind.name.upper() not in gguf.GGMLQuantizationType.__members__:
        pytest.skip("GGUF has no such kind")
    matrix = packed_matrix(kind, 5, width_of(kind, 300))
    theirs = gguf.quants.dequantize(matrix.data.numpy(), gguf.GGMLQuantizationType[kind.name.upper()])
    assert torch.equal(unpack_rows(matrix, dtype=torch.float32, backend="reference"), torch.from_numpy(theirs))


@pytest.mark.parametrize("dtype", DTYPES)
@kinds
@levels
def test_every_level_unpacks_the_reference_s_bits(level, kind, dtype):
    matrix = packed_matrix(kind, 7, width_of(kind, 160), seed=1)
    exact = unpack_rows(matrix, dtype=dtype, backend="reference")
    with cpu_levels.forced(level):
        assert torch.equal(unpack_rows(matrix, dtype=dtype), exact)
        some = torch.tensor([6, 0, 6])
        assert torch.equal(unpack_rows(matrix, some, dtype=dtype), exact[some])


@pytest.mark.parametrize("dtype", DTYPES)
@kinds
@levels
def test_products_have_the_bits_of_the_dense_matrix(level, kind, dtype):
    gen = torch.Generator().manual_seed(2)
    for outputs, least in ((1, 1), (37, 200), (70, 1100)):
        matrix = packed_matrix(kind, outputs, width_of(kind, least), seed=outputs)
        dense = unpack_rows(matrix, dtype=dtype)
        x = torch.randn(128, matrix.inputs, generator=gen).to(dtype)
        with cpu_levels.forced(level):
            for rows in (1, 2, 5, 16, 17, 32, 33, 128):
                assert torch.equal(row_linear(x[:rows], matrix), row_linear(x[:rows], dense))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.beside], ids=lambda kind: kind.name)
@levels
def test_groups_of_any_size_have_the_bits_of_the_dense_matrix(level, kind):
    gen = torch.Generator().manual_seed(4)
    for inputs, groups in ((192, 6), (256, 4), (320, 1), (1536, 3), (288, 3), (160, 2), (36, 3)):
        matrix = packed_matrix(kind, 23, inputs, seed=groups, groups=groups)
        small = replace(matrix, scales=matrix.scales.clone())
        small.scales[11] = 2.0**-126 - 2.0**-146  # a subnormal number, but not in bfloat16
        x = torch.randn(17, inputs, generator=gen).bfloat16() * 2.0**100
        with cpu_levels.forced(level):
            for one in (matrix, small):
                dense = unpack_rows(one, dtype=torch.bfloat16)
                for rows in (1, 3, 5, 6, 17):
                    assert torch.equal(row_linear(x[:rows], one), row_linear(x[:rows], dense))


@pytest.mark.parametrize("dtype", DTYPES)
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
    for mine, theirs in zip(found, exact, strict=True):
        assert torch.equal(mine, theirs)
    for name, cache in caches.items():
        assert all(torch.equal(a, b) for a, b in zip(case[name], cache, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.beside], ids=lambda kind: kind.name)
@levels
def test_scales_of_any_size_are_rounded_as_the_reference_does(level, kind, dtype):
    whole = packed_matrix(kind, 4, 192, seed=3)
    factor = torch.tensor([1.0, 1e-36, 1e-30, 1e30]).view(4, *[1] * (whole.scales.dim() - 1))
    if kind.name in ("uint8", "int4"):  # whose second number is an integer
        factor = torch.cat([factor, torch.ones_like(factor)], -1)
    matrix = replace(whole, scales=whole.scales * factor)
    exact = unpack_rows(matrix, dtype=dtype, backend="reference")
    assert ((exact != 0) & (exact.float().abs() < torch.finfo(torch.float32).tiny)).any() or dtype == torch.float16
    with cpu_levels.forced(level):
        assert torch.equal(unpack_rows(matrix, dtype=dtype), exact)


@backends("reference")
def test_the_reference_decoder_takes_them_too(on):
    weights, case = decoder_case()
    layers = [replace(layer, up=packed_matrix(BY_NAME["q8_0"], *layer.up.shape)) for layer in weights.layers]
    mixed = replace(weights, layers=layers)
    found = decoder_rows(mixed, **case, keep=5, backend=on.name)
    assert torch.equal(found[0], decoder_rows(mixed.dense(), **case, keep=5, backend=on.name)[0])


@kinds
@levels
def test_nothing_outside_a_matrix_is_read(level, kind):
    matrix = packed_matrix(kind, 6, width_of(kind, 100))
    scales = None if matrix.scales is None else guarded(matrix.scales)
    inside = PackedMatrix(kind, guarded(matrix.data), matrix.inputs, scales)
    with cpu_levels.forced(level):
        for dtype in (torch.float32, torch.bfloat16):
            x = guarded(torch.randn(3, matrix.inputs).to(dtype))
            assert torch.equal(row_linear(x, inside), row_linear(x, matrix))
    assert torch.equal(unpack_rows(inside, dtype=torch.bfloat16), unpack_rows(matrix, dtype=torch.bfloat16))


@pytest.mark.parametrize("backend", [backend_param("cpu")])
def test_a_damaged_scale_is_not_hidden(backend):
    data = packed_matrix(BY_NAME["q4_0"], 2, 64).data
    data[1, :2] = torch.tensor([0x00, 0x7E], dtype=torch.uint8)  # NaN
    out = row_linear(torch.ones(1, 64), PackedMatrix(BY_NAME["q4_0"], data, 64))
    assert out[0, 0].isfinite() and out[0, 1].isnan()


WRONG = {
    "a dtype": (lambda m: PackedMatrix(m.kind, m.data.char(), m.inputs), TypeError, "data: q4_0 lies in torch.uint8"),
    "a width": (lambda m: PackedMatrix(m.kind, m.data, m.inputs + 32), ValueError, "rows of 54 bytes"),
    "no whole blocks": (lambda m: PackedMatrix(m.kind, m.data, m.inputs + 1), ValueError, "packs 32 weights a block"),
    "scales": (lambda m: PackedMatrix(m.kind, m.data, m.inputs, torch.ones(3, 1)), ValueError, "scales: those of q4_0"),
    "an odd group": (
        lambda m: PackedMatrix(BY_NAME["nf4"], m.data, 72, torch.ones(3, 8)),
        ValueError,
        "that divide 72",
    ),
    "no zero points": (
        lambda m: PackedMatrix(BY_NAME["int4"], m.data, 72, torch.ones(3, 2)),
        ValueError,
        r"divide 72, 2\], contig",
    ),
    "no scales": (lambda m: PackedMatrix(BY_NAME["int8"], m.data.char(), 36), TypeError, "scales: int8 needs float32"),
    "inputs": (lambda m: row_linear(torch.ones(1, 32), m), RuntimeError, "weight: expected"),
    "a row": (lambda m: unpack_rows(m, torch.tensor([3]), dtype=torch.float32), (RuntimeError, IndexError), "3"),
    "rows": (
        lambda m: unpack_rows(m, torch.ones(1), dtype=torch.float32),
        (RuntimeError, IndexError),
        "rows: wrong dtype",
    ),
    "an output dtype": (lambda m: unpack_rows(m, dtype=torch.float64), RuntimeError, "like: expected float32"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_named(wrong):
    call, error, message = WRONG[wrong]
    with pytest.raises(error, match=message):
        call(packed_matrix(BY_NAME["q4_0"], 3, 64))
