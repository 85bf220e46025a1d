"""The state of a draft that learned while serving, as a file that is whole or absent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gsd_kernels_hf.store import damaged, read_saved, write_saved

FORMAT = "gsd_kernels online learner"
VERSION = 1
PARTS = ("weight", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class LearnerState:
    """Weights and moments of AdamW by part and parameter, ``weight.<name>`` and so on, and the steps behind them."""

    tensors: dict[str, Tensor]
    taken: int

    @classmethod
    def of(cls, module: nn.Module, optimizer: torch.optim.Optimizer, taken: int) -> LearnerState:
        tensors = {}
        for name, parameter in module.named_parameters():
            state = optimizer.state[parameter]
            values = (parameter, state["exp_avg"], state["exp_avg_sq"])
            tensors |= {f"{part}.{name}": t for part, t in zip(PARTS, values, strict=True)}
        return cls(tensors, taken)

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write weights and moments into a module of the same parameters and its optimizer; under ``no_grad``."""
        for name, parameter in module.named_parameters():
            parameter.copy_(self.tensors[f"weight.{name}"])
            state = {part: self.tensors[f"{part}.{name}"].to(parameter.device, copy=True) for part in PARTS[1:]}
            optimizer.state[parameter] = {
                "step": torch.tensor(float(self.taken), dtype=torch.float32, device="cpu"),
                **state,
            }


def write_state(file: Path, learned: LearnerState, base: str) -> None:
    """Write it beside what ``file`` holds, then put it in its place; ``base`` tells whose it is."""
    write_saved(file, FORMAT, VERSION, learned.tensors, taken=learned.taken, base=base)


def read_state(file: Path, parameters: dict[str, Tensor], base: str) -> LearnerState:
    """Read what :func:`write_state` wrote for these parameters.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, of a newer version, of another draft, or something else.
    """
    tensors, about = read_saved(file, "learner", FORMAT, VERSION, foreign="holds nothing that a learner saved")
    if about["base"] != base:
        raise ValueError(
            f"learner: {file} is of another draft, or of this one with other weights to begin with; load what "
            "was saved for it"
        )
    expected = {f"{part}.{name}": (p.shape, p.dtype) for name, p in parameters.items() for part in PARTS}
    if expected != {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}:
        raise damaged("learner", file, "its tensors are not the draft's")
    return LearnerState(tensors, int(about["taken"]))
