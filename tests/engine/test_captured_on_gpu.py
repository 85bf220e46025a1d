"""Captured steps where only a GPU can say: shapes in turns, events right after a replay, after a failed capture."""

from __future__ import annotations

import pytest
import torch
from engine.capturing import drafting, in_turns, on_a_gpu, text

from gsd_kernels_hf.engine import capture
from gsd_kernels_hf.engine.stats import Clock
from gsd_kernels_hf.model.replay import CaptureError, lane_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
GPU = torch.device("cuda", 0)


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


def test_captured_steps_go_on_after_a_failed_capture(caplog):
    before, x = text(on_a_gpu(), "graph", max_new_tokens=96), torch.ones(3, device=GPU)
    for _ in range(2):
        with pytest.raises(CaptureError, match="captur"):
            lane_of(GPU).capture(lambda: x.sum().item())
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        assert torch.equal(text(on_a_gpu(), "graph", max_new_tokens=96), before)
    assert not caplog.records and float(x.sum()) == 3.0


def test_events_of_a_captured_part_are_not_done_before_it():
    """Asked right after a replay they must not answer for the one before."""
    clock, x = Clock(GPU), torch.ones(3, device=GPU)

    def slow():
        with clock.part("target"):
            torch.cuda._sleep(100_000_000)  # 50 ms
            return x + 1

    with clock.capture() as parts:
        graph, _ = lane_of(GPU).capture(slow)
    for replays in (1, 2, 3):
        graph()
        clock.replayed(list(parts))
        clock.read()
        assert len(clock.pending) == 1, "the part is running"
        torch.cuda.synchronize()
        clock.read()
        assert not clock.pending and clock.seconds["target"] > 0.01 * replays
