"""The state of a draft that learned while serving, as a file that is whole or absent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gsd_kernels_hf.files import damaged, number_in, open_saved, write_file

FORMAT = "gsd_kernels online learner"
VERSION = 1
SQUARES = "exp_avg_sq"
PARTS = ("weight", "exp_avg", SQUARES)


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
            tensors |= {f"{part}.{name}": t.detach().cpu().contiguous() for part, t in zip(PARTS, values, strict=True)}
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
    about = {"format": FORMAT, "version": str(VERSION), "taken": str(learned.taken), "base": base}
    write_file(file, lambda partial: save_file(learned.tensors, partial, metadata=about))


def read_state(file: Path, parameters: dict[str, Tensor], base: str) -> LearnerState:
    """Read what :func:`write_state` wrote for these parameters.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, of a newer version, of another draft, or something else.
    """
    foreign = "holds nothing that a learner saved"
    with open_saved(file, "learner", FORMAT, VERSION, foreign=foreign) as (opened, about):
        if about["base"] != base:
            raise ValueError(
                f"learner: {file} is of another draft, or of this one with other weights to begin with; load what "
                "was saved for it"
            )
        taken = number_in(about, "taken")
        expected = {f"{part}.{name}": p for name, p in parameters.items() for part in PARTS}
        sizes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118 (not a dict)
        same = sizes == {name: list(p.shape) for name, p in expected.items()}
        tensors = {name: opened.get_tensor(name).clone() for name in expected} if same else {}
    fine = same and all(
        t.dtype == expected[name].dtype
        and bool(t.isfinite().all())
        and not (name.startswith(SQUARES) and bool((t < 0).any()))
        for name, t in tensors.items()
    )
    if not fine or taken < 1:
        raise damaged("learner", file, "its tensors are not the draft's")
    return LearnerState(tensors, taken)
