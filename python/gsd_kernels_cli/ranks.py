"""A command run by several processes: torchrun starts them, the first one prints."""

from __future__ import annotations

import atexit
import datetime
import os
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from gsd_kernels_hf.parallel import pause_at_exit

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def join(timeout: float) -> torch.device:
    """Join the other ranks; the device of this one.

    Args:
        timeout: seconds that a message may take before a rank counts as lost.

    Raises:
        ValueError: not started by torchrun, or with more processes than this machine has GPUs.
    """
    if any(name not in os.environ for name in LAUNCHED):
        raise ValueError("--tp: start it as torchrun --nproc-per-node N -m gsd_kernels_hf …, one process a GPU")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"--tp: {device} does not exist; start as many processes as the machine has GPUs")
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=timeout),
        device_id=device if device.type == "cuda" else None,
    )
    atexit.register(dist.destroy_process_group)
    if device.type == "cpu":
        pause_at_exit()
    return device


def is_first() -> bool:
    """Return whether this process prints and writes files: the only one, or rank 0."""
    return not dist.is_initialized() or dist.get_rank() == 0


def from_first(value: Any) -> Any:
    """The first rank's value, which all must call; where there is one process, its own."""
    values = [value]
    if dist.is_initialized():
        dist.broadcast_object_list(values)
    return values[0]


def sharding() -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that shard a model; the plan moved into ``DistributedConfig`` after 5.0."""
    if any(field.name == "tp_plan" for field in fields(DistributedConfig)):
        return {"distributed_config": DistributedConfig(tp_plan="auto")}
    return {"tp_plan": "auto"}
