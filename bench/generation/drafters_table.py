"""Drafters at an equal budget: each alone and with the history, and all, by tokens a forward and tokens a second.

All verify at most as many rows. The prompts are those on which no setting was chosen. Cells (a text at a temperature)
are those of :mod:`gsd_kernels_bench.generation.sources_table`: interleaved runs, kept when finished.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from gsd_kernels_hf.files import write_json

from ..lib.environment import environment
from ..lib.report import SCHEMA, markdown
from .competitors import competitors
from .generate import Settings
from .pairs import load_pair, of_length
from .sources_table import Table

TEXTS = ("code", "copy", "prose")
TEMPERATURES = (0.0, 0.7)
NAMES = (
    "plain",
    "chain",
    "merged",
    "graph",
    "heads",
    "heads-history",
    "eagle3",
    "eagle3-history",
    "dflash-chain",
    "dflash-lattice",
    "dflash-history",
    "every",
    "auto",
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
        "heads": "heads",
        "heads-history": "heads and history",
        "eagle3": "EAGLE-3",
        "eagle3-history": "EAGLE-3 and history",
        "dflash-chain": "DFlash, chain",
        "dflash-lattice": "DFlash, lattice",
        "dflash-history": "DFlash, lattice, and history",
        "every": "all of them",
        "auto": "draft model, heads, history, auto",
        "eagle3-auto": "EAGLE-3 and history, auto",
        "every-auto": "all of them, auto",
    },
    (
        ("eagle3", ("merged",), "target_forwards"),
        ("dflash-lattice", ("dflash-chain",), "target_forwards"),
        ("eagle3-history", ("eagle3",), "target_forwards"),
        ("every", ("graph",), "target_forwards"),
        ("eagle3-auto", ("auto",), "seconds"),
        ("every-auto", ("auto",), "seconds"),
    ),
    TEMPERATURES,
)


def by_position(settings: Settings, positions: list[int], *, folder: Path, name: str = "drafters-by-position") -> str:
    """Tokens a forward behind contexts of so many tokens, in Markdown; greedy, so that it does not depend on time.

    Prompts are repeated to each length, see :func:`~gsd_kernels_bench.generation.pairs.of_length`.
    """
    pair = load_pair(
        settings.pair,
        device=settings.device,
        dtype=settings.dtype,
        target_shape=settings.target_shape,
        texts=[settings.text],
        prompts=settings.prompts,
        fresh=True,
    )
    for model in (pair.target, pair.draft):  # rotary positions beyond those trained on, as far as they carry
        model.config.max_position_embeddings = max(*positions, 0) + settings.new_tokens + 1
    rows: list[dict[str, Any]] = []
    for length in positions:
        prompts = of_length(pair.prompts, length, length)
        for competitor in competitors(replace(pair, prompts=prompts), settings.competitors):
            if competitor.decode is None:
                continue
            tokens = forwards = 0
            for prompt in prompts:
                decoded = competitor.decode(prompt.input_ids, settings.new_tokens, 0)
                tokens += decoded.sequences.shape[1] - length
                forwards += int(decoded.target_forwards or 0)
            rows.append({"position": length, "competitor": competitor.name, "tokens": tokens, "forwards": forwards})
    result = {"schema": SCHEMA, "case": name, "rows": rows, "environment": environment(settings.device)}
    write_json(folder / f"{name}.json", result, indent=None)
    found = {(row["competitor"], row["position"]): row["tokens"] / max(1, row["forwards"]) for row in rows}
    names = list(dict.fromkeys(row["competitor"] for row in rows))
    lines = [[TABLE.labels.get(n, n), *(f"{found[n, length]:.2f}" for length in positions)] for n in names]
    return markdown(["tokens a forward, by context", *map(str, positions)], lines)


def settings_of(given: Settings, names: tuple[str, ...] | None) -> Settings:
    """``given`` with the competitors of the table, or some of them.

    Raises:
        ValueError: an unknown name.
    """
    unknown = [name for name in names or () if name not in NAMES]
    if unknown:
        raise ValueError(f"--competitors: {unknown[0]!r} is none of {', '.join(NAMES)}")
    return replace(given, competitors=names or NAMES, fresh=True)
