"""No kernel is compiled in the middle of a text: counted where Triton compiles, with nothing compiled and no GPU."""

from __future__ import annotations

import itertools
import os

import fake_cuda
import pytest
import torch
from chats import ask, pair, patched, words
from engine.capturing import drafting
from engine.launching import LAUNCHED, both, run_launch_code
from sources.drafters import dflash_config, eagle3_config, random_dflash, random_eagle3

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from triton.runtime.jit import JITFunction

from gsd_kernels import LayerSkip
from gsd_kernels_cli import kernel_report
from gsd_kernels_hf.engine import capture, loop, warming
from gsd_kernels_hf.policy.learning import LearningPolicy
from gsd_kernels_hf.sources import history

KERNELS = {"_commit_kernel", "_split_kernel", "_combine_kernel", "_flatten_kernel", "_merge_kernel", "_verify_kernel"}
KERNELS |= {"_write_kernel", "_insert_kernel", "_lookup_kernel", "_mix_kernel"}
SAMPLING = {
    "greedy": ({}, {"_score_kernel"}),
    "sampled": ({"do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}, {"_score_kernel", "_perturb_kernel"}),
    "cut": (
        {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"_cut_kernel", "_perturb_kernel"},
    ),
    "typical": (
        {"do_sample": True, "temperature": 0.8, "seed": 3, "criterion": "typical"},
        {"_cut_kernel", "_log_probs_kernel"},
    ),
}


@pytest.fixture
def compiled(monkeypatch):
    """Names of the kernels that a GPU's steps would compile, in order; the reference computes."""
    found: list[str] = []
    seen = set()
    run = JITFunction.run

    def compile_nothing(self, key, *args):
        if (self, key) not in seen:
            seen.add((self, key))
            found.append(self.fn.__name__)

    def run_nothing(self, *args, warmup, **kwargs):
        self.device_caches.clear()  # another test of this process may have compiled it
        return run(self, *args, warmup=True, **kwargs)

    fake_cuda.install(monkeypatch)
    # The history of a GPU without compiled ops has kernels of Triton's; the mixture's are compiled with the package.
    monkeypatch.setattr(history, "unavailable_reason", lambda *_: "not built")
    monkeypatch.setattr(capture, "can_capture", lambda session: False)  # launch code runs in every step
    run_launch_code(monkeypatch)
    monkeypatch.setattr(JITFunction, "_do_compile", compile_nothing)
    monkeypatch.setattr(JITFunction, "run", run_nothing)

    for op in LAUNCHED.values():
        chosen = both(op.implementations["triton"], op.implementations["reference"])
        monkeypatch.setattr(op, "chosen", lambda *_, chosen=chosen: chosen)
    with kernel_report._target(90):
        yield found


def texts(compiled, monkeypatch, prompts, drafts="model", reports=None, shapes=(), **options):
    """What is compiled until a text of two shapes, or of ``shapes``, was warmed, and in its steps, by prompt."""
    shapes = shapes or [shape for shape in drafting() if shape.width == 2][:2]
    monkeypatch.setattr(LearningPolicy, "largest_shapes", lambda self: shapes)
    own, warmed = loop.warm, []
    monkeypatch.setattr(loop, "warm", lambda *args: (own(*args), warmed.append(len(compiled))))
    target, draft = pair(dtype=torch.float32, head_dim=16)  # strides are multiples of 16, as of real models
    given = {
        "model": lambda: {"assistant_model": draft},
        "layer_skip": lambda: {"assistant_model": LayerSkip(target, mlp=[1])},
        "eagle3": lambda: {"drafter": random_eagle3(eagle3_config(target)).float()},
        "dflash": lambda: {"drafter": random_dflash(dflash_config(target)).float()},
        "dspark": lambda: {"drafter": random_dflash(dflash_config(target, inner={"markov_rank": 4})).float()},
    }
    counts = []
    with patched(target, **given[drafts](), graph_config="auto") as handle:
        for prompt in prompts:
            taken = itertools.chain([shapes[0]] * 2, itertools.repeat(shapes[1]))
            monkeypatch.setattr(LearningPolicy, "shape", lambda self, taken=taken: next(taken))
            compiled.clear()
            warmed.clear()
            ask(target, prompt, tokens=16, **options)
            assert len(warmed) > 3
            counts.append((compiled[: warmed[0]], compiled[warmed[0] :]))
            if reports is not None:
                reports.append(handle.stats)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLING)
def test_shapes_of_a_ladder_are_compiled_before_the_first_step(name, compiled, monkeypatch):
    warmed, own = [], warming._warm_graph
    monkeypatch.setattr(warming, "_warm_graph", lambda session, shape: warmed.append(shape) or own(session, shape))
    options, kernels = SAMPLING[name]
    prompts = [words(2, 9, seed=1), words(2, 12, seed=2)]
    (first, later), second = texts(compiled, monkeypatch, prompts, **options)
    assert set(first) >= KERNELS | kernels
    assert not later
    assert second == ([], []), "another prompt in the same bucket"
    assert len(warmed) == len(set(warmed)) == 2, "each shape once"
