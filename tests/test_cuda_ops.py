"""The CUDA ops on a GPU: equal to the reference, capturable in a CUDA graph, on the current stream and device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from graphs import STYLES, drafted
from models import noised, prompts, tiny
from ngrams import MEMORIES, Memory, check_captured_memory, check_memory, check_mix, check_perturbed
from test_compiled_ops import (
    EQUAL_SCORE,
    FLOATS,
    WARPERS,
    agreeing_target,
    assert_bit_equal,
    final_scores,
    frontier_tensors,
    sampling_inputs,
)
from triton_checks import Attention, check_attention, check_row_invariance

import gsd_kernels as gsd
from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.dag_attention.compiled import DTYPES, HEAD_DIMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

CONFIGS = [
    gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=32),
    gsd.GraphConfig(depth=6, width=8, branch=4, max_rows=64, merge_context=0),
    gsd.GraphConfig(depth=3, width=5, branch=5, max_rows=63, merge_context=2, sibling_ratio=0.2, min_prob=0.05),
    gsd.GraphConfig(depth=2, width=30, branch=32, max_rows=128, merge_context=0),
    gsd.GraphConfig.preset("chain"),
    gsd.GraphConfig.preset("tree"),
]


@pytest.fixture(autouse=True)
def built():
    reason = unavailable_reason("cuda", torch.device("cuda"))
    assert reason is None, reason


def on_cpu(tensors):
    return [t.cpu() for t in tensors]


def to_device(data, device="cuda"):
    return type(data)(*(t.to(device) for t in data.tensors()))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("batch", [1, 3])
def test_merge_flatten_verify_are_bit_equal(config, style, batch):
    seen: dict[str, list] = {"reference": [], "cuda": []}
    graphs = {
        backend: drafted(
            config,
            batch=batch,
            vocab=7,
            style=style,
            seed=batch,
            backend=backend,
            device="cuda" if backend == "cuda" else "cpu",
            on_level=lambda _g, _l, _f, _t, _lp, nxt, into=into: into.append(nxt),
        )
        for backend, into in seen.items()
    }
    assert_bit_equal(on_cpu(graphs["cuda"].tensors()), graphs["reference"].tensors())
    for ours, theirs in zip(seen["cuda"], seen["reference"], strict=True):
        assert_bit_equal(on_cpu(frontier_tensors(ours)), frontier_tensors(theirs))

    rows = gsd.flatten(graphs["reference"], config.max_rows, config.max_path, backend="reference")
    ours = gsd.flatten(graphs["cuda"], config.max_rows, config.max_path, backend="cuda")
    assert_bit_equal(on_cpu(ours.tensors()), rows.tensors())

    sampled, arguments = agreeing_target(rows, 7, batch)
    done = torch.arange(batch) == 1
    expected = gsd.verify(rows, sampled, **arguments, done=done, max_path=config.max_path, backend="reference")
    got = gsd.verify(
        to_device(rows),
        sampled.cuda(),
        **{name: t.cuda() for name, t in arguments.items()},
        done=done.cuda(),
        max_path=config.max_path,
        backend="cuda",
    )
    assert_bit_equal(on_cpu(got.tensors()), expected.tensors())


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


@pytest.mark.parametrize("name", MEMORIES)
def test_the_ngram_table_is_bit_equal(name):
    check_memory(MEMORIES[name], "cuda", "cuda")


@pytest.mark.parametrize("seed", range(20))
def test_the_ngram_table_of_many_sequences_is_bit_equal(seed):
    sizes = {"capacity": 256, "ways": 8, "max_context": 4, "vocab": 6}
    check_memory(Memory(**sizes, rows=(300, 64, 64), batch=9, seed=seed), "cuda", "cuda")


@pytest.mark.parametrize("branch", [1, 4, 5, 32])
def test_perturbed_candidates_are_equal(branch):
    for seed in range(10):
        check_perturbed(seed, branch, "cuda", "cuda")


@pytest.mark.parametrize(("branch", "others"), [(4, 4), (1, 1), (3, 7), (32, 32)])
def test_mixed_candidates_are_equal(branch, others):
    assert sum(check_mix(seed, branch, others, "cuda", "cuda") for seed in range(10)) <= 10


def test_the_ngram_table_is_captured_in_a_cuda_graph():
    check_captured_memory("cuda", "cuda")


@pytest.mark.parametrize("head_dim", [1, 7, 63, 64, 128])  # odd sizes take narrower loads
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_commit_kv_is_bit_equal(head_dim, dtype):
    results = []
    for backend, device in (("reference", "cpu"), ("cuda", "cuda")):
        (k, v), rows, num_accepted, kv_len = commit_inputs(head_dim, device=device, dtype=dtype)
        gsd.commit_kv(k, v, rows, num_accepted, kv_len, backend=backend)
        results.append(on_cpu([*k, *v, kv_len]))
    assert_bit_equal(results[1], results[0])


def test_more_caches_than_one_launch_takes():
    cache = torch.randn(400, 1, 2, 20, 8, device="cuda")
    expected = cache.clone()
    expected[:, :, :, 6] = expected[:, :, :, 9]
    layers = list(cache)
    rows = torch.tensor([[0, 4]], dtype=torch.int32, device="cuda")
    kv_len = torch.tensor([5], dtype=torch.int32, device="cuda")
    gsd.commit_kv(layers[:200], layers[200:], rows, torch.full_like(kv_len, 2), kv_len, backend="cuda")
    assert torch.equal(cache, expected) and kv_len.item() == 7


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.parametrize("vocab", [1, 63, 1000, 128256])
@pytest.mark.parametrize("dtype", FLOATS)
def test_sampled_and_drafted_tokens_are_equal(warpers, vocab, dtype):
    logits, positions, noise = sampling_inputs(vocab, dtype, vocab)
    scores = final_scores(logits, positions, noise, warpers)
    on_gpu = [x.cuda() for x in (logits, positions)]
    gpu_noise = {name: t.cuda() for name, t in noise.items()}
    gpu_warpers = {name: w.cuda() if isinstance(w, torch.Tensor) else w for name, w in warpers.items()}

    expected = gsd.sample_rows(logits, positions, **noise, **warpers, backend="reference").long()
    got = gsd.sample_rows(*on_gpu, **gpu_noise, **gpu_warpers, backend="cuda").cpu().long()
    gap = (scores.gather(-1, expected[..., None]) - scores.gather(-1, got[..., None])).squeeze(-1)
    assert (gap[got != expected].abs() <= EQUAL_SCORE).all()

    tokens, log_probs = gsd.draft_candidates(logits, positions, branch=4, **noise, **warpers, backend="reference")
    ours = gsd.draft_candidates(*on_gpu, branch=4, **gpu_noise, **gpu_warpers, backend="cuda")
    finite = log_probs.isfinite()
    assert torch.equal(ours[1].isfinite().cpu(), finite)
    torch.testing.assert_close(ours[1].cpu()[finite], log_probs[finite], atol=1e-5, rtol=1e-5)
    pairs = [scores.gather(-1, t.cpu().long().clamp(min=0)) for t in (tokens, ours[0])]
    other = (tokens != ours[0].cpu()) & finite
    assert ((pairs[0] - pairs[1])[other].abs() <= EQUAL_SCORE).all()


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
    config = CONFIGS[1]
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
    config = CONFIGS[0]
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
    graph = drafted(CONFIGS[0], backend="cuda", device="cuda")
    inputs = (graph.token_ids, graph.edge_targets, graph.edge_log_probs, 32, 10)
    results = torch.library.opcheck(torch.ops.gsd_kernels.flatten.default, inputs)
    assert set(results.values()) == {"SUCCESS"}, results
    with pytest.raises(RuntimeError, match="same CUDA device"):
        torch.ops.gsd_kernels.flatten(graph.token_ids, graph.edge_targets.cpu(), *inputs[2:])


ATTENTION = {
    "one row": Attention(rows=1, nodes=1, group=1),
    "one warp": Attention(rows=5, nodes=33, group=3),
    "two warps": Attention(rows=9, nodes=40, group=3),
    "four warps": Attention(rows=16, nodes=64, group=4),
    "several blocks": Attention(rows=63, nodes=111, group=8, capacity=1000, prefixes=(800, 63)),
    "several graph splits": Attention(rows=40, nodes=964, capacity=1500, prefixes=(530, 111)),
    "the cache ends with the last node": Attention(nodes=40, capacity=273, prefixes=(233, 233)),
    "no prefix": Attention(prefixes=(0, 4), paddings=(0, 4), nodes=31),
    "soft cap": Attention(softcap=5.0, group=4),
    "window": Attention(window=50, group=4),
    "narrow window, soft cap": Attention(window=3, softcap=2.0, rows=30, nodes=100),
    "positions first": Attention(positions_first=True, group=4),
    "long": Attention(rows=64, nodes=64, group=4, capacity=5000, prefixes=(4500, 63), paddings=(7, 0)),
}


@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention(name, head_dim, dtype):
    """Error against float64 at most twice that of plain PyTorch; NaN wherever no row looks."""
    check_attention(replace(ATTENTION[name], dtype=dtype, head_dim=head_dim), "cuda", "cuda")


@pytest.mark.parametrize("name", ["one warp", "four warps", "several graph splits", "window", "soft cap"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_rows_are_independent(name, dtype):
    check_row_invariance(replace(ATTENTION[name], dtype=dtype), "cuda", "cuda")


def test_one_captured_attention_serves_every_length():
    tensors, _ = replace(ATTENTION["four warps"], dtype=torch.float16).build("cuda")
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
    tensors, _ = replace(ATTENTION["one warp"], dtype=torch.float16).build("cuda")
    names = ("q", "k", "v", "ancestor_mask", "kv_len", "kv_start", "num_nodes")
    inputs = (*(tensors[name].nan_to_num(0) if name in "qkv" else tensors[name] for name in names), None, None)
    results = torch.library.opcheck(torch.ops.gsd_kernels.dag_attention.default, (*inputs, 0.1, None, None))
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
