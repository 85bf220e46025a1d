"""Parts of both demos: one step drawn, and whether the machine was busy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .busy import distrust
from .output import err, out, progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gsd_kernels_cli.drawing import StepPicture

MOST_NODES = 80  # of a picture that is still read with pleasure


def warned(share: float | None) -> bool:
    """Say that times measured while others took this share of the machine are not to be trusted, where they are not."""
    if (note := distrust(share)) is not None:
        out.print(note, style="bold yellow", soft_wrap=True)
    return note is not None


def draw(tokenizer: PreTrainedTokenizerBase, pictures: Sequence[StepPicture], directory: Path) -> dict[str, Any] | None:
    """Draw the step that shows most; nothing without matplotlib."""
    from gsd_kernels_cli.drawing import draw_step

    step = max(range(len(pictures)), key=lambda i: pictures[i].interest)
    picture = pictures[step]
    if len(picture.nodes) > MOST_NODES:
        picture = picture.checked_only()
    title = (
        f"Step {step + 1}: {len(pictures[step].nodes)} nodes drafted, {picture.num_rows} rows checked in one target "
        f"forward, {len(picture.accepted)} tokens gained"
    )
    files = [directory / "step.svg", directory / "step.png"]
    try:
        with progress("drawing"):
            draw_step(picture, lambda token: tokenizer.decode([token]), files, title)
    except ImportError as error:
        err.print(f"gsd-kernels: no picture: {error}", markup=False, soft_wrap=True)
        return None
    out.print(f"\n{title}: {files[0]}, {files[1]}", soft_wrap=True)
    return {
        "files": [str(file) for file in files],
        "step": step,
        "nodes": len(picture.nodes),
        "edges": len(picture.edges),
        "merges": len(picture.merges),
        "accepted_tokens": len(picture.accepted),
        "rows": picture.num_rows,
    }
