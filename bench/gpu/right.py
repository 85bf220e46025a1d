"""The verdict on the forward of rows as one operator: its error against float32, and its bits wherever they are due.

Nothing of the operator is timed before. A few layers of the real widths: every kernel, tile and split of a whole model.
What is looked for, and what is right, is what every GPU is held to before it serves (model/rows_proof.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.environment import switched
from gsd_kernels.ops.decoder_rows.cuda import OVERLAP
from gsd_kernels_hf.model import rows_proof
from gsd_kernels_hf.model.rows_proof import BOUNDS, PARTS, ROWS, Case

from ..kernels.rows import WAYS, random_model
from .stages import stage_named
from .work import Work

Point = Callable[["Subject"], dict[str, Any]]

SHAPES = ("llama-3-8b", "llama-3.2-1b")
LAYERS = 2
REPLAYS = 1000

#: A whole number of tiles and splits, and what is none: the last tile broken, one position more, one less.
CASES = (Case(1024), Case(1000), Case(1023), Case(1025), Case(4097), Case(1000, (0, 37)), Case(1025, (300, 1)))
SMALL_CASES = (Case(40), Case(33), Case(39, (0, 7)))


def run(work: Work) -> None:
    """Points ``SHAPE PREFIX``, ``SHAPE bits``, ``SHAPE batch`` and ``SHAPE launches`` of each shape."""
    if work.rehearse:
        own = unavailable_reason("cpu", work.device)
        work.skip(
            "the CUDA operator: " + ("a CPU's own takes its place" if own is None else f"the reference runs, {own}")
        )
        work.skip("launches that begin early, graphs")
    for shape in ("tiny",) if work.rehearse else SHAPES:
        of, points = Subject(work, shape), points_of(shape, small=work.rehearse)
        work.each(points, lambda name, of=of, points=points: points[name](of))


def points_of(shape: str, *, small: bool) -> dict[str, Point]:
    """The verdict on a shape: its points by name, in order of worth."""
    cases = SMALL_CASES if small else CASES
    errors_of = {f"{shape} {case.name}": partial(against_float32, case=case) for case in cases}
    first = dict(list(errors_of.items())[:2])
    return {
        **first,
        f"{shape} bits": partial(bits, prefix=cases[1].prefix),
        f"{shape} launches": partial(launches, prefix=cases[1].prefix),
        **errors_of,
        f"{shape} batch": partial(batch, case=cases[-1]),
    }


def passed(work: Work, *shapes: str) -> bool:
    """Return whether the operator is right on this device, wherever it was looked at; else it is not worth timing."""
    found = work.points_of(stage_named("right"))
    names = [name for shape in shapes for name in points_of(shape, small=work.rehearse)]
    return all(name in found and "error" not in found[name] for name in names)


class Subject(rows_proof.Subject):
    """A few layers of a shape, in the stage's dtype and in float32; made when first asked."""

    def __init__(self, work: Work, shape: str) -> None:
        super().__init__(lambda: random_model(shape, work.dtype, work.device, LAYERS), WAYS)
        self.work = work


def against_float32(of: Subject, case: Case) -> dict[str, Any]:
    """Errors of operator and modules, and what they are held to."""
    found = rows_proof.errors_of(of, case)
    print("  error: " + "; ".join(f"{way} {e['row']:.2e}, {e['element']:.2e}" for way, e in found.items()), flush=True)
    judge(found["operator"], found["modules"], of.work.dtype)
    return {"errors": found, "bounds": BOUNDS[of.work.dtype], "layers": LAYERS, "rows": ROWS, **vars(case)}


def judge(ours: dict[str, float], theirs: dict[str, float], dtype: torch.dtype) -> None:
    """Hold errors to those of the modules, and to what rounding may cost.

    Raises:
        RuntimeError: they are too large, or no numbers.
    """
    found = rows_proof.too_large(ours, theirs, dtype)
    if found is not None:
        raise RuntimeError(f"wrong: {found}")


def bits(of: Subject, prefix: int) -> dict[str, Any]:
    """A row's bits alone, and among others in blocks of every size.

    Raises:
        RuntimeError: they depend on the rows beside it.
    """
    if not invariant(of.work):
        return {"parts": []}
    none_apart(rows_proof.parts_apart(of, Case(prefix)))
    return {"parts": PARTS, "rows": rows_proof.MOST_ROWS, "prefix": prefix}


def batch(of: Subject, case: Case) -> dict[str, Any]:
    """A sequence's bits behind padding beside another one, and alone.

    Raises:
        RuntimeError: they differ.
    """
    if not invariant(of.work):
        return {"sequences": 0}
    none_apart(rows_proof.sequences_apart(of, case))
    return {"sequences": len(case.pads), "rows": ROWS, **vars(case)}


def invariant(work: Work) -> bool:
    """Return whether bits are due: the reference's depend on the rows."""
    return unavailable_reason(work.device.type, work.device) is None


def none_apart(found: Iterable[tuple[str, list[int]]]) -> None:
    """Raises:
    RuntimeError: bits differ.
    """
    for what, rows in found:
        if rows:
            raise RuntimeError(f"{what}: {len(rows)} rows have other bits, first {rows[:8]}")


@torch.no_grad()
def launches(of: Subject, prefix: int) -> dict[str, Any]:
    """Forwards of two texts in turns, called and replayed, with launches that begin early and without.

    Raises:
        RuntimeError: one of them has other bits, or a forward cannot be captured.
    """
    work, case = of.work, Case(prefix)
    rows, inputs, texts = of.behind(case), of.inputs(case, ROWS), of.texts(case)
    with switched({OVERLAP: "0"}):
        expected = [rows.rows(tokens, *inputs[1:], keep=ROWS) for tokens in texts]
    if torch.equal(*expected):
        raise RuntimeError("two texts have the same logits: nothing would be noticed")
    tokens, count = texts[0].clone(), 4 if work.rehearse else REPLAYS
    found: dict[str, dict[str, int]] = {}
    for name, overlap in (("early", "1"), ("in turn", "0")):
        with switched({OVERLAP: overlap}):
            forward: Callable[[], Tensor] = lambda: rows.rows(tokens, *inputs[1:], keep=ROWS)  # noqa: E731
            ways = {"called": forward}
            if work.device.type == "cuda":
                ways["replayed"] = rows_proof.replayed(forward, work.device)
            found[name] = {way: rows_proof.wrong(call, tokens, texts, expected, count) for way, call in ways.items()}
    bad = {f"{name}, {way}": n for name, ways in found.items() for way, n in ways.items() if n}
    if bad:
        raise RuntimeError(f"of {count} forwards some have other bits: {bad}")
    return {"forwards": count, "wrong": found, "rows": ROWS, "prefix": prefix}
