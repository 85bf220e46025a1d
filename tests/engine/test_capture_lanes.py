"""A GPU's lane: one stream to capture on, one lock round captures, and replays that wait for each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import fake_cuda
import pytest
import torch

from gsd_kernels_hf.costs import machine
from gsd_kernels_hf.model import replay
from gsd_kernels_hf.model.replay import lane_of


@pytest.fixture
def cuda(monkeypatch):
    return fake_cuda.install(monkeypatch)


def test_measuring_spoils_no_capture_of_another_thread(cuda, monkeypatch):
    """Waiting for the whole device would: a first call measures its memory while another one's step is captured."""
    monkeypatch.setattr(machine, "READ_BYTES", 1 << 12)

    def function():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(machine.measure_bandwidth, torch.device("cpu")).result(20)

    lane_of(torch.device("cpu")).capture(function)
    assert cuda.counts["waits"] == 2 * 3, "of its own work it waits"
    with pytest.raises(RuntimeError, match="stream is capturing"):
        lane_of(torch.device("cpu")).capture(lambda: replay.wait(torch.device("cpu")))


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
