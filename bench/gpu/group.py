"""Bits of products by groups of warps (wgmma) and by warps (mma.sync): whether both are one function on this GPU.

The first ten seconds on a GPU: what is found decides whether rows of all numbers may share these kernels. Other stages
measure them where it has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from gsd_kernels.environment import switched
from gsd_kernels.ops.decoder_rows.cuda import GROUP, GROUP_CAPABILITY
from gsd_kernels_hf.model.rows_proof import MOST_ROWS, apart

from .graphs import Launch, kernel_table
from .right import SHAPES, Case, Subject, none_apart
from .stages import stage_named
from .work import Work

GROUPED = " by groups"  # behind the names of other stages' points
MOST_EARLY_ROWS = 32  # that never go by groups
KERNEL = "rows_group_kernel"
ROWS = (33, 64, 100, 128, 200, 256)
PREFIX = 40
#: Factors of the output matrix's weights by dtype: subnormal numbers, and sums that leave the range.
FACTORS = {
    torch.bfloat16: {"usual": 1.0, "subnormal": 2.0**-130, "large": 2.0**124},
    torch.float16: {"usual": 1.0, "subnormal": 2.0**-18, "large": 2.0**12},
}


def run(work: Work) -> None:
    """Points ``SHAPE KIND``: a few layers and the output matrix, whose weights have the kind's size."""
    if work.rehearse:
        work.skip("groups of warps: a CPU has none, both ways are the same")
    elif torch.cuda.get_device_capability(work.device) != GROUP_CAPABILITY:
        return work.skip("groups of warps: only GPUs of compute capability 9.0 have them")
    for shape in ("tiny",) if work.rehearse else SHAPES:
        of, kinds = Subject(work, shape), kinds_of(work)
        points = {f"{shape} {kind}": partial(same, of, factor) for kind, factor in kinds.items()}
        work.each(points, lambda name, points=points: points[name]())


def kinds_of(work: Work) -> dict[str, float]:
    return FACTORS.get(work.dtype, {"usual": 1.0})


def passed_by_groups(work: Work) -> bool:
    """Return whether groups of warps had the bits of the others on this GPU; they are not there in a rehearsal."""
    found = work.points_of(stage_named("group"))
    names = [f"{shape} {kind}" for shape in SHAPES for kind in kinds_of(work)]
    return not work.rehearse and all(name in found and "error" not in found[name] for name in names)


@torch.no_grad()
def same(of: Subject, factor: float) -> dict[str, Any]:
    """Logits of some rows by both kernels, bit for bit; NaN is one number.

    Raises:
        RuntimeError: they differ, so groups of warps stay off; or no group of warps multiplied.
    """
    head = of.model.get_output_embeddings().weight
    usual = head.clone()
    head.copy_(usual.double() * factor)
    try:
        rows = of.behind(Case(PREFIX))
        inputs = of.inputs(Case(PREFIX), MOST_ROWS)
        for count in ROWS:
            tokens, kv_len, slots, mask, depths, nodes = inputs
            part = (tokens[:, :count], kv_len, slots[:count], mask[:, :count], depths[:, :count], nodes)
            found = []
            for group in "01":
                with switched({GROUP: group}):
                    found.append(rows.rows(*part, keep=count).nan_to_num(nan=7.0))
                    if not of.work.rehearse and count == ROWS[0]:
                        kernel_table(
                            lambda part=part, count=count: rows.rows(*part, keep=count), more=taken(group == "1")
                        )
            none_apart([(f"{count} rows by groups of warps", apart(found[1], found[0]))])
    finally:
        head.copy_(usual)
    return {"rows": ROWS, "factor": factor}


def taken(grouped: bool) -> Callable[[list[Launch]], dict[str, Any]]:
    """Hold what was launched to the setting: a library without the kernel would agree with itself.

    Raises:
        RuntimeError: groups of warps multiplied where they should not, or did not where they should.
    """

    def more(launches: list[Launch]) -> dict[str, Any]:
        if any(KERNEL in name for name, _ in launches) != grouped:
            names = sorted({name[:60] for name, _ in launches})
            raise RuntimeError(f"{GROUP}={int(grouped)} took {names}; the library has to be compiled for 9.0a")
        return {}

    return more
