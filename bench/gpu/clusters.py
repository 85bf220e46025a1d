"""How many clusters of 2, 4 and 8 blocks this very card holds at a time, blocks as large as a group of warps has.

It differs from card to card, by how many multiprocessors of each part of it work: a launch of more clusters takes a
second wave. Asked of the driver, with a kernel that does nothing.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from gsd_kernels.ops.decoder_rows.cuda import GROUP_CAPABILITY

from .work import Work, points

SIZES = (2, 4, 8)
SHARED_BYTES, THREADS = 193 << 10, 384  # of a block
MOST_SHARED, CLUSTER = 8, 4  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PTX = b".version 7.8\n.target sm_90\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"


class Attribute(ctypes.Structure):
    """CUlaunchAttribute: of its union the sizes of a cluster."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("count", ctypes.c_uint),
    )


def run(work: Work) -> None:
    """Points ``clusters of N``."""
    if work.rehearse or torch.cuda.get_device_capability(work.device) < GROUP_CAPABILITY:
        work.skip("clusters: GPUs of compute capability 9.0 and newer have them")
        return
    torch.zeros(1, device=work.device)  # makes the context current
    work.each(points("clusters of {size}", size=SIZES), lambda size: active(ctypes.CDLL("libcuda.so.1"), size))


def active(driver: Any, size: int) -> dict[str, Any]:
    """The number of clusters of a size that run at the same time, and the card's multiprocessors.

    Raises:
        RuntimeError: the driver refuses.
    """

    def ask(name: str, *arguments: Any) -> None:
        if status := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name} gave {status}")

    module, function, found = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    ask("cuModuleLoadData", ctypes.byref(module), PTX)
    ask("cuModuleGetFunction", ctypes.byref(function), module, b"nothing")
    ask("cuFuncSetAttribute", function, MOST_SHARED, SHARED_BYTES)
    cluster = Attribute(CLUSTER, 0, (size, 1, 1))
    blocks = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    launch = Launch((size * blocks, 1, 1), (THREADS, 1, 1), SHARED_BYTES, None, ctypes.pointer(cluster), 1)
    ask("cuOccupancyMaxActiveClusters", ctypes.byref(found), function, ctypes.byref(launch))
    print(f"  {found.value} clusters of {size} on {blocks} multiprocessors", flush=True)
    return {"size": size, "active": found.value, "multiprocessors": blocks}
