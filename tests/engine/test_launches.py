"""What a step launches on a GPU outside its two models, counted by dispatch on the CPU.

Every dispatched operation counts but for those that make a view or only allocate. Ops of this package are chosen as
``auto`` chooses on a GPU: a compiled one counts as the kernels that its CUDA version launches (:data:`LAUNCHES`), a
Triton one as what its own launch code launches on tensors without content.
"""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import models
import pytest
import torch
from engine.launching import as_on_a_gpu
from torch.utils._python_dispatch import TorchDispatchMode

import gsd_kernels as gsd
from gsd_kernels.backends import FIRST, unavailable_reason
from gsd_kernels_hf.engine import decoder
from gsd_kernels_hf.model.fused import SWITCH
from gsd_kernels_hf.policy.fixed import FixedPolicy

pytestmark = pytest.mark.skipif(
    unavailable_reason("cpu", torch.device("cpu")) is not None, reason="counts the compiled ops"
)

SHAPE = gsd.GraphConfig(depth=5, width=4, branch=3, max_rows=32, history_depth=4)
VOCAB = 61  # no other size of a step
PLANS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "seed": 5},
}
MOST = 64  # among them what a policy is told (five that would follow the step uncaptured), and marks of rows (two)

LAUNCHES = {"commit_kv": 2}  # copies, whose blocks all read the old lengths, and their advance; all others: 1
SEVERAL = {"constant_pad_nd": 2}  # a fill and a copy
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh")


def is_view(function: torch._ops.OpOverload) -> bool:
    """Whether the result shares an argument's memory and nothing is written."""
    aliased = [r.alias_info for r in function._schema.returns if r.alias_info is not None]
    return bool(aliased) and not any(info.is_write for info in aliased)


def caller() -> str:
    """The innermost function of the Hugging Face wing that is being run."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "gsd_kernels_hf" in path.parts and "gsd_kernels" not in path.parts[-3:]:
            return f"{path.parent.name}.{path.stem}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


class Launches(TorchDispatchMode):
    """Counts launches outside models' forwards, by operation and by who asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = 0  # of a model
        self.by_name: Counter[str] = Counter()
        self.by_place: Counter[tuple[str, str]] = Counter()
        self.sorts: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        namespace, _, name = function._schema.name.partition("::")
        if self.inside or is_view(function) or name in FREE:
            return result
        count = LAUNCHES.get(name, 1) if namespace == "gsd_kernels" else SEVERAL.get(name, 1)
        self.by_name[name] += count
        self.by_place[caller(), name] += count
        if name in ("sort", "argsort", "topk", "kthvalue", "msort") and args[0].shape[-1] >= VOCAB:
            self.sorts.append(name)
        return result

    @property
    def total(self) -> int:
        return sum(self.by_name.values())

    def launch(self, kernel: str) -> None:
        """Count a Triton kernel."""
        self.by_name[kernel] += 1
        self.by_place[caller(), kernel] += 1

    def uncounted(self, function):
        """``function``, with nothing in it counted."""

        def call(*args, **kwargs):
            self.inside += 1
            try:
                return function(*args, **kwargs)
            finally:
                self.inside -= 1

        return call

    def __str__(self) -> str:
        lines = [f"{count:5} {place}: {name}" for (place, name), count in sorted(self.by_place.items())]
        return "\n".join([f"{self.total} launches", *lines])

    @contextmanager
    def not_in(self, model):
        """Leave out what the model launches."""

        def enter(*_):
            self.inside += 1

        def leave(*_):
            self.inside -= 1

        hooks = [model.register_forward_pre_hook(enter), model.register_forward_hook(leave)]
        yield
        for hook in hooks:
            hook.remove()


class Enough(Exception):
    pass


def counted_step(options: dict[str, object], first: str, monkeypatch: pytest.MonkeyPatch, shape=SHAPE) -> Launches:
    """The launches of a late step of a real call.

    ``first``: ``GSD_KERNELS_CUDA_FIRST``, what ``auto`` takes first of Triton's and the compiled ops.
    """
    launches = Launches()
    if first == "triton":
        jit = pytest.importorskip("triton.runtime.jit")
        monkeypatch.setattr(jit.JITFunction, "run", lambda self, *_, **__: launches.launch(self.fn.__name__))
    as_on_a_gpu(monkeypatch, first, launches.uncounted)

    def policy(*_, **__):
        return FixedPolicy(shape)

    def loop(session, policy, *_):
        session.trims = False  # what a CPU does in place of static shapes
        counts, accepted = [], []
        for _ in range(4):
            session.use(policy.plan())
            launches.__init__()
            target, draft = (rows.stepping for rows in session.row_models)
            with launches.not_in(target), launches.not_in(draft), launches:
                verified = session.step()
            counts.append(launches.total)
            accepted += verified.accepted.num_accepted.tolist()
        assert len(set(counts)) == 1 and max(accepted) > 1, (counts, accepted)
        raise Enough

    monkeypatch.setenv(SWITCH, "0")  # rows through the modules, as on a GPU
    monkeypatch.setattr(decoder, "decode", loop)
    monkeypatch.setattr(decoder.GraphDecoder, "policy", policy)
    target = models.tiny(vocab_size=VOCAB, dtype=torch.float32)
    with pytest.raises(Enough):
        gsd.generate(
            target,
            **models.prompts(2, 11, seed=4, vocab=VOCAB),
            assistant_model=models.noised(target, 0.01),
            max_new_tokens=60,
            **options,
        )
    return launches


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("plan", PLANS)
def test_launches_outside_the_models(plan, first, monkeypatch):
    launches = counted_step(PLANS[plan], first, monkeypatch)
    print(launches)
    assert launches.total <= MOST, str(launches)
    assert not launches.sorts, f"over the vocabulary: {launches.sorts}"
    kernels = {name for name in launches.by_name if name.endswith("_kernel")}
    assert bool(kernels) == (first == "triton")


CRITERIA = {
    "exact": {},
    "speculative": {"criterion": "speculative", "graph_config": gsd.GraphConfig.preset("chain", depth=4)},
    "typical": {"criterion": "typical"},
}


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("criterion", CRITERIA)
def test_no_criterion_sorts_the_vocabulary(criterion, first, monkeypatch):
    options = CRITERIA[criterion]
    launches = counted_step(PLANS["sampled"] | options, first, monkeypatch, options.get("graph_config", SHAPE))
    assert not launches.sorts, f"over the vocabulary: {launches.sorts}"
    assert criterion == "exact" or {"warped_log_probs", "_log_probs_kernel"} & set(launches.by_name), "it was that one"
