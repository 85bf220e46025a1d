"""An op as one row: its schema, its reference, and its implementations by rank.

An implementation takes what the reference takes: records and tensors, in the reference's order. Those that C++ or
Triton compute take the operator's arguments, which are the schema's; a row's ``flat`` makes them of the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import update_wrapper
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends import resolve
from ..compiled import NAMESPACE
from .launching import launching_op

Function = Callable[..., Any]

OPS: dict[str, Op] = {}
"""Ops by name; a room's ops are added when it is imported, those of all rooms by :func:`all_ops`."""


def all_ops() -> dict[str, Op]:
    """Every op, all rooms imported."""
    for room in (path.parent.name for path in Path(__file__).parent.glob("*/api.py")):
        import_module(f"{__package__}.{room}")
    return OPS


def same(*arguments: Any) -> tuple[Any, ...]:
    """The operator takes what the reference takes."""
    return arguments


class Op:
    """An op; called, it is what the named backend computes.

    Args:
        schema: name, arguments and results of the operator, as ``torch.library`` takes them; ``(a!)`` marks what is
            written in place. C++ checks dtypes and shapes.
        reference: the specification in plain PyTorch.
        ranked: implementations, the fastest first: ``cpu`` and ``cuda`` are compiled, ``triton`` launches the function
            of the operator's name in the module ``triton`` beside the reference. The reference comes behind them.
        on_request: those that ``auto`` never takes.
        own: implementations with steps of their own, in place of the plain call of the operator.
        flat: the operator's arguments, of those that the reference takes.
        whole: the reference's arguments, of the operator's. With it ``torch.compile`` knows shapes, by the reference.
        fake: shapes where the reference cannot say them.
        result: the record that the operator's results make.
        dense: the operator takes no gaps in what it reads; copies are passed.
        lacks: of a small op, backends that take what ``auto`` does.
        tolerance: by how much floats may differ from the reference's where numbers are of the size of 1; 0: no bit.
    """

    def __init__(
        self,
        schema: str,
        reference: Function,
        *,
        ranked: Sequence[str] = ("triton", "cpu", "cuda"),
        on_request: Sequence[str] = (),
        own: dict[str, Function] | None = None,
        flat: Function = same,
        whole: Function | None = None,
        fake: Function | None = None,
        result: Function | None = None,
        dense: bool = True,
        lacks: Sequence[str] = (),
        tolerance: float = 0.0,
    ) -> None:
        self.name, _, rest = schema.partition("(")
        self.schema, self.reference, self.flat, self.whole = f"({rest}", reference, flat, whole
        self.result, self.lacks, self.tolerance = result, lacks, tolerance
        given = signature(reference).parameters.items()
        self.parameters = {name: one.default for name, one in given if one.kind is not Parameter.KEYWORD_ONLY}
        arguments = rest.partition(") ->")[0].split(", ")
        self.read = [at for at, one in enumerate(arguments) if dense and re.match(r"Tensor\?? ", one)]
        torch.library.define(f"{NAMESPACE}::{self.name}", self.schema)
        self.operator = getattr(getattr(torch.ops, NAMESPACE), self.name).default
        if fake is None:
            fake = _nothing if schema.endswith("-> ()") else self._shapes if whole is not None else None
        self.fake = fake
        if fake is not None:
            torch.library.register_fake(f"{NAMESPACE}::{self.name}", fake)
        functions = {"cpu": self.compiled, "cuda": self.compiled, "reference": reference, **(own or {})}
        if "triton" in ranked and "triton" not in functions:
            written = tuple(re.findall(r"Tensor\(\w!\)\S* (\w+)", schema))
            self.kernel = launching_op(f"{NAMESPACE}::triton_{self.name}", mutates_args=written, schema=self.schema)(
                self._launch
            )
            if fake is not None:
                self.kernel.register_fake(fake)
            functions["triton"] = self.launched
        self.implementations = {name: functions[name] for name in (*ranked, "reference", *on_request)}
        update_wrapper(self, reference)
        OPS[self.name] = self

    def __call__(self, *arguments: Any, backend: str = "auto", **named: Any) -> Any:
        if named or len(arguments) < len(self.parameters):
            arguments = self._bound(arguments, named)
        return self.chosen(backend, device_of(arguments))(*arguments)

    def chosen(self, backend: str, device: torch.device) -> Function:
        """The implementation that ``backend`` names.

        Raises:
            BackendUnavailableError: see :func:`gsd_kernels.backends.resolve`.
        """
        return resolve("auto" if backend in self.lacks else backend, device, self.implementations)

    def _bound(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments in order; ``inspect`` would take longer than the op."""
        bound, missing = list(arguments), []
        for name in list(self.parameters)[len(arguments) :]:
            bound.append(named.pop(name, self.parameters[name]))
            if bound[-1] is Parameter.empty:
                missing.append(name)
        if named or missing:
            said = f"expected the arguments {', '.join(self.parameters)}; missing: {missing}, unknown: {list(named)}"
            raise TypeError(f"{self.name}: {said}")
        return tuple(bound)

    def _made(self, results: Any) -> Any:
        return results if self.result is None else self.result(*results)

    def operands(self, *arguments: Any) -> list[Any]:
        """Return the operator's arguments, of those that the reference takes; without gaps where it takes none."""
        given = list(self.flat(*arguments))
        for at in self.read:
            if given[at] is not None and not given[at].is_contiguous():
                given[at] = given[at].contiguous()
        return given

    def compiled(self, *arguments: Any) -> Any:
        """Compute in C++, on the CPU or the GPU."""
        return self._made(self.operator(*self.operands(*arguments)))

    def launched(self, *arguments: Any) -> Any:
        """Compute by Triton."""
        return self._made(self.kernel(*self.flat(*arguments)))

    def _launch(self, *arguments: Any) -> Any:
        """The launch itself; importing an op imports no triton."""
        kernels = import_module(f"{self.reference.__module__.rpartition('.')[0]}.triton")
        return _tensors(getattr(kernels, self.name)(*self._filled(arguments)))

    def _filled(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """With defaults at the end, which PyTorch leaves out."""
        return (*arguments, *(one.default_value for one in self.operator._schema.arguments[len(arguments) :]))

    def _shapes(self, *arguments: Any) -> Any:
        assert self.whole is not None
        results = _tensors(self.reference(*self.whole(*self._filled(arguments))))
        return tuple(map(torch.empty_like, results)) if isinstance(results, tuple) else torch.empty_like(results)


def _tensors(results: Any) -> Any:
    return results.tensors() if hasattr(results, "tensors") else results


def _nothing(*_: object) -> None:
    """Results of an operator that only writes in place."""


def device_of(arguments: Sequence[Any]) -> torch.device:
    """Where an op's tensors lie: the first one among its arguments, or in a record."""
    for value in arguments:
        if isinstance(value, Tensor):
            return value.device
    record = arguments[0]
    return record.device if hasattr(record, "device") else record.tensors()[0].device
