"""Tensors that end at a page which must not be touched; an access past the end kills the process."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


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
