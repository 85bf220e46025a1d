"""Every Triton kernel compiled for this GPU."""

from __future__ import annotations

import time
from typing import Any

import torch

from gsd_kernels_cli.kernel_report import SHARED_LIMIT, kernel_table

from .work import Work


def run(work: Work) -> None:
    """Point ``kernels``."""
    work.each(["kernels"], lambda _: kernels(work))


def kernels(work: Work) -> dict[str, Any]:
    """Registers, spills and shared memory of every Triton kernel for this GPU (for 9.0 in a rehearsal)."""
    arch = 90 if work.rehearse else known_arch(*torch.cuda.get_device_capability(work.device))
    begin = time.monotonic()
    rows = kernel_table([arch])
    bad = [f"{row['case']} {row['kernel']}" for row in rows if not row["ok"]]
    if bad:
        raise RuntimeError(f"spilled or too much shared memory: {', '.join(bad)}")
    return {"seconds": time.monotonic() - begin, "arch": arch, "rows": rows}


def known_arch(major: int, minor: int) -> int:
    """The newest compute capability whose limits are known that is not above a GPU's."""
    own = 10 * major + minor
    return max((arch for arch in SHARED_LIMIT if arch <= own), default=own)
