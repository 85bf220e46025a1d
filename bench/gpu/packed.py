"""Packed matrices in the operator of rows on a GPU: the bits of the dense ones that they stand for, then their time.

A kind of a shape is timed where its bits were right. The dense operator is timed beside them, in the same stage.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gsd_kernels.ops.packed import BY_NAME, PackedMatrix, pack_matrix, unpack_rows
from gsd_kernels_hf.model.fused import FusedRows
from gsd_kernels_hf.model.proof import MOST_ROWS, apart, row_inputs
from gsd_kernels_hf.packed.modules import Packed, PackedEmbedding, PackedLinear
from gsd_kernels_hf.packed.pack import replace

from ..kernels.rows import random_model
from .inside import timed
from .right import LAYERS, none_apart
from .work import Work, points

KINDS = ("q8_0", "int8", "int4")
DENSE = "dense"
ROWS = (16, 64, 1, 8, 32, 128)
OF_BITS = (1, 16, 30, 64, 200)  # rows of blocks of every size
GROUP = 32  # inputs of an int4 scale


def run(work: Work) -> None:
    """Points ``SHAPE KIND bits`` of a few layers, and ``SHAPE KIND`` of a whole model, by numbers of rows."""
    if work.rehearse:
        work.skip("the CUDA operator: a CPU's own takes its place")
    verdicts = points("{shape} {kind} bits", shape=work.shapes, kind=KINDS)
    counts = (5,) if work.rehearse else OF_BITS
    work.each(verdicts, lambda shape, kind: bits(work, shape, kind, counts))
    cases = points("{shape} {kind}", shape=work.shapes, kind=(DENSE, *KINDS))
    wrong = [name for name, (_, kind) in cases.items() if kind != DENSE and not work.is_done(f"{name} bits")]
    work.leave(wrong, "bits not found right")
    # By the operator alone: modules would unpack the matrices every time.
    work.each(
        {name: case for name, case in cases.items() if name not in wrong},
        lambda shape, kind: timed(work, shape, whole(work, shape, kind), ROWS, {}, ("operator",)),
    )


def whole(work: Work, shape: str, kind: str) -> Any:
    """All layers of a shape with matrices of a kind."""
    model = random_model(shape, work.dtype, work.device)
    return model if kind == DENSE else replace(model, packed_modules(model, kind))


@torch.no_grad()
def bits(work: Work, shape: str, kind: str, counts: tuple[int, ...]) -> dict[str, Any]:
    """Logits of rows by the operator, with packed matrices and with what they stand for.

    Raises:
        RuntimeError: they differ.
    """
    model = random_model(shape, work.dtype, work.device, LAYERS)
    modules = packed_modules(model, kind)
    for name, module in modules.items():
        model.get_submodule(name).weight.copy_(unpack_rows(module.matrix, dtype=work.dtype, backend="reference"))
    dense = logits_of(work, model, counts)
    for count, of_dense, found in zip(counts, dense, logits_of(work, replace(model, modules), counts), strict=True):
        none_apart([(f"{kind}, {count} rows", apart(found, of_dense))])
    return {"shape": shape, "kind": kind, "layers": LAYERS, "rows": counts, "prefix": work.prefix}


def logits_of(work: Work, model: Any, counts: tuple[int, ...]) -> list[Tensor]:
    """Logits [1, R, V] of rows behind a prompt, by the operator."""
    rows = FusedRows(model, work.prefix + MOST_ROWS, torch.zeros(1, dtype=torch.int32, device=work.device), "auto")
    rows.prefill(torch.arange(work.prefix, device=work.device)[None] * 3 % model.config.vocab_size, None, None)
    return [rows.rows(*row_inputs(count, work.prefix, work.device), keep=count) for count in counts]


@torch.no_grad()
def packed_modules(model: nn.Module, kind: str) -> dict[str, Packed]:
    """Layers over the model's matrices, packed where they lie; weights that are shared stay shared."""
    matrices: dict[int, PackedMatrix] = {}
    found: dict[str, Packed] = {}
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            weight = module.weight
            if id(weight) not in matrices:
                matrices[id(weight)] = packed(weight, kind)
            layer = PackedEmbedding if isinstance(module, nn.Embedding) else PackedLinear
            found[name] = layer(matrices[id(weight)], weight.dtype)
    return found


def packed(weight: Tensor, kind: str) -> PackedMatrix:
    """[outputs, inputs] by round to nearest; ``int8`` a scale a row, ``int4`` a scale and a zero point a group."""
    if kind == "q8_0":
        return pack_matrix(weight, kind)
    most, width = (127, weight.shape[1]) if kind == "int8" else (7, GROUP)
    groups = weight.float().unflatten(1, (-1, width))  # [outputs, groups, width]
    scales = groups.abs().amax(-1).clamp(min=1e-30) / most  # [outputs, groups]
    codes = (groups / scales[..., None]).round().flatten(1)
    if kind == "int8":
        return PackedMatrix(BY_NAME[kind], codes.to(torch.int8), weight.shape[1], scales)
    halves = (codes + 8).to(torch.uint8)
    pairs = torch.stack([scales, torch.full_like(scales, 8.0)], -1)
    return PackedMatrix(BY_NAME[kind], halves[:, ::2] | halves[:, 1::2] << 4, weight.shape[1], pairs)
