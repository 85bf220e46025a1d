"""A mode that refuses data from the host, and sessions whose steps run in it."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gsd_kernels_hf.engine import session


class NoHostData(TorchDispatchMode):
    """Fails where a tensor is made from host data, which on a GPU is a copy that cannot be captured."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten.lift_fresh.default, "a tensor of host data"
        return func(*args, **(kwargs or {}))


class Placed(TorchFunctionMode):
    """Fails where a tensor is made without saying on which device: on a machine with a GPU it would lie elsewhere."""

    MAKERS = (torch.arange, torch.zeros, torch.ones, torch.full, torch.empty, torch.eye, torch.linspace, torch.rand)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert func not in self.MAKERS or kwargs.get("device") is not None, f"torch.{func.__name__} without a device"
        return func(*args, **kwargs)


def watch_steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let every session's steps but the first two, in which storage is made, refuse data and tensors of the host.

    Returns: for every step so far, whether it was watched.
    """
    step, watched = session.Session.step, []

    def watching(self):
        watched.append(len(watched) > 1)
        if not watched[-1]:
            return step(self)
        with NoHostData(), Placed():
            return step(self)

    monkeypatch.setattr(session.Session, "step", watching)
    return watched
