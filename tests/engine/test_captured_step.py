"""Steps replayed from a CUDA graph: what can be shown without a GPU."""

from __future__ import annotations

import fake_cuda
import pytest
import torch
from engine.capturing import CAPTURED, SAMPLED, on_a_gpu, text
from models import noised, tiny
from transformers import StoppingCriteria

from gsd_kernels_hf.acceptance.criteria import CRITERIA
from gsd_kernels_hf.engine import capture, session
from gsd_kernels_hf.engine.capture import WARM_STEPS
from gsd_kernels_hf.engine.engine import engines_of
from gsd_kernels_hf.model import replay

GRAPHS = 2  # of a shape: a step is queued before the host has heard of the one before


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture
def pair():
    target = tiny()
    return target, noised(target)


EACH = [(name, more) for name in CAPTURED for more in ({}, SAMPLED)]
EACH += [("chain", {**SAMPLED, "criterion": criterion}) for criterion in CRITERIA if criterion != "exact"]


def test_failing_to_capture_is_said_and_harmless(pair, cuda, monkeypatch, caplog):
    def step(self):
        record = own(self)
        if cuda.capturing:
            int(record.accepted.num_accepted[0])  # waits for the device
        return record

    expected, own = text(pair, "graph"), session.Session.step
    assert cuda.counts["captures"] == GRAPHS
    engines_of(pair[0]).clear()
    monkeypatch.setattr(session.Session, "step", step)
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        assert torch.equal(text(pair, "graph"), expected)
    said = [r.message for r in caplog.records if "captured" in r.message]
    assert said == [
        "a step could not be captured, so steps run uncaptured: "
        "operation not permitted when stream is capturing: aten::_local_scalar_dense"
    ], "what came first, not what ending the capture says"
    assert cuda.counts["captures"] == GRAPHS + 1, "it is not tried again"
    assert cuda.current_stream() is cuda._default, "later work is on the stream that it was on"


def test_a_mistake_in_a_step_is_no_matter_of_capturing(pair, cuda, monkeypatch):
    own = session.Session.step

    def step(self):
        if cuda.capturing:
            raise KeyError("a name")
        return own(self)

    monkeypatch.setattr(session.Session, "step", step)
    with pytest.raises(KeyError, match="a name"):
        text(pair, "graph")


def test_a_gpu_that_failed_for_good_ends_the_call_with_the_first_error(pair, cuda, monkeypatch, caplog):
    """Whatever is called after it fails too, and what a capture says then is not where it happened."""
    own = session.Session.step

    def step(self):
        record = own(self)
        if cuda.capturing:
            cuda.lost = "CUDA error: an illegal memory access was encountered"
            raise RuntimeError("gsd_kernels: CUDA error: an illegal\nmemory access was encountered")
        return record

    monkeypatch.setattr(session.Session, "step", step)
    with pytest.raises(replay.DeviceLostError, match="unusable after an error: gsd_kernels: CUDA error: an") as f:
        text(pair, "graph")
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
def test_what_the_host_accepts_is_committed_in_a_second_graph(pair, name, sampling, request):
    options = {**PER_TOKEN[name], **sampling}
    expected = parts(text(pair, "graph", **options))
    cuda = request.getfixturevalue("cuda")
    got = parts(text(pair, "graph", **options))
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))
    assert cuda.counts["captures"] == 2
    assert cuda.counts["replays"] >= 2 * WARM_STEPS
    assert cuda.counts["replays"] % 2 == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(("name", "more"), EACH, ids=str)
def test_captured_on_a_gpu(name, more, monkeypatch, caplog):
    pair, more = on_a_gpu(), {**more, "max_new_tokens": 64}
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        captured = text(pair, name, **more)
    assert all("is lossy" in message for message in caplog.messages)
    monkeypatch.setattr(capture, "can_capture", lambda session: False)
    assert torch.equal(text(pair, name, **more), captured)
