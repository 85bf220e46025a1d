"""The CUDA ops beyond their contracts: what they refuse and when they are chosen, without a GPU; on one, in CUDA
graphs, on the current stream and device, in a model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from decoders import CUDA_SIZES, Sizes, decoder
from graphs import drafted
from models import noised, prompts, tiny
from ops.contracts.attention import HALF_PRECISION
from ops.contracts.backends import assert_bit_equal, needs_cpu
from ops.contracts.decoder import reading_features
from ops.contracts.graph import CUDA_GRAPHS
from ops.contracts.packed import packed_matrix
from ops.contracts.sampling import sampling_inputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import gsd_kernels as gsd
from gsd_kernels import backends
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
OPS = all_ops()
ATTENTION, LEARN = OPS["dag_attention"], OPS["learn_source"]


# What is refused, and the cure.


def weights(sizes: Sizes = SMALL, dtype: torch.dtype = HALF, **changes: object) -> DecoderWeights:
    return dataclasses.replace(decoder(sizes, dtype), **changes)


def odd(dtype: torch.dtype, *shape: int) -> Tensor:
    """A tensor that does not begin at a multiple of 16 bytes."""
    return torch.zeros(1 + torch.Size(shape).numel(), dtype=dtype)[1:].view(shape)


def attended(q: Tensor | None = None, k: Tensor | None = None, v: Tensor | None = None) -> Callable[[], None]:
    given = [mine if other is None else other for mine, other in zip(QKV, (q, k, v), strict=True)]
    return lambda: attention.check(*given)


def caches(other: Tensor | None = None) -> Callable[[], None]:
    def check() -> None:
        fine = torch.zeros(1, 2, 40, 64, dtype=HALF)
        strided = fine.transpose(1, 2).contiguous().transpose(1, 2)
        cuda.check_caches(weights(), [fine] * 2, [strided, strided if other is None else other])

    return check


def drafter(change: dict[str, Tensor] | None = None, **of_projection: Tensor) -> Callable[[], None]:
    def check() -> None:
        made = reading_features(decoder(CUDA_SIZES["qwen3-128"], torch.bfloat16), "projection")
        projection = dataclasses.replace(made.projection, **of_projection)
        features.check(dataclasses.replace(made, projection=projection, **(change or {})))

    return check


def checked(sizes: Sizes = SMALL, dtype: torch.dtype = HALF, **changes: object) -> Callable[[], None]:
    return lambda: cuda.check(weights(sizes, dtype, **changes))


INT8 = BY_NAME["int8"]
QKV = torch.zeros(1, 4, 3, 64, dtype=HALF), *(torch.zeros(1, 2, 40, 64, dtype=HALF) for _ in range(2))
REFUSED = {
    "attention: float32": (
        attended(*(t.float() for t in QKV)),
        TypeError,
        "q: .*float16 or bfloat16, got float32; use",
    ),
    "attention: float64": (attended(*(t.double() for t in QKV)), TypeError, "q: .*got float64; use backend="),
    "attention: heads of 80": (
        *(attended(*(torch.cat([t, t[..., :16]], -1) for t in QKV)), ValueError),
        "q: .*head size 64 or 128, got 80; use",
    ),
    "attention: two sizes": (
        *(attended(v=torch.zeros(1, 2, 40, 128, dtype=HALF)), ValueError),
        "v: .*head size q's 64, got 128; use",
    ),
    "attention: strides": (
        *(attended(q=QKV[0].mT.contiguous().mT), ValueError),
        r"q: .*stride 1 .*got 3; pass q.contiguous\(\)",
    ),
    "attention: an odd place": (attended(k=odd(HALF, 1, 2, 40, 64)), ValueError, "k: .*16 bytes.*offset of 2"),
    "attention: odd strides": (
        *(attended(v=torch.zeros(1, 2, 40, 65, dtype=HALF)[..., :64]), ValueError),
        "v: .*strides of .*130",
    ),
    "float32": (
        checked(dtype=torch.float32),
        TypeError,
        "embedding: .*float16 or bfloat16, got float32; use",
    ),
    "heads of 80": (
        checked(Sizes(hidden=64, inner=64, head_dim=80)),
        ValueError,
        "q: .*heads of 64 or 128, got 80; use",
    ),
    "odd rows": (
        checked(Sizes(hidden=68, head_dim=64)),
        ValueError,
        "embedding: .*rows of a multiple of 8, got 68; use",
    ),
    "odd inner rows": (
        *(checked(Sizes(hidden=64, inner=77, head_dim=64)), ValueError),
        r"layers\[0\].down: .*multiple of 8, got 77",
    ),
    "two types": (
        *(checked(final_norm=torch.ones(64)), TypeError),
        "final_norm: .*the embedding's float16, got float32",
    ),
    "an odd place": (
        checked(head=odd(HALF, 63, 64)),
        ValueError,
        r"head: .*a multiple of 16 bytes; pass its .clone\(\)",
    ),
    "strides": (checked(head=torch.zeros(64, 64, dtype=HALF).T), ValueError, "head: .*a contiguous tensor"),
    "another packing": (
        *(checked(head=packed_matrix(BY_NAME["q4_0"], 63, 64)), TypeError),
        "head: .*dense matrices or packed ones of q8_0, int8, uint8, int4, int4_offset, got q4_0; use backend=",
    ),
    "narrow groups": (
        *(checked(head=PackedMatrix(INT8, torch.zeros(63, 64, dtype=torch.int8), 64, torch.ones(63, 16))), ValueError),
        "head: .*groups of a multiple of 8 weights, got 4; use backend=",
    ),
    "packed at an odd place": (
        *(checked(head=PackedMatrix(INT8, odd(torch.int8, 63, 64), 64, torch.ones(63, 1))), ValueError),
        r"head: .*a multiple of 16 bytes; pass its .clone\(\)",
    ),
    "a float32 cache": (
        *(caches(torch.zeros(1, 2, 40, 64)), TypeError),
        r"v_caches\[1\]: .*the weights' float16, got float32",
    ),
    "a cache at an odd place": (
        *(caches(odd(HALF, 1, 2, 40, 64)), ValueError),
        r"v_caches\[1\]: .*multiples of 16 bytes",
    ),
    "a cache with odd strides": (
        *(caches(torch.zeros(1, 2, 40, 65, dtype=HALF)[..., :64]), ValueError),
        r"v_caches\[1\]: .*strides \[5200, 26",
    ),
    "a float32 feature norm": (
        *(drafter({"feature_norm": torch.ones(104)}), TypeError),
        "feature_norm: .*the embedding's bfloat16, got float32; use",
    ),
    "a projection with strides": (
        *(drafter(matrix=torch.zeros(208, 104).T.bfloat16()), ValueError),
        "projection: .*a contiguous tensor",
    ),
    "a float16 token norm": (
        *(drafter(token_norm=torch.ones(104).half()), TypeError),
        "token_norm: .*the embedding's bfloat16, got float16; use",
    ),
    "a bias at an odd place": (
        *(drafter(bias=odd(torch.bfloat16, 104)), ValueError),
        "projection_bias: .*a multiple of 16 bytes",
    ),
}
TAKEN = (
    attended(),
    attended(
        QKV[0].transpose(1, 2).contiguous().transpose(1, 2), QKV[1][:, :, 3:], QKV[2].mT.contiguous().mT.contiguous()
    ),
    checked(),
    checked(head=packed_matrix(BY_NAME["q8_0"], 63, 64)),
    caches(),
    drafter(),
)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_kernels_do_not_take_is_named(name):
    check, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        check()


def test_others_are_taken():
    for check in TAKEN:
        check()


def test_a_gpu_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(ValueError, match=r"compute capability 8\.0 or newer, got 7\.5; use backend='reference'"):
        cuda.check_device(torch.device("cuda", 0))
    cuda.check_device(torch.device("cpu"))


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
    assert decoder_rows.chosen("cuda", GPU) is cuda.decoder_rows
    assert feature_rows.chosen("cuda", GPU) is features.feature_rows


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
        for op in ("merge", "verify", "commit_kv"):
            assert chosen(op) == name
            assert chosen(op, "triton") == "triton", "a name never falls back"
        assert chosen("mix_candidates") == "cuda", "one launch; Triton's are many"
        assert chosen("write_kv") == "triton", "there is no other"
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
    LEARN.chosen("reference", torch.device(device))
    assert not caplog.records


def test_the_switch_names_what_it_takes(first):
    first("cuda")
    with pytest.raises(
        ValueError, match="GSD_KERNELS_CUDA_FIRST: expected triton or compiled, got 'cuda'; or unset it"
    ):
        OPS["merge"].chosen("auto", GPU)
    OPS["merge"].chosen("auto", torch.device("cpu"))  # a CPU does not ask


def test_shapes_are_known_without_running():
    with FakeTensorMode():
        q, k, v = (torch.empty(2, h, s, 64, dtype=HALF, device="cuda") for h, s in ((8, 5), (2, 99), (2, 99)))
        mask = torch.empty(2, 5, 2, dtype=torch.int32, device="cuda")
        kv_len = torch.empty(2, dtype=torch.int32, device="cuda")
        call = torch.ops.gsd_kernels.dag_attention
        out, lse = call(q, k, v, mask, kv_len, None, None, None, 0.125, None, None)
    assert out.shape == q.shape and out.dtype == HALF and out.transpose(1, 2).is_contiguous()
    assert lse.shape == (2, 8, 5) and lse.dtype == torch.float32


def test_cpu_tensors_are_refused_by_name():
    target = tiny()
    with pytest.raises(gsd.BackendUnavailableError, match="'cuda' cannot run on cpu: it takes cuda tensors"):
        gsd.generate(target, **prompts(1, 5), assistant_model=noised(target), backend="cuda", max_new_tokens=4)


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


def commit_inputs(head_dim, layers=3, device="cuda", dtype=torch.bfloat16):
    gen = torch.Generator().manual_seed(head_dim)
    batch, heads, slots, width = 3, 4, 111, 13
    k = [torch.randn(batch, heads, slots, head_dim, generator=gen).to(dtype) for _ in range(layers)]
    v = [torch.randn(batch, slots, heads, head_dim, generator=gen).to(dtype).transpose(1, 2) for _ in range(layers)]
    rows = torch.rand(batch, 60, generator=gen).argsort(-1)[:, :width].int()
    num_accepted = torch.tensor([width, 0, 5], dtype=torch.int32)
    kv_len = torch.tensor([0, 17, 50], dtype=torch.int32)
    return (
        [[x.to(device) for x in part] for part in (k, v)],
        rows.to(device),
        num_accepted.to(device),
        kv_len.to(device),
    )


@on_gpu
def test_sampling_is_captured_in_a_cuda_graph_and_repeatable():
    logits, positions, noise = sampling_inputs(32003, torch.bfloat16, 1)
    logits, positions = logits.cuda(), positions.cuda()
    noise = {name: t.cuda() for name, t in noise.items()}
    warpers = {"temperature": torch.tensor([0.0, 0.8], device="cuda"), "top_p": torch.tensor([1.0, 0.9], device="cuda")}

    def step():
        picked = gsd.sample_rows(logits, positions, **noise, **warpers, backend="cuda")
        return [picked, *gsd.draft_candidates(logits, positions, branch=4, **noise, **warpers, backend="cuda")]

    replayed = [t.clone() for t in captured(step)]
    assert_bit_equal(replayed, step())  # sums have a fixed order


def captured(step):
    """Runs ``step`` in a CUDA graph twice; returns what the second replay left in its outputs."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    return outputs


@on_gpu
def test_a_whole_step_is_captured_in_a_cuda_graph():
    config = CUDA_GRAPHS[1]
    gen = torch.Generator().manual_seed(0)
    graph = gsd.TokenGraph.empty(2, config, "cuda")
    root = torch.tensor([1, 2], dtype=torch.int32, device="cuda")
    tail = torch.full((2, 8), -1, dtype=torch.int32, device="cuda")
    levels = []
    for level in range(config.depth):
        shape = (2, config.width if level else 1, config.branch)
        tokens = torch.rand(*shape[:2], 12, generator=gen).argsort(-1)[..., : config.branch].int()
        levels.append((tokens.cuda(), torch.randn(shape, generator=gen).log_softmax(-1).cuda()))
    done = torch.tensor([False, False], device="cuda")
    sampled = torch.randint(0, 12, (2, config.max_rows), generator=gen, dtype=torch.int32).cuda()
    remaining = torch.full((2,), 100, dtype=torch.int32, device="cuda")
    eos = torch.empty(0, dtype=torch.int32, device="cuda")
    (k, v), _, _, kv_len = commit_inputs(64)
    k, v, kv_len = [x[:2] for x in k], [x[:2] for x in v], kv_len[:2].clone()

    def step(backend="cuda"):
        graph.reset(root, tail)
        frontier = graph.root_frontier()
        for level, (tokens, log_probs) in enumerate(levels):
            options = {"level": level, "width": config.width, "merge_context": 0, "backend": backend}
            frontier = gsd.merge(graph, frontier, tokens, log_probs, **options).node_ids
        rows = gsd.flatten(graph, config.max_rows, config.max_path, backend=backend)
        limits = {"eos_ids": eos, "remaining": remaining, "done": done, "max_path": config.max_path}
        accepted = gsd.verify(rows, sampled, **limits, backend=backend)
        kv_len.zero_()
        gsd.commit_kv(k, v, accepted.accepted_rows, accepted.num_accepted, kv_len, backend=backend)
        return [*rows.tensors(), *accepted.tensors(), *graph.tensors()]

    replayed = [t.clone() for t in captured(step)]
    assert_bit_equal(replayed, step("reference"))


@on_gpu
def test_the_current_stream_is_used():
    """An op that ran on the default stream would not wait for the slow producer of its input."""
    config = CUDA_GRAPHS[0]
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
def test_opcheck_and_mixed_devices():
    graph = drafted(CUDA_GRAPHS[0], backend="cuda", device="cuda")
    inputs = (graph.token_ids, graph.edge_targets, graph.edge_log_probs, 32, 10)
    results = torch.library.opcheck(torch.ops.gsd_kernels.flatten.default, inputs)
    assert set(results.values()) == {"SUCCESS"}, results
    with pytest.raises(RuntimeError, match="same CUDA device"):
        torch.ops.gsd_kernels.flatten(graph.token_ids, graph.edge_targets.cpu(), *inputs[2:])


@on_gpu
def test_one_captured_attention_serves_every_length():
    tensors, _ = dataclasses.replace(HALF_PRECISION["four warps"], dtype=torch.float16).build("cuda")
    tensors = {n: t.nan_to_num(0.5) if t.is_floating_point() else t for n, t in tensors.items()}

    def attend():
        return gsd.dag_attention(**tensors, return_lse=True, backend="cuda")

    attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = attend()
    for seed in range(4):
        torch.manual_seed(seed)
        tensors["kv_len"].copy_(torch.randint(80, 240, (2,)))
        tensors["q"].normal_()
        graph.replay()
        assert_bit_equal(static, attend())


@on_gpu
def test_attention_opcheck_and_refusals():
    tensors, _ = dataclasses.replace(HALF_PRECISION["one warp"], dtype=torch.float16, sinks=True).build("cuda")
    names = ("q", "k", "v", "ancestor_mask", "kv_len", "kv_start")
    inputs = (*(tensors[name].nan_to_num(0) if name in "qkv" else tensors[name] for name in names), None, None)
    results = torch.library.opcheck(torch.ops.gsd_kernels.dag_attention.default, (*inputs, 0.1, None, None))
    assert set(results.values()) == {"SUCCESS"}, results
    limits = (0.1, None, None, None, tensors["sinks"])
    results = torch.library.opcheck(torch.ops.gsd_kernels.dag_attention.default, (*inputs, *limits))
    assert set(results.values()) == {"SUCCESS"}, results
    with pytest.raises(RuntimeError, match="same CUDA device"):
        torch.ops.gsd_kernels.dag_attention(*inputs[:4], inputs[4].cpu(), *inputs[5:], 0.1, None, None)
    with pytest.raises(RuntimeError, match="head size 64 or 128"):
        torch.ops.gsd_kernels.dag_attention(*(x[..., :32] for x in inputs[:3]), *inputs[3:], 0.1, None, None)


@on_gpu
@pytest.mark.parametrize("sampling", [{}, {"do_sample": True, "temperature": 0.8}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", attention.DTYPES, ids=str)
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
