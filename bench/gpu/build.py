"""Facts of this machine, and the CUDA ops built for it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from .stages import built, execute
from .work import Work

WITHOUT_GPU = "9.0a"  # what a rehearsal builds for: a is with wgmma


def run(work: Work) -> None:
    """Points ``ops``, ``backends``."""
    if not work.rehearse and not built():  # earlier results, another machine
        work.points.pop("ops", None)
    work.each({"ops": (work,)}, ops)
    if work.rehearse:
        work.skip("kernels on a GPU: whether the backends run there")
    # In a process of its own: which libraries there are is looked up once, when the package is imported.
    work.each({"backends": (work,)}, backends)


def ops(work: Work) -> dict[str, Any]:
    """Build the CUDA ops; in a rehearsal into a folder that is deleted.

    Raises:
        RuntimeError: they cannot be built; the reason is in the log.
    """
    if work.rehearse and shutil.which("nvcc") is None:
        work.skip("the build of the CUDA ops: there is no nvcc")
        return {"seconds": None}
    # setup.py builds the CUDA ops alone, for GPUs that it asks nvidia-smi for, or for those that are named.
    environment = {**os.environ, "GSD_KERNELS_BUILD_CUDA": "1", "GSD_KERNELS_BUILD_CPU": "0"}
    if shutil.which("nvidia-smi") is None:
        environment.setdefault("GSD_KERNELS_CUDA_ARCHS", WITHOUT_GPU)
    else:
        environment.pop("TORCH_CUDA_ARCH_LIST", None)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        place = ["--build-lib", folder, "--build-temp", f"{folder}/temp"] if work.rehearse else ["--inplace"]
        code = execute(
            [sys.executable, "setup.py", "-q", "build_ext", *place], environment, sys.stdout.buffer, work.left()
        )
        libraries = [file.name for file in Path(folder).rglob("_cuda*.so")]
    if code:
        raise RuntimeError(f"setup.py build_ext ended with {code}: see the log")
    return {"seconds": time.monotonic() - begin, "libraries": libraries}


_BACKENDS = """
import json, torch
from gsd_kernels.backends import BACKENDS, unavailable_reason
device = torch.device("{device}")
print(json.dumps({{name: unavailable_reason(name, device) for name in BACKENDS if name != "auto"}}))
"""


def backends(work: Work) -> dict[str, Any]:
    """Why a backend cannot run on the device, ``None`` for those that can."""
    device = work.device
    code = _BACKENDS.format(device=device.type)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    found: dict[str, Any] = {"missing_because": json.loads(done.stdout)}
    print(f"backends on {device.type}: {done.stdout.strip()}", flush=True)
    if device.type == "cuda":
        names = "name", "major", "minor", "multi_processor_count", "L2_cache_size", "total_memory", "clock_rate"
        properties = torch.cuda.get_device_properties(device)
        found |= {name: str(getattr(properties, name, None)) for name in names}
        found["memory_bytes"] = torch.cuda.mem_get_info(device)
    return found
