"""Which backends a contract's test runs on, and where each of them and the reference run.

A test takes ``on``, a :class:`Backend`, and is marked ``@backends("cpu", "interpreter", …)``. The interpreter's cases
run in processes of their own, which tests/backends/test_triton.py starts: triton reads TRITON_INTERPRET
once, when it is imported. Cases of the GPU carry the marker ``gpu``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gsd_kernels import cpu_levels
from gsd_kernels.backends import unavailable_reason

SOFT = "amx_in_software"
NO_CPU = unavailable_reason("cpu", torch.device("cpu"))
LEVELS = [SOFT] + [
    name if why is None else pytest.param(name, marks=pytest.mark.skip(reason=why))
    for name, why in (cpu_levels.levels() if NO_CPU is None else {}).items()
]
"""Instruction sets of the CPU's products; one that cannot run here says why."""
levels = pytest.mark.parametrize("level", LEVELS if NO_CPU is None else [])
needs_cpu = pytest.mark.skipif(NO_CPU is not None, reason=f"compiled CPU ops: {NO_CPU}")


@dataclass(frozen=True)
class Backend:
    """One way to run an op: the backend's name, its device, and the device of the reference beside it."""

    id: str
    name: str
    device: str = "cpu"
    reference_device: str = "cpu"

    @property
    def interpreted(self) -> bool:
        """Slow enough to be asked little."""
        return self.id == "interpreter"

    def to(self, value: Any) -> Any:
        """Tensors on the backend's device; anything else, and dataclasses of tensors, likewise."""
        return _moved(value, self.device)

    def to_reference(self, value: Any) -> Any:
        return _moved(value, self.reference_device)


ALL = {
    b.id: b
    for b in (
        Backend("reference", "reference"),
        Backend("cpu", "cpu"),
        Backend("interpreter", "triton"),
        Backend("triton", "triton", "cuda", "cuda"),
        Backend("cuda", "cuda", "cuda"),
    )
}


def _moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value if value.device.type == device else _with_strides(value, device)
    if isinstance(value, dict):
        return {name: _moved(x, device) for name, x in value.items()}
    if hasattr(value, "_fields"):  # a named tuple
        return type(value)(*(_moved(x, device) for x in value))
    if isinstance(value, tuple | list):
        return type(value)(_moved(x, device) for x in value)
    if hasattr(value, "__dataclass_fields__"):
        return replace(value, **{name: _moved(getattr(value, name), device) for name in value.__dataclass_fields__})
    return type(value)(*_moved(value.tensors(), device)) if hasattr(value, "tensors") else value


def _with_strides(tensor: Tensor, device: str) -> Tensor:
    """As it lies; ``to`` closes gaps."""
    if any(step == 0 and size > 1 for step, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor.to(device)
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)


def _marks(backend: Backend) -> list[pytest.MarkDecorator]:
    if backend.id == "interpreter":
        return [pytest.mark.interpreter]
    if backend.device == "cuda":
        if not torch.cuda.is_available():
            reason: str | None = "no CUDA GPU"
        else:  # where there is a GPU, a CUDA library that is not built is a failure and no reason to skip
            reason = unavailable_reason(backend.name, torch.device("cuda")) if backend.name == "triton" else None
        return [pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=str(reason))]
    reason = unavailable_reason(backend.name, torch.device("cpu"))
    return [pytest.mark.skipif(reason is not None, reason=f"{backend.name}: {reason}")]


def backend_param(name: str, *values: Any, id: str | None = None) -> Any:
    """A case of one backend, with its marks; further values make a tuple of parameters."""
    label = name if id is None else f"{name}-{id}"
    return pytest.param(ALL[name], *values, id=label, marks=_marks(ALL[name]))


def backends(*names: str) -> pytest.MarkDecorator:
    """Parametrise ``on`` over the named backends."""
    return pytest.mark.parametrize("on", [backend_param(name) for name in names])


def cases(argument: str, lists: dict[str, Iterable[tuple[str, Any]]]) -> pytest.MarkDecorator:
    """Parametrise ``on`` and ``argument`` over (id, value) pairs of every backend."""
    listed = [backend_param(name, value, id=case) for name, values in lists.items() for case, value in values]
    return pytest.mark.parametrize(f"on,{argument}", listed)


def assert_bit_equal(got: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Dtype, shape and every bit of tensors, or of dataclasses of tensors, wherever they lie."""
    got, expected = (_tensors(x) for x in (got, expected))
    for place, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, place
        a, b = _bits(ours), _bits(theirs)
        assert torch.equal(a, b), f"tensor {place}: {ours} instead of {theirs}"


def check_equal(op: Any, on: Backend, *arguments: Any, most: float = 0.0, **named: Any) -> tuple[Any, Any]:
    """What an op returns and all tensors that it was given are the reference's: to the bit, or floats within ``most``.

    Both get copies; new tensors of the op's hold NaN or the largest integers before. Returns the reference's results
    and positional arguments.
    """
    found = []
    for to, backend in ((on.to, on.name), (on.to_reference, "reference")):
        given, options = (to(deepcopy(x)) for x in (arguments, named))
        with nullcontext() if backend == "reference" else poisoned():
            results = op(*given, **options, backend=backend)
        found.append((results, given, options))
    ours, theirs = (_tensors(x) for x in found)
    for mine, other in zip(ours, theirs, strict=True):
        if most and other.is_floating_point():
            torch.testing.assert_close(mine.cpu(), other.cpu(), atol=most, rtol=most)
        else:
            assert_bit_equal([mine], [other])
    return found[1][0], found[1][1]


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors begin as NaN and as the largest integers, so that what an op leaves unwritten shows."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _tensors(value: Any) -> list[Tensor]:
    """All of a value's, in order: of records, lists and dictionaries too."""
    if isinstance(value, Tensor):
        return [value]
    if hasattr(value, "__dataclass_fields__"):
        value = [getattr(value, name) for name in value.__dataclass_fields__]
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, str) or not isinstance(value, Iterable):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _bits(tensor: Tensor) -> Tensor:
    sizes = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    tensor = tensor.detach().cpu()
    return tensor.contiguous().view(sizes[tensor.dtype.itemsize]) if tensor.is_floating_point() else tensor
