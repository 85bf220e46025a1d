"""A GPU proves the operator of rows before it serves there: its bits, its errors, its time, in a few seconds, once.

The cases are those of :mod:`.rows_proof`. The verdict is kept in the user's cache folder with its figures, by GPU,
driver, package and build.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

import gsd_kernels
from gsd_kernels.compiled import LIBRARIES
from gsd_kernels.environment import switched
from gsd_kernels.ops.decoder_rows import cuda

from ..files import locked
from ..store import Document
from . import replay, rows_proof
from .rows_proof import Case, Sizes, Subject, Way

logger = logging.getLogger("gsd_kernels")

PREFIX, PADS = 1000, (0, 37)
REPLAYS = 50
TIMED_ROWS = (1, 8, 16, 64)
SLOWER = 1.0  # times the modules, the mean over rows, from which on the modules go on
MOST_TEXT = 300  # characters of what went wrong
WAIT_SECONDS = 120.0  # for another process's proof
AGAIN = "again by: gsd-kernels doctor --prove"


class UnprovedError(RuntimeError):
    """Nothing could be found out of the operator; its text says why."""


@dataclass(frozen=True)
class Kind:
    """A part of the operator that is proved by itself: kernels are compiled for each.

    Attributes:
        dtype: float16 or bfloat16.
        head_dim: 64 or 128.
        products: of ``cuda.PRODUCTS``, the kernels that multiply.
    """

    dtype: torch.dtype
    head_dim: int
    products: str

    @property
    def name(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}, heads of {self.head_dim}, {self.products}"


Proof = dict[str, Any]
"""A verdict and its figures.

``"why"`` rows stay with the modules (``None``: they need not), ``"seconds"`` that it took, ``"errors"`` by way against
float32, rows or replays ``"apart"`` from the bits that are due, and ``"milliseconds"`` by rows and way.
"""


def not_ended(why: str, seconds: float = 0.0) -> Proof:
    """A proof that something ended before it had figures."""
    line = "".join(c if c.isprintable() else "?" for c in " ".join(why.split()))
    return {"why": line[:MOST_TEXT], "seconds": seconds, "errors": {}, "apart": {}, "milliseconds": {}}


def prove(kind: Kind, device: torch.device, ways: Mapping[str, Way], backend: str = "auto") -> Proof:
    """Try the operator on a model of its own; what goes wrong in it is part of the answer.

    Raises:
        UnprovedError: there is no answer: the GPU has no room for it, some 800 MB, or the proof itself failed.
        DeviceLostError: the GPU failed for good.
    """
    begin = time.perf_counter()

    def model() -> Any:
        return rows_proof.random_model(SIZES, kind.dtype, kind.head_dim, device)

    try:
        with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
            return _figures(Subject(model, ways, backend), kind.dtype, begin)
    except torch.OutOfMemoryError as error:
        raise UnprovedError("there is no memory to prove one operator on this GPU (1 GB)") from error
    except Exception as error:
        proof = not_ended(f"{type(error).__name__}: {error}", time.perf_counter() - begin)
        if not isinstance(error, RuntimeError):  # which CUDA's and the operator's are
            raise UnprovedError(f"one operator could not be proved on this GPU: {proof['why']}") from error
        if replay.lost(device) is not None:
            raise replay.DeviceLostError(f"the GPU failed while rows as one operator were proved: {error}") from error
        return proof


SIZES = Sizes()


def _figures(of: Subject, dtype: torch.dtype, begin: float) -> Proof:
    one, batch = Case(PREFIX), Case(PREFIX, PADS)
    cases = [rows_proof.errors_of(of, case) for case in (one, batch)]
    errors = {way: {kind: max(case[way][kind] for case in cases) for kind in found} for way, found in cases[0].items()}
    del of.exact  # the largest part of the memory
    apart = {
        "alone": sum(len(rows) for _, rows in rows_proof.parts_apart(of, one)),
        "beside another": sum(len(rows) for _, rows in rows_proof.sequences_apart(of, batch)),
        "replayed": rows_proof.replays_apart(of, one, REPLAYS),
    }
    times = rows_proof.milliseconds(of, one, TIMED_ROWS)
    return {
        "why": verdict(errors, apart, times, dtype),
        "seconds": round(time.perf_counter() - begin, 3),
        "errors": errors,
        "apart": apart,
        "milliseconds": {str(rows): ms for rows, ms in times.items()},
    }


def verdict(
    errors: Mapping[str, Mapping[str, float]],
    apart: Mapping[str, int],
    times: Mapping[int, Mapping[str, float]],
    dtype: torch.dtype,
) -> str | None:
    """Say what keeps rows of this dtype with the modules; ``None``: nothing does."""
    found = rows_proof.too_large(errors["operator"], errors["modules"], dtype)
    for what, count in apart.items():
        found = found or (f"{count} rows have other bits ({what})" if count else None)
    slower = math.prod(ms["operator"] / ms["modules"] for ms in times.values()) ** (1 / len(times))
    if found is None and slower > SLOWER:
        return f"it takes {slower:.2f} times as long as the modules"
    return found


def document_of(device: torch.device) -> Document:
    """Where proofs of a GPU are kept: by everything that they depend on."""
    properties = torch.cuda.get_device_properties(device)
    about = {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": driver(),
        "package": gsd_kernels.__version__,
        "build": build(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    return Document("gpu-proof", about)


def driver() -> str:
    """The driver's version; where the system does not tell, that of the CUDA which it has."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0]
    except (OSError, ValueError, IndexError):
        return f"CUDA {torch._C._cuda_getDriverVersion()}"


@cache
def build() -> str:
    """Digest of the compiled kernels."""
    library = Path(gsd_kernels.__file__).with_name(LIBRARIES["cuda"])
    return hashlib.sha256(library.read_bytes()).hexdigest()[:20] if library.exists() else "none"


def kept(kind: Kind, document: Document) -> Proof | None:
    """A proof that an earlier process made, or did not end; ``None`` for none."""
    section = document.read().get(kind.name)
    whole = isinstance(section, dict) and section.keys() == BEGUN.keys()
    return section if whole else None


BEGUN = not_ended("a proof was begun and did not end, as where a GPU hangs")
_known: dict[tuple[Path, Kind], Proof | str] = {}
"""Of this process: proofs, and why there is none. An error itself would keep what it was raised with."""
_lock = threading.Lock()


def proof_of(
    kind: Kind,
    device: torch.device,
    ways: Mapping[str, Way],
    *,
    again: bool = False,
    backend: str = "auto",
) -> Proof:
    """The proof of a kind on a GPU: known, kept, or made now. Processes that ask at once wait for one.

    Where there is no answer, a process does not look for one again unless it is asked to: every text would wait for it.

    Args:
        kind: of the operator.
        device: the GPU.
        ways: to forward rows, see :class:`~.rows_proof.Subject`.
        again: whether it is made in any case.
        backend: of the operator.

    Raises:
        UnprovedError, DeviceLostError: see :func:`prove`.
    """
    document = document_of(device)
    with _lock:
        known = document.path, kind
        if again or known not in _known:
            with locked(document.path.with_suffix(".lock"), WAIT_SECONDS):
                found = None if again else kept(kind, document)
                try:
                    _known[known] = found or _made(kind, device, ways, document, backend)
                except UnprovedError as error:
                    _known[known] = str(error)
        proof = _known[known]
    if isinstance(proof, str):
        raise UnprovedError(proof)
    return proof


def _made(kind: Kind, device: torch.device, ways: Mapping[str, Way], document: Document, backend: str) -> Proof:
    """A proof, kept; a process that dies of it leaves word of that."""
    logger.info("rows as one operator (%s) are proved on this GPU, which takes a few seconds, once", kind.name)
    section: Proof = {}
    document.write({kind.name: BEGUN})
    try:
        section = prove(kind, device, ways, backend)
    except replay.DeviceLostError as error:
        section = not_ended(str(error))
        raise
    finally:
        document.write({kind.name: section})
    return section


def report(device: torch.device, ways: Mapping[str, Way], *, again: bool) -> dict[str, Proof]:
    """Of every kind, by its name, what is kept; ``again``: it is proved anew first.

    Raises:
        DeviceLostError: the GPU failed for good.
    """
    found: dict[str, Proof] = {}
    document = document_of(device)
    for products, dtype, head_dim in itertools.product(cuda.product_kernels(device), cuda.DTYPES, cuda.HEAD_DIMS):
        kind = Kind(dtype, head_dim, products)
        try:
            with switched(cuda.selecting(products)):
                proof = proof_of(kind, device, ways, again=True) if again else kept(kind, document)
        except UnprovedError as error:
            proof = not_ended(str(error))
        if proof is not None:
            found[kind.name] = proof
    return found


def why_not(device: torch.device, dtype: torch.dtype, head_dim: int, ways: Mapping[str, Way]) -> str | None:
    """Say what keeps rows on a GPU with the modules, or ``None``; the GPU proves itself at the first question.

    Where nothing can be proved, GPUs on which the operator was measured go on with it.

    Raises:
        DeviceLostError: the GPU failed for good.
    """
    kind = Kind(dtype, head_dim, cuda.selected(device))
    try:
        reason = proof_of(kind, device, ways)["why"]
    except UnprovedError as error:
        return None if cuda.is_measured(device) else str(error)
    return None if reason is None else f"one operator did not prove itself on this GPU: {reason}; {AGAIN}"
