"""Bits of products by groups of warps (wgmma) and by warps (mma.sync): whether both are one function on this GPU.

The first ten seconds on a GPU: what is found decides whether rows of all numbers may share these kernels.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gsd_kernels.environment import switched
from gsd_kernels.ops.decoder_rows.cuda import GROUP
from gsd_kernels_hf.model.rows_proof import MOST_ROWS, apart

from .right import SHAPES, Case, Subject, none_apart
from .work import Work

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
    for shape in ("tiny",) if work.rehearse else SHAPES:
        of, kinds = Subject(work, shape), FACTORS.get(work.dtype, {"usual": 1.0})
        points = {f"{shape} {kind}": partial(same, of, factor) for kind, factor in kinds.items()}
        work.each(points, lambda name, points=points: points[name]())


@torch.no_grad()
def same(of: Subject, factor: float) -> dict[str, Any]:
    """Logits of some rows by both kernels, bit for bit; NaN is one number.

    Raises:
        RuntimeError: they differ, so groups of warps stay off.
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
            none_apart([(f"{count} rows by groups of warps", apart(found[1], found[0]))])
    finally:
        head.copy_(usual)
    return {"rows": ROWS, "factor": factor}
