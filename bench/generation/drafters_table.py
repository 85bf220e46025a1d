"""Drafters at an equal budget: each alone and with the history, and all, by tokens a forward and tokens a second.

All verify at most as many rows. The prompts are those on which no setting was chosen. Cells (a text at a temperature)
are those of :mod:`gsd_kernels_bench.generation.sources_table`: interleaved runs, kept when finished. :data:`COUNTS` is
the table without times, of fixed shapes: it is the same on every run, however busy the machine.
"""

from __future__ import annotations

from dataclasses import replace

from .generate import Settings
from .sources_table import Table

TEXTS = ("code", "copy", "prose")
TEMPERATURES = (0.0, 0.7)
NAMES = (
    "plain",
    "chain",
    "merged",
    "graph",
    "history-16",
    "heads",
    "heads-history",
    "eagle3-chain",
    "eagle3",
    "eagle3-history",
    "dflash-chain",
    "dflash-lattice",
    "dflash-history",
    "every",
    "heads-auto",
    "eagle3-auto",
    "every-auto",
)
TABLE = Table(
    "drafters",
    NAMES,
    {
        "chain": "draft model, chain",
        "merged": "draft model",
        "graph": "draft model and history",
        "history-16": "history alone",
        "heads": "heads",
        "heads-history": "heads and history",
        "eagle3-chain": "EAGLE-3, chain",
        "eagle3": "EAGLE-3",
        "eagle3-history": "EAGLE-3 and history",
        "dflash-chain": "DFlash, chain",
        "dflash-lattice": "DFlash, lattice",
        "dflash-history": "DFlash, lattice, and history",
        "every": "all of them",
        "heads-auto": "draft model, heads, history, auto",
        "eagle3-auto": "EAGLE-3 and history, auto",
        "every-auto": "all of them, auto",
    },
    (
        ("eagle3", ("merged",), "target_forwards"),
        ("dflash-lattice", ("dflash-chain",), "target_forwards"),
        ("eagle3-history", ("eagle3",), "target_forwards"),
        ("every", ("graph",), "target_forwards"),
        ("eagle3-auto", ("heads-auto",), "seconds"),
        ("every-auto", ("heads-auto",), "seconds"),
    ),
    TEMPERATURES,
)
COUNTS = replace(
    TABLE,
    case="drafters-counts",
    names=tuple(name for name in NAMES if not name.endswith("-auto")),
    questions=(
        ("eagle3", ("eagle3-chain",), "target_forwards"),
        ("dflash-lattice", ("dflash-chain",), "target_forwards"),
        ("eagle3-history", ("history-16", "eagle3"), "target_forwards"),
        ("dflash-history", ("history-16", "dflash-lattice"), "target_forwards"),
        ("every", ("graph",), "target_forwards"),
    ),
    counts=True,
)


def settings_of(given: Settings, names: tuple[str, ...] | None, known: tuple[str, ...] = NAMES) -> Settings:
    """``given`` with the competitors of a table, ``known``, or some of them.

    Raises:
        ValueError: an unknown name.
    """
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"--competitors: {unknown[0]!r} is none of {', '.join(known)}")
    return replace(given, competitors=names or known, fresh=True)
