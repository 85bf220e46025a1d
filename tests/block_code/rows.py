"""decoder_rows of the CUDA library on a CPU: its own checks and launches, the source of its kernels."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import fake_cuda
import pytest
import torch
from kept import built
from torch import Tensor

from gsd_kernels import backends
from gsd_kernels.ops.dag_attention.api import ATTENTION
from gsd_kernels.ops.decoder_rows import cuda, decoder_rows
from gsd_kernels.ops.feature_rows import feature_rows
from gsd_kernels.ops.table import OPS
from gsd_kernels_hf.model import fused

from .programs import CXX, ROOT, TORCH, build

SOURCE = ROOT / "tests/block_code/rows_op.cpp"
MISSING = "no C++ compiler (CXX, g++)" if CXX is None else None
KERNELS = ("embed", "norm", "product", "turn", "attend", "combine", "pair")
BLOCKS = pytest.param(
    "cpu",
    id="blocks",
    marks=[pytest.mark.slow, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))],
)
GPU = pytest.param(
    "cuda",
    id="gpu",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")],
)
DEVICES = (BLOCKS, GPU)
"""Where ``backend="cuda"`` takes its tensors: parameters of a fixture, which calls :func:`take_for_gpus` for "cpu"."""
OWN = "own"
"""Of :func:`drafting_on` a CPU as it is."""

FLAGS = ["-O1", "-fPIC", "-shared", "-fvisibility=hidden", *TORCH]
FLAGS += [f"-L{Path(torch.__file__).parent / 'lib'}", "-Wl,--no-as-needed", "-ltorch"]


def operators(factory: pytest.TempPathFactory) -> Any:
    """``torch.ops.gsd_block_code``, built where its sources are new."""
    inputs = ("csrc", "tests/block_code")
    path = str(built(factory, "rows_op.so", inputs, lambda folder: build(SOURCE, folder / "rows_op.so", FLAGS)))
    if not hasattr(torch.ops.gsd_block_code, "launches"):
        lines = {
            "decoder_rows": decoder_rows,
            "launches": decoder_rows,
            "kinds": decoder_rows,
            "dag_attention": ATTENTION,
        }
        lines |= {"feature_rows": feature_rows, "feature_launches": feature_rows}
        for name, op in lines.items():
            arguments, _, results = op.line.schema.partition(" -> ")
            results = results if name == op.name else "Tensor"
            torch.library.define(f"gsd_block_code::{name}", f"{arguments} -> {results}")
            ctypes.CDLL(path).gsd_line(name.encode(), op.line.text.encode())
        torch.ops.load_library(path)
    return torch.ops.gsd_block_code


def launches(factory: pytest.TempPathFactory, *arguments: Any) -> list[str]:
    """Names of the kernels that a call launches, in order; arguments as of an implementation of decoder_rows."""
    found = operators(factory).launches(*decoder_rows.operands(*arguments, None))
    return [KERNELS[kernel] for kernel in found.tolist()]


def feature_launches(factory: pytest.TempPathFactory, *arguments: Any) -> list[str]:
    """As :func:`launches`, of feature_rows."""
    found = operators(factory).feature_launches(*feature_rows.operands(*arguments))
    return [KERNELS[kernel] for kernel in found.tolist()]


def kinds(factory: pytest.TempPathFactory, *arguments: Any) -> set[tuple[int, ...]]:
    """The code that products and attention take; of a product (kernel, rows of a block, outputs, end, split, norms)."""
    found = operators(factory).kinds(*decoder_rows.operands(*arguments, None))
    return set(map(tuple, found.view(-1, 6).tolist()))


def take_for_gpus(monkeypatch: pytest.MonkeyPatch, factory: pytest.TempPathFactory) -> None:
    """``backend="cuda"`` of decoder_rows and feature_rows runs here, on CPU tensors."""
    ops, known = operators(factory), backends.unavailable_reason

    def run(name: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        return getattr(ops, name)(*OPS[name].operands(*arguments))

    def reason(backend: str, device: torch.device) -> str | None:
        return None if backend == "cuda" else known(backend, device)

    monkeypatch.setattr(cuda, "run", run)
    monkeypatch.setattr(backends, "unavailable_reason", reason)
    monkeypatch.setattr(fused, "unavailable_reason", reason)


def drafting_on(place: str, monkeypatch: pytest.MonkeyPatch, factory: pytest.TempPathFactory) -> str:
    """The device of a drafter whose layers are operators: a CPU, with :data:`OWN`; a GPU, or a CPU taken for one."""
    if place == OWN:
        return "cpu"
    monkeypatch.setenv(fused.SWITCH, "cuda")
    if place == "cpu":
        take_for_gpus(monkeypatch, factory)
        fake_cuda.install(monkeypatch)
    return place
