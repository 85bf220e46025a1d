"""A run's minutes bound all of it, by a clock that only forwards move; and what a run says that learned nothing."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest
import torch
from options import options_for
from typer.testing import CliRunner

from gsd_kernels_cli.app import app
from gsd_kernels_train.clock import NothingLearned
from gsd_kernels_train.distill import distill
from gsd_kernels_train.drafters import DrafterOptions, train_drafter
from gsd_kernels_train.heads import train_heads

TRAININGS = {
    "draft": lambda options, folder: distill(str(folder / "draft"), options),
    "heads": lambda options, _: train_heads(2, 1, options),
    "eagle3": lambda options, _: train_drafter(DrafterOptions(kind="eagle3", layers=1), options),
}


@pytest.fixture
def clock(monkeypatch):
    """``clock.pace`` seconds pass for every token whose embedding is looked up, and none for anything else."""

    class Paced:
        pace = now = 0.0

        def hook(self, module, given):
            if isinstance(module, torch.nn.Embedding):
                self.now += self.pace * given[0].numel()

    paced = Paced()
    paces = SimpleNamespace(monotonic=lambda: paced.now)
    for name, module in list(sys.modules.items()):  # time's own is that of all threads, other tests' servers too
        if name.startswith("gsd_kernels_train") and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", paces)
    handle = torch.nn.modules.module.register_module_forward_pre_hook(paced.hook)
    yield paced
    handle.remove()


@pytest.mark.parametrize("pace", [0.03, 0.3, 3.0])
@pytest.mark.parametrize("kind", TRAININGS)
def test_minutes_bound_all_of_a_run(kind, pace, folder, tmp_path, clock):
    clock.pace = pace
    out = tmp_path / "out"
    options = options_for(folder, steps=None, minutes=1.0, out=out, sequence_level=0.5, batch=2, length=12)
    try:
        report = TRAININGS[kind](options, folder)
    except NothingLearned as nothing:
        assert pace >= 0.3 and "nothing was learned" in str(nothing) and "--minutes" in str(nothing)
        assert clock.now <= 60 + 40 * pace, "what is begun is a window's forward at most"
        assert not out.exists()
    else:
        assert pace <= 0.3 and report["seconds"] == clock.now <= 60
        assert clock.now > 45, "nor is the time left unused"
        assert report["training"]["steps"] > 1 and (out / "training.json").exists()


@pytest.mark.parametrize("command", ["distill", "train-heads", "train-drafter"])
def test_a_run_without_a_step_says_so_and_exits_with_1(command, folder, tmp_path):
    more = {"distill": ["--draft", folder / "draft"], "train-heads": ["--heads", 2]}.get(command, ["--kind", "eagle3"])
    given = [command, "--target", folder / "target", *more, "--out", tmp_path / "out", "--minutes", 1e-5]
    result = CliRunner().invoke(app, [str(a) for a in [*given, "--length", 24, "--text", folder / "text.txt"]])
    assert result.exit_code == 1 and result.stdout == ""
    assert "gsd-kernels: error: nothing was learned, and nothing is written: the 0.0006 s are over" in result.stderr
    assert not (tmp_path / "out").exists()
