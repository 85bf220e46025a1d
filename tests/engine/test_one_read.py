"""The host reads a step in one tensor, once, when the next one is queued; shown on a CPU taken for a GPU."""

from __future__ import annotations

import traceback

import fake_cuda
import pytest
import torch
from engine.capturing import GRAPHS, drafting, in_turns, text
from models import noised, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from gsd_kernels_hf.engine import decoder
from gsd_kernels_hf.engine.flight import Launched
from gsd_kernels_hf.model import replay
from gsd_kernels_hf.policy.learning import LearningPolicy


class Reads:
    """Counts what brings values of the device to the host, where the CPU is taken for one."""

    def __init__(self, monkeypatch):
        self.on_host, self.count, self.places = [], 0, []
        cpu = torch.Tensor.cpu
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: self.note(tensor) or self.host(cpu(tensor).clone()))
        for name in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__", "__index__"):
            own = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, lambda tensor, own=own: self.note(tensor) or own(tensor))

    def host(self, tensor):
        self.on_host.append(tensor.untyped_storage())  # held, so that no other storage takes its place
        return tensor

    def note(self, tensor):
        storage = tensor.untyped_storage()._cdata
        if not any(found._cdata == storage for found in self.on_host):
            self.count += 1
            self.places.append("".join(traceback.format_stack(limit=6)[:-2]))


class Queued(TorchDispatchMode):
    """Names of operations, but for those of functions that go without."""

    def __init__(self):
        super().__init__()
        self.names, self.paused = set(), False

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not self.paused:
            self.names.add(function._schema.name)
        return function(*args, **(kwargs or {}))

    def without(self, function):
        def uncounted(*args):
            self.paused = True
            function(*args)
            self.paused = False

        return uncounted


@pytest.mark.parametrize("name", ["plain", "fixed", "auto"])
def test_no_step_waits_for_the_host(name, monkeypatch):
    """None reads from the device, nothing is put together outside its graph, under a policy that learns too."""
    target, cuda = tiny(), fake_cuda.install(monkeypatch)
    pair = target, noised(target)
    in_turns(monkeypatch, drafting("cuda")[0])
    options = {"plain": {"graph_config": "plain"}, "fixed": {}, "auto": {"graph_config": "auto"}}[name]
    graphs = GRAPHS - (name == "plain")
    which, options = ("plain" if name == "plain" else "graph"), {**options, "max_new_tokens": 24}
    expected, learned, steps, behind = text(pair, which, **options), [], [], []
    observe = LearningPolicy.observe
    monkeypatch.setattr(
        LearningPolicy, "observe", lambda self, seen: learned.append(seen.tokens) or observe(self, seen)
    )
    own_decode, replayed, send = decoder.decode, fake_cuda.FakeGraph.replay, replay.send

    def decode(session, policy, ranks, out):
        with monkeypatch.context() as patched, Queued() as queued:
            reads, hear = Reads(patched), Launched.hear
            patched.setattr(fake_cuda.FakeGraph, "replay", queued.without(replayed))
            patched.setattr(replay, "send", lambda tensor: reads.host(send(tensor)))

            def counted(launched):
                if not steps:
                    queued.names.clear()  # of prompts
                steps.append(reads.count)
                behind.append(launched.sent is not None and cuda.counts["replays"] > graphs * len(steps))
                return hear(launched)

            patched.setattr(Launched, "hear", counted)
            own_decode(session, policy, ranks, out)
            steps.append(reads.count)
            assert not queued.names & {"aten::cat", "aten::_to_copy"}, queued.names
            assert len(steps) > 5 and len(set(steps)) == 1, reads.places
            assert all(behind[:-1]), "another one is queued, but where the text is known to end"

    monkeypatch.setattr(decoder, "decode", decode)
    before = cuda.counts["captures"]
    cuda.counts["replays"] = 0
    assert torch.equal(text(pair, which, **options), expected) and cuda.counts["captures"] == before
    assert bool(learned) == (name == "auto") and all(learned[:-1])
