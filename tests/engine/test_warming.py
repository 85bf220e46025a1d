"""No kernel is compiled in the middle of a text: counted where Triton compiles, with nothing compiled and no GPU."""

from __future__ import annotations

import itertools
import os
from collections import Counter

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
from gsd_kernels_hf.model import fused
from gsd_kernels_hf.policy.learning import LearningPolicy
from gsd_kernels_hf.policy.shapes import ladder
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafts", "sampled"), [("layer_skip", False), ("eagle3", True), ("dflash", False), ("dspark", True)]
)
def test_drafts_of_every_kind_are_compiled_before_the_first_step(drafts, sampled, compiled, monkeypatch):
    options, kernels = SAMPLING["sampled" if sampled else "greedy"]
    [(first, later)] = texts(compiled, monkeypatch, [words(2, 9, seed=1)], drafts, **options)
    assert set(first) >= KERNELS | kernels
    assert not later


@pytest.mark.slow
def test_skipped_layers_of_a_target_whose_rows_are_one_operator(compiled, monkeypatch):
    """The operator compiles nothing, and the layers that remain are modules all the same."""
    forward = fused.decoder_rows
    monkeypatch.setattr(fused, "decoder_rows", lambda *args, **kw: forward(*args, **{**kw, "backend": "reference"}))
    monkeypatch.setattr(fused, "why_not", lambda *args: None)
    prompt = words(2, 9, seed=1)
    [(first, later)] = texts(compiled, monkeypatch, [prompt], "layer_skip", reports=(reports := []))
    assert [report.why_modules for report in reports] == [None]
    assert {"_write_kernel", "_split_kernel", "_combine_kernel", "_commit_kernel"} <= set(first)
    assert not later


def test_shapes_of_a_ladder_share_kernels(compiled, monkeypatch):
    """A variant of merge takes seconds to compile: sizes of a shape are arguments, not constants."""
    shapes = list(ladder("cuda", with_model=True).values())
    assert len({(shape.width, shape.branch, shape.max_rows) for shape in shapes}) > 5
    texts(compiled, monkeypatch, [words(2, 9, seed=1)], shapes=shapes)
    counts = Counter(compiled)
    assert counts["_merge_kernel"] == 1
    assert counts["_flatten_kernel"] <= 5, "one a power of two of the rows"
    assert counts["_verify_kernel"] <= 5


def test_the_count_notices(compiled, monkeypatch):
    monkeypatch.setattr(loop, "warm", lambda session, shapes: None)
    [(_, later)] = texts(compiled, monkeypatch, [words(2, 9, seed=1)])
    assert set(later) >= {"_flatten_kernel", "_verify_kernel", "_commit_kernel", "_score_kernel", "_mix_kernel"}
