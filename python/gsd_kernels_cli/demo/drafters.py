"""The drafters of the demo target, which a clone has."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from gsd_kernels_hf.sources.dflash import DFlash
from gsd_kernels_hf.sources.feature_drafter import Eagle3
from gsd_kernels_hf.sources.load import load_drafter

FOLDER = Path(__file__).resolve().parents[3] / "bench/drafters/demo"
"""Of a clone: the kinds of drafters, and heads, each in a folder; not in the wheel."""


def embedded(target: PreTrainedModel) -> dict[str, Eagle3 | DFlash]:
    """The drafters of the demo target that are there, by kind: none in an installed wheel."""
    return {
        kind: load_drafter(FOLDER / kind, target)
        for kind in ("eagle3", "dflash")
        if (FOLDER / kind / "config.json").is_file()
    }


def heads_folder() -> Path:
    """The folder of the demo target's heads.

    Raises:
        ValueError: it is not there.
    """
    if not (FOLDER / "heads").is_dir():
        raise ValueError("draft_heads: those of the demo are in a clone of gsd_kernels, not in its wheel")
    return FOLDER / "heads"
