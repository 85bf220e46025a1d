"""Machine, versions and commit of a result."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from gsd_kernels import cpu_levels
from gsd_kernels.backends import unavailable_reason
from gsd_kernels_cli.versions import versions


def environment(device: torch.device) -> dict[str, Any]:
    """Device, versions and commit, as every result carries them.

    And the instruction set of a CPU's products of rows, which a processor's name need not tell.
    """
    is_compiled = device.type == "cpu" and unavailable_reason("cpu", device) is None
    return {
        "device": device_name(device),
        "device_type": device.type,
        "threads": torch.get_num_threads(),
        "instructions": cpu_levels.active() if is_compiled else None,
        "platform": platform.platform(terse=True),
        "versions": {**versions(), "cuda": torch.version.cuda, "driver": driver() if device.type == "cuda" else None},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def device_name(device: torch.device) -> str:
    """The GPU's name, or the CPU's model name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def driver() -> str | None:
    """The NVIDIA driver's version."""
    lines = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return lines[0].strip() if lines else None


def commit() -> str | None:
    """The checkout's commit, marked ``+`` where sources differ from it; ``None`` outside a checkout."""
    here = str(Path(__file__).resolve().parents[1])
    head = _output("git", "-C", here, "rev-parse", "--short=12", "HEAD")
    if not head:
        return None
    changed = _output("git", "-C", here, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!results")
    return head + ("+" if changed else "")


def _output(*command: str) -> str:
    if shutil.which(command[0]) is None:
        return ""
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    return done.stdout.strip() if done.returncode == 0 else ""
