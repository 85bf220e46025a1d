"""Drafters at an equal budget: each alone and with the history, and all, by tokens a forward and tokens a second.

All verify at most as many rows. The prompts are those on which no setting was chosen. Cells (a text at a temperature)
are those of :mod:`gsd_kernels_bench.generation.sources_table`: interleaved runs, kept when finished. :data:`COUNTS` is
the table without times, of fixed shapes: it is the same on every run, however busy the machine. :data:`CHAT` and
:data:`CHAT_COUNTS` are those of SmolLM2 with the drafter that is shipped for it, :data:`EDGES` that of a lattice
drafter with edges beside its own walk, and beside the same probabilities of every place without edges.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from gsd_kernels_cli.demo.drafters import FOLDER, KINDS

from . import chat_pair, lattices
from .competitors import DRAFTERS
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
    gated=True,
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
CHAT = Table(
    "drafters-smollm2",
    ("plain", "history-16", "history-auto", "eagle3-chain", "eagle3", "eagle3-history", "eagle3-auto"),
    {**TABLE.labels, "history-auto": "history alone, auto"},
    (
        ("eagle3", ("eagle3-chain",), "target_forwards"),
        ("eagle3-history", ("history-16", "eagle3"), "target_forwards"),
        ("eagle3-history", ("history-16", "history-auto"), "seconds"),
        ("eagle3-auto", ("history-auto",), "seconds"),
        ("eagle3-auto", ("eagle3-chain", "eagle3", "eagle3-history"), "seconds"),
    ),
    TEMPERATURES,
    gated=True,
)
CHAT_COUNTS = replace(
    CHAT,
    case="drafters-smollm2-counts",
    names=tuple(name for name in CHAT.names if not name.endswith("-auto")),
    questions=CHAT.questions[:2],
    counts=True,
)
EDGES = Table(
    "drafters-edges",
    ("plain", "history-16", "lattice-chain", "lattice-marginals", "lattice", "lattice-history"),
    {
        **TABLE.labels,
        "lattice-chain": "its own walk",
        "lattice-marginals": "lattice, the same places without edges",
        "lattice": "lattice with edges",
        "lattice-history": "lattice with edges, and history",
    },
    (
        ("lattice", ("lattice-chain",), "target_forwards"),
        ("lattice", ("lattice-marginals",), "target_forwards"),
        ("lattice-history", ("history-16", "lattice"), "target_forwards"),
    ),
    TEMPERATURES,
    counts=True,
    gated=True,
)


def weights_of(pair: str, drafter: Path | None = None) -> dict[str, str]:
    """The beginning of the SHA-256 of the weights of a pair's drafters, and of one's own, by kind."""
    folders = chat_pair.DRAFTERS if pair == chat_pair.NAME else {kind: FOLDER / kind for kind in KINDS}
    folders = {**folders, **({} if drafter is None else {lattices.KIND: drafter})}
    files = {kind: folder / "model.safetensors" for kind, folder in folders.items()}
    return {kind: hashlib.sha256(file.read_bytes()).hexdigest()[:12] for kind, file in files.items() if file.is_file()}


def settings_of(given: Settings, names: tuple[str, ...] | None, known: tuple[str, ...] = NAMES) -> Settings:
    """``given`` with the competitors of a table, ``known``, or some of them, and the weights of their drafters alone.

    Raises:
        ValueError: an unknown name.
    """
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"--competitors: {unknown[0]!r} is none of {', '.join(known)}")
    kinds = [kind for name in names or known for kind in DRAFTERS.get(name, ((), ""))[0]]
    used = {lattices.KIND if kind == lattices.Marginals.name else kind for kind in kinds}
    weights = {kind: digest for kind, digest in given.drafter_weights.items() if kind in used}
    return replace(given, competitors=names or known, fresh=True, drafter_weights=weights)
