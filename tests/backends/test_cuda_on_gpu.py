"""The CUDA ops on a GPU beyond their contracts: in CUDA graphs, on the current stream and device, in a model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import drafted
from models import noised, prompts, tiny
from ops.contracts.attention import HALF_PRECISION
from ops.contracts.backends import assert_bit_equal
from ops.contracts.graph import CUDA_GRAPHS
from ops.contracts.sampling import sampling_inputs

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.dag_attention.cuda import DTYPES

pytestmark = [
    pytest.mark.quick,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]


@pytest.fixture(autouse=True)
def built():
    reason = unavailable_reason("cuda", torch.device("cuda"))
    assert reason is None, reason


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


def test_opcheck_and_mixed_devices():
    graph = drafted(CUDA_GRAPHS[0], backend="cuda", device="cuda")
    inputs = (graph.token_ids, graph.edge_targets, graph.edge_log_probs, 32, 10)
    results = torch.library.opcheck(torch.ops.gsd_kernels.flatten.default, inputs)
    assert set(results.values()) == {"SUCCESS"}, results
    with pytest.raises(RuntimeError, match="same CUDA device"):
        torch.ops.gsd_kernels.flatten(graph.token_ids, graph.edge_targets.cpu(), *inputs[2:])


def test_one_captured_attention_serves_every_length():
    tensors, _ = replace(HALF_PRECISION["four warps"], dtype=torch.float16).build("cuda")
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


def test_attention_opcheck_and_refusals():
    tensors, _ = replace(HALF_PRECISION["one warp"], dtype=torch.float16, sinks=True).build("cuda")
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
