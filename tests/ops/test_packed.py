"""Products, packed weights, rounded rows, decoders of them: the dense matrices' bits at every level of instructions."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch
from guards import guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from ops.contracts.backends import backend_param, backends, levels
from ops.contracts.decoder import STORED, WIRINGS, decoder_case, feature_case
from ops.contracts.packed import KINDS, packed_matrix, width_of

from gsd_kernels import cpu_levels
from gsd_kernels.ops.decoder_rows import decoder_rows
from gsd_kernels.ops.decoder_rows.weights import MATRICES
from gsd_kernels.ops.feature_rows import feature_rows
from gsd_kernels.ops.packed import BY_NAME, CODE_KINDS, ROUNDED_KINDS, PackedMatrix, codes, unpack_rows
from gsd_kernels.ops.packed.matrix import MOST_CODES
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


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
code_kinds = pytest.mark.parametrize("kind", CODE_KINDS, ids=lambda kind: kind.name)
dtypes = pytest.mark.parametrize("dtype", FLOATS)


def matrix_of(kind, outputs, inputs, seed=0):
    return packed_matrix(kind, outputs, inputs, seed, groups=1)


def rows_of(count, inputs, dtype, seed=1):
    """Rows of all sizes, one of zeros."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=gen) * 10.0 ** torch.randint(-7, 4, (count, 1), generator=gen)
    x[count // 2] = 0
    return x.to(dtype)


@dtypes
@code_kinds
@levels
def test_every_level_has_the_references_bits(level, kind, dtype):
    for outputs, inputs in ((1, 1), (37, 200), (70, 1100)):
        matrix, x = matrix_of(kind, outputs, inputs), rows_of(50, inputs, dtype)
        exact = row_linear(x, matrix, backend="reference")
        with cpu_levels.forced(level):
            for rows in (1, 2, 5, 17, 50):
                assert torch.equal(row_linear(x[:rows], matrix), exact[:rows])


@code_kinds
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
@given(st.integers(1, 30), st.integers(1, 90), st.integers(1, 300), st.sampled_from(FLOATS), st.integers(0, 99))
def test_a_row_of_codes_has_the_same_bits_alone(rows, outputs, inputs, dtype, seed):
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


@code_kinds
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
    for dtype in FLOATS:
        for backend in ("cpu", "reference"):
            assert torch.equal(unpack_rows(matrix, dtype=dtype, backend=backend), weights.to(dtype))
    plain = codes.taking_floats(matrix)
    assert plain.kind == BY_NAME["int8"]
    torch.testing.assert_close(unpack_rows(plain, dtype=torch.float32), weights, rtol=1e-6, atol=0)


@code_kinds
def test_codes_of_wrong_scales_are_refused(kind):
    data = torch.zeros(2, 64, dtype=torch.int8)
    with pytest.raises(ValueError, match=rf"scales: {kind.name} has one for a row of at most {MOST_CODES} inputs"):
        PackedMatrix(kind, data, 64, torch.ones(2, 2))
    with pytest.raises(ValueError, match=rf"got \[1, 1\] for {MOST_CODES + 1}"):
        PackedMatrix(kind, torch.zeros(1, MOST_CODES + 1, dtype=torch.int8), MOST_CODES + 1, torch.ones(1, 1))
    with pytest.raises(TypeError, match=r"lies in torch\.int8"):
        PackedMatrix(kind, data.view(torch.uint8), 64, torch.ones(2, 1))
    with pytest.raises(RuntimeError, match="one scale a row"):  # the operator by itself
        torch.ops.gsd_kernels.row_linear(torch.ones(1, 64), data, kind.number, torch.ones(2, 2))


SHAPES = [
    (1, 16, 1),
    (2, 48, 63),
    (5, 1008, 111),
    (17, 256, 1000),
    (64, 96, 7),
    (8, 2064, 130),
    (13, 1037, 6),
    (3, 5, 70),
]
"""(rows, in, out): whole tiles and parts of them."""


def tensors(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(rows * 1000 + n)
    return torch.randn(rows, k, generator=gen).to(dtype), torch.randn(n, k, generator=gen).to(dtype)


@backends("reference", "cpu")
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "k", "n"), SHAPES)
def test_the_error_is_at_most_twice_pytorchs(rows, k, n, dtype, on):
    x, weight = tensors(rows, k, n, dtype)
    exact = x.double() @ weight.double().T
    theirs = (torch.nn.functional.linear(x, weight).double() - exact).norm()
    ours = (row_linear(x, weight, backend=on.name).double() - exact).norm()
    assert ours <= 2 * theirs + 1e-7 * exact.norm()


@pytest.mark.parametrize("dtype", FLOATS)
@backends("cpu")
def test_a_row_does_not_depend_on_the_others(on, dtype):
    x, weight = tensors(23, 1200, 130, dtype)
    whole = row_linear(x, weight, backend=on.name)
    for rows in (1, 2, 3, 4, 7, 16):
        assert torch.equal(row_linear(x[:rows].contiguous(), weight, backend=on.name), whole[:rows])
    poisoned = x.clone()
    poisoned[1::2] = float("nan")
    found = row_linear(poisoned, weight, backend=on.name)
    assert torch.equal(found[::2], whole[::2]) and found[1::2].isnan().all()


def test_states_are_what_the_layers_read():
    """In the order that was asked for; of layer 0 the embeddings, of layer 1 what the reference passes on."""
    results = []
    for backend in ("cpu", "reference"):
        weights, case = decoder_case()
        results.append(decoder_rows(weights, **case, keep=0, states=(1, 0, 1), backend=backend))
        assert torch.equal(results[-1][2][1], weights.embedding[case["token_ids"].long()])
    (logits, hidden, states), (_, _, expected) = results
    assert states.shape == (3, 2, 5, 32) and logits.shape[1] == hidden.shape[1] == 0
    assert torch.equal(states[0], states[2]) and not torch.equal(states[0], states[1])
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)


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
def test_a_drafters_row_has_the_same_bits_alone(wiring):
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
