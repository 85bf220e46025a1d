"""Products with rows that are rounded to codes: at every level the reference's bits, alone and among others."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from guards import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.backends import levels, needs_cpu
from ops.contracts.decoder import decoder_case
from ops.contracts.packed import packed_matrix

from gsd_kernels import cpu_levels
from gsd_kernels.ops.decoder_rows import decoder_rows
from gsd_kernels.ops.packed import BY_NAME, CODE_KINDS, ROUNDED_KINDS, PackedMatrix, codes, unpack_rows
from gsd_kernels.ops.packed.matrix import MOST_CODES
from gsd_kernels.ops.row_linear import row_linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
pytestmark = [pytest.mark.quick, needs_cpu]
kinds = pytest.mark.parametrize("kind", CODE_KINDS, ids=lambda kind: kind.name)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def matrix_of(kind, outputs, inputs, seed=0):
    return packed_matrix(kind, outputs, inputs, seed, groups=1)


def rows_of(count, inputs, dtype, seed=1):
    """Rows of all sizes, one of zeros."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=gen) * 10.0 ** torch.randint(-7, 4, (count, 1), generator=gen)
    x[count // 2] = 0
    return x.to(dtype)


@dtypes
@kinds
@levels
def test_every_level_has_the_references_bits(level, kind, dtype):
    for outputs, inputs in ((1, 1), (37, 200), (70, 1100)):
        matrix, x = matrix_of(kind, outputs, inputs), rows_of(50, inputs, dtype)
        exact = row_linear(x, matrix, backend="reference")
        with cpu_levels.forced(level):
            for rows in (1, 2, 5, 17, 50):
                assert torch.equal(row_linear(x[:rows], matrix), exact[:rows])


@kinds
@levels
def test_sums_of_the_largest_codes_do_not_overflow(level, kind):
    inputs = MOST_CODES
    matrix = matrix_of(kind, 2, inputs)
    matrix.data.fill_(-128)
    x = torch.full((2, inputs), -1.0)
    x[1] = 1.0
    with cpu_levels.forced(level):
        assert torch.equal(row_linear(x, matrix), row_linear(x, matrix, backend="reference"))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(1, 90), st.integers(1, 300), st.sampled_from(DTYPES), st.integers(0, 99))
def test_a_row_has_the_same_bits_alone(rows, outputs, inputs, dtype, seed):
    matrix, x = matrix_of(CODE_KINDS[seed % len(CODE_KINDS)], outputs, inputs, seed), rows_of(rows, inputs, dtype, seed)
    together = row_linear(x, matrix)
    assert torch.equal(together, row_linear(x, matrix, backend="reference"))
    assert torch.equal(torch.cat([row_linear(row[None], matrix) for row in x]), together)


@dtypes
@levels
def test_a_decoder_takes_them_beside_dense_and_packed_ones(level, dtype):
    """Against the same decoder with codes in the place of one matrix at a time, dense elsewhere: float sums differ."""
    weights, case = decoder_case(dtype)

    names_of = cycle((*CODE_KINDS, *ROUNDED_KINDS))

    def rounding(matrix):
        return matrix_of(next(names_of), *matrix.shape, seed=matrix.shape[0])

    for names in (("q", "o", "down"), ("k", "v", "gate", "up"), ("q", "k", "v", "o", "gate", "up", "down")):
        layers = [
            replace(layer, **{name: rounding(getattr(layer, name)) for name in names}) for layer in weights.layers
        ]
        mixed = replace(weights, head=rounding(weights.head), layers=layers)
        fresh = {name: [cache.clone() for cache in case[name]] for name in ("k_caches", "v_caches")}
        exact, _, _ = decoder_rows(mixed, **(case | fresh), keep=5, backend="reference")
        with cpu_levels.forced(level):
            found, _, _ = decoder_rows(mixed, **case, keep=5, backend="cpu")
        assert ((found - exact).norm() / exact.norm()) < 0.02
        dense, _, _ = decoder_rows(replace(weights, head=mixed.head), **case, keep=5, backend="cpu")
        assert ((found - dense).norm() / dense.norm()) > 0.1


@dtypes
@levels
def test_rounded_rows_are_multiplied_as_the_dense_matrix_is(level, dtype):
    """For kinds that put floats in the place of the codes again."""
    for outputs, inputs in ((1, 1), (37, 200), (70, 1100)):
        matrix, x = matrix_of(ROUNDED_KINDS[0], outputs, inputs), rows_of(50, inputs, dtype)
        dense, rounded = unpack_rows(matrix, dtype=dtype), codes.rounded_rows(x)
        assert not torch.equal(rounded, x)
        with cpu_levels.forced(level):
            for rows in (1, 2, 5, 17, 50):
                assert torch.equal(row_linear(x[:rows], matrix), row_linear(rounded[:rows], dense))
        found, exact = row_linear(x, matrix).double(), row_linear(x, matrix, backend="reference").double()
        assert ((found - exact).norm() / exact.norm()) < 0.01


@kinds
def test_nothing_outside_is_read(kind):
    matrix = matrix_of(kind, 6, 100)
    inside = PackedMatrix(kind, guarded(matrix.data), matrix.inputs, guarded(matrix.scales))
    x = guarded(torch.randn(3, matrix.inputs))
    assert torch.equal(row_linear(x, inside), row_linear(x, matrix))


@pytest.mark.parametrize("kind", (*CODE_KINDS, *ROUNDED_KINDS), ids=lambda kind: kind.name)
def test_what_is_not_finite_stays_so(kind):
    matrix, x = matrix_of(kind, 5, 64), torch.randn(4, 64)
    x[1, 3], x[2, 7] = torch.nan, torch.inf
    out = row_linear(x, matrix)
    assert not out[1:3].isfinite().any() and out[[0, 3]].isfinite().all()


@pytest.mark.parametrize("kind", (*CODE_KINDS, *ROUNDED_KINDS), ids=lambda kind: kind.name)
def test_they_stand_for_bytes_under_a_scale(kind):
    matrix = matrix_of(kind, 5, 70)
    weights = matrix.data * matrix.scales
    if kind.name == "int8_vectorwise":  # which 127 stands for
        weights *= 7.874015718698502e-3
    for dtype in DTYPES:
        for backend in ("cpu", "reference"):
            assert torch.equal(unpack_rows(matrix, dtype=dtype, backend=backend), weights.to(dtype))
    plain = codes.taking_floats(matrix)
    assert plain.kind == BY_NAME["int8"]
    torch.testing.assert_close(unpack_rows(plain, dtype=torch.float32), weights, rtol=1e-6, atol=0)


@kinds
def test_what_is_wrong_is_named(kind):
    data = torch.zeros(2, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=rf"scales: {kind.name} has one for a row of at most {MOST_CODES} inputs"):
        PackedMatrix(kind, data, 64, torch.ones(2, 2))
    with pytest.raises(ValueError, match=rf"got \[1, 1\] for {MOST_CODES + 1}"):
        PackedMatrix(kind, torch.zeros(1, MOST_CODES + 1, dtype=torch.int8), MOST_CODES + 1, torch.ones(1, 1))
    with pytest.raises(TypeError, match=r"lies in torch\.int8"):
        PackedMatrix(kind, data.view(torch.uint8), 64, torch.ones(2, 1))
    with pytest.raises(RuntimeError, match="one scale a row"):  # the operator by itself
        torch.ops.gsd_kernels.row_linear(torch.ones(1, 64), data, kind.number, torch.ones(2, 2))
