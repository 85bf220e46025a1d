"""Steps replayed from a CUDA graph: what can be shown without a GPU. test_step_trace.py watches for host reads."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import fake_cuda
import pytest
import torch
from engine.host_data import NoHostData
from models import noised, prompts, tiny

from gsd_kernels import DraftHeads, GraphConfig, LayerSkip, generate
from gsd_kernels.ops.dag_attention.api import IMPLEMENTATIONS
from gsd_kernels_hf.engine import capture, session
from gsd_kernels_hf.engine.capture import WARM_STEPS, can_capture, untimed
from gsd_kernels_hf.model.replay import lane_of

CONFIGS = {
    "plain": None,
    "chain": GraphConfig.preset("chain", depth=3),
    "tree": GraphConfig(depth=3, width=2, branch=2, max_rows=8, merge_context=-1),
    "graph": GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=2),
    "layer_skip": GraphConfig(depth=3, width=2, branch=2, max_rows=8, history_depth=2),
    "heads": GraphConfig(depth=0, branch=2, max_rows=8, history_depth=3),
}


def sources(name, target, draft):
    """Arguments of ``generate`` for one of :data:`CONFIGS`."""
    if name == "plain":
        return {}
    drafts = {"layer_skip": {"assistant_model": LayerSkip(target, mlp=[1])}}
    drafts["heads"] = {"draft_heads": DraftHeads.for_model(target, 2)}
    return {**drafts.get(name, {"assistant_model": draft}), "graph_config": CONFIGS[name]}


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def pair():
    target = tiny()
    return target, noised(target)


@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_copies_nothing_from_the_host(pair, name, sampling, monkeypatch):
    target, draft = pair
    step, watched = session.Session.step, []

    def watching(self):
        watched.append(len(watched) > 1)
        if not watched[-1]:
            return step(self)  # storage is made in the first steps
        with NoHostData(), untimed(self):
            return step(self)

    monkeypatch.setattr(session.Session, "step", watching)
    monkeypatch.delitem(IMPLEMENTATIONS, "cpu")  # PyTorch's attention on a CPU is no part of a step on a GPU
    options = sources(name, target, draft)
    generate(target, **prompts(2, 9), max_new_tokens=24, pad_token_id=0, **options, **sampling)
    assert sum(watched) >= 3


def test_the_watch_notices():
    with pytest.raises(AssertionError, match="host data"), NoHostData():
        torch.tensor([1.0, 2.0])


SAMPLED = {"do_sample": True, "temperature": 0.8, "seed": 3}


def text(pair, name, rows=2, **options):
    """A text of one of :data:`CONFIGS`."""
    options = {"max_new_tokens": 24, "pad_token_id": 0, **sources(name, *pair), **options}
    return generate(pair[0], **prompts(rows, 9), **options)


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_steps_give_the_same_text(pair, name, sampling, request):
    expected = text(pair, name, **sampling)
    cuda = request.getfixturevalue("cuda")
    assert torch.equal(text(pair, name, **sampling), expected)
    assert cuda.counts["captures"] == 1
    assert cuda.counts["replays"] > WARM_STEPS


def test_shapes_have_graphs_of_their_own_in_one_pool(pair, request):
    expected = text(pair, "graph", max_new_tokens=64)
    cuda = request.getfixturevalue("cuda")
    assert torch.equal(text(pair, "graph", graph_config="auto", max_new_tokens=64), expected)
    assert 1 < cuda.counts["captures"] < cuda.counts["replays"]
    assert len(set(map(id, cuda.pools))) == 1


def test_failing_to_capture_is_said_and_harmless(pair, cuda, monkeypatch, caplog):
    def step(self):
        record = own(self)
        if cuda.capturing:
            int(record.accepted.num_accepted[0])  # waits for the device
        return record

    expected, own = text(pair, "graph"), session.Session.step
    assert cuda.counts["captures"] == 1
    monkeypatch.setattr(session.Session, "step", step)
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        assert torch.equal(text(pair, "graph"), expected)
    said = [r.message for r in caplog.records if "captured" in r.message]
    assert len(said) == 1 and said[0].startswith("a step could not be captured, so steps run uncaptured: operation ")
    assert cuda.counts["captures"] == 2, "it is not tried again"
    assert cuda.current_stream() is cuda._default, "later work is on the stream that it was on"


def both(work):
    """Two threads that begin at once; what one raises is raised."""
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(work, i) for i in range(2)]:
            done.result(60)


def test_threads_capture_on_one_gpu_one_after_the_other(pair, cuda, caplog):
    expected = [text(pair, "graph", rows=1 + i) for i in range(2)]
    meet = threading.Barrier(2)

    def wait():
        with contextlib.suppress(threading.BrokenBarrierError):
            meet.wait(0.3)  # long enough for the other thread to begin, were it let

    cuda.in_capture = wait
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        both(lambda i: torch.testing.assert_close(text(pair, "graph", rows=1 + i), expected[i]))
    assert not caplog.records
    assert cuda.counts["captures"] == 4


def test_gpus_have_streams_and_locks_of_their_own(cuda):
    devices = [torch.device("cuda", i) for i in range(2)]
    meet, captured_on = threading.Barrier(2), []

    def work(i):
        def function():
            captured_on.append((cuda.device, cuda.current_stream()))
            meet.wait(20)

        lane_of(devices[i]).capture(function)
        assert cuda.device == torch.device("cpu")

    both(work)
    assert {device for device, _ in captured_on} == set(devices)
    assert all(stream is lane_of(device).stream for device, stream in captured_on)
    assert lane_of(devices[0]) is lane_of(devices[0])


def test_replays_on_other_streams_wait_for_each_other(cuda):
    """They share the workspace of the stream that they were captured on."""
    lane, one, two = lane_of(torch.device("cpu")), cuda.new_stream(), cuda.new_stream()
    graph, _ = lane.capture(lambda: torch.zeros(1))
    for stream in (one, one, two, one):
        with cuda.on(stream):
            graph()
    replay = id(graph.graph)
    assert cuda.log == [
        ("replay", one, replay),
        ("replay", one, replay),
        ("wait", two, one),
        ("replay", two, replay),
        ("wait", one, two),
        ("replay", one, replay),
    ]


def test_cpu_models_are_not_captured(pair, monkeypatch):
    seen = []
    monkeypatch.setattr(capture, "can_capture", lambda session: seen.append(can_capture(session)) or seen[-1])
    generate(pair[0], **prompts(1, 5), assistant_model=pair[1], graph_config="chain", max_new_tokens=4, pad_token_id=0)
    assert seen == [False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.8, "seed": 3}], ids=["greedy", "sampled"]
)
def test_captured_on_a_gpu(name, sampling, monkeypatch, caplog):
    target = tiny(dtype=torch.float32)
    draft, target = noised(target).cuda(), target.cuda()
    options = sources(name, target, draft)
    inputs = {key: value.cuda() for key, value in prompts(2, 9).items()}
    options |= {"max_new_tokens": 64, "pad_token_id": 0, **sampling}
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        captured = generate(target, **inputs, **options)
    assert not caplog.records
    monkeypatch.setattr(capture, "can_capture", lambda session: False)
    assert torch.equal(generate(target, **inputs, **options), captured)
