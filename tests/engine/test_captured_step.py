"""Steps replayed from a CUDA graph: what can be shown without a GPU. test_step_trace.py watches for host reads."""

from __future__ import annotations

import pytest
import torch
from engine.host_data import NoHostData
from models import noised, prompts, tiny

from gsd_kernels import DraftHeads, GraphConfig, LayerSkip, generate
from gsd_kernels.ops.dag_attention.api import IMPLEMENTATIONS
from gsd_kernels_hf.engine import capture, session
from gsd_kernels_hf.engine.capture import WARM_STEPS, CapturedStep, can_capture, untimed
from gsd_kernels_hf.records import Verified

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


class OnCpu(CapturedStep):
    """Captures nothing; a replay runs the step and fills the one record."""

    captures = 0
    replays = 0

    def capture(self):
        OnCpu.captures += 1
        static = Verified(*[None] * 8)

        def replay():
            OnCpu.replays += 1
            vars(static).update(vars(self.session.step()))

        return replay, static


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


@pytest.mark.parametrize("graph_config", ["auto", CONFIGS["graph"]], ids=["auto", "graph"])
def test_replayed_steps_give_the_same_text(pair, graph_config, monkeypatch):
    target, draft = pair
    inputs = prompts(1, 9)
    options = {"assistant_model": draft, "graph_config": graph_config, "max_new_tokens": 48, "pad_token_id": 0}
    expected = generate(target, **inputs, **options)
    monkeypatch.setattr(OnCpu, "captures", 0)
    monkeypatch.setattr(OnCpu, "replays", 0)
    monkeypatch.setattr(capture, "can_capture", lambda session: True)
    monkeypatch.setattr(capture, "CapturedStep", OnCpu)
    assert torch.equal(generate(target, **inputs, **options), expected)
    assert OnCpu.captures >= 1
    assert OnCpu.replays > WARM_STEPS


def test_failing_to_capture_is_said_and_harmless(pair, monkeypatch, caplog):
    class Failing(CapturedStep):
        def capture(self):
            raise RuntimeError("operation not permitted")

    target, draft = pair
    inputs = prompts(1, 9)
    options = {"assistant_model": draft, "graph_config": CONFIGS["graph"], "max_new_tokens": 32, "pad_token_id": 0}
    expected = generate(target, **inputs, **options)
    monkeypatch.setattr(capture, "can_capture", lambda session: True)
    monkeypatch.setattr(capture, "CapturedStep", Failing)
    with caplog.at_level("WARNING", logger="gsd_kernels"):
        assert torch.equal(generate(target, **inputs, **options), expected)
    assert [r.message for r in caplog.records if "captured" in r.message] == [
        "a step could not be captured, so steps run uncaptured: operation not permitted"
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
