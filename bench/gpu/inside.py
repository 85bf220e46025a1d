"""The time of the operator, and where it goes.

The time of a forward of rows and of a prompt, operator and modules, by how its launches begin. And one forward by
kernel, its products by matrix, its attention by rows and prefix.

A kernel's own time, with launches in turn: of one that begins early, waiting would count. Every layer has weights and
a cache of its own, so none of it is found in a cache of the GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch

from gsd_kernels.ops.decoder_rows.cuda import AHEAD, GROUP, OVERLAP
from gsd_kernels_hf.model.proof import MOST_ROWS, row_inputs
from gsd_kernels_hf.model.runner import FusedRows, storage_of

from ..kernels.rows import WAYS, measure, random_model
from ..kernels.rows import table as rows_table
from .graphs import kernel_table
from .right import passed_by_groups, right_shapes
from .work import Work, points, switched

TIMED_ROWS = (16, 64, 128, 256, 8, 1, 32, 2, 4)  # 8 rows of a 1B: a level of its draft
PROMPT = 2000
GROUPS = "groups"
SETTINGS = {"early": {OVERLAP: "1"}, "in turn": {OVERLAP: "0"}, GROUPS: {GROUP: "1"}}
AHEAD_ROWS = (1, 16, 32)  # whose launches begin early

ROWS = (16, 64, 128, 256)
PREFIXES = (256, 1000, 4097, 16384, 32768)
MOST_EARLY_ROWS = 32  # that never go by groups
LAYERS = 4
PRODUCTS = ("q, k, v", "o", "gate and up", "down")  # of a layer, in the order of their launches
IS_PRODUCT = ("product_kernel", "rows_group_kernel")
ATTENTION = ("path_split_kernel", "path_end_kernel")


def ahead(work: Work) -> None:
    """Points ``SHAPE ahead=MEGABYTES``: how many of the next product's weights are asked for."""
    rows(work, {f"ahead={megabytes}": {AHEAD: str(megabytes)} for megabytes in (24, 0, 6, 12)}, AHEAD_ROWS)


def rows(work: Work, settings: Mapping[str, Mapping[str, str]] = SETTINGS, counts: Iterable[int] = TIMED_ROWS) -> None:
    """Points ``SHAPE SETTING``, by numbers of rows."""
    if work.rehearse:
        work.skip("launches that begin early, and weights that are asked for ahead: a CPU's operator has its own")
    wanted = [name for name in settings if name != GROUPS or passed_by_groups(work)]
    model = lru_cache(maxsize=1)(lambda shape: random_model(shape, work.dtype, work.device))
    cases = points("{shape} {setting}", shape=right_shapes(work), setting=wanted)
    work.each(cases, lambda shape, setting: timed(work, shape, model(shape), counts, settings[setting]))


def timed(
    work: Work, shape: str, model: Any, counts: Iterable[int], variables: Mapping[str, str], ways: Iterable[str] = WAYS
) -> dict[str, Any]:
    """Milliseconds of all numbers of rows and of a prompt, with variables of the environment; see :func:`measure`."""
    counts, seconds = ((1, 5), 0.05) if work.rehearse else (tuple(counts), 0.4)
    with switched(variables):
        found = measure(shape, model, counts, work.prefix, min(PROMPT, 50 * work.prefix), seconds, ways=ways)
    print(rows_table({"results": [found]}), flush=True)
    return {**found, "variables": dict(variables)}


def inside(work: Work) -> None:
    """Points ``SHAPE rows=R`` by kernel, also with groups of warps, and ``SHAPE rows=R prefix=P attention``; of a few
    layers all."""
    rows, prefixes = ((5,), (work.prefix,)) if work.rehearse else (ROWS, PREFIXES)
    if work.rehearse:
        work.skip("kernels by CUPTI: a CPU's operators are listed instead, and the attention is none of them")
    right = right_shapes(work)
    by_kernel = points("{shape} rows={rows}", shape=right, rows=rows)
    if passed_by_groups(work):
        by_kernel |= {f"{name} by groups": (*of, "1") for name, of in by_kernel.items() if of[1] > MOST_EARLY_ROWS}
    by_prefix = points("{shape} prefix={prefix} rows={rows} attention", shape=right, prefix=prefixes, rows=rows)
    model = lru_cache(lambda shape: random_model(shape, work.dtype, work.device, LAYERS))
    work.each(by_kernel, lambda shape, *of: table(work, model(shape), shape, work.prefix, *of))
    work.each(by_prefix, lambda shape, *of: attention(work, model(shape), shape, *of))


@torch.no_grad()
def table(work: Work, model: Any, shape: str, prefix: int, count: int, group: str = "0") -> dict[str, Any]:
    """One forward of a few layers by kernel; ``group``: by groups of warps or not.

    And seconds of each product, a layer's in the mean over the layers, and of the output matrix.

    Raises:
        RuntimeError: there are not as many as a forward of so many layers has.
    """
    start = torch.zeros(1, dtype=torch.int32, device=work.device)
    rows = FusedRows(model, prefix + MOST_ROWS, start, "auto")
    for cache in itertools.chain(*storage_of(rows.cache, rows.weights, 1)):
        cache.normal_()  # what was read before costs the same, and takes no time here
    inputs = row_inputs(count, prefix, work.device)
    with switched({OVERLAP: "0", GROUP: group}):
        rows.rows(*inputs, keep=count)
        found, launches = kernel_table(lambda: rows.rows(*inputs, keep=count))
    if not work.rehearse:
        seconds = [taken for name, taken in launches if any(kernel in name for kernel in IS_PRODUCT)]
        if len(seconds) != len(PRODUCTS) * LAYERS + 1:
            raise RuntimeError(f"{len(seconds)} products in a forward of {LAYERS} layers: {launches}")
        layers = {name: sum(seconds[place : -1 : len(PRODUCTS)]) / LAYERS for place, name in enumerate(PRODUCTS)}
        found["products"] = {**layers, "head": seconds[-1]}
    print(f"  {found['seconds'] * 1e3:.3f} ms in {found['launches']} launches", flush=True)
    return {**found, "shape": shape, "layers": LAYERS, "rows": count, "prefix": prefix}


def attention(work: Work, model: Any, shape: str, prefix: int, count: int) -> dict[str, Any]:
    """Seconds of the attention's kernels in one layer, and what they read of the cache.

    Raises:
        RuntimeError: its kernels are not among those of a forward.
    """
    top = table(work, model, shape, prefix, count)["top"]  # [name, launches, seconds] by kernel
    kept = 2 * prefix * model.config.num_key_value_heads * model.config.head_dim * work.dtype.itemsize
    found = {"shape": shape, "rows": count, "prefix": prefix, "bytes": kept}
    if work.rehearse:
        return found
    layer = {kernel: sum(row[2] for row in top if kernel in row[0]) / LAYERS for kernel in ATTENTION}
    missing = [kernel for kernel, seconds in layer.items() if not seconds]
    if missing:
        raise RuntimeError(f"no {', '.join(missing)} among {[row[0][:60] for row in top]}")
    print(f"  attention {1e6 * sum(layer.values()):.1f} µs a layer", flush=True)
    return {**found, "seconds": sum(layer.values()), "kernels": layer}
