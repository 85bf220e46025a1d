"""backend="cuda" without a GPU: what it refuses and how, and that no step needs an op that it lacks."""

from __future__ import annotations

import pytest
import torch
from models import noised, prompts, tiny
from ops.contracts.backends import needs_cpu
from torch._subclasses.fake_tensor import FakeTensorMode

import gsd_kernels as gsd
from gsd_kernels import backends
from gsd_kernels.ops.dag_attention import cuda, reference
from gsd_kernels.ops.table import OPS

pytestmark = pytest.mark.quick

HALF = torch.float16
GPU = torch.device("cuda")
ATTENTION, LEARN = OPS["dag_attention"], OPS["learn_source"]


def attention_inputs(dtype=HALF, head_dim=64):
    q = torch.zeros(1, 4, 3, head_dim, dtype=dtype)
    k, v = (torch.zeros(1, 2, 40, head_dim, dtype=dtype) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda q, k, v: (q.float(), k.float(), v.float()), TypeError, "q: .*float16 or bfloat16, got float32; use"),
        (lambda q, k, v: (q.double(), k.double(), v.double()), TypeError, "q: .*got float64; use backend="),
        (lambda q, k, v: attention_inputs(head_dim=80), ValueError, "q: .*head size 64 or 128, got 80; use"),
        (lambda q, k, v: (q, k, torch.cat([v, v], -1)), ValueError, "v: .*head size q's 64, got 128; use"),
        (lambda q, k, v: (q.mT.contiguous().mT, k, v), ValueError, r"q: .*stride 1 .*got 3; pass q.contiguous\(\)"),
        (
            lambda q, k, v: (q, torch.zeros(5121, dtype=HALF)[1:].view_as(k), v),
            ValueError,
            "k: .*16 bytes.*offset of 2",
        ),
        (lambda q, k, v: (q, k, torch.zeros(1, 2, 40, 65, dtype=HALF)[..., :64]), ValueError, "v: .*strides of .*130"),
    ],
)
def test_what_the_kernel_does_not_take_is_named_with_the_cure(change, error, match):
    with pytest.raises(error, match=match):
        cuda.check(*change(*attention_inputs()))


def test_strided_caches_are_taken():
    q, k, v = attention_inputs()
    cuda.check(q.transpose(1, 2).contiguous().transpose(1, 2), k[:, :, 3:], v.transpose(1, 2).contiguous().mT.mT)


def test_auto_never_picks_it(monkeypatch):
    """Until a GPU has measured it: not even where it is the only kernel there."""
    monkeypatch.setattr(backends, "unavailable_reason", lambda name, _: None if name != "triton" else "absent")
    found = ATTENTION.implementations
    chosen = backends.resolve("auto", GPU, {n: f for n, f in found.items() if n != "cpu"})
    assert chosen is found["reference"]
    assert ATTENTION.chosen("cuda", GPU) is cuda.dag_attention


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
