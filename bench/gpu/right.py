"""The verdict on the forward of rows as one operator: its error against float32, and its bits wherever they are due.

Nothing of the operator is timed before. A few layers of the real widths: every kernel, tile and split of a whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.decoder_rows.cuda import OVERLAP
from gsd_kernels_hf.model.replay import lane_of
from gsd_kernels_hf.model.runner import RowModel

from ..kernels.rows import MOST_ROWS, WAYS, random_model, row_inputs
from ..lib.environment import switched
from .stages import stage_named
from .work import Work

Point = Callable[["Subject"], dict[str, Any]]

SHAPES = ("llama-3-8b", "llama-3.2-1b")
LAYERS = 2
ROWS = 64  # of a comparison with float32
REPLAYS = 1000

#: Of float32 logits what rounding of a few layers may cost; ten times what was seen on CPUs (bfloat16: 0.006, 0.04).
BOUNDS = {
    torch.bfloat16: {"row": 0.06, "element": 0.4},
    torch.float16: {"row": 0.008, "element": 0.05},
    torch.float32: {"row": 1e-5, "element": 1e-4},
}
TIMES_THE_MODULES = 2.0
SLACK = 1e-5  # of float32, where the modules are the measure itself

#: First and last of some rows: blocks of 16, 32 and 64 rows, narrow and wide, each with places left over.
PARTS = ((0, 1), (0, 16), (5, 22), (16, 48), (3, 36), (0, 64), (63, 64), (64, 192), (127, 256))


@dataclass(frozen=True)
class Case:
    """Rows behind a prefix: tokens of the prompt, and left padding of every sequence."""

    prefix: int
    pads: tuple[int, ...] = (0,)

    @property
    def name(self) -> str:
        return f"prefix={self.prefix}" + (f" pads={','.join(map(str, self.pads))}" if len(self.pads) > 1 else "")


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


class Subject:
    """A few layers of a shape, in the stage's dtype and in float32; made when first asked."""

    def __init__(self, work: Work, shape: str) -> None:
        self.work, self.shape = work, shape

    @cached_property
    def model(self) -> Any:
        return random_model(self.shape, self.work.dtype, self.work.device, LAYERS)

    @cached_property
    def exact(self) -> Any:
        return copy.deepcopy(self.model).float()

    @torch.no_grad()
    def behind(self, case: Case, way: str = "operator", model: Any = None) -> RowModel:
        """A way to forward rows, behind the tokens of a case.

        Modules attend by the reference, so that the verdict needs none of our other kernels.
        """
        model, device = model or self.model, self.work.device
        start = torch.tensor(case.pads, dtype=torch.int32, device=device)
        rows = WAYS[way](model, case.prefix + MOST_ROWS, start, "auto" if way == "operator" else "reference")
        at = torch.arange(case.prefix, device=device)
        # What is written is the same behind any padding.
        ids = torch.stack([(at - pad).clamp(min=0) * (3 + 2 * b) for b, pad in enumerate(case.pads)])
        padded = (at >= start[:, None]).long() if any(case.pads) else None
        rows.prefill(ids % model.config.vocab_size, padded, None)
        return rows

    def inputs(self, case: Case, count: int) -> tuple[Tensor, ...]:
        """Rows of a tree; of the last sequence of a batch behind three positions less."""
        tokens, kv_len, *others = row_inputs(count, case.prefix, self.work.device, len(case.pads))
        kv_len[1:] -= 3
        return (tokens, kv_len, *others)


@torch.no_grad()
def against_float32(of: Subject, case: Case) -> dict[str, Any]:
    """Errors of operator and modules, and what they are held to."""
    inputs = of.inputs(case, ROWS)

    def logits(*way: Any) -> Tensor:
        return of.behind(case, *way).rows(*inputs, keep=ROWS).float()

    exact = logits("modules", of.exact)
    found = {way: errors(logits(way), exact) for way in WAYS}
    print("  error: " + "; ".join(f"{way} {e['row']:.2e}, {e['element']:.2e}" for way, e in found.items()), flush=True)
    judge(found["operator"], found["modules"], of.work.dtype)
    return {"errors": found, "bounds": BOUNDS[of.work.dtype], "layers": LAYERS, "rows": ROWS, **vars(case)}


def errors(logits: Tensor, exact: Tensor) -> dict[str, float]:
    """Of logits [B, R, V]: a row's error over its norm, and the largest one over the root mean square of its row."""
    away, size = logits - exact, exact.norm(dim=-1)
    width = exact.shape[-1] ** 0.5
    return {
        "row": float((away.norm(dim=-1) / size).max()),
        "element": float((away.abs().amax(-1) * width / size).max()),
    }


def judge(ours: dict[str, float], theirs: dict[str, float], dtype: torch.dtype) -> None:
    """Hold errors to those of the modules, and to what rounding may cost.

    Raises:
        RuntimeError: they are too large, or no numbers.
    """
    for kind, bound in BOUNDS[dtype].items():
        relative = TIMES_THE_MODULES * theirs[kind] + SLACK
        if not ours[kind] <= relative:
            raise RuntimeError(f"wrong: {kind} error {ours[kind]:.2e}, the modules' is {theirs[kind]:.2e}")
        if not ours[kind] <= bound:
            raise RuntimeError(f"wrong: {kind} error {ours[kind]:.2e}, {dtype} may have {bound:.2e}")


@torch.no_grad()
def bits(of: Subject, prefix: int) -> dict[str, Any]:
    """A row's bits alone, and among others in blocks of every size.

    Raises:
        RuntimeError: they depend on the rows beside it.
    """
    if not invariant(of.work):
        return {"parts": []}
    rows = of.behind(Case(prefix))
    tokens, kv_len, slots, mask, depths, nodes = of.inputs(Case(prefix), MOST_ROWS)
    whole = rows.rows(tokens, kv_len, slots, mask, depths, nodes, keep=MOST_ROWS)
    for first, last in PARTS:
        some = slice(first, last)
        part = (tokens[:, some], kv_len, slots[some], mask[:, some], depths[:, some], nodes)
        different(rows.rows(*part, keep=last - first), whole[:, some], f"rows {first} … {last - 1} by themselves")
    return {"parts": PARTS, "rows": MOST_ROWS, "prefix": prefix}


@torch.no_grad()
def batch(of: Subject, case: Case) -> dict[str, Any]:
    """A sequence's bits behind padding beside another one, and alone.

    Raises:
        RuntimeError: they differ.
    """
    if not invariant(of.work):
        return {"sequences": 0}
    whole, written = (of.behind(case).rows(*of.inputs(case, ROWS), keep=ROWS) for _ in range(2))
    different(written, whole, "the same call again")
    for b in range(len(case.pads)):
        alone = Alone(of, case, b).rows()
        different(alone, whole[[b]], f"sequence {b} alone")
    return {"sequences": len(case.pads), "rows": ROWS, **vars(case)}


@dataclass(frozen=True)
class Alone:
    """One sequence of a case, without its padding."""

    of: Subject
    case: Case
    number: int

    def rows(self) -> Tensor:
        tokens, kv_len, slots, mask, depths, nodes = self.of.inputs(self.case, ROWS)
        this, pad = slice(self.number, self.number + 1), self.case.pads[self.number]
        length, device = self.case.prefix - pad, self.of.work.device
        start = torch.zeros(1, dtype=torch.int32, device=device)
        rows = WAYS["operator"](self.of.model, length + MOST_ROWS, start, "auto")
        ids = torch.arange(length, device=device)[None] * (3 + 2 * self.number) % self.of.model.config.vocab_size
        rows.prefill(ids, None, None)
        return rows.rows(tokens[this], kv_len[this] - pad, slots, mask[this], depths[this], nodes[this], keep=ROWS)


def invariant(work: Work) -> bool:
    """Return whether bits are due: the reference's depend on the rows."""
    return unavailable_reason(work.device.type, work.device) is None


def different(found: Tensor, expected: Tensor, what: str) -> None:
    """Raises:
    RuntimeError: bits differ.
    """
    if not torch.equal(found, expected):
        where = (found != expected).flatten(0, -2).any(-1).nonzero().flatten().tolist()
        raise RuntimeError(f"{what}: {len(where)} rows have other bits, first {where[:8]}")


@torch.no_grad()
def launches(of: Subject, prefix: int) -> dict[str, Any]:
    """Forwards of two texts in turns, called and replayed, with launches that begin early and without.

    In turns, because what a launch reads too early is what the forward before left, which must not be the right thing.

    Raises:
        RuntimeError: one of them has other bits, or a forward cannot be captured.
    """
    work, case = of.work, Case(prefix)
    rows, inputs = of.behind(case), of.inputs(case, ROWS)
    texts = [inputs[0], (inputs[0] + 11) % of.model.config.vocab_size]
    with switched({OVERLAP: "0"}):
        expected = [rows.rows(tokens, *inputs[1:], keep=ROWS) for tokens in texts]
    if torch.equal(*expected):
        raise RuntimeError("two texts have the same logits: nothing would be noticed")
    tokens, count = texts[0].clone(), 4 if work.rehearse else REPLAYS
    found: dict[str, dict[str, int]] = {}
    for name, overlap in (("early", "1"), ("in turn", "0")):
        with switched({OVERLAP: overlap}):
            forward: Callable[[], Tensor] = lambda: rows.rows(tokens, *inputs[1:], keep=ROWS)  # noqa: E731
            ways = {"called": forward} | ({"replayed": replayed(forward, work)} if work.device.type == "cuda" else {})
            found[name] = {way: wrong(call, tokens, texts, expected, count) for way, call in ways.items()}
    bad = {f"{name}, {way}": n for name, ways in found.items() for way, n in ways.items() if n}
    if bad:
        raise RuntimeError(f"of {count} forwards some have other bits: {bad}")
    return {"forwards": count, "wrong": found, "rows": ROWS, "prefix": prefix}


def replayed(forward: Callable[[], Tensor], work: Work) -> Callable[[], Tensor]:
    forward()  # loads what it launches
    graph, logits = lane_of(work.device).capture(forward)

    def call() -> Tensor:
        graph()
        return logits

    return call


def wrong(call: Callable[[], Tensor], tokens: Tensor, texts: list[Tensor], expected: list[Tensor], count: int) -> int:
    """How many of ``count`` forwards have other bits; the host waits once."""
    number = torch.zeros((), dtype=torch.int32, device=tokens.device)
    for turn in range(count):
        tokens.copy_(texts[turn % 2])
        number += (call() != expected[turn % 2]).any()
    return int(number)
