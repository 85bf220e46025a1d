"""The state of a draft that learned while serving, as a file that is whole or absent.

Weights and moments of AdamW by part and parameter, ``weight.<name>`` and so on, and the steps behind them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from gsd_kernels_hf.store import damaged, read_saved, write_saved

FORMAT = "gsd_kernels online learner"
VERSION = 1
PARTS = ("weight", "exp_avg", "exp_avg_sq")


def write_state(file: Path, module: nn.Module, optimizer: torch.optim.Optimizer, taken: int, base: str) -> None:
    """Write it beside what ``file`` holds, then put it in its place; ``base`` tells whose it is."""
    tensors = {
        f"{part}.{name}": parameter if part == "weight" else optimizer.state[parameter][part]
        for name, parameter in module.named_parameters()
        for part in PARTS
    }
    write_saved(file, FORMAT, VERSION, tensors, taken=taken, base=base)


def read_state(file: Path, module: nn.Module, optimizer: torch.optim.Optimizer, base: str) -> int:
    """Read what :func:`write_state` wrote into a module of the same parameters and its optimizer; the steps behind it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, of a newer version, of another draft, or something else. Nothing changed.
    """
    tensors, about = read_saved(file, "learner", FORMAT, VERSION, foreign="holds nothing that a learner saved")
    if about["base"] != base:
        raise ValueError(
            f"learner: {file} is of another draft, or of this one with other weights to begin with; load what "
            "was saved for it"
        )
    parameters = dict(module.named_parameters())
    expected = {f"{part}.{name}": (p.shape, p.dtype) for name, p in parameters.items() for part in PARTS}
    if expected != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        raise damaged("learner", file, "its tensors are not the draft's")
    taken = int(about["taken"])
    with torch.inference_mode(False), torch.no_grad():
        for name, parameter in parameters.items():
            moments = {part: tensors[f"{part}.{name}"].to(parameter.device, copy=True) for part in PARTS[1:]}
            step = torch.tensor(float(taken), dtype=torch.float32, device="cpu")
            parameter.copy_(tensors[f"weight.{name}"])
            optimizer.state[parameter] = {"step": step, **moments}
    return taken
