"""The verdict on the forward of rows as one operator: its error against float32, and its bits wherever they are due.

Nothing of the operator is timed before. A few layers of the real widths: every kernel, tile and split of a whole model.
What is looked for, and what is right, is what every GPU is held to before it serves (model/proof.py), at more
prefixes, by more replays, and for products by groups of warps with weights of any size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from typing import Any

import torch

from gsd_kernels.backends import unavailable_reason
from gsd_kernels.ops.cuda_common import DTYPES, HEAD_DIMS
from gsd_kernels.ops.decoder_rows.cuda import GROUP, GROUP_CAPABILITY, ways
from gsd_kernels_hf.model import proof
from gsd_kernels_hf.model.proof import MOST_ROWS, Kind, Passage, apart, behind, row_inputs, too_large

from ..kernels.rows import random_model
from .graphs import kernel_table
from .stages import stage_named
from .work import SHAPES, Work, switched

Point = Callable[[], dict[str, Any]]
Apart = Iterable[tuple[str, list[int]]]

LAYERS = 2
REPLAYS = 1000

#: A whole number of tiles and splits, and what is none: the last tile broken, one position more, one less.
CASES = (*map(Passage, (1024, 1000, 1023, 1025, 4097)), Passage(1000, pads=(0, 37)), Passage(1025, pads=(300, 1)))
SMALL_CASES = (Passage(40), Passage(33), Passage(39, pads=(0, 7)))

KERNEL = "rows_group_kernel"
GROUP_ROWS = (33, 64, 100, 128, 200, 256)
#: Factors of the output matrix's weights by dtype: subnormal numbers, and sums that leave the range.
FACTORS = {
    torch.bfloat16: {"usual": 1.0, "subnormal": 2.0**-130, "large": 2.0**124},
    torch.float16: {"usual": 1.0, "subnormal": 2.0**-18, "large": 2.0**12},
}


def run(work: Work) -> None:
    """The points of ``group`` or ``right``, a shape's behind each other."""
    stage = work.stage.name
    if work.rehearse:
        own = unavailable_reason("cpu", work.device)
        work.skip("the CUDA operator: " + ("a CPU's own takes its place" if own is None else f"the reference: {own}"))
        work.skip("launches that begin early, graphs, groups of warps")
    elif stage == "group" and torch.cuda.get_device_capability(work.device) != GROUP_CAPABILITY:
        work.skip("groups of warps: only GPUs of compute capability 9.0 have them")
        return
    for shape in work.shapes:
        of = lru_cache(lambda shape=shape: random_model(shape, work.dtype, work.device, LAYERS))
        cases = {name: (point,) for name, point in points_of(stage, work, shape, of).items()}
        work.each(cases, lambda point: torch.no_grad()(point)())


def prove(work: Work) -> None:
    """Prove every kind, as a GPU does at its first use; a point ends in an error where it may not serve."""
    if work.rehearse:
        work.skip("a GPU's proof of itself: tests run it on a CPU, at small sizes")
        return
    found = itertools.product(DTYPES, HEAD_DIMS, ways(work.device))
    kinds = {kind.name: (kind,) for kind in itertools.starmap(Kind, found)}

    def proved(kind: Kind) -> dict[str, Any]:
        found = proof.prove(kind, work.device)
        return {**found, **({} if found["why"] is None else {"error": found["why"]})}

    work.each(kinds, proved)


def points_of(stage: str, work: Work, shape: str, of: Callable[[], Any] | None = None) -> dict[str, Point]:
    """A stage's points of a shape by name, in order of worth."""
    if stage == "group":
        factors = FACTORS.get(work.dtype, {"usual": 1.0})
        return {f"{shape} {kind}": partial(same, work, of, factor) for kind, factor in factors.items()}
    cases = SMALL_CASES if work.rehearse else CASES
    errors = {
        f"{shape} prefix={case.prompt} pads={','.join(map(str, case.pads))}": partial(against_float32, of, case)
        for case in cases
    }
    replays = partial(proof.replays_apart, count=4 if work.rehearse else REPLAYS)
    return {
        **dict(list(errors.items())[:2]),
        f"{shape} bits": partial(alike, work, of, cases[1], proof.parts_apart),
        f"{shape} launches": partial(alike, work, of, cases[1], replays),
        **errors,
        f"{shape} batch": partial(alike, work, of, cases[-1], proof.sequences_apart),
    }


def passed(work: Work, *shapes: str, stage: str = "right") -> bool:
    """Return whether a stage found a shape right on this device, wherever it was looked at."""
    found = work.points_of(stage_named(stage))
    names = [name for shape in shapes for name in points_of(stage, work, shape)]
    return all(name in found and "error" not in found[name] for name in names)


def right_shapes(work: Work) -> list[str]:
    """The shapes that were found right; the others are left for a later call."""
    right = [shape for shape in work.shapes if passed(work, shape)]
    work.leave([shape for shape in work.shapes if shape not in right], "not found right by the stage before")
    return right


def passed_by_groups(work: Work) -> bool:
    """Return whether groups of warps had the bits of the others on this GPU; they are not there in a rehearsal."""
    return not work.rehearse and passed(work, *SHAPES, stage="group")


def against_float32(of: Callable[[], Any], case: Passage) -> dict[str, Any]:
    """Errors of operator and modules.

    Raises:
        RuntimeError: the operator's is too large, or no number.
    """
    found = proof.errors(of(), case)
    print("  error: " + "; ".join(f"{way} {error:.2e}" for way, error in found.items()), flush=True)
    if (wrong := too_large(found)) is not None:
        raise RuntimeError(f"wrong: {wrong}")
    return {"errors": found, "layers": LAYERS, **case._asdict()}


def alike(work: Work, of: Callable[[], Any], case: Passage, found: Callable[[Any, Passage], Apart]) -> dict[str, Any]:
    """A row's bits in any company: among others, behind padding beside another sequence, or replayed.

    Raises:
        RuntimeError: they depend on what is beside it, or a forward cannot be captured.
    """
    if unavailable_reason(work.device.type, work.device) is not None:  # the reference's depend on the rows
        return {}
    none_apart(found(of(), case))
    return case._asdict()


def none_apart(found: Apart) -> None:
    """Raises:
    RuntimeError: rows, or replays, have other bits.
    """
    for what, wrong in found:
        if wrong:
            raise RuntimeError(f"{what}: other bits: {len(wrong)}, {wrong[:8]} …")


def same(work: Work, of: Callable[[], Any], factor: float) -> dict[str, Any]:
    """Logits of some rows by groups of warps (wgmma) and by warps (mma.sync), bit for bit; NaN is one number.

    Raises:
        RuntimeError: they differ, so groups of warps stay off; or groups multiplied where they should not, or did not
            where they should.
    """
    model, case = of(), SMALL_CASES[0]
    head = model.get_output_embeddings().weight
    usual = head.clone()
    head.copy_(usual.double() * factor)
    try:
        rows = behind(model, case)
        tokens, kv_len, slots, mask, depths, nodes = row_inputs(MOST_ROWS, case.prompt, work.device)
        for count in GROUP_ROWS:
            part = (tokens[:, :count], kv_len, slots[:count], mask[:, :count], depths[:, :count], nodes)
            call = partial(rows.rows, *part, keep=count)
            found = []
            for group in "01":
                with switched({GROUP: group}):
                    found.append(call().nan_to_num(nan=7.0))
                    if not work.rehearse and count == GROUP_ROWS[0]:
                        taken = sorted({name for name, _ in kernel_table(call)[1]})
                        # A library without the kernel would agree with itself.
                        if any(KERNEL in name for name in taken) != (group == "1"):
                            raise RuntimeError(f"{GROUP}={group} took {taken}; the library has to be compiled for 9.0a")
            none_apart([(f"{count} rows by groups of warps", apart(found[1], found[0]))])
    finally:
        head.copy_(usual)
    return {"rows": GROUP_ROWS, "factor": factor}
