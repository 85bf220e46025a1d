"""The training loop: schedule, checkpoints, losses that are not finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gsd_kernels_train import loop
from gsd_kernels_train.loop import Budget, Checkpoints, Interval, learning_rate_factor


class Dropping(torch.nn.Module):
    """A model whose training draws random numbers."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def losses(self, step, _):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        yield torch.nn.functional.dropout(self.linear(x), 0.5).square().mean()


def train_dropping(folder, *, losses=None, every=4, steps=20):
    torch.manual_seed(0)
    model = Dropping()
    optimizers = loop.build_optimizers(model, matrix_lr=0.01, lr=0.01)
    budget, interval = Budget(steps=steps), Interval(steps=every)
    given = (budget, Checkpoints(folder))
    loop.train("test", model, losses or model.losses, optimizers, *given, tokens_per_step=4, every=interval)
    return model.state_dict()


def same_state(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_a_kill_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    whole = train_dropping(tmp_path / "whole")
    save, calls = torch.save, []

    def torn(state, file):
        calls.append(file)
        if len(calls) == 3:
            Path(file).write_bytes(b"half a state")
            raise KeyboardInterrupt
        save(state, file)

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(KeyboardInterrupt):
        train_dropping(tmp_path / "cut")
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "cut").steps() == [8]
    assert same_state(train_dropping(tmp_path / "cut"), whole)


def test_a_loss_that_is_not_a_number_stops_and_keeps_the_last_checkpoint(tmp_path):
    def losses(step, progress):
        torch.manual_seed(step)
        loss = torch.ones((), requires_grad=True)
        yield loss * (float("nan") if step == 10 else 1.0)

    with pytest.raises(RuntimeError, match=r"test: the loss is nan at step 10; the checkpoint of step 8 stays"):
        train_dropping(tmp_path, losses=losses)
    assert Checkpoints(tmp_path).steps() == [8] and Checkpoints(tmp_path).load()["record"]["steps"] == 8


def test_the_learning_rate_rises_stays_and_falls_to_zero():
    rates = [learning_rate_factor(progress, 0.1, 0.5) for progress in (0, 0.05, 0.2, 0.5, 0.75, 1.0)]
    assert 0 < rates[0] < rates[1] < 1 and rates[2:4] == [1.0, 1.0] and rates[4:] == [0.5, 0.0]
    assert learning_rate_factor(0.3, 0.0, 0.0) == 1.0
