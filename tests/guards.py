"""Tensors that end at a page which must not be touched; an access past the end kills the process."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

LIMIT = 300.0  # seconds of a child


def guarded(tensor: Tensor) -> Tensor:
    """A copy whose last byte touches a protected page, and whose first page follows one."""
    tensor = tensor.contiguous()
    size, page = tensor.numel() * tensor.element_size(), mmap.PAGESIZE
    if size == 0:
        return tensor
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pages = -(-size // page)
    readable_private_anonymous = (3, 0x22, -1, 0)
    base = libc.mmap(None, (pages + 2) * page, *readable_private_anonymous)
    libc.mprotect(base, page, 0)
    libc.mprotect(base + (pages + 1) * page, page, 0)
    buffer = (ctypes.c_char * size).from_address(base + (pages + 1) * page - size)
    copy = torch.frombuffer(buffer, dtype=tensor.dtype).view(tensor.shape)
    return copy.copy_(tensor)


def guarded_empty(*shape: object, dtype: torch.dtype | None = None, device: object = None) -> Tensor:
    """torch.empty for the launch code: outputs and scratch are guarded too."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    return guarded(torch.zeros(sizes, dtype=dtype))


def in_a_fork(function: Callable[[], None]) -> int:
    """Runs ``function`` with guarded outputs in a child process; returns its wait status."""
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        torch.empty = guarded_empty
        try:
            function()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    until = time.monotonic() + LIMIT
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail(f"{function.__name__} takes longer than {LIMIT:.0f} s")
