"""An op as one row: the line of its arguments and results, its reference, and its implementations by rank.

An implementation takes what the reference takes: records and tensors, in the reference's order. Those that C++ or
Triton compute take the operator's arguments, which are the line's; a row's ``flat`` makes them of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial, update_wrapper
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..backends import resolve
from ..compiled import NAMESPACE, tell_line
from ..config import MAX_CONTEXT
from .line import Line

Function = Callable[..., Any]

GRAPH = (
    "graph!{ token_ids[B,N] parents[B,N] depths[B,N] scores:float32[B,N] "
    f"contexts[B,N,{MAX_CONTEXT}] "
    "expanded:bool[B,N] ancestor_mask[B,N,L] edge_targets[B,N,K] edge_log_probs:float32[B,N,K] "
    "num_nodes[B] num_merges[B] }"
)
"""A graph that an op takes whole: of a line."""
ROWS = "[B,R] [B,R] [B,R] [B,R,R/32] [B,R] float32[B,R] [B]"
"""Rows that an op makes, likewise."""

OPS: dict[str, Op] = {}
"""Ops by name; a room's ops are added when it is imported, those of all rooms by :func:`all_ops`."""


def all_ops() -> dict[str, Op]:
    """Every op, all rooms imported."""
    for room in (path.parent.name for path in Path(__file__).parent.glob("*/api.py")):
        import_module(f"{__package__}.{room}")
    return OPS


def device_of(arguments: Sequence[Any]) -> torch.device:
    """Where an op's tensors lie: the first one among its arguments, or in a record."""
    for value in arguments:
        if isinstance(value, Tensor):
            return value.device
    record = arguments[0]
    return record.device if hasattr(record, "device") else record.tensors()[0].device


def same(*arguments: Any) -> tuple[Any, ...]:
    """The operator takes what the reference takes."""
    return arguments


class Op:
    """An op; called, it is what the named backend computes.

    Args:
        name: of the operator.
        line: its arguments and results, see :class:`gsd_kernels.ops.line.Line`. C++ holds every call against it, Python
            what users call (:meth:`checked`); ``torch.compile`` has the results' shapes of it.
        reference: the specification in plain PyTorch.
        ranked: implementations, the fastest first: ``cpu`` and ``cuda`` are compiled, ``triton`` launches the function
            of the operator's name in the module ``triton`` beside the reference. The reference comes behind them.
        on_request: those that ``auto`` never takes.
        own: implementations with steps of their own, in place of the plain call of the operator.
        flat: the operator's arguments, of those that the reference takes.
        fake: results without content, where they are not as the line says.
        static: whether shapes and dtypes of results follow from those of arguments, and numbers.
        result: the record that the operator's results make.
        dense: the operator takes no gaps in what it reads; copies are passed.
        lacks: of a small op, backends that take what ``auto`` does.
        tolerance: by how much floats may differ from the reference's where numbers are of the size of 1; 0: no bit.
    """

    def __init__(
        self,
        name: str,
        line: str,
        reference: Function,
        *,
        ranked: Sequence[str] = ("triton", "cpu", "cuda"),
        on_request: Sequence[str] = (),
        own: dict[str, Function] | None = None,
        flat: Function = same,
        fake: Function | None = None,
        static: bool = True,
        result: Function | None = None,
        dense: bool = True,
        lacks: Sequence[str] = (),
        tolerance: float = 0.0,
    ) -> None:
        self.name, self.line, self.reference, self.flat = name, Line(line), reference, flat
        self.result, self.lacks, self.tolerance = result, lacks, tolerance
        given = signature(reference).parameters.items()
        self.parameters = {name: one.default for name, one in given if one.kind is not Parameter.KEYWORD_ONLY}
        self.read = [
            at for at, one in enumerate(self.line.arguments) if dense and one.sizes is not None and not one.written
        ]
        torch.library.define(f"{NAMESPACE}::{name}", self.line.schema)
        tell_line(name, line)
        self.operator = getattr(getattr(torch.ops, NAMESPACE), name).default
        self.fake = fake or (self._without_content if static else None)
        if self.fake is not None:
            torch.library.register_fake(f"{NAMESPACE}::{name}", self.fake)
        functions = {"cpu": self.compiled, "cuda": self.compiled, "reference": reference, **(own or {})}
        if "triton" in ranked and "triton" not in functions:
            written = [part.name for part in self.line.arguments if part.written]
            self.kernel = torch.library.custom_op(
                f"{NAMESPACE}::triton_{name}", self._launch, mutates_args=written, schema=self.line.schema
            )
            self.kernel.register_fake(self.fake)
            functions["triton"] = self.launched
        self.implementations = {name: functions[name] for name in (*ranked, "reference", *on_request)}
        update_wrapper(self, reference)
        OPS[self.name] = self

    def __call__(self, *arguments: Any, backend: str = "auto", **named: Any) -> Any:
        if named or len(arguments) < len(self.parameters):
            arguments = self._bound(arguments, named)
        return self.chosen(backend, device_of(arguments))(*arguments)

    def checked(self, *arguments: Any, backend: str = "auto") -> Any:
        """Call the op for a user, to whom a tensor that is not as the line says is named, with the cure.

        Raises:
            TypeError, ValueError: see :meth:`gsd_kernels.ops.line.Line.check`.
        """
        function = self.chosen(backend, device_of(arguments))
        if function != self.compiled:
            self.line.check(*self.flat(*arguments))
        try:
            return function(*arguments)
        except Exception:  # C++ has held them against the line too, in a hundredth of the time
            self.line.check(*self.flat(*arguments))
            raise

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
        """The launch itself, on the GPU of the tensors; importing an op imports no triton.

        Triton launches on the thread's current device and stream, which need not be those of the tensors: a model on
        the second GPU would fail, or race with the stream that wrote its tensors. PyTorch's own operators, and the
        compiled ones, switch by themselves.
        """
        kernels, device = import_module(f"{self.reference.__module__.rpartition('.')[0]}.triton"), device_of(arguments)
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            results = getattr(kernels, self.name)(*arguments)
        return results.tensors() if hasattr(results, "tensors") else results

    def _without_content(self, *arguments: Any) -> Any:
        made = self.line.made(*arguments)
        return made[0] if len(made) == 1 else tuple(made) or None


small_op = partial(Op, ranked=("cpu", "cuda"), lacks=("triton",))
"""An op of a few elements, for which a Triton kernel is not worth while."""
