"""Steps replayed from a CUDA graph: what can be shown without a GPU, and what only one can say."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import fake_cuda
import pytest
import torch
from engine.capturing import CAPTURED, GRAPHS, SAMPLED, drafting, in_turns, on_a_gpu, text
from models import noised, tiny
from transformers import StoppingCriteria

from gsd_kernels import DraftSource
from gsd_kernels_hf.acceptance.criteria import CRITERIA
from gsd_kernels_hf.costs import machine
from gsd_kernels_hf.engine import capture
from gsd_kernels_hf.engine.capture import WARM_STEPS
from gsd_kernels_hf.model import replay

GPU = torch.device("cuda", 0)


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def pair():
    target = tiny()
    return target, noised(target)


EACH = [(name, more) for name in CAPTURED for more in ({}, SAMPLED)]
EACH += [("chain", {**SAMPLED, "criterion": criterion}) for criterion in CRITERIA if criterion != "exact"]


class Spoils(DraftSource):
    """Does something while a step is captured."""

    def __init__(self, cuda, spoil):
        self.cuda, self.spoil = cuda, spoil

    def propose(self, level):
        return None

    def observe(self, seen):
        if self.cuda.capturing:
            self.spoil(seen)


@pytest.mark.parametrize(("name", "graphs"), [("graph", GRAPHS), ("chain", GRAPHS), ("plain", GRAPHS - 1)])
def test_a_shape_is_captured_once(pair, cuda, name, graphs):
    """However many steps are taken, each one queued before the host has heard of the one before."""
    for _ in range(2):
        out = text(pair, name, max_new_tokens=48, return_dict_in_generate=True)
    assert out.stats.steps > 20 and len(out.stats.shapes) == 1
    assert cuda.counts["captures"] == graphs
    assert cuda.counts["replays"] % graphs == 0 and cuda.counts["replays"] > 2 * graphs * (out.stats.steps - 2)
    spent = out.stats.seconds
    assert spent["draft"] > 0 and spent["target"] > 0 and spent["draft"] + spent["target"] <= spent["total"]


def test_failing_to_capture_is_said_and_harmless(pair, cuda, caplog):
    expected = text(pair, "graph")
    spoils = Spoils(cuda, lambda seen: int(seen.accepted.num_accepted[0]))  # waits for the device
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        assert torch.equal(text(pair, "graph", draft_sources=("model", spoils)), expected)
    said = [r.message for r in caplog.records if "captured" in r.message]
    assert said == [
        "a step could not be captured, so steps run uncaptured: "
        "operation not permitted when stream is capturing: aten::_local_scalar_dense"
    ], "what came first, not what ending the capture says"
    assert cuda.counts["captures"] == 2 * GRAPHS, "it is not tried again"
    assert cuda.current_stream() is cuda._default, "later work is on the stream that it was on"


def test_a_mistake_in_a_step_is_no_matter_of_capturing(pair, cuda):
    with pytest.raises(KeyError, match="a name"):
        text(pair, "graph", draft_sources=("model", Spoils(cuda, lambda seen: {}["a name"])))


def test_a_gpu_that_failed_for_good_ends_the_call_with_the_first_error(pair, cuda, caplog):
    """Whatever is called after it fails too, and what a capture says then is not where it happened."""

    def fail(seen):
        cuda.lost = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError("gsd_kernels: CUDA error: an illegal\nmemory access was encountered")

    with pytest.raises(replay.DeviceLostError, match="unusable after an error: gsd_kernels: CUDA error: an") as f:
        text(pair, "graph", draft_sources=("model", Spoils(cuda, fail)))
    assert "a step could not be captured" not in caplog.text and str(f.value.__cause__).startswith("gsd_kernels: ")


class Longer(StoppingCriteria):
    """Stops all sequences early, for a reason that no device state knows."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full(input_ids.shape[:1], input_ids.shape[1] > 20)


PER_TOKEN = {
    "processor": {"repetition_penalty": 1.3},
    "criterion": {"stopping_criteria": [Longer()]},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
    "logits": {"output_logits": True, "return_dict_in_generate": True, "repetition_penalty": 1.3},
    "together": {"logits_processor": [lambda ids, scores: 1.6 * scores - 0.6 * scores.roll(1, 0)]},
}


def parts(out):
    """Every tensor of what ``generate`` returned."""
    return [out] if isinstance(out, torch.Tensor) else [out.sequences, *(out.scores or ()), *(out.logits or ())]


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("processor", {}), ("criterion", SAMPLED), ("together", {})]
    + [pytest.param(name, {}, marks=pytest.mark.slow) for name in ("criterion", "scores")]
    + [pytest.param(name, SAMPLED, marks=pytest.mark.slow) for name in ("processor", "logits", "together")],
)
def test_what_the_host_accepts_is_committed_between_two_graphs(pair, name, sampling, request):
    options = {**PER_TOKEN[name], **sampling}
    expected = parts(text(pair, "graph", **options))
    cuda = request.getfixturevalue("cuda")
    got = parts(text(pair, "graph", **options))
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))
    assert cuda.counts["captures"] == GRAPHS
    assert cuda.counts["replays"] >= GRAPHS * WARM_STEPS
    assert cuda.counts["replays"] % GRAPHS == 0


# A lane: one stream to capture on, one lock round captures, and replays that wait for each other.


def test_measuring_spoils_no_capture_of_another_thread(cuda, monkeypatch):
    """Waiting for the whole device would: a first call measures its memory while another one's step is captured."""
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 12)

    def function():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(machine.measure_bandwidth, torch.device("cpu")).result(20)

    replay.lane_of(torch.device("cpu")).capture(function)
    assert cuda.counts["waits"] == 2 * 3, "of its own work it waits"
    with pytest.raises(RuntimeError, match="stream is capturing"):
        replay.lane_of(torch.device("cpu")).capture(lambda: replay.wait(torch.device("cpu")))


def test_replays_on_other_streams_wait_for_each_other(cuda):
    """They share the workspace of the stream that they were captured on."""
    lane, one, two = replay.lane_of(torch.device("cpu")), cuda.new_stream(), cuda.new_stream()
    graph, _ = lane.capture(lambda: torch.zeros(1))
    for stream in (one, one, two, one):
        with cuda.on(stream):
            graph()
    number = id(graph.graph)
    assert cuda.log == [
        ("replay", one, number),
        ("replay", one, number),
        ("wait", two, one),
        ("replay", two, number),
        ("wait", one, two),
        ("replay", one, number),
    ]


# What only a GPU can say.


def gpu(test):
    missing = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
    return pytest.mark.gpu(missing(test))


@gpu
@pytest.mark.parametrize(("name", "more"), EACH, ids=str)
def test_captured_on_a_gpu(name, more, monkeypatch, caplog):
    pair, more = on_a_gpu(), {**more, "max_new_tokens": 64}
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        captured = text(pair, name, **more)
    assert all("is lossy" in message for message in caplog.messages)
    monkeypatch.setattr(capture, "can_capture", lambda session: False)
    assert torch.equal(text(pair, name, **more), captured)


@gpu
def test_captured_shapes_take_turns_in_one_pool(monkeypatch, caplog):
    """What one graph leaves in the pool's memory, and is read later, another one must not write over."""

    def texts():
        in_turns(monkeypatch, *drafting("cuda")[:3])
        return text(on_a_gpu(), "auto", max_new_tokens=96)

    with caplog.at_level("WARNING", logger="gsd_kernels"):
        captured = texts()
    assert not caplog.records
    monkeypatch.setattr(capture, "can_capture", lambda session: False)
    assert torch.equal(texts(), captured)


@gpu
def test_captured_steps_go_on_after_a_failed_capture(caplog):
    before, x = text(on_a_gpu(), "graph", max_new_tokens=96), torch.ones(3, device=GPU)
    for _ in range(2):
        with pytest.raises(replay.CaptureError, match="captur"):
            replay.lane_of(GPU).capture(lambda: x.sum().item())
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        assert torch.equal(text(on_a_gpu(), "graph", max_new_tokens=96), before)
    assert not caplog.records and float(x.sum()) == 3.0
