"""How many megabytes of the next product's weights to ask for ahead: forwards of few rows with each, in turns."""

from __future__ import annotations

from gsd_kernels.ops.decoder_rows.cuda import AHEAD

from ..lib.timing import read_bandwidths
from .forward import Forward, Settings
from .right import passed
from .work import Work, points

MEGABYTES = (24, 0, 6, 12)
ROWS = (1, 16, 32)  # whose launches begin early
SETTINGS: Settings = {f"ahead={size}": ("operator", {AHEAD: str(size)}) for size in MEGABYTES}


def run(work: Work) -> None:
    """Points ``bandwidth`` and ``SHAPE rows=R ahead=MEGABYTES``."""
    small = work.rehearse
    if small:
        work.skip("weights that are asked for ahead: a CPU's operator has its own")
    right = [shape for shape in work.shapes if passed(work, shape)]
    work.leave([shape for shape in work.shapes if shape not in right], "not found right by the stage before")
    work.each(["bandwidth"], lambda _: read_bandwidths(work.device, quick=small))
    if not work.is_done("bandwidth"):
        return
    for shape in right:
        forward = Forward(work, shape)
        names = points(shape + " rows={rows} {setting}", rows=(5,) if small else ROWS, setting=SETTINGS)
        work.each(names, lambda name, of=forward, names=names: of.time(*names[name], SETTINGS))
