"""The CUDA ops beyond their contracts: what they refuse and when they are chosen, without a GPU; on one, in CUDA
graphs, on the current stream and device, in a model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
import torch
from backends.test_decoder import captured
from block_code import rows as block_code
from decoders import CUDA_SIZES, Sizes, decoder
from graphs import candidates, drafted, tails
from models import noised, prompts, tiny
from ops.contracts.backends import Backend, assert_bit_equal, needs_cpu
from ops.contracts.decoder import (
    HALF_PRECISION,
    STORED,
    WIRINGS,
    Attention,
    check_attention,
    packed_matrix,
    reading_features,
)
from torch import Tensor

import gsd_kernels as gsd
from gsd_kernels import backends
from gsd_kernels.ops.cuda_common import DTYPES, check_device
from gsd_kernels.ops.dag_attention import cuda as attention
from gsd_kernels.ops.dag_attention import reference
from gsd_kernels.ops.decoder_rows import DecoderWeights, cuda, decoder_rows
from gsd_kernels.ops.feature_rows import cuda as features
from gsd_kernels.ops.feature_rows import feature_rows
from gsd_kernels.ops.packed import BY_NAME, PackedMatrix
from gsd_kernels.ops.table import all_ops

pytestmark = pytest.mark.quick

HALF = torch.float16
SMALL = CUDA_SIZES["llama-64"]
GPU = torch.device("cuda")
GRAPH = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=32)
OPS = all_ops()
ATTENTION, LEARN = OPS["dag_attention"], OPS["learn_source"]


# What is refused, and the cure.

INT8 = BY_NAME["int8"]
ODD = Sizes(hidden=64, inner=64, head_dim=80), Sizes(hidden=68, head_dim=64), Sizes(hidden=64, inner=77, head_dim=64)


def odd(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor that does not begin at a multiple of 16 bytes."""
    return torch.zeros(1 + torch.Size(shape).numel(), dtype=dtype)[1:].view(shape)


def attended(change: Callable[[Tensor], Tensor] = lambda t: t, **others: Tensor) -> None:
    given = {name: torch.zeros(1, heads, 40, 64, dtype=HALF) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    attention.check(**{name: change(t) for name, t in given.items()} | others)


def checked(sizes: Sizes = SMALL, dtype: torch.dtype = HALF, **changes: object) -> None:
    cuda.check(dataclasses.replace(decoder(sizes, dtype), **changes))


def cached(cache: Tensor) -> None:
    fine = torch.zeros(1, 2, 40, 64, dtype=HALF)
    cuda.check_caches(decoder(SMALL, HALF), [fine] * 2, [fine.mT.contiguous().mT.contiguous(), cache])


def drafter(**changes: Tensor) -> None:
    made = reading_features(decoder(CUDA_SIZES["qwen3-128"], torch.bfloat16), "projection")
    norm = {name: changes.pop(name) for name in ("feature_norm",) if name in changes}
    features.check(dataclasses.replace(made, projection=dataclasses.replace(made.projection, **changes), **norm))


NARROW, WIDE = torch.zeros(1, 2, 40, 65, dtype=HALF)[..., :64], torch.zeros(1, 2, 40, 128, dtype=HALF)
AT = "a multiple of 16 bytes"
REFUSED = {
    "float32": (lambda: attended(Tensor.float), TypeError, "q: .*float16 or bfloat16, got float32; use backend="),
    "heads of 80": (
        *(lambda: attended(lambda t: torch.cat([t, t[..., :16]], -1)), ValueError),
        "q: .*heads of 64 or 128, got 80; use",
    ),
    "two head sizes": (lambda: attended(v=WIDE), ValueError, "v: .*q's heads of 64, got 128; use"),
    "strides": (
        *(lambda: attended(lambda t: t.mT.contiguous().mT), ValueError),
        r"q: .*rows at multiples of 16 bytes, got strides .*40\]",
    ),
    "an odd place": (lambda: attended(k=odd(HALF, 1, 2, 40, 64)), ValueError, "k: .*16 bytes.*from place 1; use"),
    "odd strides": (lambda: attended(v=NARROW), ValueError, "v: .*strides .* 65, 1"),
    "rows: float32": (
        *(lambda: checked(dtype=torch.float32), TypeError),
        "embedding: .*float16 or bfloat16, got float32; use",
    ),
    "rows: heads of 80": (lambda: checked(ODD[0]), ValueError, "q: .*heads of 64 or 128, got 80; use"),
    "odd rows": (lambda: checked(ODD[1]), ValueError, "embedding: .*rows of a multiple of 8, got 68; use"),
    "odd inner rows": (lambda: checked(ODD[2]), ValueError, r"layers\[0\].down: .*multiple of 8, got 77"),
    "two types": (
        *(lambda: checked(final_norm=torch.ones(64)), TypeError),
        "final_norm: .*float16 like the others, got float32",
    ),
    "rows: an odd place": (
        *(lambda: checked(head=odd(HALF, 63, 64)), ValueError),
        rf"head: .*{AT}; pass its .clone\(\)",
    ),
    "rows: strides": (
        *(lambda: checked(head=torch.zeros(64, 64, dtype=HALF).T), ValueError),
        "head: .*a contiguous tensor",
    ),
    "another packing": (
        *(lambda: checked(head=packed_matrix(BY_NAME["q4_0"], 63, 64)), TypeError),
        "head: .*dense matrices or packed ones of q8_0, int8, uint8, int4, int4_offset, got q4_0; use backend=",
    ),
    "narrow groups": (
        lambda: checked(head=PackedMatrix(INT8, torch.zeros(63, 64, dtype=torch.int8), 64, torch.ones(63, 16))),
        *(ValueError, "head: .*groups of a multiple of 8 weights, got 4; use backend="),
    ),
    "a float32 cache": (
        *(lambda: cached(torch.zeros(1, 2, 40, 64)), TypeError),
        r"v_caches\[1\]: .*float16 like the others, got float32",
    ),
    "a cache with odd strides": (lambda: cached(NARROW), ValueError, r"v_caches\[1\]: .*strides \[5200, 26"),
    "a float32 feature norm": (
        *(lambda: drafter(feature_norm=torch.ones(104)), TypeError),
        "feature_norm: .*bfloat16 like the others, got float32; use",
    ),
    "a bias at an odd place": (
        *(lambda: drafter(bias=odd(torch.bfloat16, 104)), ValueError),
        f"projection_bias: .*{AT}",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_take_is_named(name):
    check, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        check()


def test_others_are_taken():
    attended(), checked(), cached(torch.zeros(1, 2, 40, 64, dtype=HALF)), drafter()
    checked(head=packed_matrix(BY_NAME["q8_0"], 63, 64))


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or newer, got 7\.5; use backend='reference'"):
        check_device(torch.device("cuda", 0))
    check_device(torch.device("cpu"))


# What the decoders launch, and in which order; run by tests/block_code/rows_op.cpp.

LAYER = ["attend", "combine", "product", "norm", "product", "product"]  # behind q, k and v
WHOLE = ["embed", *(3 * ["norm", "product", *LAYER]), "norm", "product"]
#: Of three layers, rows whose logits are kept and hidden states, and what is launched for two texts of five rows.
LAUNCHES = {
    "all rows": (5, (), WHOLE),
    "one row": (1, (), WHOLE),
    "states are copied by launches that are there": (5, (0, 2), WHOLE),
    "those behind the last norm are not": (1, (3,), [*WHOLE[:-1], "norm", "product"]),
    "of a prompt the last layer's keys suffice": (0, (), WHOLE[: -len(LAYER) - 2]),
    "unless its states are read": (0, (3,), WHOLE[:-1]),
}


def call(of: DecoderWeights, batch: int, count: int, keep: int = 1, states: tuple = (), capacity: int = 64) -> tuple:
    """Arguments of ``decoder_rows``: rows of no meaning, and one cache that all layers have."""
    ids, first = torch.zeros(batch, count, dtype=torch.int32), of.layers[0]
    heads, size = len(first.k) // len(of.inv_freq) // 2, 2 * len(of.inv_freq)
    cache = torch.empty(1, heads, capacity, size, dtype=HALF).expand(batch, -1, -1, -1)
    rows = ids, ids, ids, ids[..., None], ids, ids[:, 0], ids[:, 0]
    return (of, *rows, *2 * [[cache] * len(of.layers)], keep, states)


def on_blocks(test):
    """Which is a function of the sources."""
    kept = pytest.mark.kept("csrc", "gsd_kernels", "tests/block_code", "tests/decoders.py")
    return kept(
        pytest.mark.slow(pytest.mark.skipif(block_code.MISSING is not None, reason=str(block_code.MISSING))(test))
    )


@on_blocks
@pytest.mark.parametrize("case", LAUNCHES)
def test_a_layer_is_eight_launches(case, tmp_path_factory):
    keep, states, expected = LAUNCHES[case]
    of = decoder(dataclasses.replace(SMALL, layers=3), HALF)
    assert block_code.launches(tmp_path_factory, *call(of, 2, 5, keep, states)) == expected


@on_blocks
@pytest.mark.parametrize("wiring", [*WIRINGS, STORED])
def test_token_and_feature_are_one_launch(tmp_path_factory, wiring):
    """And a layer that stores features is one, which turns its keys."""
    of = reading_features(decoder(SMALL, HALF), wiring)
    _, ids, *rest, keep, _ = call(of.decoder, 2, 5, 0 if wiring == STORED else 5)
    found = block_code.feature_launches(
        tmp_path_factory, of, ids, torch.zeros(2, 5, SMALL.hidden, dtype=HALF), *rest, keep
    )
    begin = ["pair", "product", *["norm", "product"] * wiring.startswith("projection")]
    whole = [*begin, *LAYER, "norm", "product", *LAYER, "norm", "product"]
    assert found == (["embed", "product", "product"] if wiring == STORED else whole)


BLOCKS_OF = (
    "one row",
    "one warp",
    "several graph splits",
    "no prefix",
    "narrow chunk, soft cap, sinks",
    "window",
    "four warps",
)


@on_blocks
@pytest.mark.parametrize(("case", "dtype"), itertools.product(BLOCKS_OF, DTYPES), ids=str)
def test_attention_is_right_on_blocks(case, dtype, monkeypatch, tmp_path_factory):
    """What a GPU runs, by tests/block_code/rows_op.cpp; caches are NaN where nobody looks."""
    block_code.take_for_gpus(monkeypatch, tmp_path_factory)
    monkeypatch.setattr(ATTENTION, "operator", torch.ops.gsd_block_code.dag_attention)
    check_attention(dataclasses.replace(HALF_PRECISION[case], dtype=dtype), Backend("blocks", "cuda"))


# When they are chosen.


def test_auto_never_picks_what_no_gpu_has_measured(monkeypatch):
    """Not even where it is the only kernel there."""
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, _: None if name != "triton" else "absent")
    found = ATTENTION.implementations
    chosen = backends.resolve("auto", GPU, {n: f for n, f in found.items() if n != "cpu"})
    assert chosen is found["reference"]
    assert ATTENTION.chosen("cuda", GPU) is attention.dag_attention
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, _: None if name != "cpu" else "absent")
    for first in ("triton", "compiled"):
        monkeypatch.setattr(backends, "compiled_first", lambda first=first: first == "compiled")
        for operator in (decoder_rows, feature_rows):
            assert operator.chosen("auto", GPU) is operator.reference


@pytest.fixture
def first(monkeypatch):
    """Sets ``GSD_KERNELS_CUDA_FIRST`` on a machine that has everything."""
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, _: None if name != "cpu" else "absent")
    monkeypatch.setattr(backends, "compiled_first", backends.compiled_first.__wrapped__)
    return lambda value: monkeypatch.setenv("GSD_KERNELS_CUDA_FIRST", value)


def test_one_switch_prefers_what_is_compiled_ahead(first):
    def chosen(name, backend="auto"):
        function = OPS[name].chosen(backend, GPU)
        return next(
            backend for backend, one in OPS[name].implementations.items() if one == function and backend != "cpu"
        )

    assert chosen("merge") == "triton", "until a GPU has shown the others"
    for value, name in (("triton", "triton"), ("compiled", "cuda")):
        first(value)
        for op in ("merge", "verify", "flatten"):
            assert chosen(op) == name
            assert chosen(op, "triton") == "triton", "a name never falls back"
        assert chosen("dag_attention") == "triton", "attention is on request"


@pytest.mark.parametrize(("backend", "device"), [("auto", "cuda"), ("triton", "cuda"), ("auto", "cpu")])
def test_ops_without_a_kernel_are_said_to_be_slow(backend, device, first, monkeypatch, caplog):
    missing = {"cpu": "not built; pip install .", "cuda": "not built; GSD_KERNELS_BUILD_CUDA=1 pip install ."}
    monkeypatch.setattr(backends, "COMPILED_UNAVAILABLE", missing)
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, _: missing.get(name))
    backends._say_slow.cache_clear()
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        for _ in range(2):
            assert LEARN.chosen(backend, torch.device(device)) is LEARN.reference
    assert [r.message for r in caplog.records] == [
        f"on this {device.upper()} PyTorch's operators compute steps, which is right and slow: {missing[device]}"
    ]
    caplog.clear()
    monkeypatch.setitem(missing, device, None)
    assert LEARN.chosen(backend, torch.device(device)) == LEARN.compiled
    assert not caplog.records


def test_the_switch_names_what_it_takes(first):
    first("cuda")
    with pytest.raises(
        ValueError, match="GSD_KERNELS_CUDA_FIRST: expected triton or compiled, got 'cuda'; or unset it"
    ):
        OPS["merge"].chosen("auto", GPU)
    OPS["merge"].chosen("auto", torch.device("cpu"))  # a CPU does not ask


@needs_cpu
def test_a_whole_model_can_name_it(monkeypatch):
    """The compiled ops have one name on both devices; only the attention has to be replaced to run a step here."""
    calls = []

    def attention(call):
        calls.append(call.q.shape)
        return reference.dag_attention(call)

    monkeypatch.setattr(backends, "unavailable_reason", lambda *_: None)
    monkeypatch.setitem(ATTENTION.implementations, "cuda", attention)
    target = tiny()
    options = {"assistant_model": noised(target), "max_new_tokens": 20, "pad_token_id": 0, "graph_config": "tree"}
    inputs = prompts(2, 9)
    got = gsd.generate(target, **inputs, **options, backend="cuda")
    assert calls and torch.equal(got, gsd.generate(target, **inputs, **options, backend="reference"))


# On a GPU.


@pytest.fixture
def built():
    reason = backends.unavailable_reason("cuda", torch.device("cuda"))
    assert reason is None, reason


def on_gpu(test):
    """What skips a test where there is no GPU; where there is one, a library that is not built is a failure."""
    for mark in (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")):
        test = mark(test)
    return pytest.mark.usefixtures("built")(test)


@on_gpu
@pytest.mark.parametrize("backend", ["cuda", "triton"])
def test_one_captured_step_serves_every_length(backend):
    """A step's ops are captured once; replays with other lengths, tokens and graphs equal fresh calls."""
    config = gsd.GraphConfig(depth=2, width=4, branch=3, max_rows=16)
    tensors, _ = Attention(rows=16, nodes=16, group=4, dtype=HALF).build("cuda")
    tensors = {n: t.nan_to_num(0.5) if t.is_floating_point() else t for n, t in tensors.items()}
    gen = torch.Generator().manual_seed(0)
    graph = gsd.TokenGraph.empty(2, config, "cuda")
    tail = tails(2, 5, gen).cuda()
    tokens, log_probs = (t.cuda() for t in candidates("random", 5, (2, 1, 3), gen))
    logits, positions = torch.randn(2, 16, 5000, device="cuda"), torch.zeros(2, 16, dtype=torch.int32, device="cuda")
    root, eos, left, order = (
        torch.tensor(t, dtype=torch.int32, device="cuda") for t in ([1, 2], [3], [99, 99], [0, 1])
    )
    keys = {"seed": torch.tensor(1, device="cuda"), "sequence_ids": order, "temperature": 0.8, "top_p": 0.9}
    budget = {"eos_ids": eos, "remaining": left, "done": left < 0, "max_path": config.max_path}
    cache = torch.randn(2, 2, 40, 64, device="cuda")

    def step() -> tuple[Tensor, ...]:
        graph.reset(root, tail)
        gsd.merge(graph, graph.root_frontier(), tokens, log_probs, level=0, width=4, merge_context=1, backend=backend)
        rows = gsd.flatten(graph, 16, config.max_path, backend=backend)
        out = gsd.dag_attention(**tensors, backend=backend)
        picked = gsd.sample_rows(logits, positions, **keys, backend=backend)
        drafts = gsd.draft_candidates(logits, positions, branch=4, **keys, backend=backend)
        accepted = gsd.verify(rows, picked, **budget, backend=backend)
        moved = cache.clone()
        gsd.commit_kv(
            [moved], [moved.clone()], accepted.accepted_rows, accepted.num_accepted, root.clone(), backend=backend
        )
        return out, picked, *drafts, *rows.tensors(), *accepted.tensors(), moved

    for _ in range(3):
        step()
    static, replay = captured(step)
    for seed in range(4):
        torch.manual_seed(seed)
        tensors["kv_len"].copy_(torch.randint(80, 250, (2,)))
        tensors["q"].normal_()
        tokens.copy_(torch.randint(0, 9, tokens.shape).sort(-1).values + torch.arange(3))
        logits.normal_(std=2)
        positions.random_(0, 100)
        replay()
        assert_bit_equal(static, step())


@on_gpu
def test_the_current_stream_is_used():
    """An op that ran on the default stream would not wait for the slow producer of its input."""
    config = GRAPH
    graph = drafted(config, backend="cuda", device="cuda")
    expected = gsd.flatten(graph, config.max_rows, config.max_path, backend="reference")
    clean = graph.edge_log_probs.clone()
    stream = torch.cuda.Stream()
    graph.edge_log_probs.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        graph.edge_log_probs.copy_(clean)
        rows = gsd.flatten(graph, config.max_rows, config.max_path, backend="cuda")
    torch.cuda.synchronize()
    assert_bit_equal(rows.tensors(), expected.tensors())


@on_gpu
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_whole_model_decodes_with_the_cuda_ops(dtype, sampling):
    """Every step on the CUDA ops; greedy tokens are the best ones in float32, but for half precision's rounding."""
    target = tiny(dtype=dtype, head_dim=64, num_attention_heads=4, num_key_value_heads=2).cuda()
    config = gsd.GraphConfig(depth=3, width=2, branch=2, max_rows=8)
    inputs = {name: t.cuda() for name, t in prompts(2, 9).items()}
    options = {"assistant_model": noised(target), "graph_config": config, "max_new_tokens": 48, "pad_token_id": 0}
    out = gsd.generate(
        target, **inputs, **options, **sampling, seed=3, eos_token_id=[], backend="cuda", return_dict_in_generate=True
    )
    new = out.sequences[:, inputs["input_ids"].shape[1] :]
    assert new.shape == (2, 48) and out.stats.tokens_per_step > 1
    if sampling:
        return
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(new)], 1)
    with torch.no_grad():
        rounded = target(out.sequences, attention_mask=mask).logits[:, -49:-1].float()
        exact = target.float()(out.sequences, attention_mask=mask).logits[:, -49:-1]
    gap = exact.amax(-1) - exact.gather(-1, new[..., None]).squeeze(-1)
    assert gap.max() <= 4 * (rounded - exact).abs().max(), "a token that rounding does not explain"
