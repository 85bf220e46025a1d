"""A step does the same work whatever its data: it traces without values, and never asks the device for one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import models
import pytest
import torch
from engine.host_data import NoHostData, Placed
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import gsd_kernels as gsd
from gsd_kernels_hf.engine import decoder
from gsd_kernels_hf.engine.session import Session
from gsd_kernels_hf.policy.base import Plan
from gsd_kernels_hf.sources import history

pytestmark = pytest.mark.quick

torch.set_num_threads(1)

BATCH, VOCAB = 3, 32
PLAIN = {"assistant_model": None}
HISTORY = {"assistant_model": None, "draft_sources": ("history",)}
SETUPS = {
    "plain": PLAIN,
    "chain": {"graph_config": gsd.GraphConfig.preset("chain", depth=3)},
    "graph": {"graph_config": gsd.GraphConfig(depth=4, width=6, branch=3, max_rows=40, merge_context=1)},
    "reuse": {"graph_config": gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=24, history_depth=2)},
    "history": {**HISTORY, "graph_config": gsd.GraphConfig(depth=2, width=4, branch=2, max_rows=16)},
    "automatic": {"graph_config": "auto"},
    "layer_skip": {"graph_config": gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=24, history_depth=2)},
    "heads": {"graph_config": gsd.GraphConfig(depth=2, width=2, branch=2, max_rows=24, history_depth=2)},
    "speculative": {"criterion": "speculative"},
    "block": {"criterion": "block"},
    "typical": {"criterion": "typical", "graph_config": "graph"},
}
PLANS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "seed": 5},
}
FAST = (("plain", "greedy"), ("graph", "sampled"))  # the rest is marked slow
CASES = [
    pytest.param(s, p, marks=() if (s, p) in FAST else pytest.mark.slow)
    for s in SETUPS
    for p in PLANS
    if p == "sampled" or s in ("plain", "graph", "history")  # what is picked, no setup sees
]


class Enough(Exception):
    pass


def with_session(check: Callable[[Session], None], setup: str, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run ``check`` on the session of a real call, in place of its loop."""

    def loop(session, policy, *_):
        session.trims = False  # what a CPU does in place of static shapes, with a host read
        # The widest shape; an automatic policy chooses rows outside of what is captured.
        shape = session.request.options.graph_config if session.mixer is not None else None
        session.use(Plan(shape))
        check(session)
        raise Enough

    monkeypatch.setattr(decoder, "decode", loop)
    # The mixture's reference works in Python; test_history_text.py has the compiled ops in captured steps.
    monkeypatch.setattr(history, "unavailable_reason", lambda *_: "by the reference")
    target = models.tiny("mistral-window", vocab_size=VOCAB, dtype=torch.float32)
    arguments = {"assistant_model": models.noised(target, 0.01), "backend": "reference", "max_new_tokens": 40}
    if setup == "layer_skip":
        arguments["assistant_model"] = gsd.LayerSkip(target, mlp=[1])
    if setup == "heads":
        arguments["draft_heads"] = gsd.DraftHeads.for_model(target, 2)
    with pytest.raises(Enough):
        prompt = models.prompts(BATCH, 11, seed=4, vocab=VOCAB)
        gsd.generate(target, **prompt, **{**arguments, **SETUPS[setup], **PLANS[plan]})


def traced(session: Session) -> None:
    """FakeTensorMode raises at the first operation whose result's shape, or a host value, depends on data."""
    before = session.state.tokens.clone()
    with FakeTensorMode(allow_non_fake_inputs=True):
        first, second = session.step(), session.step()
        assert isinstance(second.accepted.next_token, FakeTensor)
        shapes = [tuple(t.shape) for t in first.accepted.tensors()]
        assert shapes == [(BATCH, session.max_path + 1), (BATCH,), (BATCH,)]
        assert shapes == [tuple(t.shape) for t in second.accepted.tensors()]
        with pytest.raises(DataDependentOutputException):  # a host read does raise
            int(second.accepted.next_token[0])
    assert torch.equal(session.state.tokens, before), "nothing was computed"


class HostReads(TorchDispatchMode):
    """Collects operations that wait for the device, or whose output's shape depends on values."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique", "equal", "is_nonzero", "item")

    def __init__(self):
        super().__init__()
        self.seen: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        self.count += 1
        if name.split(".")[0].startswith(self.WAITING):
            self.seen.append(name)
        by_mask = name.startswith(("index.", "index_put")) and any(
            t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if by_mask:
            self.seen.append(f"{name} by a mask")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("setup", "plan"), CASES)
def test_a_step_traces_without_values_and_reads_nothing_back(setup, plan, monkeypatch):
    """A real one copies nothing from the host, either, once storage is there."""

    def check(session):
        traced(session)
        operations, accepted = [], []
        for _ in range(5):
            with HostReads() as reads, NoHostData() if operations else nullcontext(), Placed():
                record = session.step()
            assert not reads.seen, reads.seen
            operations.append(reads.count)
            accepted += record.accepted.num_accepted.tolist()
        # Once storage is there, every step is the same sequence of operations, whatever is accepted.
        assert len(set(operations[1:])) == 1, operations
        if setup != "plain":
            assert len(set(accepted)) > 1, "the steps must differ"

    with_session(check, setup, plan, monkeypatch)


def test_the_collector_sees_host_reads():
    with HostReads() as reads:
        x = torch.arange(4)
        x[x > 1]
        bool(x.any())
        x.nonzero()
    assert {name.split(".")[0].split(" ")[0] for name in reads.seen} >= {"index", "_local_scalar_dense", "nonzero"}
    with pytest.raises(AssertionError, match="host data"), NoHostData():
        torch.tensor([1.0, 2.0])
    with pytest.raises(AssertionError, match="arange without a device"), Placed():
        torch.arange(3)
